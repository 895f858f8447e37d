"""Writes confirmed tokens into the key-value cache; nothing else writes it.

A forward pass reads the cache and returns the new tokens' keys and values. `commit` writes the confirmed ones once and
contiguously. Rejected tokens never enter the cache, so there is no rollback and no compaction. In a layer with a window
they overwrite the tokens that no later token sees.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle_jax.core.types import KVCache, NewKV

CACHE_BLOCK = 512
"""Slots of a block of the cache, which attention reads whole; a smaller cache is one block."""


def slots_read(cache: KVCache) -> Float[Array, ""]:
    """Returns the slots of the cache that attention reads per sequence, the mean: those of blocks that hold tokens."""
    held = jnp.maximum(-(-cache.length // CACHE_BLOCK) * CACHE_BLOCK, 1)
    return jnp.mean(jnp.minimum(held, cache.slots).astype(jnp.float32))


def commit(
    cache: KVCache,
    new: NewKV,
    count: Int[Array, " B"],
    rows: Int[Array, "B M"] | None = None,
    result: Float[Array, "B T2 H"] | None = None,
    windows: tuple[int, ...] = (),
) -> KVCache:
    """Appends `count[b]` of the new tokens to row b.

    Args:
      new: keys and values of T new tokens.
      count: tokens to append, 0 to M.
      rows: which new tokens, in order, e.g. the accepted path; None takes all T as they come (M = T).
      result: output of the pass that read the cache; see `_write_after_read_on_cpu`.
      windows: of the layers, as in `TargetFn`.

    All M entries are written at `length`. Those past `count` are zeros that the next commit overwrites: attention gives
    them the weight 0, but 0 * NaN would be NaN. The caller keeps `length + M <= S`: XLA would move a slice beyond the
    end back, onto committed tokens. A ring has no end: only the `count` tokens are written, the last ones of those that
    share a slot.
    """
    start = cache.length if result is None else _write_after_read_on_cpu(cache.length, result)

    def pick(fresh: Float[Array, "B G T hd"]) -> Float[Array, "B G M hd"]:
        picked = fresh if rows is None else jnp.take_along_axis(fresh, rows[:, None, :, None], axis=2)
        confirmed = jnp.arange(picked.shape[2])[None, :] < count[:, None]
        return jnp.where(confirmed[:, None, :, None], picked, 0)

    def append(buffer: Array, fresh: Array, window: int, axis: int) -> Array:
        if window and buffer.shape[axis + 1] == window:
            return jax.vmap(functools.partial(_append_to_ring, axis=axis))(buffer, fresh, start, count)
        return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis))(buffer, fresh, start)

    def append_keys(
        buffer: Float[Array, "B G hd S"], fresh: Float[Array, "B G T hd"], window: int
    ) -> Float[Array, "B G hd S"]:
        return append(buffer, pick(fresh).astype(buffer.dtype).swapaxes(2, 3), window, 2)

    def append_values(
        buffer: Float[Array, "B G S hd"], fresh: Float[Array, "B G T hd"], window: int
    ) -> Float[Array, "B G S hd"]:
        return append(buffer, pick(fresh).astype(buffer.dtype), window, 1)

    windows = windows or (0,) * len(cache.keys)
    return KVCache(
        keys=tuple(map(append_keys, cache.keys, new.keys, windows)),
        values=tuple(map(append_values, cache.values, new.values, windows)),
        length=cache.length + count,
    )


def _append_to_ring(ring: Array, fresh: Array, start: Int[Array, ""], count: Int[Array, ""], axis: int) -> Array:
    """Writes the first `count` entries of `fresh` to slots start, start + 1, ... modulo their number, of one row.

    Two slices, at `start` and at the first slot, hold all of them: a scatter by slot would be slow on TPU.
    """
    slots, width = ring.shape[axis], min(ring.shape[axis], fresh.shape[axis])

    def write(ring: Array, begin: Array | int) -> Array:
        entry = (begin + jnp.arange(width) - start) % slots
        entry = entry + (count - 1 - entry) // slots * slots  # the last of those that share the slot; negative: none
        old = jax.lax.dynamic_slice_in_dim(ring, begin, width, axis)
        new = jnp.take(fresh, jnp.maximum(entry, 0), axis=axis)
        is_new = (entry >= 0).reshape([width if axis == i else 1 for i in range(ring.ndim)])
        merged = jnp.where(jnp.broadcast_to(is_new, old.shape), new, old)
        return jax.lax.dynamic_update_slice_in_dim(ring, merged, begin, axis)

    if width < slots:
        ring = write(ring, jnp.minimum(start % slots, slots - width))
    return write(ring, 0)


def _write_after_read_on_cpu(place: Int[Array, " B"], result: Float[Array, "B T2 H"]) -> Int[Array, " B"]:
    """Returns `place`, on CPU dependent on `result`: the engine's one workaround for a compiler.

    Without it XLA's CPU compiler copies the whole cache in every cycle, to write before the pass has read. The
    comparison makes XLA finish the read first. Worth on two cores: 3 to 8% of a cycle with 4,096 slots, for the bundled
    pair and SmolLM2; nothing measurable with 768. On TPU it would cost a copy of a layer of a sharded cache.
    `pytest tests/core/test_cache.py -k copies` fails if a loop copies a cache.
    """
    return jax.lax.platform_dependent(
        place,
        cpu=lambda place: place + jnp.isnan(result[:, 0, 0]).astype(place.dtype),
        default=lambda place: place,
    )
