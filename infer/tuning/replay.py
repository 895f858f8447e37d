"""Counts the cycles of any draft tree on recorded text, without running a model.

`infer.tuning.shadow` records the trees that a method drafts at every position of a text. From these follows where the
cycles of a smaller tree would begin and end. The result is exact for the recorded width, whatever depth and number of
nodes: a level does not depend on how many follow, and the rerank chooses among all candidates. A narrower beam may
expand a node that the wide beam dropped; the children of such a node were not recorded and count as rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from eagle_jax.config import TreeConfig
from eagle_jax.core.types import ROOT


class Replay:
    """The trees of P positions, recorded with one wide dynamic tree whose every candidate is a node.

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
        self._beams: dict[int, np.ndarray] = {}

    @classmethod
    def joined(cls, parts: Sequence[Any]) -> Replay:
        """Joins several batches, each given as the seven arguments; all recorded with the same tree."""
        replies = [reply for part in parts for reply in part[0]]
        before = np.cumsum([0, *(len(part[0]) for part in parts)])
        owner = np.concatenate([part[2] + start for part, start in zip(parts, before[:-1], strict=True)])
        return cls(replies, parts[0][1], owner, *map(np.concatenate, list(zip(*parts, strict=True))[3:]))

    def accepted(self, tree: TreeConfig) -> np.ndarray:
        """Returns [P] drafted tokens that a cycle with this tree would accept at every position.

        Args:
          tree: a dynamic tree or a chain, by value and with rerank, no deeper than the recorded one.

        Raises:
          ValueError: another kind of tree, or a deeper one.
        """
        if tree.parents is not None or tree.rank_by != "value" or not tree.rerank or tree.top_p != 1:
            raise ValueError(f"tree must be a plain dynamic tree, got {tree}. Measure this one instead.")
        if tree.depth > self.levels:
            raise ValueError(
                f"depth must be at most the {self.levels} recorded levels, got {tree.depth}. Record a deeper tree."
            )
        pool = self._beam(tree.top_k) & (self.depths <= tree.depth)
        kept = _best(self.scores, pool, tree.num_nodes)
        path = self.path[:, : tree.depth]
        return np.sum((path >= 0) & np.take_along_axis(kept, np.maximum(path, 0), axis=1), axis=1)

    def cycles(self, tree: TreeConfig | None) -> np.ndarray:
        """Returns [R] cycles of every reply after the prefill; None is plain decoding."""
        accepted = np.zeros(len(self.at), int) if tree is None else self.accepted(tree)
        return count_cycles(accepted, self.reply, [len(reply) for reply in self.replies])

    def acceptance(self) -> list[float]:
        """Returns by depth how often the text goes on along the tree of a position, over all positions."""
        return np.mean(self.path >= 0, axis=0).tolist() if len(self.at) else [0.0] * self.levels

    def _text_path(self, tokens: np.ndarray) -> np.ndarray:
        """Returns [P, levels] the node that is the text's own at every level, -1 for none."""
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

    def _beam(self, top_k: int) -> np.ndarray:
        """[P, N+1] candidates that a beam of width `top_k` records."""
        if top_k not in self._beams:
            offered = self.nodes & (self.ranks < top_k)
            pool = frontier = offered & (self.depths == 1)
            for level in range(2, self.levels + 1):
                born = offered & (self.depths == level) & np.take_along_axis(frontier, self.above, axis=1)
                pool = pool | born
                frontier = _best(self.scores, born, top_k)
            self._beams[top_k] = pool
        return self._beams[top_k]


def count_cycles(accepted: np.ndarray, reply: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Returns [R] cycles per reply: each advances by the accepted tokens and one.

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
    """Returns the target passes of all replies in batches of `batch`, in order; the longest row counts."""
    return int(sum(max(cycles[start : start + batch]) for start in range(0, len(cycles), batch)))


def trees(depths: Iterable[int], top_ks: Iterable[int], nodes: Iterable[int]) -> list[TreeConfig]:
    """Returns every possible tree of a grid, chains first; a chain has as many nodes as levels."""
    found = [TreeConfig.chain(depth) for depth in sorted(set(depths)) if 1 in set(top_ks)]
    for depth in sorted(set(depths)):
        for top_k in sorted(set(top_ks) - {1}):
            most = top_k if depth == 1 else top_k + (depth - 1) * top_k**2
            found += [TreeConfig(depth, top_k, count) for count in sorted(set(nodes)) if max(depth, 2) <= count <= most]
    return found


def _best(scores: np.ndarray, mask: np.ndarray, count: int) -> np.ndarray:
    """Marks the `count` best scores of every row's marked entries; ties go to the lower index."""
    columns = np.flatnonzero(mask.any(axis=0))
    keyed = np.where(mask[:, columns], -scores[:, columns].astype(np.float64), np.inf)
    order = np.argsort(keyed, axis=1, kind="stable")[:, :count]
    kept = np.zeros((len(mask), len(columns)), bool)
    np.put_along_axis(kept, order, True, axis=1)
    whole = np.zeros_like(mask)
    whole[:, columns] = kept
    return whole & mask


def _depths(parents: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Returns the level of every node, 0 for the root and for padding."""
    depths = np.zeros(parents.shape, int)
    while True:
        deeper = np.where(parents > ROOT, np.take_along_axis(depths, above, axis=1) + 1, 0)
        if np.array_equal(deeper, depths):
            return depths
        depths = deeper


def _sibling_ranks(parents: np.ndarray) -> np.ndarray:
    """Returns the rank of every node among the children of its parent, in order of appearance."""
    order = np.argsort(parents, axis=1, kind="stable")
    grouped = np.take_along_axis(parents, order, axis=1)
    places = np.broadcast_to(np.arange(parents.shape[1]), parents.shape)
    new = np.ones(parents.shape, bool)
    new[:, 1:] = grouped[:, 1:] != grouped[:, :-1]
    first = np.maximum.accumulate(np.where(new, places, 0), axis=1)
    ranks = np.empty(parents.shape, int)
    np.put_along_axis(ranks, order, places - first, axis=1)
    return ranks
