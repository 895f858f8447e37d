"""Checks counts of recorded cycles against hand-made trees and slow versions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.core.types import PADDING
from eagle_jax.evaluate.acceptance import Cycles, n_alpha, record_cycles
from eagle_jax.evaluate.positions import by_position, calibrate, depths_and_ranks
from tests.models import TREES, random_prompts, tiny_head, tiny_target


def recorded(rows: list[tuple[list[int], list[float], set[int], bool]]) -> Cycles:
    """Cycles from (parents, scores, accepted drafted nodes, whether the target's own token followed)."""
    parents = np.array([row[0] for row in rows], np.int32)
    scores = np.array([row[1] for row in rows], np.float32)
    accepted = np.array([[node == 0 or node in row[2] for node in range(parents.shape[1])] for row in rows])
    reached = np.zeros(parents.shape, bool)
    for at, (above, _, path, goes_on) in enumerate(rows):
        walked = sorted({0} | path)
        looked = walked if goes_on else walked[:-1]
        reached[at] = [parent in looked for parent in above]
    emitted = np.array([len(path) + goes_on for _, _, path, goes_on in rows], np.int32)
    return Cycles(np.zeros(len(rows), np.int32), np.zeros_like(parents), parents, scores, accepted, reached, emitted)


# root -> 1, 2; 1 -> 3, 4.
TREE, SCORES = [-1, 0, 0, 1, 1], [0.0, math.log(0.6), math.log(0.25), math.log(0.6 * 0.5), math.log(0.6 * 0.15)]
CHAIN = [-1, 0, 1]
# The first cycle accepts 1 and 4, the second nothing, the third 2, the fourth ends the reply with node 1.
BY_HAND = recorded(
    [(TREE, SCORES, {1, 4}, True), (TREE, SCORES, set(), True), (TREE, SCORES, {2}, True), (TREE, SCORES, {1}, False)]
)


def test_counts_by_hand():
    found = by_position(BY_HAND)
    assert found.drafted.tolist() == [[4, 4], [4, 4]]
    assert found.reached.tolist() == [[4, 4], [1, 1]]  # nothing is verified behind the end of the reply
    assert found.accepted.tolist() == [[2, 1], [0, 1]]
    seen = calibrate(BY_HAND)  # confidences 0.15, 0.25, 0.5, 0.6
    assert seen.count.tolist() == [0, 1, 4, 0, 1, 4, 0, 0, 0, 0]
    assert seen.accepted.tolist() == [0, 1, 1, 0, 0, 2, 0, 0, 0, 0]
    assert seen.confidence == pytest.approx([math.nan, 0.15, 0.25, math.nan, 0.5, 0.6, *[math.nan] * 4], nan_ok=True)
    assert seen.error == pytest.approx((abs(1 - 0.15) + abs(1 - 1) + abs(0 - 0.5) + abs(2 - 2.4)) / 10)
    assert calibrate(BY_HAND._replace(reached=np.zeros((4, 5), bool))).error is None
    assert n_alpha(recorded([(CHAIN, [0.0] * 3, {1}, True)] * 2)) == ([1.0, 0.0], [2, 2], [2, 0])


def test_no_cycles_have_no_rates():
    none = Cycles(*(field[:0] for field in BY_HAND))
    assert by_position(none).drafted.shape == (0, 0)
    assert calibrate(none).error is None


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: n_alpha(BY_HAND), "cycles must hold chains, got a tree"),
        (lambda: calibrate(recorded([(CHAIN, [0.0, 0.0, 0.0], {1}, True)])), "must be cumulative log-probabilities"),
        (lambda: calibrate(recorded([(CHAIN, [0.0, -1.0, -0.5], {1}, True)])), "must be cumulative log-probabilities"),
    ],
)
def test_bad_arguments(run, message):
    with pytest.raises(ValueError, match=message):
        run()


def slow_counts(cycles: Cycles) -> dict[tuple[int, int], list[int]]:
    """(depth, rank) -> drafted, reached, accepted, by walking up from every node of every cycle."""
    found: dict[tuple[int, int], list[int]] = {}
    for row, parents in enumerate(cycles.parents.tolist()):
        for node in range(1, len(parents)):
            if parents[node] == PADDING:
                continue
            depth, above = 1, parents[node]
            while above > 0:
                depth, above = depth + 1, parents[above]
            rank = parents[:node].count(parents[node])
            entry = found.setdefault((depth, rank), [0, 0, 0])
            entry[0] += 1
            entry[1] += bool(cycles.reached[row, node])
            entry[2] += bool(cycles.accepted[row, node])
    return found


def random_cycles(seed: int) -> Cycles:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(20):
        parents, scores = [-1], [0.0]
        for node in range(1, 12):
            parents.append(
                PADDING if rng.random() < 0.15 else int(rng.choice([n for n in range(node) if parents[n] != PADDING]))
            )
            scores.append(-math.inf if parents[node] == PADDING else scores[parents[node]] + math.log(rng.random()))
        path, at = set(), 0
        while children := [node for node in range(1, 12) if parents[node] == at]:
            if rng.random() < 0.4:
                break
            path.add(at := int(rng.choice(children)))
        rows.append((parents, scores, path, not path or bool(rng.random() < 0.8)))
    return recorded(rows)


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_a_walk_up_every_tree(seed):
    cycles = random_cycles(seed)
    found, slow = by_position(cycles), slow_counts(cycles)
    for (depth, rank), entry in slow.items():
        assert [int(table[depth - 1, rank]) for table in found] == entry
    assert [int(table.sum()) for table in found] == [sum(entry[i] for entry in slow.values()) for i in range(3)]


def test_counts_of_real_trees():
    """As `slow_counts`; siblings stand in the order of their rank: none is likelier than the one before it."""
    target, head = tiny_target(4), tiny_head("eagle1", TreeConfig(2, 2, 4), 4, seed=17)
    prompts = random_prompts([5, 9, 3], 4)
    cycles = record_cycles(target, head.with_tree(TREES["top-p"]), prompts, max_new_tokens=24, temperature=1.0, key=0)
    found = by_position(cycles)
    filled = zip(*np.nonzero(found.drafted), strict=True)
    assert {(d + 1, r): [table[d, r] for table in found] for d, r in filled} == slow_counts(cycles)
    depths, ranks = depths_and_ranks(cycles.parents)
    for row, parents in enumerate(cycles.parents):
        for node in np.flatnonzero(ranks[row] > 0):
            before = np.flatnonzero((parents == parents[node]) & (ranks[row] == ranks[row][node] - 1))
            assert cycles.scores[row, before[0]] >= cycles.scores[row, node]
    assert depths.max() <= TREES["top-p"].depth
