"""Pre-training: the fast gradient is the gradient, micro-batches add up, the schedule completes, a text is learnt."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eagle_jax.config import DecoderConfig
from eagle_jax.models.decoder import Decoder
from eagle_jax.training.initialise import fresh_target
from eagle_jax.training.pretrain import TrainState, next_token_loss, optimiser, train_step, warmup_stable_decay

CONFIG = DecoderConfig(17, 16, 24, 1, num_heads=2, num_kv_heads=1, head_dim=8)


@pytest.fixture(scope="module")
def params():
    return jax.jit(functools.partial(fresh_target, CONFIG))(jax.random.key(0))


@pytest.fixture(scope="module")
def rows():
    return jnp.asarray(np.random.default_rng(0).integers(0, 17, (4, 2, 9)), jnp.int32)


def test_the_fast_gradient_is_the_gradient(params, rows):
    def plain(params):
        logits = Decoder(CONFIG).apply({"params": params}, rows[0][:, :-1], method="everything")
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, rows[0][:, 1:]))

    wanted, wanted_grads = jax.jit(jax.value_and_grad(plain))(params)
    loss, grads = jax.jit(jax.value_and_grad(lambda params: next_token_loss(CONFIG, params, rows[0])))(params)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_micro_batches_make_the_step_of_the_whole_batch_and_learn(params, rows):
    tx = optimiser()
    step = jax.jit(functools.partial(train_step, CONFIG, tx))
    state = TrainState(params, jax.jit(tx.init)(params), jnp.int32(0))
    split, split_loss = step(state, rows, jnp.float32(0.01))
    whole, whole_loss = step(state, rows.reshape(1, 8, 9), jnp.float32(0.01))
    np.testing.assert_allclose(split_loss, whole_loss, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(split.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)
    for _ in range(40):
        state, loss = step(state, rows, jnp.float32(0.01))
    assert float(loss) < 0.5 * float(split_loss)
    assert int(state.step) == 40


def test_the_schedule_rises_stays_and_falls_to_zero():
    rate = functools.partial(warmup_stable_decay, peak=2.0, warmup=4)
    assert [rate(step, decay_from=None, decay_steps=10) for step in (0, 3, 50)] == [0.5, 2.0, 2.0]
    assert [rate(step, decay_from=50, decay_steps=10) for step in (49, 50, 55, 60)] == [2.0, 2.0, 1.0, 0.0]
