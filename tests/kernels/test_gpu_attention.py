"""Checks the GPU kernel against the definition of attention, interpreted on CPU, and lowers it for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax.kernels import attend_cache, gpu_attention
from eagle_jax.models import attention
from tests.kernels.cases import CASES, any_operands, check_case, check_kernel, operands

INTERPRETED = functools.partial(attention._attend, read_cache=functools.partial(attend_cache, interpret=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("lengths", "sizes"), CASES)
def test_the_kernel_equals_the_definition(lengths, sizes, dtype):
    check_case(INTERPRETED, lengths, sizes, dtype)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_kernel_equals_the_definition_for_any_shape(data):
    check_kernel(INTERPRETED, any_operands(data))


@pytest.mark.parametrize("programs", [1, 256])
def test_blocks_beyond_a_row_are_not_read(monkeypatch, programs):
    """One program reads all blocks of a row, or several share them out; NaN beyond the last reaches no result."""
    monkeypatch.setattr(gpu_attention, "PROGRAMS", programs)
    given = list(operands(np.random.default_rng(0), (0, 128, 129), slots=300, groups=3))
    wanted = attention._attend(*given, scale=0.3)
    for row, read in enumerate((0, 128, 192)):
        given[4], given[5] = given[4].at[row, :, :, read:].set(np.nan), given[5].at[row, :, read:].set(np.nan)
    np.testing.assert_allclose(INTERPRETED(*given, scale=0.3), wanted, rtol=2e-5, atol=2e-5)


def test_gradients_are_those_of_the_definition(monkeypatch):
    monkeypatch.setattr(attention, "attend_cache", functools.partial(attend_cache, interpret=True))
    given = operands(np.random.default_rng(1), (3, 9), sinks=True, window=20, dtype="bfloat16")

    def loss(mix, floats):
        query, keys, values, sinks = floats
        return jnp.sum(jnp.square(mix(query, keys, values, *given[3:8], sinks, scale=0.3).astype(jnp.float32)))

    floats = (*given[:3], given[8])
    found, wanted = (
        jax.grad(functools.partial(loss, attention.BY_DEVICE[name]))(floats) for name in ("cuda", "default")
    )
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (ours, theirs)), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("window", [None, 590])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_half_precision_is_lowered_to_the_kernel_for_cuda(dtype, window):
    given = operands(np.random.default_rng(0), (3, 600), width=64, slots=640, window=window, dtype=dtype)
    attend = jax.jit(functools.partial(attention.attend, scale=0.125))
    found = attend.trace(*given[:8]).lower(lowering_platforms=("cuda",)).as_text()
    assert ("triton" in found and "attend_cache" in found) == (dtype == "bfloat16")
