"""Shadow decoding: records what a method would draft at every position while the target decodes plainly.

The state of a drafter depends on the confirmed text alone, because drafts do not persist. So plain decoding can carry a
drafter along and let it draft at every position. From these trees `infer.tuning.replay` counts the cycles of any
smaller tree. The target passes over one row whatever the tree, so a very wide tree costs little.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from eagle_jax.core.loop import step
from eagle_jax.core.sampling import make_sampling
from eagle_jax.core.types import (
    FINITE,
    Drafter,
    DraftTree,
    Engine,
    GenerateState,
    Params,
    RowRandomness,
    Sampling,
    empty_tree,
)
from eagle_jax.parallel.processes import to_host
from eagle_jax.runtime.drafters import BoundDrafter
from eagle_jax.runtime.errors import check_finite, memory_errors
from eagle_jax.runtime.generation import prefill_program, request_of
from eagle_jax.runtime.request import check_law
from eagle_jax.runtime.target import Target


class Recorded(NamedTuple):
    """The trees of P positions: those of reply 0 in order, then those of reply 1, ...

    Attributes:
      replies: token ids per prompt, as plain decoding writes them. depth: D, levels that are drafted at most.
      reply: [P] the reply that a position belongs to. at: [P] index in it of the token that comes next, from 1.
      tokens, parents: [P, N+1], scores: [P, N+1], as in `DraftTree`; row 0 is the root, token `at - 1`.
    """

    replies: list[list[int]]
    depth: int
    reply: np.ndarray
    at: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray


def can_record(drafter: BoundDrafter) -> bool:
    """Returns whether drafts follow from the text alone: not sampled, not made from the target's earlier choices."""
    return drafter.drafter.verify is None and not drafter.drafter.reads_choices


def record(
    target: Target,
    drafter: BoundDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    key: jax.Array | int | None = None,
) -> Recorded:
    """Decodes a batch of prompts plainly and records what `drafter` would draft at every position.

    Raises:
      ValueError: as `eagle_jax.generate`, or drafts that do not follow from the text alone.
      MemoryError: the device is too small; the message says how much is needed.
    """
    check_law(temperature=temperature)
    if not can_record(drafter):
        raise ValueError(
            f"drafter must draft from the text alone, got {drafter.name}, which samples or depends on "
            "earlier trees. Measure it with eagle_jax.generate."
        )
    following = dataclasses.replace(drafter, drafter=silent(drafter.drafter))
    request = request_of(target, following, prompts, max_new_tokens, make_sampling(temperature), key=key)
    found: list[tuple[np.ndarray, ...]] = []
    with memory_errors(request):
        state = prefill_program(*request)
        done = to_host(state.done)
        while not done.all():
            state, tree, running = _record_and_step(
                request.params, state, request.sampling, request.engine, drafter.drafter
            )
            *seen, done = to_host((tree.tokens, tree.parents, tree.scores, running, state.done))
            found.append(tuple(seen))
        tokens, counts, *faults = to_host((state.tokens, state.num_tokens, state.not_finite, state.bad_drafts))
        check_finite(*faults)
    replies = [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]
    places = [(row, at + 1) for row, reply in enumerate(replies) for at in range(len(reply) - 1)]
    assert all(found[at - 1][3][row] for row, at in places)
    columns = [
        np.stack([found[at - 1][column][row] for row, at in places])
        if places  # every reply may end with its first token
        else np.zeros((0, drafter.drafter.num_nodes + 1), np.float32 if column == 2 else np.int32)
        for column in range(3)
    ]
    reply, at = np.array(places, np.int32).reshape(-1, 2).T
    return Recorded(replies, drafter.drafter.depth, reply, at, *columns)


@functools.lru_cache(maxsize=64)
def silent(drafter: Drafter) -> Drafter:
    """Returns the same method without drafts: plain decoding that updates the drafter's state."""

    def draft(
        params: Params, state: Any, root: Array, chance: RowRandomness, sampling: Sampling
    ) -> tuple[DraftTree, Any]:
        return empty_tree(root), state

    return drafter._replace(draft=draft, depth=0, num_nodes=0)


@functools.partial(jax.jit, static_argnames=("engine", "drafter"), donate_argnums=(1,))
def _record_and_step(
    params: Params, state: GenerateState, sampling: Sampling, engine: Engine, drafter: Drafter
) -> tuple[GenerateState, DraftTree, Bool[Array, " B"]]:
    chance = RowRandomness(state.keys, state.num_tokens)
    tree, _ = drafter.draft(params, state.drafter, state.root, chance, sampling)
    running = ~state.done
    spoiled = running & jnp.any(jnp.isnan(tree.scores), axis=1) & (state.bad_drafts == FINITE)
    state = state._replace(bad_drafts=jnp.where(spoiled, state.num_tokens, state.bad_drafts))
    state, _ = step(params, state, sampling, engine)
    return state, tree._replace(draft_log_probs=None), running
