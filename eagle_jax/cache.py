"""The committed key-value cache: the only place that writes it.

A forward pass reads the cache and returns the new tokens' keys and values; `commit` writes the confirmed ones,
contiguously and once. Rejected tokens never touch the cache, so there is nothing to roll back and nothing to
compact.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle_jax.types import KVCache, NewKV


def commit(cache: KVCache, new: NewKV, count: Int[Array, " B"], rows: Int[Array, "B M"] | None = None) -> KVCache:
    """Appends `count[b]` of the new tokens to row b.

    Args:
      new: keys and values of T new tokens.
      count: tokens to append, 0 to M.
      rows: which new tokens, in order, e.g. the accepted path; None takes all T as they come (M = T).

    All M entries are written at `length`, those past `count` as garbage that the next commit overwrites. The caller
    keeps `length + M <= S`: a slice beyond the end would be moved back by XLA and overwrite committed tokens.
    """

    def append(buffer: Float[Array, "B G S hd"], fresh: Float[Array, "B G T hd"]) -> Float[Array, "B G S hd"]:
        if rows is not None:
            fresh = jnp.take_along_axis(fresh, rows[:, None, :, None], axis=2)
        return _write_rows(buffer, fresh.astype(buffer.dtype), cache.length)

    return KVCache(
        keys=tuple(map(append, cache.keys, new.keys)),
        values=tuple(map(append, cache.values, new.values)),
        length=cache.length + count,
    )


def _write_rows(
    buffer: Float[Array, "B G S hd"], fresh: Float[Array, "B G M hd"], start: Int[Array, " B"]
) -> Float[Array, "B G S hd"]:
    def write(row: Float[Array, "G S hd"], new: Float[Array, "G M hd"], at: Int[Array, ""]) -> Float[Array, "G S hd"]:
        return jax.lax.dynamic_update_slice(row, new, (0, at, 0))

    return jax.vmap(write)(buffer, fresh, start)
