"""Checks static trees of paths and of accuracies, the latter against every possible tree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_jax.config import EAGLE1_PARENTS, ConfigError, TreeConfig, sibling_ranks, static_depths
from eagle_jax.shapes import best_parents, medusa_parents, parents_of_paths


def paths_of(parents):
    paths, ranks = [], sibling_ranks(parents)
    for node, parent in enumerate(parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), ranks[node]))
    return paths


def test_paths_and_parents_are_the_same_tree():
    assert parents_of_paths([[0], [0, 0], [1], [0, 1], [0, 0, 0]]) == (-1, -1, 0, 0, 2)
    again = parents_of_paths(paths_of(EAGLE1_PARENTS)[::-1])
    assert sorted(paths_of(again)) == sorted(paths_of(EAGLE1_PARENTS))
    assert TreeConfig.static(again).depth == 5


PUBLISHED = {
    "EAGLE-1": (EAGLE1_PARENTS, {"": 4, "0": 3, "1": 2, "2": 2, "3": 1, "00": 3, "01": 2, "02": 2, "10": 1, "000": 3,
                                 "0000": 2}),
    "Medusa": (medusa_parents(), {"": 10, "0": 10, "1": 7, "2": 3, "3": 2} | dict.fromkeys("456789", 1)
               | {"00": 10, "01": 3, "02": 2, "10": 2, "20": 1, "000": 2} | {f"0{rank}": 1 for rank in range(3, 8)}),
}  # fmt: skip
"""Parents, and the number of children of every inner node. Both trees are called mc_sim_7b_63 by their authors."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_trees_are_their_authors(name):
    parents, children = PUBLISHED[name]
    assert set(paths_of(parents)) == {
        (*map(int, path), rank) for path, count in children.items() for rank in range(count)
    }
    assert len(parents) == sum(children.values()) == {"EAGLE-1": 25, "Medusa": 63}[name]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [1, 0]], r"must hold the parent \[1\] of \[1, 0\]"),
        ([[0], [2]], r"must hold the sibling of rank 1 of \[2\]"),
        ([[]], r"must list a rank .*, got \[\]"),
        ([[-1]], r"must list a rank .*, got \[-1\]"),
    ],
)
def test_paths_without_a_parent_or_sibling_raise(paths, message):
    with pytest.raises(ConfigError, match=message):
        parents_of_paths(paths)


def worth(paths, accuracies):
    return sum(np.prod([accuracies[depth][rank] for depth, rank in enumerate(path)]) for path in paths)


RANKS = st.lists(st.floats(0, 0.5), min_size=2, max_size=2).map(lambda level: sorted(level)[::-1])


@given(st.lists(RANKS, min_size=2, max_size=2), st.integers(1, 6))
def test_the_tree_of_accuracies_is_the_best_of_all(accuracies, nodes):
    built = best_parents(accuracies, nodes)
    assert len(built) == nodes and max(static_depths(built)) <= 2
    every = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]

    def is_tree(paths):
        return all((len(p) == 1 or p[:-1] in paths) and (not p[-1] or (*p[:-1], p[-1] - 1) in paths) for p in paths)

    best = max(worth(paths, accuracies) for paths in itertools.combinations(every, nodes) if is_tree(paths))
    assert worth(paths_of(built), accuracies) == pytest.approx(best)


def test_bad_accuracies_raise():
    with pytest.raises(ConfigError, match="must lie in 0 to 1"):
        best_parents([[1.2]], 1)
    with pytest.raises(ConfigError, match="must have one or more values for every depth"):
        best_parents([[0.5], []], 1)
    with pytest.raises(ConfigError, match="num_nodes must be at most the 6 paths"):
        best_parents([[0.5, 0.2], [0.3, 0.1]], 7)
