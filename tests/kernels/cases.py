"""Arguments of attention with a cache, for the kernels of all devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from eagle_jax.models import attention


def operands(rng, lengths, *, new=5, columns=None, heads=6, groups=2, width=8, slots=40, window=None, sinks=False,
             shared=False, dtype="float32"):  # fmt: skip
    """Random arguments of attention with a cache."""
    batch, columns = len(lengths), columns or new
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    mask = rng.random((new, columns) if shared else (batch, new, columns)) < 0.5
    mask[..., columns - new :] |= np.eye(new, dtype=bool)
    first = None
    if window is not None:
        first = jnp.asarray(np.array(lengths)[:, None] + rng.integers(0, 4, (batch, new)) - window + 1, jnp.int32)
    return (
        draw(batch, new, heads, width), draw(batch, groups, columns, width), draw(batch, groups, columns, width),
        jnp.asarray(mask), draw(batch, groups, width, slots), draw(batch, groups, slots, width),
        jnp.asarray(lengths, jnp.int32), first, draw(heads) if sinks else None,
    )  # fmt: skip


def check_kernel(kernel, given, near=1e-5):
    """`kernel`, with the arguments of attention with a cache, equals the definition."""
    scale = given[0].shape[-1] ** -0.5
    wanted = jax.jit(functools.partial(attention._attend, scale=scale))(*given)
    found = jax.jit(functools.partial(kernel, scale=scale))(*given)
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, wanted)), rtol=near, atol=near)


def check_case(kernel, lengths, sizes, dtype):
    """As `check_kernel`, for a case of `CASES`."""
    given = operands(np.random.default_rng(len(lengths)), lengths, dtype=dtype, **sizes)
    check_kernel(kernel, given, 1e-5 if dtype == "float32" else 2e-2)


CASES = [
    ((0, 1, 40), {}),
    ((512, 513, 0), {"slots": 600}),  # the second block is not whole
    ((1100, 511, 1), {"slots": 1100, "new": 1, "width": 64}),
    ((7, 700), {"slots": 1024, "new": 3, "columns": 30, "heads": 4, "groups": 4}),  # drafted levels come first
    ((3, 40), {"new": 300, "heads": 16, "groups": 2, "slots": 64, "shared": True}),  # several tiles of queries
    ((0, 3, 7, 8, 13, 50), {"slots": 7, "window": 7}),  # a ring at every wrap
    ((599, 600, 601, 900, 1300, 0), {"slots": 600, "window": 590, "heads": 4}),
    ((9, 600), {"slots": 640, "sinks": True}),
    ((9, 600), {"slots": 530, "window": 520, "sinks": True, "heads": 8, "groups": 1}),
]
"""Lengths of the rows, and other sizes of `operands`."""


def any_operands(data):
    """Operands of random sizes, by Hypothesis."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    groups, slots, new = draw(1, 4), draw(1, 1200), draw(1, 70)
    window = data.draw(st.sampled_from([None, max(1, slots - 5)]))
    longest = slots if window is None else 3 * slots
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=1, max_size=3))
    return operands(
        np.random.default_rng(draw(0, 99)), lengths, new=new, columns=new + draw(0, 20), heads=groups * draw(1, 5),
        groups=groups, width=draw(1, 5) * 8, slots=slots, window=window, sinks=data.draw(st.booleans()),
        shared=data.draw(st.booleans()),
    )  # fmt: skip
