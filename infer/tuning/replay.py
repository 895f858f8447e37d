"""Arithmetic of choosing a draft tree: how long its cycles are, by replaying watched text, and what they cost.

Nothing here runs a model. From the trees that a method drafts at every position of a text (`infer.tuning.shadow`)
follows where the cycles of a smaller tree would have begun and ended. That is exact for the watched width K, whatever
depth and number of nodes: the levels above do not know how many follow, and the rerank chooses among all candidates.
For a smaller K it is so but for nodes that a narrow beam goes on from and the wide one dropped: what it would have
drafted below is not known and counts as nothing (`Replay.unknown` says how often).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from eagle_jax.config import TreeConfig
from eagle_jax.core.types import ROOT


class Replay:
    """The trees of P positions, watched with one wide dynamic tree whose every candidate is a node.

    Args:
      replies: token ids of every reply. depth: levels of the trees, even where padding leaves fewer.
      reply: [P] which of them. at: [P] index in it of the next token, from 1.
      tokens, parents, scores: [P, N+1], as in `DraftTree`; positions of a reply in order, replies one after the other.
    """

    def __init__(
        self,
        replies: Sequence[Sequence[int]],
        depth: int,
        reply: np.ndarray,
        at: np.ndarray,
        tokens: np.ndarray,
        parents: np.ndarray,
        scores: np.ndarray,
    ) -> None:
        self.replies, self.levels, self.reply, self.at = replies, depth, reply, at
        self.parents, self.scores = np.asarray(parents), np.asarray(scores)
        # Padding and what has no probability are nodes of no tree.
        self.nodes = (self.parents >= 0) & np.isfinite(self.scores)
        self.above = np.maximum(self.parents, 0)
        self.depths = _depths(self.parents, self.above)
        self.ranks = _sibling_ranks(self.parents)
        self.path = self._text_path(np.asarray(tokens))
        self._beams: dict[int, tuple[np.ndarray, float]] = {}

    @classmethod
    def joined(cls, parts: Sequence[Any]) -> Replay:
        """Of several batches, each given as the seven arguments; all watched with the same tree."""
        replies = [reply for part in parts for reply in part[0]]
        before = np.cumsum([0, *(len(part[0]) for part in parts)])
        owner = np.concatenate([part[2] + start for part, start in zip(parts, before[:-1], strict=True)])
        return cls(replies, parts[0][1], owner, *map(np.concatenate, list(zip(*parts, strict=True))[3:]))

    def accepted(self, tree: TreeConfig) -> np.ndarray:
        """[P] drafted tokens that a cycle with this tree would accept if it began here.

        Args:
          tree: a dynamic tree or a chain, by value and with rerank, no deeper than what was watched.

        Raises:
          ValueError: a tree that these records say nothing about.
        """
        if tree.parents is not None or tree.rank_by != "value" or not tree.rerank or tree.top_p != 1:
            raise ValueError(f"{tree} is no plain dynamic tree: only those are replayed, measure it instead")
        if tree.depth > self.levels:
            raise ValueError(f"depth={tree.depth}: only {self.levels} levels were watched")
        beam, _ = self._beam(tree.top_k)
        pool = beam & (self.depths <= tree.depth)
        kept = _best(self.scores, pool, tree.num_nodes)
        path = self.path[:, : tree.depth]
        return np.sum((path >= 0) & np.take_along_axis(kept, np.maximum(path, 0), axis=1), axis=1)

    def cycles(self, tree: TreeConfig | None) -> np.ndarray:
        """[R] cycles after the prefill that every reply takes; None is plain decoding."""
        accepted = np.zeros(len(self.at), int) if tree is None else self.accepted(tree)
        return count_cycles(accepted, self.reply, [len(reply) for reply in self.replies])

    def by_position(self) -> tuple[np.ndarray, np.ndarray]:
        """([levels, K] reached, accepted): by depth and rank among siblings, over all positions of the text.

        A candidate is reached where the text goes through its parent, and accepted where it goes on with it.
        """
        ranks = int(self.ranks[self.nodes].max(initial=0)) + 1
        reached, accepted = (np.zeros((self.levels, ranks), int) for _ in range(2))
        parent = np.zeros(len(self.at), int)
        for level in range(self.levels):
            children = self.nodes & (self.parents == parent[:, None])
            reached[level] = [int(np.sum((children & (self.ranks == rank)).any(axis=1))) for rank in range(ranks)]
            parent = self.path[:, level]  # -1, which is nobody's parent here, where the text left the tree
            gone_on = np.flatnonzero(parent >= 0)
            accepted[level] = np.bincount(self.ranks[gone_on, parent[gone_on]], minlength=ranks)
        return reached, accepted

    def unknown(self, top_k: int) -> float:
        """Share of the nodes that a beam of this width goes on from of which the children were not watched."""
        return self._beam(top_k)[1]

    def _text_path(self, tokens: np.ndarray) -> np.ndarray:
        """[P, levels] the node at every level that is the text's own, -1 where there is none."""
        longest = max(map(len, self.replies)) + self.levels
        text = np.array([[*reply, *[-1] * (longest - len(reply))] for reply in self.replies])
        here, alive = np.zeros(len(self.at), int), np.ones(len(self.at), bool)
        path = np.full((len(self.at), self.levels), -1)
        for level in range(self.levels):
            wanted = text[self.reply, self.at + level]
            match = self.nodes & (self.parents == here[:, None]) & (tokens == wanted[:, None])
            alive &= match.any(axis=1)
            here = match.argmax(axis=1)
            path[alive, level] = here[alive]
        return path

    def _beam(self, top_k: int) -> tuple[np.ndarray, float]:
        """[P, N+1] candidates that a beam of width `top_k` records, and how often it left what was watched."""
        if top_k not in self._beams:
            offered = self.nodes & (self.ranks < top_k)
            pool = offered & (self.depths == 1)
            frontier, blind, opened = pool, 0, 0
            for level in range(2, self.levels + 1):
                born = offered & (self.depths == level) & np.take_along_axis(frontier, self.above, axis=1)
                parents = np.zeros_like(frontier)
                np.put_along_axis(parents, np.where(born, self.above, 0), True, axis=1)
                blind += int(np.sum(frontier & ~parents))
                opened += int(np.sum(frontier))
                pool = pool | born
                frontier = _best(self.scores, born, top_k)
            self._beams[top_k] = pool, blind / max(opened, 1)
        return self._beams[top_k]


def count_cycles(accepted: np.ndarray, reply: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """[R] cycles per reply: each begins where the one before ended and goes on by what it accepts and one.

    Args:
      accepted: [P] drafted tokens accepted by a cycle that begins at this position. reply: [P], ascending.
      lengths: [R] tokens of every reply; the first is the prefill's, so reply r has `lengths[r] - 1` positions.
    """
    starts = np.searchsorted(reply, np.arange(len(lengths)))
    cycles = np.zeros(len(lengths), int)
    for row, length in enumerate(lengths):
        at = 0
        while at < length - 1:
            at += int(accepted[starts[row] + at]) + 1
            cycles[row] += 1
    return cycles


def count_passes(cycles: Sequence[int] | np.ndarray, batch: int) -> int:
    """Target passes of all replies in batches of `batch`, in order: each batch takes as many as its longest row."""
    return int(sum(max(cycles[start : start + batch]) for start in range(0, len(cycles), batch)))


@dataclasses.dataclass(frozen=True)
class PassCosts:
    """Seconds of a cycle that drafts nothing and verifies so many rows, by measurement.

    Attributes:
      rows: ascending, the root counted; the first is 1, plain decoding. seconds: per cycle of the whole batch.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, rows: int) -> float:
        """Linear between the measured widths; beyond the last one, in the direction of the last two."""
        if rows <= self.rows[-1] or len(self.rows) < 2:
            return float(np.interp(rows, self.rows, self.seconds))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        return self.seconds[-1] + max(slope, 0.0) * (rows - self.rows[-1])


@dataclasses.dataclass(frozen=True)
class DraftCosts:
    """Seconds that a method adds to a pass of the width of its tree: drafting, its update, a longer commit.

    Attributes:
      measured: (depth, top_k, seconds) of some cycles, less `PassCosts.at` of their width. One or two depths per top_k.
    """

    measured: tuple[tuple[int, int, float], ...]

    def at(self, depth: int, top_k: int) -> float:
        """Linear in the depth for every measured top_k, and between these linear in top_k."""
        widths = sorted({width for _, width, _ in self.measured})
        return float(np.interp(top_k, widths, [self._level(depth, width) for width in widths]))

    def _level(self, depth: int, top_k: int) -> float:
        points = sorted((d, seconds) for d, width, seconds in self.measured if width == top_k)
        (low, first), (high, last) = points[0], points[-1]
        if high == low:
            return max(first, 0.0)
        return max(first + (last - first) / (high - low) * (depth - low), 0.0)


def speedup(plain_passes: int, plain: float, passes: int, cycle: float, plain_prefill: float, prefill: float) -> float:
    """Tokens per second over those of plain decoding, for the same text.

    Args:
      plain_passes, passes: target passes after the prefill, without and with drafts. plain, cycle: seconds of each.
      plain_prefill, prefill: seconds of all prefills, likewise: a drafter may read the prompt too.
    """
    return (plain_prefill + plain_passes * plain) / (prefill + passes * cycle)


def trees(depths: Iterable[int], top_ks: Iterable[int], nodes: Iterable[int]) -> list[TreeConfig]:
    """Every possible tree of a grid, chains first; a chain has as many nodes as levels and is there for every depth."""
    found = [TreeConfig.chain(depth) for depth in sorted(set(depths)) if 1 in set(top_ks)]
    for depth in sorted(set(depths)):
        for top_k in sorted(set(top_ks) - {1}):
            most = top_k if depth == 1 else top_k + (depth - 1) * top_k**2
            found += [TreeConfig(depth, top_k, count) for count in sorted(set(nodes)) if max(depth, 2) <= count <= most]
    return found


TOLERATED = 0.03
"""What a choice may lose to plain decoding on a task it was measured on: on other prompts it is to stay within 5%."""


@dataclasses.dataclass(frozen=True)
class Score:
    """How a method compares with plain decoding, from repetitions measured in turns.

    Attributes:
      ratios: per task, plain seconds over its seconds in every repetition.
    """

    ratios: dict[str, tuple[float, ...]]

    @property
    def speedups(self) -> dict[str, float]:
        """Median ratio per task."""
        return {task: float(np.median(values)) for task, values in self.ratios.items()}

    @property
    def mean(self) -> float:
        """Mean over tasks of the median ratio."""
        return float(np.mean(list(self.speedups.values())))

    @property
    def worst(self) -> float:
        """The least median ratio of a task."""
        return min(self.speedups.values())

    @property
    def safe(self) -> bool:
        """Whether it beats plain decoding in the mean over tasks, and loses no more than `TOLERATED` on any of them.

        Both by more than the measured spread: that is two standard errors of a median, 1.25 * 1.48 * (median absolute
        deviation) / sqrt(repetitions) of normal noise. One slow moment of the machine does not decide, and more
        repetitions decide more.
        """
        least = [*map(_median_less_spread, self.ratios.values())]
        return float(np.mean(least)) > 1 and min(least) > 1 - TOLERATED

    def and_then(self, more: Score) -> Score:
        """With the repetitions of a later measurement of the same tasks."""
        return Score({task: (*values, *more.ratios[task]) for task, values in self.ratios.items()})


def _median_less_spread(values: Sequence[float]) -> float:
    middle = float(np.median(values))
    deviation = float(np.median(np.abs(np.subtract(values, middle))))
    return middle - 2 * 1.2533 * 1.4826 * deviation / len(values) ** 0.5


def choose(scores: dict[Any, Score]) -> Any | None:
    """Of those that are safe the one with the largest mean; None, plain decoding, where none is."""
    safe = {name: score for name, score in scores.items() if score.safe}
    return max(safe, key=lambda name: safe[name].mean) if safe else None


def _best(scores: np.ndarray, mask: np.ndarray, count: int) -> np.ndarray:
    """Of every row's marked entries the `count` with the best scores; ties go to the lower index."""
    columns = np.flatnonzero(mask.any(axis=0))
    keyed = np.where(mask[:, columns], -scores[:, columns].astype(np.float64), np.inf)
    order = np.argsort(keyed, axis=1, kind="stable")[:, :count]
    kept = np.zeros((len(mask), len(columns)), bool)
    np.put_along_axis(kept, order, True, axis=1)
    whole = np.zeros_like(mask)
    whole[:, columns] = kept
    return whole & mask


def _depths(parents: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Level of every node, 0 for the root and for padding."""
    depths = np.zeros(parents.shape, int)
    while True:
        deeper = np.where(parents > ROOT, np.take_along_axis(depths, above, axis=1) + 1, 0)
        if np.array_equal(deeper, depths):
            return depths
        depths = deeper


def _sibling_ranks(parents: np.ndarray) -> np.ndarray:
    """Rank of every node among the children of its parent, in order of appearance."""
    order = np.argsort(parents, axis=1, kind="stable")
    grouped = np.take_along_axis(parents, order, axis=1)
    places = np.broadcast_to(np.arange(parents.shape[1]), parents.shape)
    new = np.ones(parents.shape, bool)
    new[:, 1:] = grouped[:, 1:] != grouped[:, :-1]
    first = np.maximum.accumulate(np.where(new, places, 0), axis=1)
    ranks = np.empty(parents.shape, int)
    np.put_along_axis(ranks, order, places - first, axis=1)
    return ranks
