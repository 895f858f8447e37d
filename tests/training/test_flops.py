"""Operations of products and loops; the peak of a device."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.training.flops import PEAK, peak_flops, product_flops

A, B, SQUARE = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 3, 5), (2, 5, 7), (4, 4)))
LOOP = jax.jit(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=6)[0])


@pytest.mark.parametrize(
    ("fn", "args", "products"),
    [
        (jnp.matmul, (A, B), 2 * 3 * 5 * 7),
        (lambda a: a + 1, (A,), 0),
        (LOOP, (SQUARE,), 6 * 4**3),
        (jax.grad(lambda x: jnp.sum(LOOP(x))), (SQUARE,), 3 * 6 * 4**3),
        (jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(x @ x)))), (SQUARE,), 4 * 4**3),
        (lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y, x), (SQUARE,), 4**3),
    ],
    ids=["product", "sum", "loop", "gradient", "recomputed", "branch"],
)
def test_a_product_is_two_operations_per_term(fn, args, products):
    """Every turn of a loop, inner programs, and the longer branch count."""
    assert product_flops(fn, *args) == 2 * products


def test_an_unknown_device_is_measured(monkeypatch):
    assert peak_flops("float32") > 1e8
    peak_flops.cache_clear()

    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind="TPU v5 lite")])
    monkeypatch.setattr(jax, "device_count", lambda: 16)
    assert peak_flops() == 16 * PEAK["TPU v5 lite"]
    peak_flops.cache_clear()
