"""Operations of products and loops; the peak of a device."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.models.decoder import init_params
from eagle_jax.models.heads import init_head_params
from eagle_jax.packed import PackedTokens
from eagle_jax.training.flops import PEAK, peak_flops, product_flops
from eagle_jax.training.objective import Objective
from eagle_jax.training.step import Frozen, HeadTrainState, head_optimiser, head_train_step

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


def test_an_update_counts_as_the_compiler_counts_it():
    """Without loops of several turns; the compiler also counts operations outside products."""
    target = DecoderConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4,
                           num_kv_heads=2, head_dim=32, max_position=128)  # fmt: skip
    config = HeadConfig("eagle3", dataclasses.replace(target, num_layers=1), 256, 128, (0, 1, 2))
    objective, tx = Objective(steps=2, remat=False, chunk=64), head_optimiser(1e-3, 1, 10)
    key = jax.random.key(0)
    params = jax.eval_shape(lambda: init_params(target, key))
    head = jax.eval_shape(lambda: init_head_params(config, key)["head"])
    state = HeadTrainState(head, jax.eval_shape(tx.init, head), jax.ShapeDtypeStruct((), jnp.int32), key)
    frozen = Frozen(params, jax.ShapeDtypeStruct((256,), jnp.int32))
    texts = PackedTokens(
        *(jax.ShapeDtypeStruct((1, 4, 64), kind) for kind in (jnp.int32, jnp.bool_, jnp.int32, jnp.int32))
    )
    step = functools.partial(head_train_step, target, config, objective, tx, "float32")
    ours = product_flops(step, state, frozen, texts)
    theirs = jax.jit(step).lower(state, frozen, texts).compile().cost_analysis()["flops"]
    assert 0.8 * theirs < ours <= 1.02 * theirs


def test_an_unknown_device_is_measured(monkeypatch):
    assert peak_flops("float32") > 1e8
    peak_flops.cache_clear()

    class Chip:
        device_kind = "TPU v5 lite"

    monkeypatch.setattr(jax, "devices", lambda: [Chip()])
    monkeypatch.setattr(jax, "device_count", lambda: 16)
    assert peak_flops() == 16 * PEAK["TPU v5 lite"]
    peak_flops.cache_clear()
