"""Defines attention over committed and new tokens: `attend`, and what computes it on one kind of device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from eagle_jax.core.cache import CACHE_BLOCK
from eagle_jax.kernels import attend_cache, attend_cached

QUERY_BLOCK = 512
"""Queries of one block. Without a cache, longer texts attend by blocks: scores are [A, 512, T], not [A, T, T]."""


def cut_rows(x: Shaped[Array, "..."], axis: int, size: int) -> Shaped[Array, "parts ..."]:
    """Cuts an axis into parts of `size`, padded with zeros (False); the axis of parts comes first."""
    length = x.shape[axis]
    count = -(-length // size)
    padding = [(0, count * size - length if i == axis else 0) for i in range(x.ndim)]
    parts = jnp.pad(x, padding).reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(parts, axis, 0)


def by_query_blocks(
    mix: Callable[[tuple[Array, ...]], Array], rows: tuple[Array, ...], axes: tuple[int, ...]
) -> Float[Array, "B T I"]:
    """Returns `mix(rows)`, computed by blocks of at most `QUERY_BLOCK` queries.

    Args:
      mix: returns [B, T, I]; a row depends on one query only.
      rows: arrays with the T queries along `axes`.
    """
    length = rows[0].shape[axes[0]]
    if length <= QUERY_BLOCK:
        return mix(rows)
    blocks = tuple(cut_rows(x, axis, QUERY_BLOCK) for x, axis in zip(rows, axes, strict=True))
    # The gradient recomputes every block: the scores of all blocks would not fit in memory.
    mixed = jnp.moveaxis(jax.lax.map(jax.checkpoint(mix), blocks), 0, 1)
    return mixed.reshape(mixed.shape[0], -1, mixed.shape[-1])[:, :length]


def within_window(mask: Bool[Array, "*b T T2"], window: int) -> Bool[Array, "*b T T2"]:
    """Returns the mask by which a token sees at most the last `window` tokens that it sees by `mask`.

    A row of `mask` sees the ancestors of its token in the order of their positions, so the distance of two tokens is
    the number of visible columns between them. In a tree it is their difference in depth.
    """
    if window >= mask.shape[-1]:
        return mask
    return mask & (jax.lax.cumsum(mask.astype(jnp.int32), axis=mask.ndim - 1, reverse=True) <= window)


class SoftmaxPart(NamedTuple):
    """Attention over some of the tokens, before the division by the sum of all weights; float32.

    Attributes:
      top: maximum of the scores. total: sum of exp(score - top). mixed: sum of exp(score - top) * value.
    """

    top: Float[Array, "B G M 1"]
    total: Float[Array, "B G M 1"]
    mixed: Float[Array, "B G M hd"]

    def join(self, other: SoftmaxPart) -> SoftmaxPart:
        """Returns attention over the tokens of both."""
        top = jnp.maximum(self.top, other.top)
        ours, theirs = jnp.exp(self.top - top), jnp.exp(other.top - top)
        return SoftmaxPart(top, ours * self.total + theirs * other.total, ours * self.mixed + theirs * other.mixed)


def _attend_part(
    query: Float[Array, "B G M hd"],
    keys: Float[Array, "B G hd S"],
    values: Float[Array, "B G S hd"],
    visible: Bool[Array, "#B #G #M S"],
    scale: float,
) -> SoftmaxPart:
    # The scale applies to the float32 scores, not to a half-precision query.
    scores = jnp.einsum("bgmd,bgds->bgms", query, keys, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    # The softmax does not depend on the subtracted maximum, so the maximum needs no gradient.
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights.astype(values.dtype)
    return SoftmaxPart(top, total, jnp.einsum("bgms,bgsd->bgmd", weights, values, preferred_element_type=jnp.float32))


def _attend_cache(
    query: Float[Array, "B G M hd"],
    keys: Float[Array, "B G hd S"],
    values: Float[Array, "B G S hd"],
    length: Int[Array, " B"],
    first: Int[Array, "B M"] | None,
    scale: float,
    block: int | None = None,
) -> SoftmaxPart:
    """Attends to the committed tokens of every row, from position `first` on.

    Reads the blocks of so many slots that hold some; None reads all slots at once, which takes less time for a small
    cache: XLA's CPU compiler copies a block before it reads it.
    """
    slots = keys.shape[3]

    def visible(at: Int[Array, "1 S2"]) -> Bool[Array, "B 1 #M S2"]:
        if first is None:
            return (at < length[:, None])[:, None, None]
        last = length[:, None] - 1
        positions = last - (last - at) % slots  # in a ring; negative in an empty slot
        return (positions[:, None] >= jnp.maximum(first, 0)[:, :, None])[:, None]

    if block is None or slots <= block:
        return _attend_part(query, keys, values, visible(jnp.arange(slots)[None, :]), scale)
    end = jnp.minimum(jnp.max(length), slots)

    def add_block(carry: tuple[Array, SoftmaxPart]) -> tuple[Array, SoftmaxPart]:
        start, part = carry
        begin = jnp.minimum(start, slots - block)  # the last block may begin in the one before it
        at = begin + jnp.arange(block)[None, :]
        seen = visible(at) & (at >= start)[None, None]
        block_keys = jax.lax.dynamic_slice_in_dim(keys, begin, block, axis=3)
        block_values = jax.lax.dynamic_slice_in_dim(values, begin, block, axis=2)
        return start + block, part.join(_attend_part(query, block_keys, block_values, seen, scale))

    zeros = jnp.zeros((*query.shape[:3], 1), jnp.float32)
    empty = SoftmaxPart(zeros + jnp.finfo(jnp.float32).min, zeros, jnp.zeros(query.shape, jnp.float32))
    return jax.lax.while_loop(lambda carry: carry[0] < end, add_block, (jnp.zeros_like(end), empty))[1]


def attend(
    query: Float[Array, "B T A hd"],
    new_keys: Float[Array, "B G T2 hd"],
    new_values: Float[Array, "B G T2 hd"],
    mask: Bool[Array, "*b T T2"],
    cached_keys: Float[Array, "B G hd S"] | None = None,
    cached_values: Float[Array, "B G S hd"] | None = None,
    length: Int[Array, " B"] | None = None,
    first: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    sinks: Float[Array, " A"] | None = None,
) -> Float[Array, "B T A*hd"]:
    """Computes grouped-query attention over committed and new tokens, joined in one float32 softmax.

    A query sees the `length` committed tokens of its row, those before position `first` excepted, and the new tokens
    where `mask` ([T, T2] or [B, T, T2]) is True. The cache is only read. `scale` multiplies the scores; None is
    head_dim ** -0.5. `sinks` are scores that take part in the softmax and add nothing.
    """
    batch, new, _, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    if cached_keys is None and new > QUERY_BLOCK:
        mask = jnp.broadcast_to(mask, (batch, *mask.shape[-2:]))
        block = functools.partial(attend, new_keys=new_keys, new_values=new_values, scale=scale, sinks=sinks)
        return by_query_blocks(lambda rows: block(rows[0], mask=rows[1]), (query, mask), (1, 1))
    if cached_keys is None or cached_values is None or length is None:
        return _attend(query, new_keys, new_values, mask, None, None, None, None, sinks, scale=scale)
    operands = (query, new_keys, new_values, mask, cached_keys, cached_values, length, first, sinks)
    return _attend_on_device(scale, *operands)


@functools.partial(jax.jit, static_argnums=0)  # alike layers are traced once
def _attend_on_device(scale: float, *operands: Array | None) -> Array:
    chosen = {device: functools.partial(mix, scale=scale) for device, mix in BY_DEVICE.items()}
    return jax.lax.platform_dependent(*operands, **chosen)


def _attend(
    query: Float[Array, "B T A hd"],
    new_keys: Float[Array, "B G T2 hd"],
    new_values: Float[Array, "B G T2 hd"],
    mask: Bool[Array, "*b T T2"],
    cached_keys: Float[Array, "B G hd S"] | None,
    cached_values: Float[Array, "B G S hd"] | None,
    length: Int[Array, " B"] | None,
    first: Int[Array, "B T"] | None,
    sinks: Float[Array, " A"] | None,
    *,
    scale: float,
    read_cache: Callable[..., tuple[Array, Array, Array]] = _attend_cache,
) -> Float[Array, "B T A*hd"]:
    """Computes `attend` from its definition; `read_cache` attends to the cache, and returns a `SoftmaxPart`."""
    batch, new, heads, head_dim = query.shape
    groups = new_keys.shape[1]
    # [B, G, R*T, hd]: all query heads of a group are rows of one matrix product with that group's keys.
    grouped = query.reshape(batch, new, groups, heads // groups, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, groups, -1, head_dim)
    visible = mask[None, None, None] if mask.ndim == 2 else mask[:, None, None]
    visible = jnp.broadcast_to(visible, (batch, groups, heads // groups, *mask.shape[-2:]))
    visible = visible.reshape(batch, groups, -1, mask.shape[-1])
    if cached_keys is None or cached_values is None or length is None:
        part = _attend_part(grouped, new_keys.swapaxes(2, 3), new_values, visible, scale)
    else:
        # A masked node has weight 0, but 0 * NaN is NaN: its NaN values would reach other nodes. Its scores stay NaN.
        finite_values = jnp.where(jnp.isfinite(new_values), new_values, 0)
        fresh = _attend_part(grouped, new_keys.swapaxes(2, 3), finite_values, visible, scale)
        firsts = None if first is None else jnp.tile(first, (1, heads // groups))
        part = fresh.join(SoftmaxPart(*read_cache(grouped, cached_keys, cached_values, length, firsts, scale)))
    if sinks is not None:
        top = sinks.astype(jnp.float32).reshape(1, groups, -1, 1, 1)
        top = jnp.broadcast_to(top, (batch, *top.shape[1:3], new, 1)).reshape(part.top.shape)
        part = part.join(SoftmaxPart(top, jnp.ones_like(top), jnp.zeros_like(part.mixed)))
    mixed = (part.mixed / part.total).astype(query.dtype)
    mixed = mixed.reshape(batch, groups, heads // groups, new, head_dim).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(batch, new, heads * head_dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_kernel(kernel: Callable[..., Array], scale: float, *operands: Array | None) -> Array:
    return kernel(*operands, scale=scale)


def _by_kernel_forward(
    kernel: Callable[..., Array], scale: float, *operands: Array | None
) -> tuple[Array, tuple[Array | None, ...]]:
    return kernel(*operands, scale=scale), operands


def _by_kernel_backward(
    kernel: Callable[..., Array], scale: float, operands: tuple[Any, ...], grad: Array
) -> tuple[Any, ...]:
    return jax.vjp(functools.partial(_attend, scale=scale), *operands)[1](grad)


_by_kernel.defvjp(_by_kernel_forward, _by_kernel_backward)


def _on_tpu(*operands: Any, scale: float) -> Array:
    return _by_kernel(attend_cached, scale, *operands)


def _on_nvidia(query: Array, *others: Any, scale: float) -> Array:
    # Float32 products that are exact to float32 do not run on tensor cores: the kernel would be 20 times slower.
    if query.dtype == jnp.float32:
        return _attend(query, *others, scale=scale)
    return _by_kernel(functools.partial(_attend, read_cache=attend_cache), scale, query, *others)


BY_DEVICE: dict[str, Callable[..., Array]] = {
    "cpu": functools.partial(_attend, read_cache=functools.partial(_attend_cache, block=CACHE_BLOCK)),
    "tpu": _on_tpu,
    "cuda": _on_nvidia,
    "default": _attend,
}
"""How a device computes `attend` with a cache; equal within rounding. Gradients are those of the definition.

On a CPU and with the kernels, a large cache costs what it holds. The GPU's kernel serves half precision.
"""
