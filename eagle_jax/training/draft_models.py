"""Computes the losses of drafters other than EAGLE heads: Medusa and Hydra heads, small draft models."""

from __future__ import annotations

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle_jax.config import DecoderConfig, MedusaConfig
from eagle_jax.core.types import Params
from eagle_jax.models import MedusaHeads, target_fn
from eagle_jax.packed import PackedTokens
from eagle_jax.training.hardware import dense_gradients
from eagle_jax.training.losses import (
    ahead,
    by_chunks,
    likelihood_of_acceptance,
    overlap,
    soft_cross_entropy,
    supervised_ahead,
)
from eagle_jax.training.objective import Logits, StepMetrics, TargetOutputs
from eagle_jax.training.unrolling import causal_mask


def medusa_loss(
    config: MedusaConfig,
    heads: Params,
    target_outputs: TargetOutputs,
    texts: PackedTokens,
    target_logits: Logits,
    *,
    dtype: str = "float32",
    decay: float = 0.8,
    teacher: bool = True,
    chunk: int = 256,
    remat: bool = True,
    shares: Float[Array, " heads"] | float = 1.0,
) -> tuple[Float[Array, ""], StepMetrics]:
    """Returns sum_i decay^i (mean loss of head i over its counted rows), and metrics per head.

    Head i predicts token t + i + 2 in row t. The row counts if that token is supervised and in the same document.

    Args:
      heads: `params["heads"]`.
      target_outputs: `hidden`, and for Hydra `embeds`, of the target; they get no gradient.
      target_logits: the target's lm_head, [..., H] -> [..., V].
      dtype: of the heads' products and activations; losses are float32.
      decay: base of the weights (Medusa, section 2.2.1: 0.8).
      teacher: labels are the target's law (Hydra++, section 4.2); False: the tokens of the texts (Medusa-1, Hydra).
      chunk, remat: as in `by_chunks`.
      shares: weight of every head's mean: the share of a micro-batch in the rows of that head.
    """
    model = MedusaHeads(config)
    heads = jax.tree.map(lambda leaf: leaf.astype(dtype), heads)
    hidden = jax.lax.stop_gradient(target_outputs.hidden).astype(dtype)
    with nn.intercept_methods(dense_gradients):
        states = hidden
        if config.prefix is not None:
            mask = causal_mask(texts.segments)
            states = model.apply({"params": heads}, hidden, texts.positions, mask, method="prefix").states

        def terms(head: int) -> StepMetrics:
            inputs = [states]
            if config.kind == "hydra":
                assert target_outputs.embeds is not None, "Hydra heads read embeddings"
                embeds = jax.lax.stop_gradient(target_outputs.embeds).astype(states.dtype)
                inputs += [ahead(embeds, step + 1) for step in range(head + 1)]
            counted = supervised_ahead(texts, head + 2)

            def sums_of(inputs: Array, following: Array, labels: Array, counted: Array) -> tuple[Array, Array]:
                logits = model.apply({"params": heads}, inputs, head)
                log_q = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
                if teacher:
                    p = jax.nn.softmax(jax.lax.stop_gradient(target_logits(following)).astype(jnp.float32), axis=-1)
                    loss, best = soft_cross_entropy(log_q, p), jnp.argmax(p, axis=-1)
                else:
                    loss, best = -jnp.take_along_axis(log_q, labels[..., None], axis=-1)[..., 0], labels
                hit = jnp.argmax(logits, axis=-1) == best
                return jnp.sum(jnp.where(counted, loss, 0.0)), jnp.sum(hit & counted).astype(jnp.float32)

            rows = (jnp.concatenate(inputs, axis=-1), ahead(hidden, head + 1), ahead(texts.tokens, head + 2), counted)
            loss, hits = by_chunks(sums_of, rows, (1, 1, 1, 1), chunk, remat=remat)
            count = jnp.sum(counted).astype(jnp.float32)
            return StepMetrics(loss / jnp.maximum(count, 1.0), hits / jnp.maximum(count, 1.0), count)

        metrics = jax.tree.map(lambda *each: jnp.stack(each), *map(terms, range(config.num_heads)))
    return jnp.sum(decay ** jnp.arange(config.num_heads) * metrics.loss * shares), metrics


Divergence = Literal["kl", "tv", "lk"]
"""KL(p, q); total variation 1 - alpha, the rate of rejection of standard speculative sampling; -log alpha (LK loss)."""


def distillation_loss(
    config: DecoderConfig,
    params: Params,
    texts: PackedTokens,
    hidden: Float[Array, "B T H"],
    target_logits: Logits,
    *,
    dtype: str = "float32",
    divergence: Divergence = "kl",
    chunk: int = 256,
    remat: bool = True,
    shares: Float[Array, " 1"] | float = 1.0,
) -> tuple[Float[Array, ""], StepMetrics]:
    """Returns the mean divergence of the draft model q from the target p over supervised tokens.

    Row t compares the laws of token t + 1. It counts if that token is supervised and in the same document. If the
    vocabularies are padded to different sizes, the ids of the smaller one are compared.

    Args:
      config: the draft model, with the target's tokenizer.
      hidden: final-normed states of the target.
      target_logits: the target's lm_head.
      dtype: of the draft model's products and activations; losses are float32.
      chunk, remat: as in `by_chunks`.
      shares: weight of the mean: the share of a micro-batch in the counted rows.

    Returns:
      the loss, and metrics of length 1; accuracy is alpha, the rate at which standard speculative sampling accepts.
    """
    fn = target_fn(config)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    hidden, counted = jax.lax.stop_gradient(hidden), supervised_ahead(texts, 1)

    def sums_of(own: Array, teacher: Array, counted: Array) -> tuple[Array, Array]:
        drafted, taught = fn.logits(params, own), jax.lax.stop_gradient(target_logits(teacher))
        shared = min(drafted.shape[-1], taught.shape[-1])
        log_q = jax.nn.log_softmax(drafted[..., :shared], axis=-1)
        log_p = jax.nn.log_softmax(taught[..., :shared], axis=-1)
        p = jnp.exp(log_p)
        alpha = overlap(log_q, p)
        if divergence == "kl":
            loss = soft_cross_entropy(log_q, p) - soft_cross_entropy(log_p, p)
        else:
            loss = 1.0 - alpha if divergence == "tv" else likelihood_of_acceptance(log_q, p)
        return jnp.sum(jnp.where(counted, loss, 0.0)), jnp.sum(jnp.where(counted, alpha, 0.0))

    with nn.intercept_methods(dense_gradients):
        out = fn.forward(params, texts.tokens, texts.positions, causal_mask(texts.segments), None)
        loss, alpha = by_chunks(sums_of, (out.hidden, hidden, counted), (1, 1, 1), chunk, remat=remat)
    count = jnp.sum(counted, dtype=jnp.float32)
    rows = jnp.maximum(count, 1)
    metrics = StepMetrics((loss / rows)[None], (alpha / rows)[None], count[None])
    return jnp.sum(metrics.loss * shares), metrics
