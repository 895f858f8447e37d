"""Distillation of a small draft model: it learns the target's law where the target speaks."""

from __future__ import annotations

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from eagle_jax.config import DecoderConfig
from eagle_jax.core.types import Params
from eagle_jax.models.decoder import target_fn
from eagle_jax.packed import PackedTokens
from eagle_jax.training.gradients import dense_gradients
from eagle_jax.training.losses import ahead, by_chunks, likelihood_of_acceptance, overlap, soft_cross_entropy
from eagle_jax.training.objective import Logits, Signals, StepMetrics
from eagle_jax.training.step import beside
from eagle_jax.training.unroll import causal_mask

Divergence = Literal["kl", "tv", "lk"]
"""KL(p, q); total variation 1 - sum min(p, q), what standard speculative sampling rejects; its -log (LK loss)."""


def distillation_loss(
    config: DecoderConfig,
    params: Params,
    texts: PackedTokens,
    hidden: Float[Array, "B T H"],
    target_logits: Logits,
    *,
    divergence: Divergence = "kl",
    chunk: int = 256,
    remat: bool = True,
) -> tuple[Float[Array, ""], StepMetrics]:
    """Mean divergence of the draft model q from the target p over the supervised tokens.

    (Distillation for speculative decoding: DistillSpec, arXiv:2310.08461.) Row t judges both models' laws for token
    t + 1, and counts where that is supervised and of the same document.

    Args:
      config: the draft model, with the target's tokenizer; of two vocabularies that are padded to different sizes the
        ids that both have are judged. hidden: of the target, final-normed.
      target_logits: its lm_head. chunk: rows of a text whose logits are held at once; 0 is all.
      remat: chunks are computed again for the gradient.

    Returns:
      the loss, and in metrics of length 1: it, alpha (how often standard speculative sampling would accept the draft
      model's token) as accuracy, and the rows counted.
    """
    fn = target_fn(config)
    hidden = jax.lax.stop_gradient(hidden)
    counted = _counted(texts)

    def judge(own: Array, teacher: Array, counted: Array) -> tuple[Array, Array]:
        drafted, taught = fn.logits(params, own), jax.lax.stop_gradient(target_logits(teacher))
        shared = min(drafted.shape[-1], taught.shape[-1])  # models of one tokenizer pad its vocabulary differently
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
        loss, alpha = by_chunks(judge, (out.hidden, hidden, counted), (1, 1, 1), chunk, remat=remat)
    count = jnp.sum(counted, dtype=jnp.float32)
    rows = jnp.maximum(count, 1)
    return loss / rows, StepMetrics((loss / rows)[None], (alpha / rows)[None], count[None])


def draft_model_loss(
    target: DecoderConfig,
    config: DecoderConfig,
    model: Params,
    weights: Params,
    texts: PackedTokens,
    dtype: str = "float32",
    signals: Signals | None = None,
    mesh: Mesh | None = None,
    shares: Float[Array, " 1"] | None = None,
    **options: Any,
) -> tuple[Float[Array, ""], StepMetrics]:
    """`distillation_loss` of a draft model beside its target.

    Args:
      weights: of the target. dtype: of the draft model's products and activations.
      signals: of the target, where they were written beforehand. mesh, shares: as in `step.head_loss`.
      options: of `distillation_loss`.
    """
    texts, seen, judge = beside(target, weights, texts, signals, mesh)
    model = jax.tree.map(lambda leaf: leaf.astype(dtype), model)
    loss, metrics = distillation_loss(config, model, texts, seen.hidden, judge, **options)
    return loss if shares is None else loss * shares[0], metrics


def distilled_rows(texts: PackedTokens) -> Float[Array, " 1"]:
    """Rows of packed texts that a draft model is judged by."""
    return jnp.sum(_counted(texts), dtype=jnp.float32)[None]


def _counted(texts: PackedTokens) -> Bool[Array, "B T"]:
    """Whether row t is judged: token t + 1 is supervised, of the row's document."""
    return ahead(texts.supervised, 1) & (ahead(texts.segments, 1) == texts.segments) & (texts.segments > 0)
