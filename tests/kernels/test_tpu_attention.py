"""Checks the TPU kernel against the definition of attention, interpreted on CPU, and compiles it for TPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax.kernels import attend_cached, tpu_attention
from eagle_jax.models import attention
from tests.kernels.cases import CASES, any_operands, check_case, check_kernel, operands

INTERPRETED = functools.partial(attend_cached, interpret=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("lengths", "sizes"), CASES)
def test_the_kernel_equals_the_definition(lengths, sizes, dtype):
    check_case(INTERPRETED, lengths, sizes, dtype)


@settings(max_examples=20)
@given(data=st.data())
def test_the_kernel_equals_the_definition_for_any_shape(data):
    """With one tile of queries or several, and blocks that are full or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu_attention, "ROWS", data.draw(st.sampled_from([32, tpu_attention.ROWS])))
        patch.setattr(tpu_attention, "BLOCK", data.draw(st.sampled_from([128, tpu_attention.BLOCK])))
        check_kernel(INTERPRETED, any_operands(data))


def test_blocks_beyond_a_row_are_not_read_and_groups_may_be_split(monkeypatch):
    """NaN beyond the last block of a row, and in a masked node, does not reach the result."""
    monkeypatch.setattr(tpu_attention, "BLOCK", 128)
    monkeypatch.setattr(tpu_attention, "MEMORY", 1)
    given = list(operands(np.random.default_rng(0), (0, 128, 129), slots=300, groups=3))
    wanted = attention._attend(*given, scale=0.3)
    for row, read in enumerate((128, 128, 256)):
        given[4], given[5] = given[4].at[row, :, :, read:].set(np.nan), given[5].at[row, :, read:].set(np.nan)
    found = attend_cached(*given, scale=0.3, interpret=True)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    given[3] = given[3].at[:, :, 2].set(False).at[:, 2, 2].set(True)
    given[2] = given[2].at[:, :, 2].set(np.nan)
    others = np.asarray(attend_cached(*given, scale=0.3, interpret=True)).reshape(3, 5, -1)[:, [0, 1, 3, 4]]
    assert np.isfinite(others).all()


@pytest.mark.parametrize(("slots", "length"), [(300, 0), (600, 512), (600, 513), (2176, 1024), (2176, 2176), (40, 900)])
def test_no_block_beyond_a_row_is_fetched(slots, length):
    """A step fetches a block if it is another one than that of the step before; the last step adds new tokens."""
    block = min(slots, tpu_attention.BLOCK)
    steps = np.arange(-(-slots // block) + 1)
    held = np.asarray(tpu_attention.block_of(steps, length, slots, block))
    fetched = 1 + np.count_nonzero(np.diff(held))
    assert held[0] == 0 and np.all(np.diff(held) >= 0)
    assert fetched == -(-max(1, min(length, slots)) // block) == -(-tpu_attention.blocks_read(slots, length) // block)


def test_gradients_are_those_of_the_definition(monkeypatch):
    monkeypatch.setattr(attention, "attend_cached", functools.partial(attend_cached, interpret=True))
    given = operands(np.random.default_rng(1), (3, 9), sinks=True, window=20)

    def loss(mix, floats):
        query, keys, values, sinks = floats
        return jnp.sum(jnp.square(mix(query, keys, values, *given[3:8], sinks, scale=0.3)))

    floats = (*given[:3], given[8])
    found, wanted = (
        jax.grad(functools.partial(loss, attention.BY_DEVICE[name]))(floats) for name in ("tpu", "default")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
