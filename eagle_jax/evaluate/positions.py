"""Computes acceptance by tree position, calibration, n-alpha and the worth of a chain from recorded cycles.

The functions count what `acceptance.record_cycles` recorded, in NumPy. A node is "reached" if its parent was accepted,
so that the target verified it. Rates over reached nodes are conditional on the path above; a rate over no node is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eagle_jax.core.types import PADDING, ROOT
from eagle_jax.evaluate.acceptance import Cycles, NAlpha

BINS = 10
"""Bins of a calibration, equally wide in confidence."""


class Positions(NamedTuple):
    """Counts by depth and by rank among siblings.

    Attributes:
      drafted, reached, accepted: [D, K] int64; entry (d, r) counts nodes of depth d + 1 whose parent has r children
        before them: nodes drafted, those that the target looked at, those it accepted.
    """

    drafted: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray


class Nodes(NamedTuple):
    """Counts by node of a tree whose shape is the same in every cycle.

    Attributes:
      parents: [N] int64, as in `TreeConfig.static`: the parent among the drafted nodes, `ROOT` for the root.
      drafted, reached, accepted: [N] int64. A static tree without top-p drafts every node in every cycle.
    """

    parents: np.ndarray
    drafted: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray


class Calibration(NamedTuple):
    """The draft's confidence in reached nodes beside the share of them that the target accepted.

    Confidence is the conditional probability that the draft gave a node after its parent, exp(score - parent's score).
    Bin b of M holds confidences in (b / M, (b + 1) / M]; the first one 0 as well.

    Attributes:
      count: [M] int64, reached nodes per bin. confidence: [M] float64, their mean confidence; NaN in an empty bin.
      accepted: [M] int64, how many of them were accepted.
    """

    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    confidence: np.ndarray
    accepted: np.ndarray

    @property
    def error(self) -> float | None:
        """Expected calibration error (arXiv:1706.04599): the mean over nodes of |acceptance - confidence| of bins."""
        total = int(self.count.sum())
        if total == 0:
            return None
        full = self.count > 0
        gaps = np.abs(self.accepted[full] - self.count[full] * self.confidence[full])
        return float(gaps.sum() / total)


def depths_and_ranks(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[C, N+1] depth of every node (the root's is 0) and its rank among its siblings, from 0; -1 where no node is.

    Rows of one parent stand in the order of their rank, whatever the tree, so the rank is the number of rows before.
    """
    depths, ranks = np.full(parents.shape, -1), np.full(parents.shape, -1)
    children = np.zeros(parents.shape, int)
    every = np.arange(len(parents))
    for node in range(parents.shape[1]):
        above = parents[:, node]
        depths[above == ROOT, node] = ranks[above == ROOT, node] = 0
        inner = above >= 0
        at = every[inner], above[inner]
        depths[inner, node] = depths[at] + 1
        ranks[inner, node] = children[at]
        children[at] += 1
    return depths, ranks


def by_position(cycles: Cycles) -> Positions:
    """Acceptance by depth and rank (the conditional form of EAGLE-2's figure 5, arXiv:2406.16858).

    In a dynamic tree a position is filled only where the draft was confident of it, so its rate is that of the nodes
    that were chosen; rates of a static tree are those of the position itself.
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
    """The sum of tables of counts of different sizes, as large as the largest: trees differ in depth and width."""
    shape = max(map(len, tables)), max((len(row) for table in tables for row in table), default=0)
    total = np.zeros(shape, np.int64)
    for table in tables:
        for depth, row in enumerate(table):
            total[depth, : len(row)] += np.asarray(row, np.int64)
    return total


def by_node(cycles: Cycles) -> Nodes:
    """Acceptance by node of a static tree: of a Medusa tree, EAGLE-1's, a chain.

    Raises:
      ValueError: the shape differs between cycles, so that a row is not the same position in all of them.
    """
    parents = cycles.parents[:, 1:]
    node = parents != PADDING
    shape = np.where(node, parents, PADDING).max(axis=0, initial=PADDING)
    if np.any(node & (parents != shape)):
        raise ValueError("the tree is dynamic: its rows are other positions in every cycle; count by depth and rank")
    reached, accepted = cycles.reached[:, 1:] & node, cycles.accepted[:, 1:] & node
    columns = (flags.sum(axis=0, dtype=np.int64) for flags in (node, reached, accepted))
    return Nodes(np.where(shape == PADDING, PADDING, shape - 1).astype(np.int64), *columns)


def calibrate(cycles: Cycles, bins: int = BINS) -> Calibration:
    """The draft's confidence beside its acceptance (EAGLE-2, figure 6), over reached nodes.

    It means something where drafts are ranked and verified deterministically: a reached node is then accepted with the
    target's own probability of it. Drafts sampled from the draft's law are accepted by p/q, which is another question.

    Raises:
      ValueError: fewer than one bin, or scores that are no log-probabilities (prompt lookup and lookahead have none).
    """
    if bins < 1:
        raise ValueError(f"bins={bins} must be at least 1")
    every, nodes = np.nonzero(cycles.reached & (cycles.parents >= 0))
    scores = cycles.scores[every, nodes].astype(np.float64)
    gains = scores - cycles.scores[every, cycles.parents[every, nodes]]
    if len(scores) and not scores.any():
        raise ValueError(
            "every score is 0: this method drafts without probabilities, there is no confidence to calibrate"
        )
    if np.any(gains > 1e-4) or not np.all(np.isfinite(gains)):  # float32 sums of log-probabilities round
        raise ValueError("the scores are no cumulative log-probabilities: a node is likelier than its parent")
    confidence = np.exp(np.minimum(gains, 0.0))
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    total = np.bincount(place, weights=confidence, minlength=bins)
    mean = np.divide(total, count, out=np.full(bins, np.nan), where=count > 0)
    right = np.bincount(place[cycles.accepted[every, nodes]], minlength=bins)
    return Calibration(count.astype(np.int64), mean, right.astype(np.int64))


def n_alpha(cycles: Cycles) -> NAlpha:
    """n-alpha (arXiv:2401.15077) of recorded chains; the same numbers as `acceptance.measure_n_alpha`.

    Raises:
      ValueError: what was drafted is no chain.
    """
    parents = cycles.parents[:, 1:]
    chain = np.arange(parents.shape[1])[None]
    if np.any((parents != PADDING) & (parents != chain)):
        raise ValueError("n-alpha is measured with chains: record with TreeConfig.chain(n)")
    tested = (cycles.reached[:, 1:] & (parents != PADDING)).sum(axis=0).tolist()
    accepted = cycles.accepted[:, 1:].sum(axis=0).tolist()
    return NAlpha([hits / tries if tries else None for hits, tries in zip(accepted, tested, strict=True)], tested,
                  accepted)  # fmt: skip


def tokens_per_pass(cycles: Cycles) -> float | None:
    """Measured tau: emitted tokens per target pass, pooled over all cycles; the target's own token counts."""
    return float(cycles.emitted.sum() / len(cycles.emitted)) if len(cycles.emitted) else None


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens per target pass of a chain whose every draft is accepted with the same probability, independently.

    (1 - a^(K+1)) / (1 - a), equation 1 of Leviathan et al. (arXiv:2211.17192); K + 1 where a is 1.

    Raises:
      ValueError: `acceptance` outside [0, 1], or a negative length.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance} must lie in [0, 1]")
    if length < 0:
        raise ValueError(f"length={length} must not be negative")
    return math.fsum(acceptance**n for n in range(length + 1))


def expected_tokens_by_position(alpha: Sequence[float | None]) -> float:
    """The same with a rate per position: 1 + a0 + a0 a1 + ... over n-alpha; a position never reached adds nothing."""
    total, path = 1.0, 1.0
    for rate in alpha:
        path *= rate or 0.0
        total += path
    return total


def chain_speedup(acceptance: float, length: int, cost: float) -> float:
    """Expected speedup of a chain over plain decoding (arXiv:2211.17192, theorem 3.8).

    (1 - a^(K+1)) / ((1 - a) (1 + c K)): K draft passes of `cost` target passes each precede a target pass, which is
    taken to cost the same over K + 1 tokens as over one.

    Raises:
      ValueError: as `expected_tokens`, or a negative cost.
    """
    if cost < 0:
        raise ValueError(f"cost={cost} must not be negative: it is a draft pass over a target pass, in time")
    return expected_tokens(acceptance, length) / (1 + cost * length)


def best_chain(acceptance: float, cost: float, longest: int = 64) -> int:
    """The K of 0 to `longest` with the largest `chain_speedup`; the shorter one of equals, 0 is plain decoding.

    Raises:
      ValueError: as `chain_speedup`.
    """
    return max(range(longest + 1), key=lambda length: (chain_speedup(acceptance, length, cost), -length))
