"""Updates a head on a frozen target once: features computed or stored, micro-batches, float32 weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.core.types import Params
from eagle_jax.models import target_fn
from eagle_jax.packed import PackedTokens
from eagle_jax.parallel import by_device, by_rows, embeds_by_rows, gathered
from eagle_jax.training.hardware import dense_gradients
from eagle_jax.training.losses import count_rows
from eagle_jax.training.objective import Logits, Objective, StepMetrics, TargetOutputs, unrolled_loss
from eagle_jax.training.unrolling import causal_mask


class Frozen(NamedTuple):
    """Constants of head training."""

    target: Params
    d2t: Int[Array, " Vd"] | None = None  # offsets of the draft vocabulary; None for all of V
    # Divides the tapped features. Deep states of a trained model are tens of times larger than the output of a fresh
    # layer: without the division heads learn half as fast. `fold_scale` moves it into the finished head.
    feature_scale: Float[Array, " F"] | None = None


class HeadTrainState(NamedTuple):
    """State of training."""

    head: Params  # trained parameters, float32 (an EAGLE head without `d2t`)
    opt_state: optax.OptState
    step: Int[Array, ""]  # number of updates
    key: Array  # random key of the noise


class UpdateReport(NamedTuple):
    """Measurements before an update."""

    loss: Float[Array, ""]
    gradient: Float[Array, ""]  # global norm, before clipping
    metrics: StepMetrics


def observe(
    target: DecoderConfig, params: Params, texts: PackedTokens, taps: tuple[int, ...], mesh: Mesh | None = None
) -> TargetOutputs:
    """Runs the frozen target over packed texts, without logits. `mesh`: as in `head_loss`."""
    fn, params = target_fn(target), gathered(params, mesh)
    with nn.intercept_methods(embeds_by_rows(mesh)), nn.intercept_methods(by_device(mesh)):
        out = fn.forward(params, texts.tokens, texts.positions, causal_mask(texts.segments), None, taps)
        return jax.lax.stop_gradient(TargetOutputs(out.features, out.hidden, fn.embed(params, texts.tokens)))


def head_loss(
    target: DecoderConfig,
    config: HeadConfig,
    objective: Objective,
    head: Params,
    frozen: Frozen,
    texts: PackedTokens,
    key: Array,
    dtype: str = "float32",
    target_outputs: TargetOutputs | None = None,
    mesh: Mesh | None = None,
    shares: Float[Array, " steps"] | float = 1.0,
) -> tuple[Float[Array, ""], StepMetrics]:
    """Computes the loss of an EAGLE head on a batch of packed texts.

    Args:
      dtype: of the head's products and activations; scores, norms and losses are always float32.
      target_outputs: stored outputs of the target, with or without embeddings; None runs the target.
      mesh: shards parameters (by the rules of `eagle_jax.parallel.mesh`) and rows; None leaves the layout to the
        compiler.
      shares: as in `unrolled_loss`.
    """
    texts, target_outputs, target_logits = read_target(target, frozen.target, texts, target_outputs, mesh, config.taps)
    features = target_outputs.features
    if frozen.feature_scale is not None:
        features = features / frozen.feature_scale[None, None]
    head = jax.tree.map(lambda leaf: leaf.astype(dtype), head)
    embeds = target_outputs.embeds
    if config.own_embedding:
        embeds = by_rows(jax.lax.stop_gradient(head["embed_tokens"]["embedding"][texts.tokens]), mesh)
    assert embeds is not None, "read_target looks up embeddings"
    target_outputs = TargetOutputs(features.astype(dtype), target_outputs.hidden, embeds.astype(dtype))
    kept = None if frozen.d2t is None else frozen.d2t + jnp.arange(frozen.d2t.shape[0], dtype=frozen.d2t.dtype)
    with nn.intercept_methods(dense_gradients):
        return unrolled_loss(config, objective, head, target_outputs, texts, target_logits, kept, key, mesh, shares)


def read_target(
    target: DecoderConfig,
    params: Params,
    texts: PackedTokens,
    target_outputs: TargetOutputs | None,
    mesh: Mesh | None,
    taps: tuple[int, ...] = (),
) -> tuple[PackedTokens, TargetOutputs, Logits]:
    """Returns sharded texts, the target's outputs (computed if None) with embeddings, and its lm_head."""
    fn, texts = target_fn(target), jax.tree.map(lambda leaf: by_rows(leaf, mesh), texts)
    if target_outputs is None:
        target_outputs = observe(target, params, texts, taps, mesh)
    elif target_outputs.embeds is None:
        target_outputs = target_outputs._replace(embeds=by_rows(fn.embed(params, texts.tokens), mesh))
    # Gathered once: every turn of the loop over chunks reads the whole lm_head.
    whole = gathered(params, mesh, embedding=target.tie_word_embeddings)
    return texts, target_outputs, lambda hidden: fn.logits(whole, hidden)


def feature_scale(features: Float[Array, "B T F"], texts: PackedTokens) -> Float[Array, " F"]:
    """Returns the root mean square of every tapped channel over texts, [F], for `Frozen.feature_scale`."""
    counted = (texts.segments > 0)[..., None]
    squares = jnp.where(counted, jnp.square(features.astype(jnp.float32)), 0.0)
    mean = jnp.sum(squares, axis=(0, 1)) / jnp.maximum(jnp.sum(counted), 1)
    return jnp.sqrt(mean + 1e-6)


def fold_scale(head: Params, scale: Float[Array, " F"]) -> Params:
    """Returns the EAGLE-3 head that reads raw features as `head` reads features divided by `scale`.

    `1 / scale` reverses it. Exact only for a head without `fc_norm` and `norm_before_fc`, which need no scale.
    """
    return {**head, "fc": {**head["fc"], "weight": head["fc"]["weight"] / scale[None]}}


class MicroBatch(NamedTuple):
    """Texts of an update that are computed together; an update stacks M of them on a leading axis."""

    texts: PackedTokens
    target_outputs: TargetOutputs | None  # stored outputs of the target
    key: Array  # random key of the noise
    shares: Float[Array, " n"]  # weight of each of the loss's n means: the micro-batch's share in the supervised rows


LossFn = Callable[[Params, MicroBatch], tuple[Float[Array, ""], StepMetrics]]
"""Loss and metrics of trained parameters on a micro-batch."""


def head_train_step(
    target: DecoderConfig,
    config: HeadConfig,
    objective: Objective,
    tx: optax.GradientTransformation,
    dtype: str,
    state: HeadTrainState,
    frozen: Frozen,
    texts: PackedTokens,
    mesh: Mesh | None = None,
    target_outputs: TargetOutputs | None = None,
) -> tuple[HeadTrainState, UpdateReport]:
    """Updates an EAGLE head once: `train_step` with `head_loss`."""

    def loss_fn(head: Params, batch: MicroBatch) -> Any:
        texts, target_outputs, key, shares = batch
        return head_loss(target, config, objective, head, frozen, texts, key, dtype, target_outputs, mesh, shares)

    return train_step(loss_fn, lambda texts: count_rows(texts, objective.steps), tx, state, texts, target_outputs)


def train_step(
    loss_fn: LossFn,
    rows_of: Callable[[PackedTokens], Float[Array, " n"]],
    tx: optax.GradientTransformation,
    state: HeadTrainState,
    texts: PackedTokens,
    target_outputs: TargetOutputs | None = None,
) -> tuple[HeadTrainState, UpdateReport]:
    """Updates the trained parameters once. The target and its embeddings do not change.

    A mean of a micro-batch is weighted by the micro-batch's share of its supervised rows. The result is that of one
    batch, except with a draft vocabulary: the rows outside it are not known before the target runs, so rows inside it
    have slightly different weights if micro-batches differ in their number.

    Args:
      loss_fn: loss of a micro-batch, a sum of n means (of steps or heads).
      rows_of: counts the supervised rows of each mean.
      texts: [M, B, T] with a leading axis of micro-batches.
      target_outputs: stored outputs of the target with the same leading axis, or None.
    """
    micro, rows = texts.tokens.shape[0], jax.vmap(rows_of)(texts)
    shares = rows / jnp.maximum(jnp.sum(rows, axis=0, keepdims=True), 1)
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.fold_in(state.key, state.step)))(jnp.arange(micro))

    def terms(batch: MicroBatch) -> Any:
        """Returns a micro-batch's terms of gradient, loss and metrics."""
        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.head, batch)
        return grads, loss, metrics.loss * batch.shares, metrics.accuracy * batch.shares, metrics.counted

    batches = MicroBatch(texts, target_outputs, keys, shares)
    first = jax.tree.map(lambda x: x[0], batches)
    zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(terms, first))
    add = lambda total, batch: (jax.tree.map(jnp.add, total, terms(batch)), None)  # noqa: E731
    total = jax.lax.scan(add, zero, batches)[0] if micro > 1 else terms(first)
    grads, loss, *metrics = total
    report = UpdateReport(loss, optax.tree.norm(grads), StepMetrics(*metrics))
    updates, opt_state = tx.update(grads, state.opt_state, state.head)
    head = optax.apply_updates(state.head, updates)
    return HeadTrainState(head, opt_state, state.step + 1, state.key), report
