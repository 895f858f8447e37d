"""Drafts with the target itself: lookahead decoding (Fu, Bailis, Stoica and Zhang, arXiv:2402.02057).

The target's pass also refines a window of guessed tokens, as in Jacobi's iteration: columns are positions ahead, levels
the last N - 1 iterations. Every pass gives each column one token more, so every column is an n-gram that the target
wrote. Those that begin with the root are verified in the next pass.

The window is part of the draft tree, and needs no extra pass or mask: level 0 is a chain from the root, the
other levels of a column hang below its first token. The n-grams are chains of their own.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eagle_jax.config import ConfigError, check_integer
from eagle_jax.core import PADDING, ROOT, Drafter, DraftTree, Params, RowRandomness, Sampling, Verified


class LookaheadState(NamedTuple):
    """N-grams and window of the passes so far.

    Attributes:
      window: [B, N-1, W] int32, tokens of the last N - 1 iterations; level l of column c is l + c positions after the
        root, and the first cell is the root.
      pool: [B, P, N] int32, n-grams. stamps: [B, P] int32, time of the last occurrence; 0 for an empty entry.
      clock: [B] int32, the last stamp given.
    """

    window: Int[Array, "B N1 W"]
    pool: Int[Array, "B P N"]
    stamps: Int[Array, "B P"]
    clock: Int[Array, " B"]


@functools.lru_cache(maxsize=64)
def lookahead_drafter(ngram: int = 5, window: int = 7, guesses: int = 7, pool: int = 512) -> Drafter:
    """Builds the drafter of a Jacobi window and an n-gram pool, one static tree.

    Arguments are those of `eagle_jax.lookahead`. A pass finds W n-grams, one of which begins with the last token. The
    pool keeps the latest n-grams of a row; the authors keep the latest `guesses` of every first token.

    Raises:
      ConfigError: a number is too small.
    """
    for name, value, least in (("ngram", ngram, 2), ("window", window, 1), ("guesses", guesses, 1), ("pool", pool, 1)):
        check_integer(name, value, least)
    if pool < (least := max(window, guesses)):
        raise ConfigError(f"pool must be at least {least}, got {pool}. A pass adds window n-grams and reads guesses.")
    levels = ngram - 1
    parents = _shape(levels, window, guesses)
    last = (levels - 1) * window  # row of the last level's first column

    def init(params: Params, batch: int, slots: int) -> LookaheadState:
        zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
        return LookaheadState(
            zeros((batch, levels, window)), zeros((batch, pool, ngram)), zeros((batch, pool)), zeros((batch,))
        )

    def update(params: Params, state: LookaheadState, verified: Verified) -> LookaheadState:
        with jax.named_scope("drafter_update"):
            if verified.choices is None:
                return _seed(state, verified)
            fresh = verified.choices[:, last : last + window]
            found = jnp.concatenate([state.window, fresh[:, None]], axis=1).swapaxes(1, 2)  # [B, W, N]
            kept, stamps, clock = jax.vmap(_remember)(state.pool, state.stamps, state.clock, found)
            moved = jnp.concatenate([state.window[:, 1:], fresh[:, None]], axis=1)
            new = LookaheadState(moved, kept, stamps, clock)
            running = verified.count > 0
            return jax.tree.map(
                lambda new, old: jnp.where(running.reshape(-1, *[1] * (new.ndim - 1)), new, old), new, state
            )

    def draft(
        params: Params, state: LookaheadState, root: Array, randomness: RowRandomness, sampling: Sampling
    ) -> tuple[DraftTree, LookaheadState]:
        with jax.named_scope("draft"):
            batch = root.shape[0]
            stamps, best = jax.lax.top_k(jnp.where(state.pool[:, :, 0] == root[:, None], state.stamps, 0), guesses)
            guessed = jnp.take_along_axis(state.pool[:, :, 1:], best[:, :, None], axis=1).reshape(batch, -1)
            known = jnp.repeat(stamps > 0, levels, axis=1)
            valid = jnp.concatenate([jnp.ones((batch, levels * window), bool), known], axis=1)
            rows = jnp.where(valid, jnp.broadcast_to(jnp.asarray(parents), valid.shape), PADDING)
            moved = state.window.at[:, 0, 0].set(root)
            tokens = jnp.concatenate([moved.reshape(batch, -1), guessed], axis=1)
            tree = DraftTree(tokens, rows, jnp.where(valid, 0.0, -jnp.inf))  # no probabilities are known
            return tree, state._replace(window=moved)

    depth, nodes = max(window + levels - 2, levels), levels * (window + guesses) - 1

    def rewind(state: LookaheadState, length: Array) -> LookaheadState:
        return state  # n-grams of discarded text stay useful

    return Drafter(init, draft, update, taps=(), depth=depth, num_nodes=nodes, reads_choices=True, rewind=rewind)


def _shape(levels: int, window: int, guesses: int) -> np.ndarray:
    """Returns the parents of the window, level by level from the root on, and then of the n-grams."""
    rows = [ROOT, *range(window - 1)]
    rows += range((levels - 1) * window)  # each below the cell of the level before
    for _ in range(guesses):
        rows += [0, *range(len(rows), len(rows) + levels - 1)]
    return np.array(rows, np.int32)


def _seed(state: LookaheadState, verified: Verified) -> LookaheadState:
    """Fills the window with tokens of the prompt."""
    width = verified.tokens.shape[1]
    if width == 1:  # the prompt's last token: its chunk has filled the window
        return state
    cells = np.arange(state.window[0].size)
    places = jnp.asarray(cells)[None] % jnp.maximum(verified.count, 1)[:, None]
    seeded = jnp.take_along_axis(verified.tokens, places, axis=1).reshape(state.window.shape)
    return state._replace(window=jnp.where((verified.count > 0)[:, None, None], seeded, state.window))


def _remember(
    pool: Int[Array, "P N"], stamps: Int[Array, " P"], clock: Int[Array, ""], found: Int[Array, "W N"]
) -> tuple[Array, Array, Array]:
    """Replaces one row's oldest n-grams by new ones; an n-gram already in the pool gets a new stamp."""
    count = found.shape[0]
    same = jnp.all(pool[:, None] == found[None], axis=-1)
    stamps = jnp.where(jnp.any(same, axis=1), 0, stamps)
    twice = jnp.triu(jnp.all(found[:, None] == found[None], axis=-1), k=1)  # of equal ones the last stays
    fresh = jnp.where(jnp.any(twice, axis=1), 0, clock + 1 + jnp.arange(count))
    _, oldest = jax.lax.top_k(-stamps, count)
    return pool.at[oldest].set(found), stamps.at[oldest].set(fresh), clock + count
