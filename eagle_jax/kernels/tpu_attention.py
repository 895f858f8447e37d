"""Attention over a cache and new tokens in one Pallas kernel for TPUs: scores stay on the chip."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

BLOCK = 512
"""Slots of a block of the cache."""
ROWS = 1024
"""Most rows of a tile of queries: tokens times the query heads of a group."""
MEMORY = 6 << 20
"""Bytes of VMEM for the arrays of a step. A kernel gets 16 MiB; scores and other temporaries take the rest."""
LANES, SUBLANES = 128, 16
"""A tile of a TPU's vector memory in bfloat16."""
LOWEST = float(jnp.finfo(jnp.float32).min)


def attend_cached(
    query: Float[Array, "B T A hd"],
    new_keys: Float[Array, "B G T2 hd"],
    new_values: Float[Array, "B G T2 hd"],
    mask: Bool[Array, "*b T T2"],
    cached_keys: Float[Array, "B G hd S"],
    cached_values: Float[Array, "B G S hd"],
    length: Int[Array, " B"],
    first: Int[Array, "B T"] | None = None,
    sinks: Float[Array, " A"] | None = None,
    *,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "B T A*hd"]:
    """Computes `eagle_jax.models.attention.attend` with a cache.

    A step of the grid adds a block of the cache to a softmax in VMEM; the last step adds the new tokens by their mask.
    Blocks beyond `length` are neither fetched nor computed. The query heads of a group and the new tokens are the rows
    of one product. A step has as many groups as fit into `MEMORY`.

    Args:
      interpret: runs the kernel on any device, for tests.
    """
    batch, new, heads, head_dim = query.shape
    groups, slots = cached_keys.shape[1], cached_keys.shape[3]
    repeat = heads // groups
    tile = tile_of(new, repeat)
    rows, columns, block = _round_up(new, tile), _round_up(new_keys.shape[2], LANES), min(slots, BLOCK)
    blocks, held = -(-slots // block), _groups_per_step(groups, repeat * tile, head_dim, columns, block, query.dtype)

    grouped = query.reshape(batch, new, groups, repeat, head_dim).transpose(0, 2, 3, 1, 4)
    masks = (mask[None] if mask.ndim == 2 else mask).astype(jnp.bfloat16)
    # A masked node has weight 0, but 0 * NaN is NaN: its NaN values would reach other nodes. Its scores stay NaN.
    finite_values = jnp.where(jnp.isfinite(new_values), new_values, 0)

    def of_tile(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, held, repeat, *shape), lambda b, g, t, j, length: (b, g, 0, t, 0))

    def of_groups(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, held, *shape), lambda b, g, t, j, length: (b, g, 0, 0))

    def read(b: Any, j: Any, length: Any) -> Any:
        return block_of(j, length[b], slots, block)

    shared = masks.shape[0] == 1
    operands: list[Array] = [
        _pad(grouped, 3, rows), _pad(new_keys, 2, columns), _pad(finite_values, 2, columns),
        _pad(_pad(masks, 1, rows), 2, columns), cached_keys, cached_values,
    ]  # fmt: skip
    specs = [
        of_tile(tile, head_dim),
        of_groups(columns, head_dim),
        of_groups(columns, head_dim),
        pl.BlockSpec((1, tile, columns), lambda b, g, t, j, length: (0 if shared else b, t, 0)),
        pl.BlockSpec((1, held, head_dim, block), lambda b, g, t, j, length: (b, g, 0, read(b, j, length))),
        pl.BlockSpec((1, held, block, head_dim), lambda b, g, t, j, length: (b, g, read(b, j, length), 0)),
    ]
    if first is not None:
        operands.append(_pad(first[:, :, None], 1, rows))
        specs.append(pl.BlockSpec((1, tile, 1), lambda b, g, t, j, length: (b, t, 0)))
    if sinks is not None:
        spread = sinks.astype(jnp.float32).reshape(groups, repeat, 1, 1)
        operands.append(jnp.broadcast_to(spread, (groups, repeat, tile, 1)).reshape(groups, -1, 1))
        specs.append(pl.BlockSpec((held, repeat * tile, 1), lambda b, g, t, j, length: (g, 0, 0)))

    sizes = (held, repeat * tile)
    mixed = pl.pallas_call(
        functools.partial(_step, scale=scale, slots=slots, has_first=first is not None, has_sinks=sinks is not None),
        out_shape=jax.ShapeDtypeStruct((batch, groups, repeat, rows, head_dim), query.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, groups // held, rows // tile, blocks + 1),
            in_specs=specs,
            out_specs=of_tile(tile, head_dim),
            scratch_shapes=[pltpu.VMEM((*sizes, width), jnp.float32) for width in (1, 1, head_dim)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        name="attend_cached",
        interpret=interpret,
    )(length, *operands)
    return mixed[:, :, :, :new].transpose(0, 3, 1, 2, 4).reshape(batch, new, heads * head_dim)


def tile_of(new: int, repeat: int) -> int:
    """Returns the tokens of a tile of queries: all, or as many as `ROWS` allows with `repeat` query heads a group."""
    return min(_round_up(new, SUBLANES), max(SUBLANES, ROWS // repeat // SUBLANES * SUBLANES))


def block_of(step: Any, length: Any, slots: int, block: int) -> Any:
    """Returns the block of the cache that a step of the grid has in VMEM, for a row of `length` tokens.

    Beyond the last block that holds tokens it stays this one: a block that does not change is not fetched again.
    """
    return jnp.minimum(step, jnp.maximum(pl.cdiv(jnp.minimum(length, slots), block) - 1, 0))


def blocks_read(slots: int, context: int | None = None) -> int:
    """Returns the slots of a cache that the kernel reads for a row of `context` tokens; None is a full cache."""
    return slots if context is None else min(slots, _round_up(max(context, 1), min(slots, BLOCK)))


def _step(length_ref: Any, *refs: Any, scale: float, slots: int, has_first: bool, has_sinks: bool) -> None:
    """Adds a block of the cache, or the new tokens, to the softmax of some groups, and writes the last result.

    Args:
      refs: of the operands, the output and the softmax's parts: maximum of the scores, sum of exp(score - maximum),
        and the sum of these weights times the values.
    """
    query_ref, new_keys_ref, new_values_ref, mask_ref, keys_ref, values_ref = refs[:6]
    first_ref, sinks_ref = refs[6] if has_first else None, refs[6 + has_first] if has_sinks else None
    out_ref, top_ref, total_ref, mixed_ref = refs[-4:]
    row, at, steps = pl.program_id(0), pl.program_id(3), pl.num_programs(3)
    _, held, repeat, tile, head_dim = query_ref.shape
    block = keys_ref.shape[3]
    length = length_ref[row]
    filled = jnp.minimum(length, slots)

    def over_heads(visible: Array) -> Array:
        """[tile, columns] as float32 for every query head of a group."""
        spread = jnp.broadcast_to(visible.astype(jnp.float32)[None], (repeat, *visible.shape))
        return spread.reshape(repeat * tile, -1) > 0

    def add(group: int, keys: Array, values: Array, visible: Array | None, contract: int) -> None:
        query = query_ref[0, group].reshape(repeat * tile, head_dim)
        scores = jax.lax.dot_general(
            query, keys, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32
        )  # fmt: skip
        scores = scores * scale if visible is None else jnp.where(visible, scores * scale, LOWEST)
        top = jnp.maximum(top_ref[group], jnp.max(scores, axis=1, keepdims=True))
        kept, weights = jnp.exp(top_ref[group] - top), jnp.exp(scores - top)
        total_ref[group] = kept * total_ref[group] + jnp.sum(weights, axis=1, keepdims=True)
        added = jax.lax.dot_general(
            weights.astype(values.dtype), values, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        mixed_ref[group] = kept * mixed_ref[group] + added
        top_ref[group] = top

    @pl.when(at == 0)
    def _begin() -> None:
        top_ref[...] = jnp.full(top_ref.shape, LOWEST, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        mixed_ref[...] = jnp.zeros(mixed_ref.shape, jnp.float32)

    needs_mask = (at < steps - 1) & (at * block < filled)
    if first_ref is None:  # every token is visible: only the block in which a row ends needs a mask
        is_full = (at + 1) * block <= filled
        needs_mask &= ~is_full

        @pl.when((at < steps - 1) & is_full)
        def _add_full_block() -> None:
            for group in range(held):
                add(group, keys_ref[0, group], values_ref[0, group], None, 0)

    @pl.when(needs_mask)
    def _add_block() -> None:
        slot = at * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        if first_ref is None:
            visible = slot < filled
        else:  # in a ring: position p is in slot p modulo the slots
            last = length - 1
            position = last - jax.lax.rem(last, slots) + slot
            position = jnp.where(position > last, position - slots, position)  # negative in an empty slot
            visible = over_heads((position >= jnp.maximum(first_ref[0], 0)) & (slot < slots))
        # The last block may reach beyond the cache, and what lies there may be NaN.
        there = at * block + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0) < slots
        for group in range(held):
            values = values_ref[0, group]
            if slots % block:
                values = jnp.where(there, values, jnp.zeros_like(values))
            add(group, keys_ref[0, group], values, visible, 0)

    @pl.when(at == steps - 1)
    def _add_new() -> None:
        visible = over_heads(mask_ref[0].astype(jnp.float32) > 0)
        for group in range(held):
            add(group, new_keys_ref[0, group], new_values_ref[0, group], visible, 1)
            total, mixed = total_ref[group], mixed_ref[group]
            if sinks_ref is not None:  # scores that take part in the softmax and add nothing
                top = jnp.maximum(top_ref[group], sinks_ref[group])
                kept = jnp.exp(top_ref[group] - top)
                total, mixed = kept * total + jnp.exp(sinks_ref[group] - top), kept * mixed
            out_ref[0, group] = (mixed / total).astype(out_ref.dtype).reshape(repeat, tile, head_dim)


def _groups_per_step(groups: int, rows: int, head_dim: int, columns: int, block: int, dtype: Any) -> int:
    """Returns the most groups, a divisor of all, whose arrays take at most `MEMORY`; at least 1."""
    item = 2 * jnp.dtype(dtype).itemsize  # of two buffers
    width = _round_up(head_dim, LANES)
    size = item * 2 * width * (rows + columns + block) + 4 * rows * (width + 2 * LANES)
    return max(
        count for count in range(1, groups + 1) if groups % count == 0 and (count == 1 or count * size <= MEMORY)
    )


def _round_up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _pad(x: Array, axis: int, size: int) -> Array:
    return jnp.pad(x, [(0, size - x.shape[i] if i == axis else 0) for i in range(x.ndim)])
