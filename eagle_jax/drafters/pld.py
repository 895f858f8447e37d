"""Drafts from the text so far: prompt lookup decoding.

If the last n tokens occurred before, the tokens that followed them are the draft (Saxena, 2023,
https://github.com/apoorvumang/prompt-lookup-decoding). The text is a fixed buffer in the drafter's state. The search
compares the buffer with its shifts, without a loop over the text or work on the host.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from eagle_jax.config import ConfigError, check_integer
from eagle_jax.core import PADDING, ROOT, Drafter, DraftTree, Params, RowRandomness, Sampling, Verified


class LookupState(NamedTuple):
    """The confirmed text.

    Attributes:
      tokens: [B, S] int32, undefined beyond `length`.
      length: [B] int32; the root is not included yet.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]


@functools.lru_cache(maxsize=64)
def prompt_lookup_drafter(ngram: int = 3, length: int = 10, latest: bool = False, shortest: int = 1) -> Drafter:
    """Builds the drafter; arguments are those of `eagle_jax.prompt_lookup`.

    Raises:
      ConfigError: a number is below 1, or `shortest` exceeds `ngram`.
    """
    for name, value in (("ngram", ngram), ("length", length), ("shortest", shortest)):
        check_integer(name, value)
    if shortest > ngram:
        raise ConfigError(f"shortest must be at most ngram, {ngram}, got {shortest}. Lower it, or raise ngram.")

    def init(params: Params, batch: int, slots: int) -> LookupState:
        return LookupState(jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def update(params: Params, state: LookupState, verified: Verified) -> LookupState:
        with jax.named_scope("drafter_update"):
            put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
            tokens = put(state.tokens, verified.tokens, verified.start)
            # A finished row keeps its length, so tokens written beyond it are never read.
            end = jnp.where(verified.count > 0, verified.start + verified.count, state.length)
            return LookupState(tokens, end)

    def follow(text: Int[Array, " S"], end: Int[Array, ""], root: Int[Array, ""]) -> tuple[Array, Array]:
        """Returns `length` draft tokens and a mask of those inside the text."""
        at = jnp.arange(text.shape[0])
        text = jnp.where(at == end, root, text)  # the last token is the root
        start, known = jnp.int32(0), jnp.bool_(False)
        match = at < end  # ends of earlier occurrences of the last tokens
        for back in range(min(ngram, text.shape[0])):
            match &= (at >= back) & (jnp.roll(text, back) == text[end - back])
            if back + 1 < shortest:
                continue
            place = text.shape[0] - 1 - jnp.argmax(match[::-1]) if latest else jnp.argmax(match)
            found = jnp.any(match)  # a longer match replaces a shorter one
            start, known = jnp.where(found, place + 1, start).astype(jnp.int32), known | found
        steps = start + jnp.arange(length)
        return text[jnp.minimum(steps, text.shape[0] - 1)], known & (steps <= end)

    def draft(
        params: Params, state: LookupState, root: Array, randomness: RowRandomness, sampling: Sampling
    ) -> tuple[DraftTree, LookupState]:
        with jax.named_scope("draft"):
            tokens, found = jax.vmap(follow)(state.tokens, state.length, root)
            found = jnp.pad(found, ((0, 0), (1, 0)), constant_values=True)  # the root in front
            rows = jnp.broadcast_to(jnp.arange(ROOT, length, dtype=jnp.int32), found.shape)
            tokens = jnp.concatenate([root[:, None], tokens], axis=1)
            scores = jnp.where(found, 0.0, -jnp.inf)  # no probabilities are known
            return DraftTree(tokens, jnp.where(found, rows, PADDING), scores), state

    def rewind(state: LookupState, known: Array) -> LookupState:
        return state._replace(length=known)

    return Drafter(init, draft, update, taps=(), depth=length, num_nodes=length, rewind=rewind)
