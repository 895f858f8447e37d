"""Records every tree that the target verified, and measures n-alpha of a drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eagle_jax.config import TreeConfig
from eagle_jax.core.types import PADDING
from eagle_jax.parallel.processes import to_host
from eagle_jax.runtime.drafters import BoundDrafter, TreeDrafter
from eagle_jax.runtime.errors import check_finite, memory_errors
from eagle_jax.runtime.generation import prefill_program, request_of, step_program
from eagle_jax.runtime.target import Target

CHAIN_LENGTH = 6
"""Drafted tokens of the chains that n-alpha is measured with: n = 0..5, as in the papers."""


class NAlpha(NamedTuple):
    """Acceptance by position in a chain.

    Attributes:
      alpha: entry n is accepted / tested at position n; None if tested is 0.
      tested: drafts at each position that the target verified.
      accepted: drafts at each position that it accepted.
    """

    alpha: list[float | None]
    tested: list[int]
    accepted: list[int]


class Cycles(NamedTuple):
    """Every tree that the target verified while it generated: C cycles of unfinished rows.

    Attributes:
      prompt: [C] row of the prompt.
      tokens, parents, scores: [C, N+1], as in `DraftTree`.
      accepted: [C, N+1] nodes in the reply, the root included. Drafts beyond the end of the reply (budget, stop token)
        are not.
      reached: [C, N+1] nodes that the target verified: their parent is accepted, and is not the end of the reply.
      emitted: [C] tokens that the cycle added to the reply.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    accepted: np.ndarray
    reached: np.ndarray
    emitted: np.ndarray


def record_cycles(
    target: Target,
    drafter: BoundDrafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    key: jax.Array | int | None = None,
) -> Cycles:
    """Generates from a batch of prompts as `eagle_jax.generate` does, and returns every tree.

    Raises:
      ValueError: as `eagle_jax.generate`.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "key": key}
    request = request_of(target, drafter, prompts, **options)
    found: list[tuple[np.ndarray, ...]] = []
    with memory_errors(request):
        state = prefill_program(*request)
        while not to_host(state.done).all():
            state, info = step_program(request.params, state, request.sampling, request.engine)
            tree, walk = info.tree, info.acceptance
            found.append(to_host((tree.tokens, tree.parents, tree.scores, walk.path, walk.count, info.emitted)))
        check_finite(*to_host((state.not_finite, state.bad_drafts)))
    width = request.engine.drafter.num_nodes + 1
    cycles = []
    for tokens, parents, scores, path, count, emitted in found:
        for row in np.flatnonzero(emitted):
            walked = path[row, : min(int(count[row]), int(emitted[row])) + 1]
            accepted = np.zeros(width, bool)
            accepted[walked] = True
            # The target's choice after the last token of a reply does not count.
            tested = walked if emitted[row] > count[row] else walked[:-1]
            reached = np.isin(parents[row], tested)
            reached[walked[1:]] = True  # lookahead's branches may share tokens: a path may cross several of them
            cycles.append((row, tokens[row], parents[row], scores[row], accepted, reached, emitted[row]))
    if not cycles:  # every reply ended with its first token
        ids, flags, none = np.zeros((0, width), int), np.zeros((0, width), bool), np.zeros(0, int)
        return Cycles(none, ids, ids, ids.astype(float), flags, flags, none)
    return Cycles._make(np.stack(column) for column in zip(*cycles, strict=True))


def measure_n_alpha(
    target: Target,
    head: TreeDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    key: jax.Array | int | None = None,
) -> NAlpha:
    """Measures n-alpha (arXiv:2401.15077): acceptance of a draft after n accepted drafts of a chain.

    In a chain that the budget or a stop token cuts off, the drafts up to the end of the reply count. To leave out such
    chains would bias the result against long ones.

    Args:
      head: its tree is replaced by a chain of 6 tokens, or of one for each of fewer Medusa heads.

    Raises:
      ValueError: as `eagle_jax.generate`; also if the acceptance rule decides about whole paths ("block", "traversal").
    """
    if (rule := head.tree.verification) in ("block", "traversal"):
        raise ValueError(
            f"verification must be 'deterministic' or 'rejection', got {rule!r}, which accepts whole paths. "
            "Give head.with_tree(TreeConfig.chain(n))."
        )
    chain = TreeConfig.chain(min(CHAIN_LENGTH, head.deepest or CHAIN_LENGTH), rule)
    drafter = head.with_tree(dataclasses.replace(chain, sampled_ranking=head.tree.sampled_ranking))
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "key": key}
    return n_alpha(record_cycles(target, drafter, prompts, **options))


def n_alpha(cycles: Cycles) -> NAlpha:
    """Computes n-alpha (arXiv:2401.15077) of recorded chains.

    Raises:
      ValueError: a draft is not a chain.
    """
    parents = cycles.parents[:, 1:]
    drafted = parents != PADDING
    if np.any(drafted & (parents != np.arange(parents.shape[1])[None])):
        raise ValueError("cycles must hold chains, got a tree. Record them with TreeConfig.chain(n).")
    tested = (cycles.reached[:, 1:] & drafted).sum(axis=0).tolist()
    accepted = cycles.accepted[:, 1:].sum(axis=0).tolist()
    alpha = [hits / tries if tries else None for hits, tries in zip(accepted, tested, strict=True)]
    return NAlpha(alpha, tested, accepted)
