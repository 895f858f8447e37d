"""Computes the loss of distilling a small draft model from the target (DistillSpec, arXiv:2310.08461)."""

from __future__ import annotations

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle_jax.config import DecoderConfig
from eagle_jax.core.types import Params
from eagle_jax.models.decoder import target_fn
from eagle_jax.packed import PackedTokens
from eagle_jax.training.host import dense_gradients
from eagle_jax.training.losses import by_chunks, likelihood_of_acceptance, overlap, soft_cross_entropy, supervised_ahead
from eagle_jax.training.objective import Logits, StepMetrics
from eagle_jax.training.unrolling import causal_mask

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
    hidden = jax.lax.stop_gradient(hidden)
    counted = supervised_ahead(texts, 1)

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
