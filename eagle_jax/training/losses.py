"""Losses of the draft heads, each with its mask: a row counts or it does not, and means are over what counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def ahead(x: Array, by: int) -> Array:
    """`x[:, t + by]` in row t of axis 1; zeros (False) where there is nothing that far ahead."""
    if by == 0:
        return x
    kept = x[:, by:]
    return jnp.concatenate([kept, jnp.zeros_like(x[:, : x.shape[1] - kept.shape[1]])], axis=1)


def masked_mean(values: Float[Array, "*b"], counted: Bool[Array, "*b"]) -> Float[Array, ""]:
    """Mean of the counted values; 0 where nothing counts."""
    return jnp.sum(jnp.where(counted, values, 0.0)) / jnp.maximum(jnp.sum(counted), 1)


def soft_cross_entropy(logits: Float[Array, "*b V"], probabilities: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """-sum_v p(v) log q(v) in nats, per position, in float32."""
    return -jnp.sum(probabilities * jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1), axis=-1)


def smooth_l1(predicted: Float[Array, "*b H"], wanted: Float[Array, "*b H"]) -> Float[Array, "*b"]:
    """Huber loss with threshold 1, averaged over the last axis: squared near zero, absolute far away."""
    error = jnp.abs(predicted.astype(jnp.float32) - wanted.astype(jnp.float32))
    return jnp.mean(jnp.where(error < 1.0, 0.5 * jnp.square(error), error - 0.5), axis=-1)


def target_law(
    logits: Float[Array, "*b V"], kept: Int[Array, " Vd"] | None
) -> tuple[Float[Array, "*b Vd"], Int[Array, "*b"], Bool[Array, "*b"]]:
    """The target's distribution as a head is taught it.

    Args:
      logits: of the target. kept: target ids of the draft vocabulary, or None for all of V.

    Returns:
      probabilities renormalised over the draft vocabulary; the target's own favourite as an index into the draft
      vocabulary (meaningless where it lies outside); and whether it lies inside.
    """
    best = jnp.argmax(logits, axis=-1)
    if kept is None:
        return jax.nn.softmax(logits, axis=-1), best, jnp.ones(best.shape, bool)
    position = jnp.clip(jnp.searchsorted(kept, best), 0, kept.shape[0] - 1)
    return jax.nn.softmax(logits[..., kept], axis=-1), position, kept[position] == best
