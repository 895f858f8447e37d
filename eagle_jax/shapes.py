"""Builds static trees, from published lists of paths or from measured accuracies."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from eagle_jax.config import ConfigError

MEDUSA = (
    "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90 000 001 "
    "002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200 0000 0001"
)
"""Medusa's tree of 63 nodes ("mc_sim_7b_63", also used by Hydra): the rank of every node on every path."""


def medusa_parents(depth: int = 4) -> tuple[int, ...]:
    """Returns the parents of Medusa's tree, cut to `depth` levels."""
    return parents_of_paths([[int(rank) for rank in path] for path in MEDUSA.split() if len(path) <= depth])


def parents_of_paths(paths: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Converts paths of ranks to parents for `TreeConfig.static`; [0, 2]: third child of the first child.

    Raises:
      ConfigError: the parent or the elder sibling of a path is missing.
    """
    order = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    row = {path: number for number, path in enumerate(order)}
    for path in order:
        if not path or min(path) < 0:
            raise ConfigError(f"a path must list a rank from 0 up for every level, got {list(path)}. Remove it.")
        if path[:-1] and path[:-1] not in row:
            raise ConfigError(f"paths must hold the parent {list(path[:-1])} of {list(path)}. Add it.")
        if path[-1] and (*path[:-1], path[-1] - 1) not in row:
            raise ConfigError(f"paths must hold the sibling of rank {path[-1] - 1} of {list(path)}. Add it.")
    return tuple(row[path[:-1]] if path[:-1] else -1 for path in order)


def best_parents(accuracies: Sequence[Sequence[float]], num_nodes: int) -> tuple[int, ...]:
    """Builds the static tree of `num_nodes` nodes with the greatest expected length (Medusa, section 3.3).

    Args:
      accuracies: `[D][K]`, share of the candidates of rank r at depth d + 1 that are the target's token. The value of a
        node is the product along its path. The best nodes are added one by one, after parents and earlier siblings.

    Raises:
      ConfigError: accuracies are missing or outside 0 to 1, or there are fewer paths than `num_nodes`.
    """
    if not accuracies or not all(accuracies):
        raise ConfigError(f"accuracies must have one or more values for every depth, got {accuracies!r}. Add them.")
    if not all(0 <= value <= 1 for level in accuracies for value in level):
        raise ConfigError(f"accuracies must lie in 0 to 1, got {accuracies!r}. Give shares.")
    # A later rank is added after its earlier siblings, so it is never worth more than they are.
    levels = [list(itertools.accumulate(level, min)) for level in accuracies]
    chosen: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-levels[0][0], (0,))]
    while waiting and len(chosen) < num_nodes:
        worth, path = heapq.heappop(waiting)
        chosen.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < len(levels[depth - 1]):
            above = worth / levels[depth - 1][rank] if levels[depth - 1][rank] else 0.0
            heapq.heappush(waiting, (above * levels[depth - 1][rank + 1], (*path[:-1], rank + 1)))
        if depth < len(levels):
            heapq.heappush(waiting, (worth * levels[depth][0], (*path, 0)))
    if len(chosen) < num_nodes:
        raise ConfigError(f"num_nodes must be at most the {len(chosen)} paths given, got {num_nodes}. Lower it.")
    return parents_of_paths(chosen)
