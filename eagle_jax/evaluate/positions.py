"""Computes acceptance by tree position, calibration and expected tokens from recorded cycles.

The functions count nodes of `acceptance.record_cycles`, in NumPy. A node is "reached" if its parent was accepted: then
the target verified the node. Rates over reached nodes are conditional on the path above them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eagle_jax.core.types import ROOT
from eagle_jax.evaluate.acceptance import Cycles

BINS = 10
"""Default number of bins of a calibration, equally wide in confidence."""


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
        """Expected calibration error (arXiv:1706.04599): the mean over nodes of |acceptance - confidence| of bins."""
        total = int(self.count.sum())
        if total == 0:
            return None
        full = self.count > 0
        gaps = np.abs(self.accepted[full] - self.count[full] * self.confidence[full])
        return float(gaps.sum() / total)


def depths_and_ranks(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns depth (0 for the root) and rank among siblings (from 0) of every node, [C, N+1]; -1 at padding.

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


def calibrate(cycles: Cycles, bins: int = BINS) -> Calibration:
    """Counts reached nodes and their acceptance by confidence (EAGLE-2, figure 6).

    Meaningful for ranked drafts under deterministic verification: the target accepts a reached node with its own
    probability of the token. Sampled drafts are accepted by p/q instead.

    Raises:
      ValueError: `bins` is below 1, or the scores are not log-probabilities (prompt lookup, lookahead).
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}.")
    rows, nodes = np.nonzero(cycles.reached & (cycles.parents >= 0))
    scores = cycles.scores[rows, nodes].astype(np.float64)
    gains = scores - cycles.scores[rows, cycles.parents[rows, nodes]]
    # The margin covers rounding of float32 sums of log-probabilities.
    if (len(scores) and not scores.any()) or np.any(gains > 1e-4) or not np.all(np.isfinite(gains)):
        raise ValueError(
            "scores of cycles must be cumulative log-probabilities. This drafter has no probabilities to calibrate."
        )
    confidence = np.exp(np.minimum(gains, 0.0))
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    total = np.bincount(place, weights=confidence, minlength=bins)
    mean = np.divide(total, count, out=np.full(bins, np.nan), where=count > 0)
    accepted = np.bincount(place[cycles.accepted[rows, nodes]], minlength=bins)
    return Calibration(count.astype(np.int64), mean, accepted.astype(np.int64))


def tokens_per_pass(cycles: Cycles) -> float | None:
    """Returns tau, emitted tokens per target pass, over all cycles; None without cycles."""
    return float(cycles.emitted.sum() / len(cycles.emitted)) if len(cycles.emitted) else None


def expected_tokens(acceptance: float, length: int) -> float:
    """Returns tokens per target pass of a chain whose drafts are accepted independently, with one probability.

    (1 - a^(K+1)) / (1 - a), equation 1 of Leviathan et al. (arXiv:2211.17192); K + 1 for a = 1.

    Raises:
      ValueError: `acceptance` is outside [0, 1], or `length` is negative.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must lie in [0, 1], got {acceptance}.")
    if length < 0:
        raise ValueError(f"length must not be negative, got {length}.")
    return math.fsum(acceptance**n for n in range(length + 1))


def best_chain(acceptance: float, cost: float, longest: int = 64) -> int:
    """Returns the K of 0 to `longest` with the largest expected speedup (arXiv:2211.17192, theorem 3.8).

    The speedup is (1 - a^(K+1)) / ((1 - a) (1 + c K)): K draft passes precede a target pass, which costs the same for
    K + 1 tokens as for one. Of equal values the shorter chain wins; 0 is plain decoding.

    Args:
      acceptance: a. cost: c, time of a draft pass divided by time of a target pass.

    Raises:
      ValueError: as `expected_tokens`, or `cost` is negative.
    """
    if cost < 0:
        raise ValueError(f"cost must not be negative, got {cost}. It is draft time divided by target time.")
    speedups = [expected_tokens(acceptance, length) / (1 + cost * length) for length in range(longest + 1)]
    return int(np.argmax(speedups))
