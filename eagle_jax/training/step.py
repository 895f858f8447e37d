"""One training step of a draft head on a frozen target, features computed in the same program."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.models.decoder import target_fn
from eagle_jax.training.eagle1 import eagle1_loss
from eagle_jax.training.losses import target_law
from eagle_jax.training.pretrain import dense_gradients
from eagle_jax.training.ttt import Signals, StepMetrics, ttt_loss
from eagle_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Objective:
    """How a head is taught.

    Attributes:
      steps, decay: of training-time test (EAGLE-3). noise, token_weight: of feature regression (EAGLE-1/2).
    """

    steps: int = 7
    decay: float = 0.8
    noise: float = 0.1
    token_weight: float = 0.1


class Frozen(NamedTuple):
    """What head training reads and never changes.

    Attributes:
      target: parameters of the target. d2t: [Vd] int32 offsets of the draft vocabulary, None for all of V.
      feature_scale: [F], by which tapped features are divided before the head sees them (None: not at all). Deep states
        of a trained model are tens of times larger than what a fresh layer writes; undivided, the head's residual
        stream drowns its own layer and learns half as fast. `fold_scale` puts the division into the finished head.
    """

    target: Params
    d2t: Int[Array, " Vd"] | None = None
    feature_scale: Float[Array, " F"] | None = None


class HeadTrainState(NamedTuple):
    """What head training carries on from.

    Attributes:
      head: trained parameters (without `d2t`). opt_state: the optimiser's. step: scalar int32. key: of the noise.
    """

    head: Params
    opt_state: optax.OptState
    step: Int[Array, ""]
    key: Array


def observe(
    target: DecoderConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    supervised: Bool[Array, "B T"],
    taps: tuple[int, ...],
    kept: Int[Array, " Vd"] | None,
) -> Signals:
    """Runs the frozen target over whole texts; its [T, V] logits exist for one text at a time."""
    fn = target_fn(target)
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    out = fn.forward(params, tokens, positions, jnp.tril(jnp.ones((length, length), bool)), None, taps)
    law, best, inside = jax.lax.map(lambda hidden: target_law(fn.logits(params, hidden), kept), out.hidden)
    return jax.lax.stop_gradient(Signals(out.features, fn.embed(params, tokens), law, best, inside, supervised))


def head_loss(
    target: DecoderConfig,
    config: HeadConfig,
    objective: Objective,
    head: Params,
    frozen: Frozen,
    tokens: Int[Array, "B T"],
    supervised: Bool[Array, "B T"],
    key: Array,
) -> tuple[Float[Array, ""], StepMetrics]:
    """Loss of either kind of head on a batch of texts."""
    d2t = frozen.d2t
    kept = None if d2t is None else d2t + jnp.arange(d2t.shape[0], dtype=d2t.dtype)
    signals = observe(target, frozen.target, tokens, supervised, config.taps, kept)
    if frozen.feature_scale is not None:
        signals = signals._replace(features=signals.features / frozen.feature_scale[None, None])
    if config.own_embedding:
        signals = signals._replace(embeds=jax.lax.stop_gradient(head["embed_tokens"]["embedding"][tokens]))
    with nn.intercept_methods(dense_gradients):
        if config.kind == "eagle3":
            return ttt_loss(config, head, signals, steps=objective.steps, decay=objective.decay)
        fn = target_fn(target)
        return eagle1_loss(
            config,
            head,
            signals,
            lambda hidden: fn.logits(frozen.target, hidden),
            key,
            noise=objective.noise,
            token_weight=objective.token_weight,
        )


def feature_scale(
    target: DecoderConfig, params: Params, tokens: Int[Array, "B T"], taps: tuple[int, ...]
) -> Float[Array, " F"]:
    """Root mean square of every tapped channel over the given texts, [F]: see `Frozen.feature_scale`."""
    features = observe(target, params, tokens, jnp.ones(tokens.shape, bool), taps, None).features
    return jnp.sqrt(jnp.mean(jnp.square(features), axis=(0, 1)) + 1e-6)


def fold_scale(head: Params, scale: Float[Array, " F"]) -> Params:
    """The EAGLE-3 head that does to raw features what `head` does to features divided by `scale`.

    With `1 / scale` the way back. Exact only for a head whose first operation on features is `fc`: not with `fc_norm`
    or `norm_before_fc`, which need no scale.
    """
    return {**head, "fc": {**head["fc"], "kernel": head["fc"]["kernel"] / scale[:, None]}}


def head_optimiser(rate: float, warmup: int, total: int) -> optax.GradientTransformation:
    """AdamW (0.9, 0.95), clipped at 0.5, linear warm-up and cosine decay to a hundredth."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, max(total, warmup + 1), rate / 100)
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.0))


def head_train_step(
    target: DecoderConfig,
    config: HeadConfig,
    objective: Objective,
    tx: optax.GradientTransformation,
    state: HeadTrainState,
    frozen: Frozen,
    tokens: Int[Array, "B T"],
    supervised: Bool[Array, "B T"],
) -> tuple[HeadTrainState, Float[Array, ""], StepMetrics]:
    """One update of the head; neither the target nor any embedding changes."""

    def loss_of(head: Params) -> tuple[Array, StepMetrics]:
        key = jax.random.fold_in(state.key, state.step)
        return head_loss(target, config, objective, head, frozen, tokens, supervised, key)

    (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(state.head)
    updates, opt_state = tx.update(grads, state.opt_state, state.head)
    head = optax.apply_updates(state.head, updates)
    return HeadTrainState(head, opt_state, state.step + 1, state.key), loss, metrics
