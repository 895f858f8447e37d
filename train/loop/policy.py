"""Asks arithmetic questions, scores replies, and updates a policy by GRPO (arXiv:2402.03300)."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import DecoderConfig
from eagle_jax.core import Params
from eagle_jax.data.corpus import read_rows
from eagle_jax.data.rows import SkippedRow, parse_row
from eagle_jax.models import Decoder
from eagle_jax.training.hardware import dense_gradients

NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
TEMPLATES = (
    ("{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?", lambda a, b: a + b),
    ("{name} has {c} {thing} and gives away {a}. How many {thing} are left?", lambda a, b: b),  # c is a + b
    ("{name} has {a} boxes with {b} {thing} each. How many {thing} does {name} have?", lambda a, b: a * b),
)
NAMES, THINGS = ("Tom", "Anna", "Mia", "Sam"), ("apples", "books", "pens", "cards")
SHARES = {"number": 0.2, "ended": 0.2, "marked": 0.2, "close": 0.4}
"""What `reward` gives for each property of a reply."""


class Question(NamedTuple):
    """Holds a question and its reference answer."""

    text: str
    answer: float


def arithmetic(count: int, seed: int) -> list[Question]:
    """Returns `count` word problems with one operation on numbers from 2 to 12."""
    rng, found = random.Random(seed), list[Question]()
    for _ in range(count):
        template, solve = rng.choice(TEMPLATES)
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        text = template.format(name=rng.choice(NAMES), thing=rng.choice(THINGS), a=a, b=b, c=a + b)
        found.append(Question(text, float(solve(a, b))))
    return found


def read_reference_questions(path: Path) -> list[Question]:
    """Reads questions with a reference answer: GSM8K, or any form of `parse_row` whose first reply has a number.

    Raises:
      ValueError: no row has a question and a number; or as `read_rows`.
    """
    found, reason = [], "no rows"
    for _, row in read_rows(path):
        try:
            parsed = parse_row(row)
        except SkippedRow as error:
            reason = str(error)
            continue
        messages = [] if isinstance(parsed, str) else parsed.messages
        if [message["role"] for message in messages[:2]] != ["user", "assistant"]:
            reason = "a row without a question and its answer"
            continue
        answer = number_of(messages[1]["content"])
        if answer is None:
            reason = "an answer without a number"
            continue
        found.append(Question(messages[0]["content"], answer))
    if not found:
        raise ValueError(
            f"--prompts {path} must hold questions with a number as answer, got {reason}. "
            'Write rows such as {"question": "What is 2 + 3?", "answer": "#### 5"}.'
        )
    return found


def number_of(text: str) -> float | None:
    """Returns the number after the last "####", else the last number of the text, else None."""
    marked = re.findall(rf"####\s*\$?({NUMBER})", text)
    numbers = marked or re.findall(NUMBER, text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def reward(text: str, ended: bool, answer: float) -> float:
    """Scores a reply from 0 to 1, in the parts of `SHARES`.

    A small model is rarely right, so the score rises by degrees: for any number, for an end within the budget, for a
    number after "####", and for a number close to the answer (half of the share at most unless it is equal).
    """
    number = number_of(text)
    score = SHARES["number"] * (number is not None) + SHARES["ended"] * ended
    score += SHARES["marked"] * (re.search(rf"####\s*\$?{NUMBER}", text) is not None)
    if number is not None:
        error = abs(number - answer) / max(1.0, abs(answer))
        score += SHARES["close"] * (1.0 if error == 0 else 0.5 * max(0.0, 1.0 - error))
    return score


def advantages(rewards: Float[np.ndarray, "Q G"]) -> Float[np.ndarray, "Q G"]:
    """Returns rewards less the mean of their group, over its standard deviation; 0 in a group of equal rewards."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    deviation = rewards.std(axis=1, keepdims=True)
    return np.where(deviation > 1e-6, centred / np.maximum(deviation, 1e-6), 0.0).astype(np.float32)


class Samples(NamedTuple):
    """Holds J texts of T tokens with what the update needs.

    Attributes:
      tokens: prompt, reply, padding. is_reply: True at the tokens of replies.
      log_probs: of the law that drew the replies, at their tokens. advantage: of every reply.
    """

    tokens: Int[Array, "J T"]
    is_reply: Bool[Array, "J T"]
    log_probs: Float[Array, "J T"]
    advantage: Float[Array, " J"]


def place_replies(is_reply: Bool[Array, "J T"], log_probs: Sequence[Float[np.ndarray, " n"]]) -> Float[Array, "J T"]:
    """Returns the log-probabilities of J replies at the places of their tokens, and 0 elsewhere."""
    placed = np.zeros(is_reply.shape, np.float32)
    placed[np.asarray(is_reply)] = np.concatenate(log_probs)
    return jnp.asarray(placed)


def text_log_probs(
    config: DecoderConfig, params: Params, tokens: Int[Array, "J T"], temperature: float | Array
) -> Float[Array, "J T"]:
    """Returns the log-probability of every token after those before it, at a temperature; 0 at the first."""
    with nn.intercept_methods(dense_gradients):
        logits = Decoder(config).apply({"params": params}, tokens[:, :-1], method="all_logits")
    found = -optax.softmax_cross_entropy_with_integer_labels(logits / temperature, tokens[:, 1:])
    return jnp.pad(found, ((0, 0), (1, 0)))


def grpo_loss(
    new: Float[Array, "J T"], samples: Samples, clip: float, kl: float, reference: Float[Array, "J T"] | None = None
) -> Float[Array, ""]:
    """Returns the loss of GRPO: the clipped ratio times the advantage, a mean over tokens and then over replies.

    Args:
      new: log-probabilities of the policy in training.
      kl: weight of the divergence from the reference, by the estimator exp(d) - d - 1, d = reference - new.
      reference: log-probabilities of the initial policy; unused if `kl` is 0.
    """
    advantage = jnp.broadcast_to(samples.advantage[:, None], new.shape)
    # Padding and prompts have no log-probabilities in `samples`: their ratio could overflow.
    ratio = jnp.exp(jnp.where(samples.is_reply, new - samples.log_probs, 0.0))
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
    if reference is not None and kl > 0:
        distance = jnp.where(samples.is_reply, reference - new, 0.0)
        gain -= kl * (jnp.exp(distance) - distance - 1)
    counts = jnp.maximum(1, jnp.sum(samples.is_reply, axis=1))
    return -jnp.mean(jnp.sum(jnp.where(samples.is_reply, gain, 0.0), axis=1) / counts)


@functools.partial(jax.jit, static_argnames=("config", "tx", "clip", "kl"))
def update_policy(
    config: DecoderConfig, tx: optax.GradientTransformation, clip: float, kl: float, params: Params,
    opt_state: optax.OptState, samples: Samples, temperature: Array, initial: Params,
) -> tuple[Params, optax.OptState, Array]:  # fmt: skip
    """Updates the policy once. Returns parameters, state of the optimiser, and the loss before the update.

    Args:
      initial: parameters of the reference; not read if `kl` is 0.
    """

    def loss(params: Params) -> Array:
        new = text_log_probs(config, params, samples.tokens, temperature)
        reference = text_log_probs(config, initial, samples.tokens, temperature) if kl > 0 else None
        return grpo_loss(new, samples, clip, kl, reference)

    value, gradient = jax.value_and_grad(loss)(params)
    change, opt_state = tx.update(gradient, opt_state, params)
    return optax.apply_updates(params, change), opt_state, value
