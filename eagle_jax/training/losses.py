"""Defines the losses of draft heads by row, shifts of rows, and sums over chunks of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from eagle_jax.models import cut_rows
from eagle_jax.packed import PackedTokens


def ahead(x: Shaped[Array, "B T ..."], by: int) -> Shaped[Array, "B T ..."]:
    """Shifts axis 1: row t has `x[:, t + by]`; rows outside `x` are zeros (False). `by` may be negative."""
    zeros = jnp.zeros_like(x[:, : abs(by)])
    return jnp.concatenate([x[:, by:], zeros] if by >= 0 else [zeros, x[:, :by]], axis=1)


def supervised_ahead(texts: PackedTokens, by: int) -> Bool[Array, "B T"]:
    """Returns whether token t + by is supervised, and in the document of row t."""
    same = (ahead(texts.segments, by) == texts.segments) & (texts.segments > 0)
    return ahead(texts.supervised, by) & same


def count_rows(texts: PackedTokens, count: int, first: int = 2) -> Float[Array, " count"]:
    """Counts rows of packed texts that predict a supervised token `first`, `first` + 1, ... places ahead.

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
    parts = tuple(cut_rows(x, axis, chunk) for x, axis in zip(rows, axes, strict=True))
    run = lambda part: sums_of(*part)  # noqa: E731
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(jax.checkpoint(run) if remat else run, parts))


def rowwise_dot(x: Float[Array, "*b N"], y: Float[Array, "*b N"]) -> Float[Array, "*b"]:
    """Returns sum_n x(n) y(n) as a matrix product: XLA for CPU is slower at a sum of products."""
    return jnp.einsum("...n,...n->...", x, y, precision=jax.lax.Precision.HIGHEST)


def soft_cross_entropy(log_q: Float[Array, "*b V"], p: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """Returns -sum_v p(v) log q(v) in nats."""
    return -rowwise_dot(p, log_q)


def overlap(log_q: Float[Array, "*b V"], p: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """Returns alpha = sum_v min(p, q), the acceptance of a draft from q (arXiv:2211.17192, section 3.2)."""
    return jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1)


def likelihood_of_acceptance(log_q: Float[Array, "*b V"], p: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """Returns -log alpha (LK loss, arXiv:2602.23881)."""
    return -jnp.log(jnp.maximum(overlap(log_q, p), 1e-9))
