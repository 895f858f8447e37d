"""Checks recorded cycles and n-alpha against `generate` and `stream`, and counts against slow versions."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core.types import PADDING
from eagle_jax.evaluate import Cycles, by_position, calibrate, depths_and_ranks, measure_n_alpha, n_alpha, record_cycles
from eagle_jax.runtime.drafters import DraftHead
from eagle_jax.runtime.target import Target
from tests.models import TREES, random_prompts, tiny_head, tiny_target

VOCAB, DEPTH, TOKENS = 4, 6, 24
PROMPTS = random_prompts([5, 9, 3, 7, 6, 4, 8, 5], VOCAB)


@pytest.fixture(scope="module")
def pair():
    """A target with a stop token, and a head whose tree is not a chain."""
    target, head = tiny_target(VOCAB), tiny_head("eagle1", TreeConfig(2, 2, 4), VOCAB, seed=17)
    stopping = Target.from_params(dataclasses.replace(target.config, eos_ids=(3,)), target.params)
    return stopping, DraftHead.from_params(head.config, head.params, stopping, head.tree)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["deterministic", "rejection"])
def test_n_alpha_counts_the_drafts_inside_the_reply(pair, rule):
    """The expected counts are those of the chunks of `stream`. Sampled drafts use the drafter's own rule."""
    target, head = pair
    chain = TreeConfig.chain(DEPTH, rule)
    options = {"max_new_tokens": TOKENS, **({} if rule == "deterministic" else {"temperature": 1.0, "key": 1})}
    prompts = PROMPTS if rule == "deterministic" else PROMPTS[:1]
    shorter = head.with_tree(TreeConfig.chain(2, rule))
    found = measure_n_alpha(target, shorter, prompts, **options)
    tested, accepted, cut = np.zeros(DEPTH, int), np.zeros(DEPTH, int), 0
    for prompt in prompts:
        for chunk in list(eagle_jax.stream(target, head.with_tree(chain), prompt, **options))[1:]:
            accepted[: chunk.drafted] += 1
            tested[: len(chunk.tokens)] += 1
            cut += chunk.drafted == len(chunk.tokens)
    assert found == (
        [a / t if t else None for a, t in zip(accepted.tolist(), tested.tolist(), strict=True)],
        tested.tolist(), accepted.tolist(),
    )  # fmt: skip
    if rule == "deterministic":
        assert cut > 0, "no reply ended inside a chain"
        assert 0 < accepted[1] < tested[1]


def test_recorded_cycles_make_up_the_replies_of_generate(pair):
    target, head = pair
    out = eagle_jax.generate(target, head, PROMPTS, max_new_tokens=TOKENS)
    found = record_cycles(target, head, PROMPTS, max_new_tokens=TOKENS)
    assert np.bincount(found.prompt, minlength=len(PROMPTS)).tolist() == out.cycles.tolist()
    for row, reply in enumerate(out.tokens):
        written, last = [reply[0]], reply[0]
        for cycle in np.flatnonzero(found.prompt == row):
            assert found.tokens[cycle, 0] == last
            drafted = found.tokens[cycle][found.accepted[cycle]][1:].tolist()
            emitted = int(found.emitted[cycle])
            written += drafted[:emitted]
            assert len(drafted) in (emitted, emitted - 1)  # the last token may be the target's own
            if len(drafted) < emitted:
                written.append(reply[len(written)])
                nodes = np.flatnonzero(found.accepted[cycle])
                assert set(found.parents[cycle][found.reached[cycle]]) <= set(nodes)
                children = found.parents[cycle] == nodes[-1]  # of the last accepted node: verified, none accepted
                assert np.all(found.reached[cycle][children])
                assert written[-1] not in found.tokens[cycle][children]
            last = written[-1]
        assert written == reply
    assert not np.any(found.accepted[:, 1:] & ~found.reached[:, 1:])


def test_replies_without_drafts_have_no_rates(pair):
    """Plain decoding records roots only, and a reply of one token no cycle."""
    target, head = pair
    found = record_cycles(target, None, [[1, 2]], max_new_tokens=4)
    assert found.tokens.shape == (len(found.emitted), 1)
    assert np.all(found.accepted)
    none = measure_n_alpha(target, head, [[1, 2, 3]], max_new_tokens=1)
    assert none == ([None] * DEPTH, [0] * DEPTH, [0] * DEPTH)
    empty = record_cycles(target, head, [[1, 2, 3]], max_new_tokens=1)
    assert by_position(empty).drafted.shape == (0, 0)
    assert calibrate(empty).error is None


def recorded(rows: list[tuple[list[int], list[float], set[int], bool]]) -> Cycles:
    """Returns cycles of (parents, scores, accepted drafted nodes, whether the target's own token followed)."""
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


def test_counts_equal_counts_by_hand():
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


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda head: measure_n_alpha(head.target, head.with_tree(TreeConfig.chain(3, "block")), [[1]]), "got 'block'"),
        (lambda head: measure_n_alpha(head.target, head, [[1]], temperature=1.0), "key must be given"),
        (lambda _: n_alpha(BY_HAND), "cycles must hold chains, got a tree"),
        (lambda _: calibrate(recorded([(CHAIN, [0.0, 0.0, 0.0], {1}, True)])), "cumulative log-probabilities"),
        (
            lambda _: calibrate(recorded([(CHAIN, [0.0, -1.0, -0.5], {1}, True)])),
            "must be cumulative log-probabilities",
        ),
    ],
)
def test_invalid_arguments_raise_errors(pair, run, message):
    with pytest.raises(ValueError, match=message):
        run(pair[1])


def slow_counts(cycles: Cycles) -> dict[tuple[int, int], list[int]]:
    """Returns {(depth, rank): [drafted, reached, accepted]}, by walking up from every node of every cycle."""
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


@pytest.mark.slow
def test_counts_equal_those_of_a_walk_up_every_tree():
    """Siblings stand in the order of their rank: none is likelier than the one before it."""
    target, head = tiny_target(4), tiny_head("eagle1", TreeConfig(2, 2, 4), 4, seed=17)
    prompts = random_prompts([5, 9, 3], 4)
    cycles = record_cycles(target, head.with_tree(TREES["top-p"]), prompts, max_new_tokens=24, temperature=1.0, key=0)
    found = by_position(cycles)
    assert PADDING in cycles.parents and 0 < found.accepted.sum() < found.reached.sum()
    filled = zip(*np.nonzero(found.drafted), strict=True)
    assert {(d + 1, r): [table[d, r] for table in found] for d, r in filled} == slow_counts(cycles)
    depths, ranks = depths_and_ranks(cycles.parents)
    for row, parents in enumerate(cycles.parents):
        for node in np.flatnonzero(ranks[row] > 0):
            before = np.flatnonzero((parents == parents[node]) & (ranks[row] == ranks[row][node] - 1))
            assert cycles.scores[row, before[0]] >= cycles.scores[row, node]
    assert depths.max() <= TREES["top-p"].depth
