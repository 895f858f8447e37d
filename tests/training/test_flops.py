"""Counting arithmetic: products, loops by their turns, nothing for what is not a product."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eagle_jax.training.flops import PEAK, peak_flops, product_flops

A, B = jax.ShapeDtypeStruct((3, 5), jnp.float32), jax.ShapeDtypeStruct((5, 7), jnp.float32)


def test_a_product_is_two_operations_per_term():
    assert product_flops(jnp.dot, A, B) == 2 * 3 * 5 * 7
    assert product_flops(lambda a: a + 1, A) == 0
    batched = (jax.ShapeDtypeStruct((2, 3, 5), jnp.float32), jax.ShapeDtypeStruct((2, 5, 7), jnp.float32))
    assert product_flops(jnp.matmul, *batched) == 2 * 2 * 3 * 5 * 7


def test_loops_count_their_turns_and_inner_programs_count():
    square = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    loop = jax.jit(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=6)[0])
    assert product_flops(loop, square) == 6 * 2 * 4**3
    assert product_flops(jax.grad(lambda x: jnp.sum(loop(x))), square) == 3 * 6 * 2 * 4**3
    again = jax.checkpoint(lambda x: jnp.sum(jnp.sin(x @ x) @ x))
    assert product_flops(jax.grad(again), square) > product_flops(again, square) * 2
    either = lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y, x)  # noqa: E731
    assert product_flops(either, square) == 2 * 4**3


def test_an_unknown_device_is_measured(monkeypatch):
    assert peak_flops("float32") > 1e8
    peak_flops.cache_clear()

    class Chip:
        device_kind = "TPU v5 lite"

    monkeypatch.setattr(jax, "devices", lambda: [Chip()])
    monkeypatch.setattr(jax, "device_count", lambda: 16)
    assert peak_flops() == 16 * PEAK["TPU v5 lite"]
    peak_flops.cache_clear()
