"""Trains a small target from scratch: next-token loss, optimiser, schedule, one step."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from eagle_jax.config import DecoderConfig
from eagle_jax.core.types import Params
from eagle_jax.models import Decoder
from eagle_jax.training.hardware import dense_gradients


class TrainState(NamedTuple):
    """State of the training of a target."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]  # number of updates


def next_token_loss(config: DecoderConfig, params: Params, rows: Int[Array, "B T"]) -> Float[Array, ""]:
    """Returns the mean cross-entropy of tokens 1.. of every row, in nats."""
    with nn.intercept_methods(dense_gradients):
        logits = Decoder(config).apply({"params": params}, rows[:, :-1], method="all_logits")
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]))


def warmup_stable_decay(step: int, peak: float, warmup: int, decay_from: int, decay_steps: int) -> float:
    """Returns the learning rate: linear rise, constant, linear decay to 0 from step `decay_from`."""
    fall = 1.0 - max(0, step - decay_from) / decay_steps
    return peak * min(1.0, (step + 1) / warmup) * max(0.0, fall)


def train_step(
    config: DecoderConfig,
    tx: optax.GradientTransformation,
    state: TrainState,
    rows: Int[Array, "M B T"],
    rate: Float[Array, ""],
) -> tuple[TrainState, Float[Array, ""]]:
    """Updates once at learning rate `rate` over M micro-batches; also returns the loss before the update.

    Micro-batches keep activations in the processor's cache. The gradient is that of the whole batch.
    """

    def accumulate(total: tuple[Array, Params], part: Array) -> tuple[tuple[Array, Params], None]:
        found = jax.value_and_grad(lambda params: next_token_loss(config, params, part))(state.params)
        return jax.tree.map(jnp.add, total, found), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
    loss, grads = jax.tree.map(lambda total: total / rows.shape[0], jax.lax.scan(accumulate, zero, rows)[0])
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    updates = jax.tree.map(lambda update: rate * update, updates)
    return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), loss
