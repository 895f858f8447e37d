"""Drafts from the text so far, and from earlier samples: prompt lookup decoding.

If the last n tokens occurred before, the tokens that followed them are the draft (Saxena, 2023,
https://github.com/apoorvumang/prompt-lookup-decoding). The text is a fixed buffer in the drafter's state. The search
compares the buffer with its shifts, without a loop over the text or work on the host.

Earlier samples, the history, are a parameter that all rows share: new samples of the same size need no new program.
Samples may name their prompt. Of equally long n-grams a row takes one in a sample of its own prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

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


class History(NamedTuple):
    """Earlier samples, one after another, each with `SEPARATOR` behind it, padded (`pack_history`).

    Attributes:
      tokens: [E] int32. owner: [E] int32, row of `prompts` that a token's sample answers.
      prompts: [Q, P] int32, padded with `SEPARATOR`; a row of padding alone is a prompt of every text.
    """

    tokens: Int[Array, " E"]
    owner: Int[Array, " E"]
    prompts: Int[Array, "Q P"]


SEPARATOR = -1
"""Value of `History.tokens` between samples, and of padding; no token id."""
LEAST_HISTORY, LEAST_PROMPTS, LEAST_PROMPT = 1024, 16, 64
"""Tokens, prompts and tokens of a prompt in the smallest history; larger ones have powers of two."""


def pack_history(samples: Sequence[np.ndarray], prompts: Sequence[np.ndarray] | None = None) -> History:
    """Returns a history, whose sizes are powers of two: samples of about the same length share a program.

    Args:
      samples: token ids per sample. prompts: of every sample; None lets every text use every sample.
    """
    owners = [()] * len(samples) if prompts is None else [tuple(prompt.tolist()) for prompt in prompts]
    known = {prompt: row for row, prompt in enumerate(dict.fromkeys(owners))}
    used = sum(len(sample) + 1 for sample in samples)
    tokens = np.full((_power_of_two(max(LEAST_HISTORY, used)),), SEPARATOR, np.int32)
    owner = np.zeros_like(tokens)
    longest = max([LEAST_PROMPT, *map(len, known)])
    table = np.full((_power_of_two(max(LEAST_PROMPTS, len(known))), _power_of_two(longest)), SEPARATOR, np.int32)
    for prompt, row in known.items():
        table[row, : len(prompt)] = prompt
    at = 0
    for sample, prompt in zip(samples, owners, strict=True):
        end = at + len(sample)
        tokens[at:end], owner[at:end] = sample, known[prompt]
        at = end + 1
    return History(jnp.asarray(tokens), jnp.asarray(owner), jnp.asarray(table))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


@functools.lru_cache(maxsize=64)
def prompt_lookup_drafter(
    ngram: int = 3, length: int = 10, latest: bool = False, shortest: int = 1, history: bool = False
) -> Drafter:
    """Builds the drafter; arguments are those of `eagle_jax.prompt_lookup`.

    Args:
      history: looks n-grams up in `params["drafter"]["history"]`, a `History`, too.

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

    def find(
        places: Int[Array, " E"],
        ends: Bool[Array, " E"],
        last: Int[Array, " n"],
        last_first: bool,
        preferred: Bool[Array, " E"] | None = None,
    ) -> tuple[Array, Array]:
        """Finds the longest of the n-grams that end the text.

        Args:
          places: tokens to search. ends: where an n-gram may end. last: the last tokens, the newest first.
          last_first: of equally long ones, takes the last instead of the first.
          preferred: of equally long ones, these come before all others.

        Returns:
          the index behind the n-gram, and its length; 0 if there is none.
        """
        at, match = jnp.arange(places.shape[0]), ends
        width = jnp.zeros(places.shape, jnp.int32)
        for back in range(min(last.shape[0], places.shape[0])):
            match &= (at >= back) & (jnp.roll(places, back) == last[back])
            width += match
        width = jnp.where(width >= shortest, width, 0)
        rank = width if preferred is None else 2 * width + (preferred & (width > 0))
        place = places.shape[0] - 1 - jnp.argmax(rank[::-1]) if last_first else jnp.argmax(rank)
        return (place + 1).astype(jnp.int32), width[place]

    def follow(
        text: Int[Array, " S"], end: Int[Array, ""], root: Int[Array, ""], samples: History | None
    ) -> tuple[Array, Array]:
        """Returns `length` draft tokens and a mask of those inside the text, or inside one of the samples."""
        at = jnp.arange(text.shape[0])
        text = jnp.where(at == end, root, text)  # the last token is the root
        back = end - jnp.arange(ngram)
        last = jnp.where(back >= 0, text[jnp.maximum(back, 0)], PADDING)  # a short text has fewer; no token is PADDING
        start, width = find(text, at < end, last, latest)
        steps = jnp.arange(length)
        own = text[jnp.minimum(start + steps, text.shape[0] - 1)], (width > 0) & (start + steps <= end)
        if samples is None:
            return own
        # No n-gram reaches over a separator, and one at the end of a sample has no continuation.
        followed = jnp.pad(samples.tokens[1:], (0, 1), constant_values=SEPARATOR) != SEPARATOR
        start, theirs = find(samples.tokens, followed, last, True, begins(text, end, samples.prompts)[samples.owner])
        tokens = samples.tokens[jnp.minimum(start + steps, samples.tokens.shape[0] - 1)]
        inside = (jnp.cumsum(tokens == SEPARATOR) == 0) & (start + steps < samples.tokens.shape[0])
        better = theirs > width
        return jnp.where(better, tokens, own[0]), jnp.where(better, inside, own[1])

    def begins(text: Int[Array, " S"], end: Int[Array, ""], prompts: Int[Array, "Q P"]) -> Bool[Array, " Q"]:
        """Returns whether the text begins with each of the prompts."""
        at = jnp.arange(prompts.shape[1])
        start = jnp.where(at <= end, text[jnp.minimum(at, text.shape[0] - 1)], PADDING)[None]
        return jnp.all((prompts == start) | (prompts == SEPARATOR), axis=1)

    def draft(
        params: Params, state: LookupState, root: Array, randomness: RowRandomness, sampling: Sampling
    ) -> tuple[DraftTree, LookupState]:
        with jax.named_scope("draft"):
            samples = params["drafter"]["history"] if history else None
            tokens, found = jax.vmap(follow, in_axes=(0, 0, 0, None))(state.tokens, state.length, root, samples)
            found = jnp.pad(found, ((0, 0), (1, 0)), constant_values=True)  # the root in front
            rows = jnp.broadcast_to(jnp.arange(ROOT, length, dtype=jnp.int32), found.shape)
            tokens = jnp.concatenate([root[:, None], tokens], axis=1)
            scores = jnp.where(found, 0.0, -jnp.inf)  # no probabilities are known
            return DraftTree(tokens, jnp.where(found, rows, PADDING), scores), state

    def rewind(state: LookupState, known: Array) -> LookupState:
        return state._replace(length=known)

    return Drafter(init, draft, update, taps=(), depth=length, num_nodes=length, rewind=rewind)
