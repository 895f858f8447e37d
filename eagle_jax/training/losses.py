"""Defines the losses of draft heads by row, shifts of rows, and sums over chunks of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from eagle_jax.models.layers import cut_rows
from eagle_jax.packed import PackedTokens


def ahead(x: Array, by: int) -> Array:
    """Shifts axis 1: row t has `x[:, t + by]`; the last rows are zeros (False)."""
    if by == 0:
        return x
    kept = x[:, by:]
    return jnp.concatenate([kept, jnp.zeros_like(x[:, : x.shape[1] - kept.shape[1]])], axis=1)


def behind(x: Array, by: int) -> Array:
    """Shifts axis 1: row t has `x[:, t - by]`; the first rows are zeros (False)."""
    kept = x[:, : max(0, x.shape[1] - by)]
    return jnp.concatenate([jnp.zeros_like(x[:, : x.shape[1] - kept.shape[1]]), kept], axis=1)


def supervised_ahead(texts: PackedTokens, by: int) -> Bool[Array, "B T"]:
    """Returns whether token t + by is supervised, and in the document of row t."""
    same = (ahead(texts.segments, by) == texts.segments) & (texts.segments > 0)
    return ahead(texts.supervised, by) & same


def count_rows(texts: PackedTokens, count: int, first: int = 2) -> Float[Array, " count"]:
    """Counts the rows of packed texts that predict a supervised token `first`, `first` + 1, ... places ahead.

    The k-th step of an EAGLE head and the k-th Medusa head predict a token k + 2 places ahead, a language model 1.
    """
    return jnp.stack([jnp.sum(supervised_ahead(texts, first + k), dtype=jnp.float32) for k in range(count)])


def by_chunks(
    sums_of: Callable[..., Any], rows: tuple[Array, ...], axes: tuple[int, ...], chunk: int, *, remat: bool = True
) -> Any:
    """Returns the tree of sums `sums_of(*rows)`, computed by chunks of rows.

    Args:
      sums_of: must ignore rows of zeros (False), which fill the last chunk.
      axes: axis of the rows in every array.
      chunk: rows of a chunk; 0 is all.
      remat: computes a chunk again for the gradient, so that logits of all rows never exist at once.
    """
    length = rows[0].shape[axes[0]]
    chunk = min(chunk or length, length)

    def add(sums: Any, part: tuple[Array, ...]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, sums_of(*part)), None

    parts = tuple(cut_rows(x, axis, chunk) for x, axis in zip(rows, axes, strict=True))
    shapes = jax.eval_shape(sums_of, *(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in parts))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(jax.checkpoint(add) if remat else add, zero, parts)[0]


def rowwise_dot(x: Float[Array, "*b N"], y: Float[Array, "*b N"]) -> Float[Array, "*b"]:
    """Returns sum_n x(n) y(n) as a matrix product: XLA for CPU takes ten times as long for a sum of products."""
    return jnp.einsum("...n,...n->...", x, y, precision=jax.lax.Precision.HIGHEST)


def soft_cross_entropy(log_q: Float[Array, "*b V"], p: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """Returns -sum_v p(v) log q(v) in nats."""
    return -rowwise_dot(p, log_q)


def overlap(log_q: Float[Array, "*b V"], p: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """Returns alpha = sum_v min(p, q): how often a draft from q is accepted by p (arXiv:2211.17192, section 3.2)."""
    return jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)


def likelihood_of_acceptance(log_q: Float[Array, "*b V"], p: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """Returns -log alpha (LK loss, arXiv:2602.23881)."""
    return -jnp.log(jnp.maximum(overlap(log_q, p), 1e-9))


def blended_divergence(log_q: Float[Array, "*b V"], p: Float[Array, "*b V"], eta: float) -> Float[Array, "*b"]:
    """Returns lambda KL(p, q) + (1 - lambda) TV(p, q) with constant lambda = exp(-eta alpha) (arXiv:2602.23881).

    Far from the target KL dominates, whose gradient never vanishes; near it TV = 1 - alpha, the rate of rejection.
    """
    alpha = overlap(log_q, p)
    share = jax.lax.stop_gradient(jnp.exp(-eta * alpha))
    entropy = jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.maximum(p, 1e-30)), 0.0), axis=-1)
    return share * (soft_cross_entropy(log_q, p) + entropy) + (1.0 - share) * (1.0 - alpha)


def best_of(log_q: Float[Array, "*b V"], p: Float[Array, "*b V"], count: int) -> Float[Array, "*b"]:
    """Returns -sum of p log q over the `count` likeliest tokens of p (HASS, arXiv:2408.15766, section 3.1)."""
    mass, index = jax.lax.top_k(p, count)
    return -jnp.sum(mass * jnp.take_along_axis(log_q, index, axis=-1), axis=-1)


def smooth_l1(predicted: Float[Array, "*b H"], target: Float[Array, "*b H"]) -> Float[Array, "*b"]:
    """Returns the Huber loss with threshold 1, averaged over the last axis."""
    error = jnp.abs(predicted.astype(jnp.float32) - target.astype(jnp.float32))
    return jnp.mean(jnp.where(error < 1.0, 0.5 * jnp.square(error), error - 0.5), axis=-1)
