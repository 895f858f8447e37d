"""Losses of the draft heads, each with its mask: a row counts or it does not, and means are over what counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def ahead(x: Array, by: int) -> Array:
    """`x[:, t + by]` in row t of axis 1; zeros (False) where there is nothing that far ahead."""
    if by == 0:
        return x
    kept = x[:, by:]
    return jnp.concatenate([kept, jnp.zeros_like(x[:, : x.shape[1] - kept.shape[1]])], axis=1)


def behind(x: Array, by: int) -> Array:
    """`x[:, t - by]` in row t of axis 1; zeros (False) in the first `by` rows."""
    kept = x[:, : max(0, x.shape[1] - by)]
    return jnp.concatenate([jnp.zeros_like(x[:, : x.shape[1] - kept.shape[1]]), kept], axis=1)


def by_chunks(
    judge: Callable[..., Any], rows: tuple[Array, ...], axes: tuple[int, ...], chunk: int, *, remat: bool = True
) -> Any:
    """The sums that `judge(*rows)` gives, a tree, chunk by chunk of the rows along `axes`; 0 is all at once.

    Rows that fill the last chunk are zeros (False), which must count for nothing.

    Args:
      remat: what a chunk holds, its logits above all, is computed anew for the gradient and never there for all rows.
    """
    length = rows[0].shape[axes[0]]
    chunk = min(chunk or length, length)
    count = -(-length // chunk)

    def cut(x: Array, axis: int) -> Array:
        padding = [(0, count * chunk - length if i == axis else 0) for i in range(x.ndim)]
        return jnp.moveaxis(jnp.pad(x, padding).reshape(*x.shape[:axis], count, chunk, *x.shape[axis + 1 :]), axis, 0)

    def add(sums: Any, part: tuple[Array, ...]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, judge(*part)), None

    parts = tuple(cut(x, axis) for x, axis in zip(rows, axes, strict=True))
    shapes = jax.eval_shape(judge, *(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in parts))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(jax.checkpoint(add) if remat else add, zero, parts)[0]


def rowwise_dot(x: Float[Array, "*b N"], y: Float[Array, "*b N"]) -> Float[Array, "*b"]:
    """Sum of x(n) y(n) over n. As a sum of products XLA for CPU takes ten times as long."""
    return jnp.einsum("...n,...n->...", x, y, precision=jax.lax.Precision.HIGHEST)


def soft_cross_entropy(log_q: Float[Array, "*b V"], p: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """-sum_v p(v) log q(v) in nats."""
    return -rowwise_dot(p, log_q)


def overlap(log_q: Float[Array, "*b V"], p: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """Returns alpha = sum_v min(p, q): how often a draft from q is accepted by p (arXiv:2211.17192, section 3.2)."""
    return jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)


def likelihood_of_acceptance(log_q: Float[Array, "*b V"], p: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """-log alpha (LK loss, arXiv:2602.23881)."""
    return -jnp.log(jnp.maximum(overlap(log_q, p), 1e-9))


def blended_divergence(log_q: Float[Array, "*b V"], p: Float[Array, "*b V"], eta: float) -> Float[Array, "*b"]:
    """Returns lambda KL(p, q) + (1 - lambda) TV(p, q) with lambda = exp(-eta alpha) given (LK loss, arXiv:2602.23881).

    Far from the target KL leads, whose gradient never vanishes; near it the total variation 1 - alpha, which is what
    costs acceptance.
    """
    alpha = overlap(log_q, p)
    share = jax.lax.stop_gradient(jnp.exp(-eta * alpha))
    entropy = jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.maximum(p, 1e-30)), 0.0), axis=-1)
    return share * (soft_cross_entropy(log_q, p) + entropy) + (1.0 - share) * (1.0 - alpha)


def best_of(log_q: Float[Array, "*b V"], p: Float[Array, "*b V"], count: int) -> Float[Array, "*b"]:
    """-sum of p log q over the `count` likeliest tokens of p (HASS, arXiv:2408.15766, section 3.1)."""
    mass, index = jax.lax.top_k(p, count)
    return -jnp.sum(mass * jnp.take_along_axis(log_q, index, axis=-1), axis=-1)


def smooth_l1(predicted: Float[Array, "*b H"], wanted: Float[Array, "*b H"]) -> Float[Array, "*b"]:
    """Huber loss with threshold 1, averaged over the last axis: squared near zero, absolute far away."""
    error = jnp.abs(predicted.astype(jnp.float32) - wanted.astype(jnp.float32))
    return jnp.mean(jnp.where(error < 1.0, 0.5 * jnp.square(error), error - 0.5), axis=-1)
