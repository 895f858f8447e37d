"""Checks pre-training: gradients, micro-batches, the schedule, a loss that falls."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eagle_jax.config import DecoderConfig
from eagle_jax.models import Decoder
from eagle_jax.training import target_optimiser
from eagle_jax.training.initialisation import fresh_target
from eagle_jax.training.pretrain import TrainState, next_token_loss, train_step, warmup_stable_decay

CONFIG = DecoderConfig(17, 16, 24, 1, num_heads=2, num_kv_heads=1, head_dim=8)


@pytest.fixture(scope="module")
def params():
    return jax.jit(functools.partial(fresh_target, CONFIG))(jax.random.key(0))


@pytest.fixture(scope="module")
def rows():
    return jnp.asarray(np.random.default_rng(0).integers(0, 17, (4, 2, 9)), jnp.int32)


def test_hand_written_gradients_equal_those_of_jax(params, rows):
    rows = jnp.tile(
        rows.reshape(8, 9), (2, 1)
    )  # at least FEW_ROWS tokens: products of fewer have barriers of their own

    def plain(params):
        logits = Decoder(CONFIG).apply({"params": params}, rows[:, :-1], method="all_logits")
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]))

    slow = jax.jit(jax.value_and_grad(plain))
    fast = jax.jit(jax.value_and_grad(lambda params: next_token_loss(CONFIG, params, rows)))
    (loss, grads), (wanted, wanted_grads) = fast(params), slow(params)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    found = [run.lower(params).as_text().count("optimization_barrier") for run in (fast, slow)]
    assert found[0] > 0 == found[1]  # only the hand-written gradients have barriers
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), grads, wanted_grads)


def test_micro_batches_give_the_step_of_the_whole_batch(params, rows):
    tx = target_optimiser()
    step = jax.jit(functools.partial(train_step, CONFIG, tx))
    state = TrainState(params, jax.jit(tx.init)(params), jnp.int32(0))
    split, split_loss = step(state, rows, jnp.float32(0.01))
    whole, whole_loss = step(state, rows.reshape(1, 8, 9), jnp.float32(0.01))
    np.testing.assert_allclose(split_loss, whole_loss, rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4), split.params, whole.params)
    for _ in range(40):
        state, loss = step(state, rows, jnp.float32(0.01))
    assert float(loss) < 0.5 * float(split_loss)
    assert int(state.step) == 40


def test_the_schedule_rises_stays_and_falls_to_zero():
    rate = functools.partial(warmup_stable_decay, peak=2.0, warmup=4)
    wanted = {0: 0.5, 3: 2.0, 49: 2.0, 50: 2.0, 55: 1.0, 60: 0.0}
    assert {step: rate(step, decay_from=50, decay_steps=10) for step in wanted} == wanted
