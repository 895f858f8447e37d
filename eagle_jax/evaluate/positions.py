"""Computes acceptance by tree position and calibration from recorded cycles.

The functions count nodes of `acceptance.record_cycles`, in NumPy. A node is "reached" if its parent was accepted: then
the target verified the node. Rates over reached nodes are conditional on the path above them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eagle_jax.core.types import ROOT
from eagle_jax.evaluate.acceptance import Cycles

BINS = 10
"""Bins of a calibration, equally wide in confidence."""


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
            "scores of cycles must be cumulative log-probabilities. This drafter has no probabilities to calibrate."
        )
    confidence = np.exp(np.minimum(gains, 0.0))
    place = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    count = np.bincount(place, minlength=BINS)
    total = np.bincount(place, weights=confidence, minlength=BINS)
    mean = np.divide(total, count, out=np.full(BINS, np.nan), where=count > 0)
    return Calibration(count, mean, np.bincount(place[cycles.accepted[rows, nodes]], minlength=BINS))
