"""Attention over a cache in one Pallas kernel for NVIDIA GPUs (Triton): scores stay on the chip."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

BLOCK = 64
"""Slots of a block of the cache."""
ROWS = 64
"""Most rows of a tile of queries: query heads of a group times tokens."""
LEAST = 16
"""Smallest side of a product on a tensor core."""
PROGRAMS = 256
"""Programs that keep a large GPU busy (an H200 has 132 processors); fewer tiles share out the cache of a row."""
LOWEST = float(jnp.finfo(jnp.float32).min)


def attend_cache(
    query: Float[Array, "B G M hd"],
    keys: Float[Array, "B G hd S"],
    values: Float[Array, "B G S hd"],
    length: Int[Array, " B"],
    first: Int[Array, "B M"] | None,
    scale: float,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B G M 1"], Float[Array, "B G M 1"], Float[Array, "B G M hd"]]:
    """Attends to the committed tokens of every row, from position `first` on; reads no block that holds none.

    A program has a tile of the queries of a group and a share of the row's blocks (flash decoding, Dao et al. 2023);
    the shares' softmaxes are joined afterwards.

    Args:
      interpret: runs the kernel on any device, for tests.

    Returns:
      float32 maximum of the scores, sum of exp(score - maximum), and sum of these weights times the values.
    """
    batch, groups, rows, head_dim = query.shape
    slots = keys.shape[3]
    tile = min(ROWS, max(LEAST, pl.next_power_of_2(rows)))
    tiles, width = -(-rows // tile), max(LEAST, pl.next_power_of_2(head_dim))
    shares = min(-(-slots // BLOCK), -(-PROGRAMS // (batch * groups * tiles)))

    def of_tile(*shape: int | None) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda b, g, t, s: (b, g, t, 0))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda b, g, t, s: (b, g, 0, 0))

    def part(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, *shape), lambda b, g, t, s: (s, b, g, t) + (0,) * (len(shape) - 1))

    padded = jnp.pad(query, ((0, 0), (0, 0), (0, tiles * tile - rows), (0, width - head_dim)))
    operands: list[Array] = [length, padded, keys, values]
    specs = [
        pl.BlockSpec((None,), lambda b, g, t, s: (b,)), of_tile(tile, width), whole(head_dim, slots),
        whole(slots, head_dim),
    ]  # fmt: skip
    if first is not None:
        operands.append(jnp.pad(first, ((0, 0), (0, tiles * tile - rows))))
        specs.append(pl.BlockSpec((None, tile), lambda b, g, t, s: (b, t)))
    sizes = (shares, batch, groups, tiles * tile)
    tops, totals, mixed = pl.pallas_call(
        functools.partial(_share, scale=scale, slots=slots, head_dim=head_dim, shares=shares),
        grid=(batch, groups, tiles, shares),
        in_specs=specs,
        out_specs=(part(tile), part(tile), part(tile, width)),
        out_shape=(
            jax.ShapeDtypeStruct(sizes, jnp.float32), jax.ShapeDtypeStruct(sizes, jnp.float32),
            jax.ShapeDtypeStruct((*sizes, width), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        name="attend_cache",
        interpret=interpret,
    )(*operands)  # fmt: skip
    top = jnp.max(tops, axis=0, keepdims=True)
    kept = jnp.exp(tops - top)
    total, joined = jnp.sum(kept * totals, axis=0), jnp.sum(kept[..., None] * mixed, axis=0)
    return top[0, :, :, :rows, None], total[:, :, :rows, None], joined[:, :, :rows, :head_dim]


def _share(length_ref: Any, query_ref: Any, keys_ref: Any, values_ref: Any, *refs: Any, scale: float, slots: int,
           head_dim: int, shares: int) -> None:  # fmt: skip
    """Attends from a tile of queries to a share of a row's blocks.

    Args:
      refs: the first visible position of every query, if they have one, and the three results.
    """
    first_ref, (top_ref, total_ref, mixed_ref) = refs[0] if len(refs) == 4 else None, refs[-3:]
    tile, width = query_ref.shape
    share, length = pl.program_id(3), length_ref[...]
    filled = jnp.minimum(length, slots)
    blocks = pl.cdiv(filled, BLOCK)
    each = pl.cdiv(blocks, shares)
    query = query_ref[...]
    dims = jnp.arange(width)

    def add(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, mixed = carry
        at = index * BLOCK + jnp.arange(BLOCK)
        there = at < slots
        keys = plgpu.load(
            keys_ref.at[pl.ds(0, width), pl.ds(index * BLOCK, BLOCK)],
            mask=(dims < head_dim)[:, None] & there[None], other=0.0,
        )  # fmt: skip
        values = plgpu.load(
            values_ref.at[pl.ds(index * BLOCK, BLOCK), pl.ds(0, width)],
            mask=there[:, None] & (dims < head_dim)[None], other=0.0,
        )  # fmt: skip
        if first_ref is None:
            visible = jnp.broadcast_to((at < filled)[None], (tile, BLOCK))
        else:  # in a ring: position p is in slot p modulo the slots
            last = length - 1
            position = last - jax.lax.rem(last, slots) + at
            position = jnp.where(position > last, position - slots, position)  # negative in an empty slot
            visible = (position[None] >= jnp.maximum(first_ref[...], 0)[:, None]) & there[None]
        scores = jnp.where(visible, plgpu.dot(query, keys) * scale, LOWEST)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        kept, weights = jnp.exp(top - higher), jnp.exp(scores - higher[:, None])
        total = kept * total + jnp.sum(weights, axis=1)
        return higher, total, kept[:, None] * mixed + plgpu.dot(weights.astype(values.dtype), values)

    empty = (
        jnp.full((tile,), LOWEST, jnp.float32), jnp.zeros((tile,), jnp.float32),
        jnp.zeros((tile, width), jnp.float32),
    )  # fmt: skip
    found = jax.lax.fori_loop(share * each, jnp.minimum((share + 1) * each, blocks), add, empty)
    top_ref[...], total_ref[...], mixed_ref[...] = found
