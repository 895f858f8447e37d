"""Records the trees that a target verified; computes n-alpha, acceptance by position, and calibration.

A node is "reached" if its parent was accepted: then the target verified the node. Rates over reached nodes are
conditional on the path above them. Counts are made in NumPy, on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import numpy as np

from eagle_jax.config import TreeConfig
from eagle_jax.core import PADDING, ROOT
from eagle_jax.parallel import to_host
from eagle_jax.runtime.drafters import BoundDrafter, TreeDrafter
from eagle_jax.runtime.errors import check_finite, memory_errors
from eagle_jax.runtime.generation import Options, prefill_program, request_of, step_program
from eagle_jax.runtime.target import Target

CHAIN_LENGTH = 6
"""Drafted tokens of the chains that n-alpha is measured with: n = 0..5, as in the papers."""
BINS = 10
"""Bins of a calibration, equally wide in confidence."""


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
    target: Target, drafter: BoundDrafter | None, prompts: Sequence[Sequence[int]], **options: Unpack[Options]
) -> Cycles:
    """Generates from prompts as `eagle_jax.generate` does, with its options, and returns every tree.

    Raises:
      ValueError, NotFiniteError, MemoryError: as `eagle_jax.generate`.
    """
    request = request_of(target, drafter, prompts, **options)
    width = request.engine.drafter.num_nodes + 1
    cycles = []
    with memory_errors(request):
        state = prefill_program(*request)
        while not to_host(state.done).all():
            state, info = step_program(request.params, state, request.sampling, request.engine)
            tree, walk = info.tree, info.acceptance
            found = (tree.tokens, tree.parents, tree.scores, walk.path, walk.count, info.emitted)
            tokens, parents, scores, path, count, emitted = to_host(found)
            for row in np.flatnonzero(emitted):
                walked = path[row, : min(int(count[row]), int(emitted[row])) + 1]
                accepted = np.isin(np.arange(width), walked)
                # The target's choice after the last token of a reply does not count.
                tested = walked if emitted[row] > count[row] else walked[:-1]
                reached = np.isin(parents[row], tested)
                reached[walked[1:]] = True  # lookahead's branches may share tokens: a path may cross several of them
                cycles.append((row, tokens[row], parents[row], scores[row], accepted, reached, emitted[row]))
        check_finite(*to_host((state.not_finite, state.bad_drafts)))
    if not cycles:  # every reply ended with its first token
        ids, flags, none = np.zeros((0, width), int), np.zeros((0, width), bool), np.zeros(0, int)
        return Cycles(none, ids, ids, ids.astype(float), flags, flags, none)
    return Cycles._make(np.stack(column) for column in zip(*cycles, strict=True))


def measure_n_alpha(
    target: Target, drafter: TreeDrafter, prompts: Sequence[Sequence[int]], **options: Unpack[Options]
) -> NAlpha:
    """Measures n-alpha (arXiv:2401.15077): acceptance of a draft after n accepted drafts of a chain.

    In a chain that the budget or a stop token cuts off, the drafts up to the end of the reply count. To leave out such
    chains would bias the result against long ones.

    Args:
      drafter: its tree is replaced by a chain of 6 tokens, or of one for each of fewer Medusa heads.
      options: as in `eagle_jax.generate`.

    Raises:
      ValueError: as `eagle_jax.generate`; also if the acceptance rule decides about whole paths ("block", "traversal").
      NotFiniteError, MemoryError: as `eagle_jax.generate`.
    """
    if (rule := drafter.tree.verification) in ("block", "traversal"):
        raise ValueError(
            f"verification must be 'deterministic' or 'rejection', got {rule!r}, which accepts whole paths. "
            "Give drafter.with_tree(TreeConfig.chain(n))."
        )
    chain = TreeConfig.chain(min(CHAIN_LENGTH, drafter.max_depth or CHAIN_LENGTH), rule)
    chained = drafter.with_tree(dataclasses.replace(chain, sampled_ranking=drafter.tree.sampled_ranking))
    return n_alpha(record_cycles(target, chained, prompts, **options))


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


class Positions(NamedTuple):
    """Counts by depth and by rank among siblings.

    Attributes:
      drafted, reached, accepted: [D, K] int64. Entry (d, r) counts the nodes of depth d + 1 and rank r.
    """

    drafted: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray


class Calibration(NamedTuple):
    """Acceptance of reached nodes by confidence.

    Confidence is the probability that the draft gave a node after its parent, exp(score - parent's score). Bin b of M
    holds confidences in (b / M, (b + 1) / M]; the first bin also holds 0.

    Attributes:
      count: [M] int64, reached nodes per bin.
      confidence: [M] float64, their mean confidence; NaN in an empty bin.
      accepted: [M] int64, accepted nodes per bin.
    """

    count: np.ndarray  # type: ignore[assignment]  # hides the unused method tuple.count
    confidence: np.ndarray
    accepted: np.ndarray

    @property
    def error(self) -> float | None:
        """Expected calibration error (arXiv:1706.04599): mean over nodes of a bin's |acceptance - confidence|."""
        total = int(self.count.sum())
        if total == 0:
            return None
        full = self.count > 0
        gaps = np.abs(self.accepted[full] - self.count[full] * self.confidence[full])
        return float(gaps.sum() / total)


def depths_and_ranks(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns depth (root: 0) and rank among siblings (from 0) of every node, [C, N+1]; -1 at padding.

    Siblings are stored in the order of their rank in every tree, so the rank is the number of siblings before a node.
    """
    depths, ranks = np.full(parents.shape, -1), np.full(parents.shape, -1)
    children = np.zeros(parents.shape, int)
    rows = np.arange(len(parents))
    for node in range(parents.shape[1]):
        above = parents[:, node]
        depths[above == ROOT, node] = ranks[above == ROOT, node] = 0
        inner = above >= 0
        at = rows[inner], above[inner]
        depths[inner, node] = depths[at] + 1
        ranks[inner, node] = children[at]
        children[at] += 1
    return depths, ranks


def by_position(cycles: Cycles) -> Positions:
    """Counts nodes by depth and rank (the conditional form of EAGLE-2's figure 5, arXiv:2406.16858).

    A dynamic tree fills a position only where the draft was confident, so its rates are those of selected nodes.
    """
    depths, ranks = depths_and_ranks(cycles.parents)
    node = depths > 0
    shape = max(int(depths.max(initial=0)), 0), int(ranks[node].max(initial=-1)) + 1

    def count(flags: np.ndarray) -> np.ndarray:
        table = np.zeros(shape, np.int64)
        chosen = flags & node
        np.add.at(table, (depths[chosen] - 1, ranks[chosen]), 1)
        return table

    return Positions(count(node), count(cycles.reached), count(cycles.accepted))


def pooled(tables: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """Adds tables of counts; the result has the size of the largest."""
    shape = max(map(len, tables)), max((len(row) for table in tables for row in table), default=0)
    total = np.zeros(shape, np.int64)
    for table in tables:
        for depth, row in enumerate(table):
            total[depth, : len(row)] += np.asarray(row, np.int64)
    return total


def calibrate(cycles: Cycles) -> Calibration:
    """Counts reached nodes and their acceptance by confidence (EAGLE-2, figure 6).

    Meaningful for ranked drafts under deterministic verification: the target accepts a reached node with its own
    probability of the token. Sampled drafts are accepted by p/q instead.

    Raises:
      ValueError: the scores are not log-probabilities (prompt lookup, lookahead).
    """
    rows, nodes = np.nonzero(cycles.reached & (cycles.parents >= 0))
    scores = cycles.scores[rows, nodes].astype(np.float64)
    gains = scores - cycles.scores[rows, cycles.parents[rows, nodes]]
    # The margin covers rounding of float32 sums of log-probabilities.
    if (len(scores) and not scores.any()) or np.any(gains > 1e-4) or not np.all(np.isfinite(gains)):
        raise ValueError(
            "scores of cycles must be cumulative log-probabilities, got other numbers. Record a drafter with "
            "probabilities, such as an EAGLE head."
        )
    confidence = np.exp(np.minimum(gains, 0.0))
    place = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    count = np.bincount(place, minlength=BINS)
    total = np.bincount(place, weights=confidence, minlength=BINS)
    mean = np.divide(total, count, out=np.full(BINS, np.nan), where=count > 0)
    return Calibration(count, mean, np.bincount(place[cycles.accepted[rows, nodes]], minlength=BINS))
