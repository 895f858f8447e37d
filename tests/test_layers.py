"""Checks products of few rows and attention over a cache that CPUs read in blocks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.models import attention, layers


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 7), (11,), (63,), (64,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_and_its_gradients_are_those_of_any_number_of_rows(shape, dtype):
    rng = np.random.default_rng(len(shape))
    x, weight = (jnp.asarray(rng.normal(size=size), dtype) for size in ((*shape, 24), (40, 24)))

    def wanted(x, weight):
        return jnp.sum(jnp.square(jnp.dot(x, weight.T, preferred_element_type="float32")))

    def found(x, weight):
        return jnp.sum(jnp.square(layers.product(x, weight, "float32")))

    near = {"rtol": 1e-5, "atol": 1e-4} if dtype == "float32" else {"rtol": 2e-2, "atol": 0.5}
    y = jax.jit(layers.product)(x, weight)
    assert y.dtype == dtype and y.shape == (*shape, 40)
    for one, other in zip(jax.value_and_grad(found, (0, 1))(x, weight), jax.value_and_grad(wanted, (0, 1))(x, weight),
                          strict=True):  # fmt: skip
        jax.tree.map(lambda a, b: np.testing.assert_allclose(*(np.asarray(c, np.float32) for c in (a, b)), **near),
                     one, other)  # fmt: skip


@pytest.mark.parametrize(("rows", "padded"), [(3, 4), (8, 8), (11, 16)])
def test_on_cpu_the_weight_is_the_first_factor_of_few_rows(rows, padded):
    """XLA packs the second factor in every call; it would swap the factors back without a barrier."""
    sizes = [jax.ShapeDtypeStruct(size, "float32") for size in ((rows, 32), (48, 32))]
    text = jax.jit(layers.product).lower(*sizes).compile().as_text()
    assert re.findall(r"= (f32\[[0-9,]*\])\S* dot\(", text) == [f"f32[48,{padded}]"]


def naive(query, keys, values, mask):
    """Attention of one row: query [T, A, hd], keys and values [G, S, hd], mask [T, S]."""
    group = query.shape[1] // keys.shape[0]
    keys, values = (np.repeat(part, group, axis=0) for part in (keys, values))
    scores = np.where(mask, np.einsum("tad,asd->ats", query, keys) / np.sqrt(query.shape[2]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("ats,asd->tad", weights / weights.sum(-1, keepdims=True), values).reshape(len(query), -1)


@pytest.mark.parametrize(
    ("slots", "lengths"),
    [(40, (0, 40, 17)), (256, (256, 1, 0)), (257, (257, 256, 3)), (600, (0, 0, 0)), (600, (255, 256, 257)),
     (700, (512, 3, 0)), (700, (513, 700, 40))],
)  # fmt: skip
def test_attention_over_a_cache_is_that_of_the_formula(slots, lengths):
    """Slots beyond the block of the longest row hold NaN: a program that reads them returns NaN."""
    rng = np.random.default_rng(slots)
    batch, new, heads, groups, width = len(lengths), 5, 6, 2, 8
    query = rng.normal(size=(batch, new, heads, width)).astype(np.float32)
    keys, values = (rng.normal(size=(batch, groups, slots + new, width)).astype(np.float32) for _ in range(2))
    mask = rng.random((batch, new, new)) < 0.5
    mask |= np.eye(new, dtype=bool)
    cached_keys, cached_values = keys[:, :, :slots].swapaxes(2, 3).copy(), values[:, :, :slots].copy()
    read = min(slots, -(-max(lengths) // attention.CACHE_BLOCK) * attention.CACHE_BLOCK)
    if read < slots - attention.CACHE_BLOCK:  # the last block ends with the cache
        cached_keys[..., read:], cached_values[:, :, read:] = np.nan, np.nan
    found = jax.jit(attention.attend)(
        query, keys[:, :, slots:], values[:, :, slots:], mask, cached_keys, cached_values, jnp.array(lengths)
    )
    for row, length in enumerate(lengths):
        visible = np.concatenate([np.broadcast_to(np.arange(slots) < length, (new, slots)), mask[row]], axis=1)
        wanted = naive(query[row], keys[row], values[row], visible)
        np.testing.assert_allclose(found[row], wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("slots", "lengths"), [(7, (0, 3, 7, 8, 13, 50)), (600, (599, 600, 601, 900, 1300, 0))])
def test_attention_over_a_ring_is_that_of_the_formula(slots, lengths):
    """Token p is in slot p modulo the slots; every query has its own first position."""
    rng = np.random.default_rng(slots)
    batch, new, heads, groups, width, longest = len(lengths), 5, 6, 2, 8, max(lengths)
    query = rng.normal(size=(batch, new, heads, width)).astype(np.float32)
    keys, values = (rng.normal(size=(batch, groups, longest + new, width)).astype(np.float32) for _ in range(2))
    mask = np.tril(np.ones((new, new), bool))
    cached_keys, cached_values = (np.zeros((batch, groups, slots, width), np.float32) for _ in range(2))
    for row, length in enumerate(lengths):
        held = np.arange(max(0, length - slots), length)
        cached_keys[row][:, held % slots] = keys[row][:, held]
        cached_values[row][:, held % slots] = values[row][:, held]
    first = np.array(lengths)[:, None] + np.arange(new)[None] - slots + 1
    found = jax.jit(attention.attend)(
        query, keys[:, :, longest:], values[:, :, longest:], mask, cached_keys.swapaxes(2, 3), cached_values,
        jnp.array(lengths), jnp.asarray(first, jnp.int32),
    )  # fmt: skip
    for row, length in enumerate(lengths):
        at = np.arange(longest)
        seen = np.concatenate([(at < length) & (at >= first[row][:, None]), mask], axis=1)
        np.testing.assert_allclose(found[row], naive(query[row], keys[row], values[row], seen), rtol=2e-5, atol=2e-5)
