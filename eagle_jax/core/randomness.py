"""Draws random numbers: Threefry-2x32 hashes (Salmon et al., SC 2011) of a row's key and an integer.

JAX's own generators do not promise that. `rbg` and `unsafe_rbg`, usual on TPUs, draw for a whole batch from the key of
its first row under `vmap`. And a float32 uniform has 23 random bits: Gumbel noise made of one never exceeds 16.6, so
tokens below a probability of 1e-7 are hardly drawn. Here every number has 64 random bits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, Key, UInt


class RowRandomness(NamedTuple):
    """Randomness of a cycle; a drafter may read `sampling.noise(key, i, tokens)`, the target's noise.

    Attributes:
      keys: [B] one PRNG key per row, the same in every cycle.
      index: [B] int32, generated position of the next token; a node at depth d stands for position `index + d - 1`.
    """

    keys: Key[Array, " B"]
    index: Int[Array, " B"]  # type: ignore[assignment]  # hides tuple.index, which nothing here calls

    def own_keys(self) -> Key[Array, " B"]:
        """Returns [B] keys for sampled drafts, new in every cycle and independent of the target's draws."""
        return jax.vmap(lambda key, index: _key_for(key, _DRAFT, index))(*self)


def verify_key(key: Key[Array, ""], index: Int[Array, ""]) -> Key[Array, ""]:
    """Derives a row's key for an acceptance rule's own draws, independent of those of drafter and target."""
    return _key_for(key, _VERIFY, index)


_DRAFT, _VERIFY = 2**31 - 1, 2**31 - 2
"""Folded into a key for other draws than the target's: no generated token has these positions."""
_NUMBER = 1
"""First word of the counters hashed here; `jax.random.fold_in` and `split` hash counters that begin with 0."""


def threefry_keys(keys: Key[Array, "*b"] | UInt[Array, "*b w"]) -> Key[Array, "*b"]:
    """Converts keys of any generator of JAX to Threefry keys, one by one; Threefry keys do not change.

    Args:
      keys: typed keys, or the words of raw ones: 2 (`threefry2x32`) or 4 (`rbg`, `unsafe_rbg`) per key.

    Raises:
      ValueError: a key has an odd number of words.
    """
    if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        keys = jax.random.key_data(keys)
    words = keys.shape[-1]
    if words % 2:
        raise ValueError(f"keys must have an even number of 32-bit words, got {words}. Pass jax.random.key(seed).")
    hashed = keys[..., 0], keys[..., 1]
    for at in range(2, words, 2):
        hashed = threefry2x32_p.bind(*hashed, keys[..., at], keys[..., at + 1])
    return jax.random.wrap_key_data(jnp.stack(hashed, axis=-1), impl="threefry2x32")


def row_keys(key: Key[Array, ""], rows: Int[Array, " B"] | UInt[Array, " B"]) -> Key[Array, " B"]:
    """Derives a Threefry key per row number: `fold_in(key, row)`."""
    key = threefry_keys(key)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def uniform(key: Key[Array, ""], numbers: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns uniform float32 in (0, 1): number i of the sequence of `key`, for every i in `numbers`.

    Near 0 they are as fine as float32 allows (down to 2**-65), near 1 they stop at 1 - 2**-24.
    """
    words = jax.random.key_data(threefry_keys(key))
    return _fraction(*_threefry(words[0], words[1], jnp.uint32(_NUMBER), numbers.astype(jnp.uint32)))


def _threefry(
    first: UInt[Array, ""], second: UInt[Array, ""], high: UInt[Array, ""], low: UInt[Array, "*n"]
) -> tuple[UInt[Array, "*n"], UInt[Array, "*n"]]:
    """Returns the hash of `threefry2x32_p`: 20 rounds, of which XLA makes one kernel with what reads the numbers.

    The primitive is a loop on CPUs and a call of its own on GPUs.
    """
    words = first, second, first ^ second ^ jnp.uint32(0x1BD11BDA)
    high, low = high + words[0], low + words[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            high = high + low
            low = high ^ ((low << turn) | (low >> (32 - turn)))
        high = high + words[(group + 1) % 3]
        low = low + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return high, low


def _fraction(high: UInt[Array, "*n"], low: UInt[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns (bits + 1/2) / 2**64 of 64 bits, rounded to float32 and kept below 1."""
    value = high.astype(jnp.float32) * 2.0**-32 + (low.astype(jnp.float32) * 2.0**-64 + 2.0**-65)
    return jnp.minimum(value, 1 - 2.0**-24)  # `high` may have been rounded up to 2**32


def gumbel(key: Key[Array, ""], numbers: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns standard Gumbel noise, float32: number i of the sequence of `key`, for every i in `numbers`.

    The upper tail is right down to probabilities of 1e-18: the noise reaches 45.
    """
    # Large noise comes from small uniform numbers, which have the finest resolution.
    return -jnp.log(-jnp.log1p(-uniform(key, numbers)))


def _key_for(key: Key[Array, ""], purpose: int, index: Int[Array, ""]) -> Key[Array, ""]:
    return jax.random.fold_in(jax.random.fold_in(threefry_keys(key), purpose), index)
