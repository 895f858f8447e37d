"""Turns logits into the sampled law: temperature, top-k, top-p, min-p, in the order of `transformers`."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt

from eagle_jax.core.randomness import gumbel, threefry_keys
from eagle_jax.core.types import Sampling

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-6, 1e38
"""Logits divided by less could overflow float32; a higher temperature is infinite in float32."""


def make_sampling(temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Sampling:
    """Checks the settings and makes arrays of them: another value does not compile anew.

    Args:
      temperature: 0 is greedy decoding; logits are divided by it.
      top_k: keep the k largest logits; 0 switches it off.
      top_p: keep the smallest set of likeliest tokens with at least this probability; 1 switches it off.
      min_p: keep tokens with at least this share of the largest probability; 0 switches it off.

    Raises:
      ValueError: an argument is outside its range.
    """
    if temperature != 0 and not LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE:  # NaN fails the comparison
        limits = f"{LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}"
        raise ValueError(
            f"temperature must be 0 (greedy decoding) or {limits}, got {temperature}. Pass 0 for the likeliest token."
        )
    if isinstance(top_k, bool) or not 0 <= top_k < 2**31 or int(top_k) != top_k:
        raise ValueError(f"top_k must be an integer of at least 0, got {top_k}. 0 switches it off.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}. 1 switches it off.")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p must lie in [0, 1], got {min_p}. 0 switches it off.")
    if temperature == 0:
        return Sampling()
    return Sampling(
        temperature=jnp.float32(temperature),
        top_k=jnp.int32(top_k) if top_k else None,
        top_p=jnp.float32(top_p) if top_p < 1 else None,
        min_p=jnp.float32(min_p) if min_p else None,
    )


def process_logits(logits: Float[Array, "*b V"], sampling: Sampling) -> Float[Array, "*b V"]:
    """Returns float32 log-probabilities of the processed law, -inf for removed tokens; at least one stays.

    Greedy settings give the plain log-softmax, since no temperature applies.
    """
    logits = logits.astype(jnp.float32)
    if sampling.temperature is None:
        return jax.nn.log_softmax(logits, axis=-1)
    order = _ordered_bits(logits)  # before the division: a high temperature makes some logits equal
    logits = logits / sampling.temperature
    if sampling.top_k is not None or sampling.top_p is not None:
        logits = _cut_by_rank(logits, order, sampling)
    if sampling.min_p is not None:
        # Compared in log space: p >= min_p * max p.
        floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(sampling.min_p)
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    return jax.nn.log_softmax(logits, axis=-1)


def largest(values: Float[Array, "*b V"], count: int) -> tuple[Float[Array, "*b K"], Int[Array, "*b K"]]:
    """Returns the largest values of every row in descending order, and their places; of equal ones the lower place.

    As `jax.lax.top_k`, whose compiled form on a TPU depends on the rank: of two axes it is one kernel, of more a sort
    of all values.
    """
    found = jax.lax.top_k(values.reshape(-1, values.shape[-1]), count)
    best, places = (part.reshape(*values.shape[:-1], count) for part in found)
    return best, places


def first_largest(values: Float[Array, "*b V"]) -> Int[Array, "*b"]:
    """Returns int32 `jnp.argmax` of the last axis.

    On CPUs XLA computes an argmax, and what leads to it, number by number. A maximum and the first place of it are
    vector instructions. On a TPU an argmax is one kernel with the lm_head.
    """

    def by_maximum(values: Array) -> Array:
        places = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
        best = (values == jnp.max(values, axis=-1, keepdims=True)) | jnp.isnan(values)
        return jnp.min(jnp.where(best, places, values.shape[-1] - 1), axis=-1)

    def by_argmax(values: Array) -> Array:
        return jnp.argmax(values, axis=-1).astype(jnp.int32)

    return jax.lax.platform_dependent(values, cpu=by_maximum, default=by_argmax)


def _cut_by_rank(logits: Float[Array, "*b V"], bits: UInt[Array, "*b V"], sampling: Sampling) -> Float[Array, "*b V"]:
    """Applies top-k and top-p by the order of `bits`: a sort would move far more memory on a TPU."""
    if sampling.top_k is not None:
        kth = _weighted_rank(bits, jnp.ones_like(logits), jnp.minimum(sampling.top_k, 2**24).astype(jnp.float32))
        logits = jnp.where(bits >= kth, logits, -jnp.inf)  # like `transformers`, ties with the k-th stay
    if sampling.top_p is not None:
        probs = jax.nn.softmax(logits, axis=-1)
        # The likeliest token has more than 1e-12 in any vocabulary. XLA reads a denormal top_p as 0: no sum is below 0.
        top_p = jnp.maximum(sampling.top_p, 1e-12)
        last = _weighted_rank(bits, probs, top_p)
        # Of tokens that tie at the edge, those with lower ids stay until the mass is reached.
        above, tied = bits > last, bits == last
        mass = jnp.sum(jnp.where(above, probs, 0.0), axis=-1, keepdims=True)
        before = mass + probs * (jnp.cumsum(tied, axis=-1) - 1).astype(jnp.float32)
        logits = jnp.where(above | (tied & (before < top_p)), logits, -jnp.inf)
    return logits


def _ordered_bits(x: Float[Array, "*b V"]) -> UInt[Array, "*b V"]:
    """Returns unsigned integers in the order of the float32 numbers."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 and 0 tie
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _weighted_rank(
    bits: UInt[Array, "*b V"], weights: Float[Array, "*b V"], limit: Float[Array, ""]
) -> UInt[Array, "*b 1"]:
    """Returns the least value above which entries weigh less than `limit` (weights 1: the k-th largest).

    Found digit by digit in base 16, in eight passes over the vocabulary. 0 if all entries weigh less.
    """
    digits = jnp.arange(16, dtype=jnp.uint32).reshape([1] * (bits.ndim - 1) + [16])

    def place(step: Array, found: Array) -> Array:
        shift = jnp.uint32(28) - 4 * step.astype(jnp.uint32)
        # The largest numbers that begin with the digits found so far and then with 0, 1, ... 15.
        ends = found | (digits << shift) | ((jnp.uint32(1) << shift) - 1)
        above = jnp.sum(jnp.where(bits[..., None, :] > ends[..., None], weights[..., None, :], 0.0), axis=-1)
        digit = jnp.argmax(above < limit, axis=-1, keepdims=True).astype(jnp.uint32)
        return found | (digit << shift)

    return jax.lax.fori_loop(0, 8, place, jnp.zeros((*bits.shape[:-1], 1), jnp.uint32))


LogProbs = Literal["target", "law"]
"""The law of log-probabilities: the target's at temperature 1, or the sampled one (when greedy, the target's)."""


def log_prob(
    logits: Float[Array, "*b V"], tokens: Int[Array, "*b"], law: LogProbs, sampling: Sampling
) -> Float[Array, "*b"]:
    """Returns the log-probability of every token by a law, natural logarithm, float32."""
    values = process_logits(logits, sampling if law == "law" else Sampling())
    return jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]


def draw(logits: Float[Array, " V"], key: Key[Array, ""], index: Int[Array, ""], sampling: Sampling) -> Int[Array, ""]:
    """Draws one token for one row: argmax when greedy, else argmax of the processed law with Gumbel noise.

    Args:
      key: the row's key. index: tokens that the row has generated before. The draw depends on (logits, key, index)
        alone: hence the text of a key is the same with every drafter.
    """
    if sampling.greedy:
        return first_largest(logits)
    drawn = process_logits(logits, sampling) + noise(key, index, jnp.arange(logits.size))
    return first_largest(drawn)


def noise(key: Key[Array, ""], index: Int[Array, ""], tokens: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns Gumbel noise of `tokens` (target ids) in the draw at position `index`, its only randomness."""
    return gumbel(jax.random.fold_in(threefry_keys(key), index), tokens)
