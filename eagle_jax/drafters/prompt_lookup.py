"""Drafts from the text so far: prompt lookup decoding.

Where the last n tokens stood before, what followed them then is drafted now (Saxena, 2023,
https://github.com/apoorvumang/prompt-lookup-decoding). The text is a fixed buffer in the drafter's state and the search
a comparison with its shifts: no loop over the text, nothing on the host.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from eagle_jax.config import ConfigError
from eagle_jax.core.types import PADDING, ROOT, Drafter, DraftTree, Params, RowRandomness, Sampling, Verified


class LookupState(NamedTuple):
    """The confirmed text.

    Attributes:
      tokens: [B, S] int32, garbage beyond `length`. length: [B] int32; the root is not among them yet.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]


@functools.lru_cache(maxsize=64)
def prompt_lookup(ngram: int = 3, length: int = 10, latest: bool = False, shortest: int = 1) -> Drafter:
    """Drafts a chain: what followed the last `ngram` tokens where they stood before; if nowhere, one token fewer ...

    Args:
      ngram: most tokens that are looked up. shortest: fewest. length: most tokens drafted.
      latest: of several places take the latest, not the first.

    Raises:
      ConfigError: a number below 1, or `shortest` above `ngram`.
    """
    for name, value in (("ngram", ngram), ("length", length), ("shortest", shortest)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.")
    if shortest > ngram:
        raise ConfigError(f"shortest must be at most ngram, {ngram}, got {shortest}.")

    def init(params: Params, batch: int, slots: int) -> LookupState:
        return LookupState(jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def update(params: Params, state: LookupState, verified: Verified) -> LookupState:
        with jax.named_scope("head_update"):
            put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
            tokens = put(state.tokens, verified.tokens, verified.start)
            # A finished row keeps its length, so tokens written beyond it are never read.
            end = jnp.where(verified.count > 0, verified.start + verified.count, state.length)
            return LookupState(tokens, end)

    def draft(
        params: Params, state: LookupState, root: Array, randomness: RowRandomness, sampling: Sampling
    ) -> tuple[DraftTree, LookupState]:
        with jax.named_scope("draft"):
            tokens, found = jax.vmap(
                functools.partial(_continue, shortest=shortest, ngram=ngram, size=length, latest=latest)
            )(state.tokens, state.length, root)
            found = jnp.pad(found, ((0, 0), (1, 0)), constant_values=True)  # the root in front
            rows = jnp.broadcast_to(jnp.arange(ROOT, length, dtype=jnp.int32), found.shape)
            tokens = jnp.concatenate([root[:, None], tokens], axis=1)
            scores = jnp.where(found, 0.0, -jnp.inf)  # no probabilities are known
            return DraftTree(tokens, jnp.where(found, rows, PADDING), scores), state

    def rewind(state: LookupState, known: Array) -> LookupState:
        return state._replace(length=known)

    return Drafter(init, draft, update, taps=(), depth=length, num_nodes=length, rewind=rewind)


def _continue(
    text: Int[Array, " S"], length: Int[Array, ""], root: Int[Array, ""], *, shortest: int, ngram: int, size: int,
    latest: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns what followed an earlier occurrence of the end of one row's text, [size], and which of it is text."""
    at = jnp.arange(text.shape[0])
    text = jnp.where(at == length, root, text)  # whose last token is the root
    start, known = jnp.int32(0), jnp.bool_(False)
    match = at < length  # places where the last tokens stood, by the last of them
    for back in range(min(ngram, text.shape[0])):
        match &= (at >= back) & (jnp.roll(text, back) == text[length - back])
        if back + 1 < shortest:
            continue
        place = text.shape[0] - 1 - jnp.argmax(match[::-1]) if latest else jnp.argmax(match)
        found = jnp.any(match)  # more tokens than before: these count
        start, known = jnp.where(found, place + 1, start).astype(jnp.int32), known | found
    steps = start + jnp.arange(size)
    return text[jnp.minimum(steps, text.shape[0] - 1)], known & (steps <= length)
