"""Replayed cycles against the engine's own; arithmetic of costs; the choice."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import TreeConfig
from infer.tuning.choice import Score, choose
from infer.tuning.costs import DraftCosts, PassCosts, speedup
from infer.tuning.replay import Replay, count_cycles, count_passes, trees
from infer.tuning.shadow import record
from tests.models import near_model, random_prompts, tiny_head, tiny_target

PROMPTS = random_prompts([5, 9, 3, 7], 12)
WIDE = TreeConfig(depth=4, top_k=3, num_nodes=30)  # every candidate is a node
OPTIONS = {"max_new_tokens": 24, "key": 3}


@functools.cache
def replay(kind: str, tree: TreeConfig, temperature: float) -> Replay:
    target = tiny_target()
    found = record(target, drafter(kind, tree), PROMPTS, temperature=temperature, **OPTIONS)
    plain = eagle_jax.generate(target, None, PROMPTS, temperature=temperature, **OPTIONS)
    assert found.replies == plain.tokens
    return Replay(*found)


def drafter(kind: str, tree: TreeConfig) -> eagle_jax.BoundDrafter:
    return near_model(tiny_target(), tree) if kind == "small" else tiny_head(kind, tree)


def measured(kind: str, tree: TreeConfig, temperature: float) -> list[int]:
    options = OPTIONS | {"temperature": temperature}
    return eagle_jax.generate(tiny_target(), drafter(kind, tree), PROMPTS, **options).cycles.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", [TreeConfig(2, 3, 5), TreeConfig(4, 3, 12)], ids=["short", "long"])
def test_trees_of_the_watched_width_are_replayed_exactly(tree, temperature):
    found = replay("eagle1", WIDE, temperature)
    cycles = found.cycles(tree)
    assert cycles.tolist() == measured("eagle1", tree, temperature)
    assert cycles.sum() < found.cycles(None).sum()  # something was accepted
    assert found.cycles(None).tolist() == [len(reply) - 1 for reply in found.replies]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "small"])
def test_trees_of_every_method_are_replayed_exactly(kind, temperature):
    for tree in (TreeConfig(1, 3, 2), TreeConfig(2, 3, 12), TreeConfig(3, 3, 4), TreeConfig(4, 3, 30)):
        assert replay(kind, WIDE, temperature).cycles(tree).tolist() == measured(kind, tree, temperature)


def test_chains_are_replayed_from_a_longer_one():
    found = replay("eagle1", TreeConfig.chain(5), 0.0)
    assert found.cycles(TreeConfig.chain(2)).tolist() == measured("eagle1", TreeConfig.chain(2), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle1", "small"])
def test_narrow_trees_are_replayed_from_a_wide_one(kind):
    wide = replay(kind, TreeConfig(3, 12, 300), 0.0)  # a frontier of the whole vocabulary opens every node that counts
    for tree in (TreeConfig.chain(1), TreeConfig.chain(3), TreeConfig(3, 2, 7)):
        assert wide.cycles(tree).tolist() == measured(kind, tree, 0.0)


def test_lookups_are_replayed_from_the_longest():
    target = tiny_target(vocab=4)
    prompts = random_prompts([20, 30], 4)
    found = Replay(*record(target, eagle_jax.prompt_lookup(target, length=6), prompts, max_new_tokens=24))
    short = eagle_jax.generate(target, eagle_jax.prompt_lookup(target, length=2), prompts, max_new_tokens=24)
    assert found.cycles(TreeConfig.chain(2)).tolist() == short.cycles.tolist()
    assert max(short.cycles) < 23


def test_a_lookup_that_finds_nothing_accepts_nothing():
    target = tiny_target()
    found = record(target, eagle_jax.prompt_lookup(target, length=6), [[1]], max_new_tokens=3)
    kept = Replay(*found._replace(parents=np.where(found.parents == -1, -1, -2)))  # all padding
    assert kept.cycles(TreeConfig.chain(2)).tolist() == [2]


def test_batches_are_joined():
    parts = [record(tiny_target(), drafter("eagle1", WIDE), PROMPTS[at : at + 2], max_new_tokens=24) for at in (0, 2)]
    assert Replay.joined(parts).cycles(TreeConfig(2, 3, 5)).tolist() == measured("eagle1", TreeConfig(2, 3, 5), 0.0)


def slow_accepted(kept: Replay, tokens: np.ndarray, tree: TreeConfig, position: int) -> int:
    """A tree of one position, grown, reranked and walked one node after the other."""
    parents, scores = kept.parents[position], kept.scores[position]
    children = {n: [c for c in range(1, len(parents)) if parents[c] == n] for n in range(len(parents))}
    frontier = pool = children[0][: tree.top_k]
    for _ in range(tree.depth - 1):
        born = [child for node in frontier for child in children[node][: tree.top_k]]
        pool = pool + born
        frontier = sorted(sorted(born), key=lambda n: -scores[n])[: tree.top_k]
    chosen = set(sorted(sorted(pool), key=lambda n: -scores[n])[: tree.num_nodes])
    text, at, node, count = kept.replies[kept.reply[position]], kept.at[position], 0, 0
    while True:
        following = [
            c for c in children[node] if c in chosen and at + count < len(text) and tokens[c] == text[at + count]
        ]
        if not following:
            return count
        node, count = following[0], count + 1


def test_accepted_drafts_are_those_of_a_slow_walk():
    found = record(tiny_target(), drafter("eagle1", WIDE), PROMPTS, **OPTIONS)
    kept = Replay(*found)
    for tree in (TreeConfig(3, 2, 5), TreeConfig(4, 3, 9), TreeConfig.chain(2), TreeConfig(4, 2, 13)):
        slow = [slow_accepted(kept, found.tokens[p], tree, p) for p in range(len(found.at))]
        assert kept.accepted(tree).tolist() == slow
        assert max(slow) > 0


def test_what_cannot_be_replayed_or_watched_is_refused():
    kept = replay("eagle1", WIDE, 0.0)
    with pytest.raises(ValueError, match="depth must be at most the 4 recorded levels, got 5"):
        kept.accepted(TreeConfig(5, 2, 8))
    for tree in (
        TreeConfig.static([-1, -1]),
        TreeConfig(2, 2, 4, rank_by="confidence"),
        TreeConfig(2, 2, 4, top_p=0.5),
    ):
        with pytest.raises(ValueError, match="tree must be a plain dynamic tree"):
            kept.accepted(tree)
    with pytest.raises(ValueError, match="got lookahead, which samples or depends on earlier trees"):
        record(tiny_target(), eagle_jax.lookahead(tiny_target()), PROMPTS)
    with pytest.raises(ValueError, match="key must be given"):
        record(tiny_target(), drafter("eagle1", WIDE), PROMPTS, temperature=1.0)


def test_replies_of_one_token_have_no_cycles():
    found = record(tiny_target(), drafter("eagle1", WIDE), PROMPTS, max_new_tokens=1)
    assert found.tokens.shape == (0, 31)
    assert Replay(*found).cycles(TreeConfig(2, 3, 5)).tolist() == [0, 0, 0, 0]


def test_cycles_and_passes_are_counted():
    accepted, reply = np.array([2, 9, 9, 0, 0, 5, 1]), np.array([0, 0, 0, 0, 0, 2, 2])
    assert count_cycles(accepted, reply, [6, 1, 3]).tolist() == [3, 0, 1]
    assert count_passes([3, 0, 1], 1) == 4
    assert count_passes([3, 0, 1], 2) == 3 + 1
    assert count_passes([3, 0, 1], 5) == 3


def test_costs_between_what_was_measured():
    costs = PassCosts((1, 4, 8), (1.0, 4.0, 6.0))
    assert [costs.at(rows) for rows in (1, 2, 4, 6, 8, 10)] == [1, 2, 4, 5, 6, 7]
    assert PassCosts((1, 4, 8), (1.0, 4.0, 3.0)).at(20) == 3.0  # a noisy table does not make wide passes free
    assert PassCosts((1,), (2.0,)).at(9) == 2.0
    drafts = DraftCosts(((1, 1, 0.1), (5, 1, 0.5), (1, 3, 0.3), (5, 3, 1.5)))
    assert drafts.at(3, 1) == pytest.approx(0.3)
    assert drafts.at(3, 3) == pytest.approx(0.9)
    assert drafts.at(3, 2) == pytest.approx(0.6)
    assert DraftCosts(((4, 1, 0.2),)).at(9, 7) == 0.2
    assert DraftCosts(((2, 1, 0.0), (4, 1, 1.0))).at(1, 1) == 0.0  # never below nothing
    given = dict(plain_passes=100, plain=0.01, passes=40, cycle=0.02, plain_prefill=0.2)
    assert speedup(**given, prefill=0.2) == pytest.approx(1.2)
    assert speedup(**given, prefill=0.4) == pytest.approx(1.0)


def test_the_grid_holds_only_trees_that_can_be():
    found = trees([1, 3], [1, 2], [1, 2, 4, 50])
    assert found == [TreeConfig.chain(1), TreeConfig.chain(3), TreeConfig(1, 2, 2), TreeConfig(3, 2, 4)]
    assert trees([2], [3], [4]) == [TreeConfig(2, 3, 4)]


def test_acceptance_is_counted_by_depth():
    found = replay("eagle1", WIDE, 0.0)
    own = found.acceptance()
    assert len(own) == 4 and 1 >= own[0] >= own[1] >= own[2] >= own[3] and own[0] > 0
    assert own[0] == np.mean(found.accepted(TreeConfig(1, 3, 3)) == 1)


def test_the_best_of_the_safe_is_chosen():
    steady = Score({"a": (1.5, 1.52, 1.48, 1.5, 1.5), "b": (1.1, 1.12, 1.11, 1.11, 1.11)})
    slower_on_one = Score({"a": (2.5,) * 5, "b": (0.96, 0.97, 0.98, 0.97, 0.96)})
    within_the_spread = Score({"a": (2.0,) * 5, "b": (1.02, 1.2, 0.9, 1.2, 0.85)})
    assert (steady.safe, slower_on_one.safe, within_the_spread.safe) == (True, False, False)
    assert within_the_spread.promising and not slower_on_one.and_then(slower_on_one).promising
    assert Score({"a": (1.5,) * 5, "b": (0.985, 0.99, 0.985, 0.99, 0.985)}).safe  # on other prompts 5% may be lost
    assert not Score({"a": (1.01, 1.0, 1.0, 1.0, 1.0), "b": (1.0, 0.99, 1.0, 1.0, 1.0)}).safe  # gains nothing
    more = Score({"a": (2.0,) * 5, "b": (1.04, 1.02, 1.03, 1.03, 1.02)})
    assert within_the_spread.and_then(more).safe
    assert within_the_spread.and_then(more).ratios["b"] == (1.02, 1.2, 0.9, 1.2, 0.85, 1.04, 1.02, 1.03, 1.03, 1.02)
    assert steady.mean == pytest.approx(1.305) and steady.worst == 1.11
    scores = {"x": slower_on_one, "y": steady, "z": within_the_spread}
    assert choose(scores) == "y"
    assert choose(scores | {"w": Score({"a": (1.6,) * 5, "b": (1.2,) * 5})}) == "w"
    assert choose({"x": slower_on_one}) is None and choose({}) is None
    assert Score({"a": (0.5, 2.0, 2.0, 2.0, 2.0)}).safe  # one slow moment does not decide
    assert not Score({"a": (2.0,) * 4}).safe  # four repetitions show no spread
