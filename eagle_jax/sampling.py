"""From logits to the law that is sampled: temperature, top-k, top-p, min-p. One definition for every caller.

The processors and their order are those of `transformers`: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from eagle_jax.types import Sampling

LOWEST_TEMPERATURE = 1e-6
"""Logits divided by less could overflow float32."""


def make_sampling(temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Sampling:
    """Checks the settings and turns those that do something into arrays, so that changing a value does not recompile.

    Args:
      temperature: 0 is greedy decoding; logits are divided by it.
      top_k: keep the k largest logits; 0 switches it off.
      top_p: keep the smallest set of likeliest tokens with at least this probability; 1 switches it off.
      min_p: keep tokens with at least this share of the largest probability; 0 switches it off.

    Raises:
      ValueError: naming the argument and its range.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature={temperature} must be a finite number of at least 0 (0 is greedy decoding)")
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"temperature={temperature} is below {LOWEST_TEMPERATURE}, where logits overflow: 0 is greedy decoding"
        )
    if isinstance(top_k, bool) or not 0 <= top_k < 2**31 or int(top_k) != top_k:  # NaN fails the comparison
        raise ValueError(f"top_k={top_k} must be an integer of at least 0 (0 switches it off)")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must lie in (0, 1] (1 switches it off)")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p={min_p} must lie in [0, 1] (0 switches it off)")
    if temperature == 0:
        return Sampling()
    return Sampling(
        temperature=jnp.float32(temperature),
        top_k=jnp.int32(top_k) if top_k else None,
        top_p=jnp.float32(top_p) if top_p < 1 else None,
        min_p=jnp.float32(min_p) if min_p else None,
    )


def process_logits(logits: Float[Array, "*b V"], sampling: Sampling) -> Float[Array, "*b V"]:
    """Log-probabilities of the processed law, float32; removed tokens have -inf. At least one token always stays.

    Greedy settings give the plain log-softmax, since no temperature applies.
    """
    logits = logits.astype(jnp.float32)
    if sampling.temperature is None:
        return jax.nn.log_softmax(logits, axis=-1)
    logits = logits / sampling.temperature
    if sampling.top_k is not None or sampling.top_p is not None:
        logits = _cut_by_rank(logits, sampling)
    if sampling.min_p is not None:
        # Compared in log space: p >= min_p * max p.
        floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(sampling.min_p)
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    return jax.nn.log_softmax(logits, axis=-1)


def _cut_by_rank(logits: Float[Array, "*b V"], sampling: Sampling) -> Float[Array, "*b V"]:
    vocab = logits.shape[-1]
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    keep = jnp.ones(ranked.shape, bool)
    if sampling.top_k is not None:
        kth = jnp.minimum(sampling.top_k, vocab) - 1
        smallest = jnp.take_along_axis(ranked, jnp.broadcast_to(kth, (*ranked.shape[:-1], 1)), axis=-1)
        keep = ranked >= smallest  # like `transformers`, ties with the k-th stay
    if sampling.top_p is not None:
        probs = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        keep = keep & ((before < sampling.top_p) | (before == 0))
    back = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(keep, back, axis=-1), logits, -jnp.inf)


def draw(logits: Float[Array, " V"], key: Key[Array, ""], index: Int[Array, ""], sampling: Sampling) -> Int[Array, ""]:
    """One token for one row: argmax when greedy, else a Gumbel draw from the processed law.

    Args:
      key: the row's key. index: how many tokens the row has generated before this one. The draw is a function of
        (logits, key, index) alone; that makes the text of a key the same with every drafter.
    """
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jnp.argmax(process_logits(logits, sampling) + noise(key, index, logits.size), axis=-1).astype(jnp.int32)


def noise(key: Key[Array, ""], index: Int[Array, ""], vocab: int) -> Float[Array, " V"]:
    """The Gumbel noise of the draw at generated position `index`: all the chance there is in that token."""
    return jax.random.gumbel(jax.random.fold_in(key, index), (vocab,), jnp.float32)
