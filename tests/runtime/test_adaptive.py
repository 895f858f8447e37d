"""Checks `cycle_cost`: plain steps, and trees of several sizes, change no text; the drafter reads what is confirmed."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.core import (
    CycleCost,
    DraftTree,
    RowRandomness,
    adaptive,
    loop,
    prefill,
    required_slots,
)
from eagle_jax.parallel import make_mesh
from eagle_jax.runtime.generation import request_of
from tests.models import DRAFTERS, DRAWN, TREES, cycle_result, prices, random_prompts, tiny_head, tiny_target

PROMPTS = random_prompts([5, 31, 1, 17], 12)
RUN = dict(max_new_tokens=[30, 7, 32, 12], eos_ids=[[3], [5], [], [4]], key=7)
FAST = {("eagle3-k3n12", 1.0), ("lookup", 0.0)}
COSTS = (1.0 + i / 1e6 for i in itertools.count(1))  # of tests that change the constants: a program of its own for each


def pytest_params():
    for name in DRAFTERS:
        for temperature in (0.0, 1.0):
            if (name in DRAWN and temperature) or "lookahead" in name:
                continue
            marks = () if (name, temperature) in FAST else pytest.mark.slow
            yield pytest.param(name, temperature, marks=marks)


@pytest.mark.parametrize(("name", "temperature"), list(pytest_params()))
def test_text_is_that_of_plain_decoding(name, temperature, monkeypatch):
    monkeypatch.setattr(adaptive, "BURST", 3)
    monkeypatch.setattr(adaptive, "SLACK", 0.0)
    monkeypatch.setattr(adaptive, "LOSS", 1.0)  # short bursts
    target = tiny_target()
    drafter = DRAFTERS[name](target)
    options = RUN | {"temperature": temperature, "log_probs": "law"}
    plain, drafted = (eagle_jax.generate(target, one, PROMPTS, **options) for one in (None, drafter))
    cost = drafter.drafter.depth + 0.5 + next(COSTS)  # more than a cycle can emit: bursts follow every cycle
    out = check_text(target, drafter, cost, options, plain, drafted, (name, temperature) in FAST)
    accepted = drafted.cycles.sum() < plain.cycles.sum()
    assert drafted.cycles.sum() < out.cycles.sum() or not accepted, "no plain step ran"


@pytest.mark.parametrize(("name", "temperature"), list(pytest_params()))
def test_text_does_not_depend_on_the_sizes_of_trees(name, temperature, monkeypatch):
    """Every cycle takes the next size, so that all follow one another."""
    sizes, choose = [], adaptive.choose

    def in_turns(payoff, state, tree, costs, depth, levels, refilled):
        sizes.append(list(costs.rows))
        choice = choose(payoff, state, tree, costs, depth, levels, refilled)
        return choice._replace(rung=jnp.max(state.cycles) % len(costs.rows))

    monkeypatch.setattr(adaptive, "choose", in_turns)
    target = tiny_target()
    drafter = DRAFTERS[name](target)
    options = RUN | {"temperature": temperature, "log_probs": "law"}
    plain, drafted = (eagle_jax.generate(target, one, PROMPTS, **options) for one in (None, drafter))
    rows = drafter.drafter.num_nodes + 1
    cost = CycleCost(tuple(sorted({1, (rows + 1) // 2, rows})), (next(COSTS),) * len({1, (rows + 1) // 2, rows}))
    check_text(target, drafter, cost, options, plain, drafted, (name, temperature) in FAST)
    assert sizes[0] == ([rows] if drafter.drafter.verify else list(cost.rows))


def check_text(target, drafter, cost, options, plain, drafted, accepts):
    out = eagle_jax.generate(target, drafter, PROMPTS, cycle_cost=cost, **options)
    assert out.tokens == plain.tokens
    for ours, theirs in zip(out.log_probs, plain.log_probs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert out.accepted.sum(1).tolist() == out.cycles.tolist()
    assert drafted.cycles.sum() <= out.cycles.sum() <= plain.cycles.sum()
    if accepts:
        assert out.cycles.sum() < plain.cycles.sum(), "nothing was accepted"
    return out


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "eagle3-k3n12" else pytest.mark.slow) for n in DRAFTERS
     if "lookahead" not in n],
)  # fmt: skip
def test_after_a_burst_the_drafter_drafts_as_after_a_prompt(name, monkeypatch):
    """The same text, of which the drafter has read five tokens at the end of a burst, or all in the prompt."""
    monkeypatch.setattr(adaptive, "BURST", 5)
    target = tiny_target()
    drafter = DRAFTERS[name](target)
    options = {"max_new_tokens": 16, "eos_ids": ()}
    request = request_of(target, drafter, PROMPTS, **options)
    begun = prefill(*request)
    payoff, state = loop.burst(
        request.params, adaptive.start()._replace(wait=jnp.int32(8), balance=jnp.float32(-0.5)), begun,
        request.sampling, request.engine,
    )  # fmt: skip
    assert payoff.wait == 3 and float(payoff.balance) == pytest.approx(-0.4)  # five plain steps pay 2% each
    assert state.num_tokens.tolist() == [6] * 4
    longer = [[*prompt, *row[:5]] for prompt, row in zip(PROMPTS, np.asarray(state.tokens).tolist(), strict=True)]
    other = request_of(target, drafter, longer, **options)
    fresh = prefill(*other)
    assert fresh.root.tolist() == state.root.tolist() and fresh.cache.length.tolist() == state.cache.length.tolist()
    trees = [
        one.engine.drafter.draft(
            one.params, some.drafter, some.root, RowRandomness(some.keys, some.num_tokens), one.sampling
        )[0]
        for one, some in ((request, state), (other, fresh))
    ]
    for name in ("tokens", "parents"):
        np.testing.assert_array_equal(*(getattr(tree, name) for tree in trees))
    np.testing.assert_allclose(*(tree.scores for tree in trees), atol=1e-4)


@pytest.mark.parametrize("worth", [1.0, 1.5])
@pytest.mark.parametrize(
    ("cycles", "pauses"),  # of lanes: a batch of two has more slack
    [
        # Three cycles lose 3.3 plain steps, of which 32 pay back 0.64: the next loss is a failure again. 128 pay 2.56.
        # Good cycles fill the balance; five bad ones take it from 2.5 to -3. Pauses begin anew.
        (
            [1] * 9 + [3] * 16 + [1] * 12,
            [(3, 32), (4, 128), (6, 512), (9, 2048), (30, 32), (31, 128), (33, 512), (36, 2048)],
        ),
        ([3] * 8 + [1] * 20, [(14, 32), (15, 128), (17, 512), (20, 2048), (23, 2048), (26, 2048)]),
    ],
)
def test_failures_are_followed_by_longer_pauses(cycles, pauses, worth):
    """A cycle costs 2 plain steps, which count as 2.1; cycles may cost 2.5 more than they yield."""
    state = prefill(*request_of(tiny_target(), None, PROMPTS[:3]))._replace(done=jnp.array([False, False, True]))
    payoff, waits = adaptive.start(), []
    for emitted in cycles:
        choice = adaptive.Choice(0, 2.0, 1.0, worth)
        payoff = adaptive.judge(payoff, state, cycle_result([emitted, emitted, 0]), choice, refilled=True)
        waits.append(int(payoff.wait))
        payoff = adaptive.repay(payoff, payoff.wait)
    assert [(cycle, wait) for cycle, wait in enumerate(waits, 1) if wait] == pauses


@pytest.mark.parametrize("promise", [1.0, 4.0])
def test_drafts_that_do_not_pay_cost_two_percent(promise):
    """A useless head loses 2% of the steps, and 2.5 plain steps and one cycle before that shows."""
    state = prefill(*request_of(tiny_target(), None, PROMPTS[:1], max_new_tokens=128))
    tree = DraftTree(jnp.zeros((1, 2), jnp.int32), jnp.array([[-1, 0]]), jnp.log(jnp.array([[1.0, min(promise, 1.0)]])))
    payoff, steps, lost = adaptive.start(), 0, 0.0
    while steps < 5000:
        choice = adaptive.choose(payoff, state, tree, prices({2: promise / 2 + 1}, draft=0.5), 1)
        cost = float(choice.cost)
        payoff = adaptive.judge(payoff, state, cycle_result([1]), choice)
        steps, lost = steps + 1 + int(payoff.wait), lost + cost - 1
        assert lost <= adaptive.LOSS * steps + adaptive.SLACK + cost
        payoff = adaptive.repay(payoff, payoff.wait)


@pytest.mark.parametrize(("budget", "worth", "failures"), [(40, 1.0, 1), (40, 1.2, 2), (40, 3.0, 3), (200, 1.0, 3)])
def test_doubtful_drafts_of_short_replies_stop_sooner(budget, worth, failures):
    """2% of 40 tokens are 0.8 plain steps, which one cycle that costs 2 and emits 1 exceeds; three exceed 2.5.

    At a worth of 1.2, expected and seen are (8 * 1.2 + 1) / (8 + 2) = 1.06 and (8 * 1.2 + 1.94) / (8 + 3.88) = 0.97
    tokens per plain step: 0.37 and 0.07 of the way from 0.95 to 1.25, and so is the loss that ends the drafts.
    """
    state = prefill(*request_of(tiny_target(), None, PROMPTS[:1], max_new_tokens=budget))
    payoff, cycles = adaptive.start(), 0
    while not payoff.wait:
        payoff = adaptive.judge(payoff, state, cycle_result([1]), adaptive.Choice(0, 2.0, 1.0, worth))
        cycles += 1
    assert cycles == failures


def test_a_cycle_gains_what_rows_with_many_tokens_left_emit():
    """By hand: 30, 30 and 8 tokens are left, on a scale of sqrt(30) / 2; in refilled lanes the mean counts."""
    state = prefill(*request_of(tiny_target(), None, PROMPTS[:3], max_new_tokens=[31, 31, 9]))
    few = np.exp(-2 * 22 / np.sqrt(30)) / (2 + np.exp(-2 * 22 / np.sqrt(30)))
    for emitted in ([3, 1, 5], [4, 3, 1], [2, 2, 2]):
        weighted = (1 - few) * np.mean(emitted[:2]) + few * emitted[2]
        for refilled, gain in ((False, weighted), (True, np.mean(emitted))):
            choice = adaptive.Choice(0, 2.0, 1.0, 1.5, lag=0.25)
            payoff = adaptive.judge(adaptive.start(), state, cycle_result(emitted), choice, refilled)
            assert float(payoff.balance) == pytest.approx(gain - 0.25 - 2.1, abs=1e-5)
    over = state._replace(done=jnp.array([False, True, False]))
    payoff = adaptive.judge(adaptive.start(), over, cycle_result([3, 0, 1]), choice._replace(lag=0.0))
    assert float(payoff.balance) == pytest.approx(3 - 2.1, abs=1e-2)


@pytest.mark.parametrize(("emitted", "worth", "waits"), [([1], 2.0, True), ([1, 4, 4, 4], 2.0, False),
                                                        ([1, 1, 1, 1], 0.8, True)])  # fmt: skip
def test_the_slowest_row_may_fall_behind_a_useful_mean(emitted, worth, waits):
    state = prefill(*request_of(tiny_target(), None, PROMPTS[: len(emitted)], max_new_tokens=129))
    payoff = adaptive.start()._replace(balance=jnp.float32(-2.4), gained=jnp.float32(20), spent=jnp.float32(10))
    if worth < 1:
        payoff = payoff._replace(gained=jnp.float32(8))
    after = adaptive.judge(payoff, state, cycle_result(emitted), adaptive.Choice(0, 2.0, 1.0, worth))
    assert float(after.balance) == pytest.approx(-2.4 + np.mean(emitted) - 2.1)
    assert (int(after.wait) > 0) == waits


def test_what_is_usual_follows_from_the_costs():
    """By hand: of a chain of two, 0.7 and 0.49 drafts are accepted; a tree of two levels and 5 rows counts as that."""
    cost = CycleCost((1, 2, 3, 5), (1.0, 1.4, 1.5, 3.0), 0.1, 0.2)
    for rows, depth, worth in ((2, 2, 1.7 / (1.5 + 0.14)), (3, 2, 2.19 / (1.7 + 0.238)), (3, 1, 1.7 / (1.5 + 0.14))):
        assert float(adaptive.usual_worth(cost.prices(rows), depth)) == pytest.approx(worth)
    assert float(adaptive.usual_worth(cost.prices(5, all_sizes=False), 2)) == pytest.approx(2.19 / (3.2 + 0.238))
    dear = dataclasses.replace(cost, draft=0.3)
    assert float(adaptive.usual_worth(dear.prices(5, all_sizes=False), 2)) == pytest.approx(2.19 / (3.5 + 0.238))


def test_the_size_with_the_most_tokens_per_cost_is_chosen():
    """By hand: a chain of two nodes in the running row, whose probabilities are 0.5 and 0.25."""
    state = prefill(*request_of(tiny_target(), None, PROMPTS[:2]))._replace(done=jnp.array([False, True]))
    tree = DraftTree(
        jnp.zeros((2, 3), jnp.int32), jnp.array([[-1, 0, 1]] * 2), jnp.log(jnp.array([[1, 0.5, 0.25], [1, 1, 1]]))
    )
    payoff = adaptive.start()
    for costs, level, rung in (
        ((1.0, 1.4, 1.5), 0.0, 2),  # 1, 1.07 and 1.17 tokens per cost
        ((1.0, 1.4, 1.7), 0.0, 1),  # 1.03 for both nodes
        ((1.0, 1.6, 1.8), 0.0, 0),
        ((1.0, 1.6, 1.8), 0.5, 0),  # drafting two levels has cost 1: 0.5, 0.58 and 0.63, and none is worth it
    ):
        choice = adaptive.choose(payoff, state, tree, prices(dict(enumerate(costs, 1)), level), 2, 2)
        assert int(choice.rung) == rung
        assert float(choice.cost) == pytest.approx(2 * level + costs[rung])
        assert float(choice.hoped) == pytest.approx((0, 0.5, 0.75)[rung])
    # A head that promised 0.75 drafted tokens a cycle, and kept none, is trusted less and less.
    costs = prices({1: 1.0, 3: 1.4})
    chosen = []
    for _ in range(64):
        choice = adaptive.choose(payoff, state, tree, costs, 2)
        chosen.append(int(choice.rung))
        payoff = adaptive.judge(payoff, state, cycle_result([1, 0]), choice)
    assert chosen[:8] == [1] * 8 and 0 in chosen


def test_an_accepted_token_costs_its_draw():
    """By hand: of two nodes 0.75 tokens are expected, and both are accepted."""
    state = prefill(*request_of(tiny_target(), None, PROMPTS[:1]))
    tree = DraftTree(jnp.zeros((1, 3), jnp.int32), jnp.array([[-1, 0, 1]]), jnp.log(jnp.array([[1, 0.5, 0.25]])))
    passes = (1.0, 1.4)
    for token, worth, rung in ((0.0, 1.75 / 1.4, 1), (0.4, 1.75 / 1.7, 1), (0.5, 1.0, 0)):
        choice = adaptive.choose(adaptive.start(), state, tree, prices({1: 1.0, 3: 1.4}, token=token), 2)
        assert int(choice.rung) == rung
        assert float(choice.worth) == pytest.approx(worth)
        cost = float(choice.cost)
        assert cost == pytest.approx(passes[rung])  # what is accepted is not known before
        payoff = adaptive.judge(adaptive.start(), state, cycle_result([3]), choice, token=token)
        whole = cost + 2 * token
        assert float(payoff.balance) == pytest.approx(3 - whole - 0.1 * (whole - 1))
        assert float(payoff.spent) == pytest.approx(whole)


def test_the_slowest_of_equal_rows_gains_less_than_the_mean():
    """By hand: 73.1 cycles of 1.75 tokens for 128 tokens, of which the slowest of four rows loses 1.26 deviations.

    0, 1 and 2 drafts are accepted with chances of 0.5, 0.25 and 0.25: a variance of 1.25 - 0.75^2.
    """
    state = prefill(*request_of(tiny_target(), None, [PROMPTS[0]] * 4, max_new_tokens=129))
    tree = DraftTree(
        jnp.zeros((4, 3), jnp.int32), jnp.array([[-1, 0, 1]] * 4), jnp.log(jnp.array([[1, 0.5, 0.25]] * 4))
    )
    choices = [
        adaptive.choose(adaptive.start(), state, tree, prices({3: 1.25}), 2, refilled=refilled)
        for refilled in (False, True)
    ]
    lag = 1.2 * 1.049 * np.sqrt(0.6875 * 1.75 / 128)
    assert float(choices[0].lag) == pytest.approx(lag, rel=1e-3)
    assert float(choices[0].worth) == pytest.approx((1.75 - lag) / 1.25, rel=1e-4)
    assert float(choices[1].lag) == 0 and float(choices[1].worth) == pytest.approx(1.75 / 1.25)


def test_drafts_of_which_none_is_worth_its_cost_end_at_once():
    state = prefill(*request_of(tiny_target(), None, PROMPTS[:1], max_new_tokens=129))
    for cost, hoped, wait in ((1.5, 0.0, 32), (1.5, 0.1, 0), (1.0, 0.0, 0)):
        after = adaptive.judge(adaptive.start(), state, cycle_result([1]), adaptive.Choice(0, cost, hoped, 0.9))
        assert int(after.wait) == wait
    paid = adaptive.start()._replace(gained=jnp.float32(30), spent=jnp.float32(20))  # one bad position is no failure
    assert int(adaptive.judge(paid, state, cycle_result([1]), adaptive.Choice(0, 1.5, 0.0, 0.9)).wait) == 0


def test_one_bad_position_is_no_failure_where_drafts_usually_pay():
    state = prefill(*request_of(tiny_target(), None, PROMPTS[:1], max_new_tokens=129))
    for usual, wait in ((1.3, 0), (0.9, 32)):
        choice = adaptive.Choice(0, 1.1, 0.0, 0.9)
        assert int(adaptive.judge(adaptive.start(), state, cycle_result([1]), choice, usual=usual).wait) == wait


def test_drafting_stops_where_a_level_is_not_worth_its_cost():
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    options = {"max_new_tokens": 64, "eos_ids": ()}
    plain = eagle_jax.generate(target, None, PROMPTS, **options)
    longest = []
    # A frontier's probability is at most 1; the pass is so cheap that the first level pays.
    for level, token in ((0.0, 0.0), (1.1, 0.0), (0.05, 0.99)):
        cost = CycleCost((1, 13), (1.0, 0.1), level, token)
        out = eagle_jax.generate(target, head, PROMPTS, cycle_cost=cost, **options)
        assert out.tokens == plain.tokens
        longest.append(int(np.flatnonzero(out.accepted.sum(0)).max()))
    assert longest[0] > 1 and longest[1] == longest[2] == 1


def test_a_head_that_promised_too_much_drafts_fewer_levels():
    request = request_of(tiny_target(), tiny_head("eagle3", TREES["k3n12"]), PROMPTS, max_new_tokens=32)
    state, spent = prefill(*request), []
    for shift in (0.0, -3.0):
        payoff = adaptive.start()._replace(shift=jnp.float32(shift))
        after, _ = loop.drafted_cycle(
            request.params, payoff, state, request.sampling, request.engine, CycleCost((13,), (1.0,), 0.05)
        )
        spent.append(float(after.spent))  # 1 for the pass and 0.05 for every level
    assert 1 < spent[1] < spent[0]
    cost = CycleCost((13,), (1.0,), 0.05, draft=0.25)
    after, _ = loop.drafted_cycle(request.params, payoff, state, request.sampling, request.engine, cost)
    assert float(after.spent) == pytest.approx(spent[1] + 0.25)


def test_a_burst_fits_in_the_cache_of_the_head():
    """A head writes all rows of a burst, also those beyond its last token; the target's cache stays small."""
    head = tiny_head("eagle3", TREES["k3n12"])
    request = request_of(tiny_target(), head, PROMPTS, cycle_cost=2.0, max_new_tokens=32)
    width, (max_tokens, chunk, _) = request.batch.prompts.shape[1], request.sizes
    needed = required_slots(width, max_tokens, head.drafter.depth, chunk)
    start = functools.partial(prefill, engine=request.engine, sizes=request.sizes._replace(slots=needed))
    state = jax.eval_shape(start, *request[:3])
    assert state.cache.slots == needed
    assert state.drafter.cache.slots >= required_slots(width, max_tokens, adaptive.BURST, chunk) > needed
    with pytest.raises(ValueError, match=f"slots must be at least required_slots, {needed}, got {needed - 1}"):
        prefill(*request._replace(sizes=request.sizes._replace(slots=needed - 1)))


@pytest.mark.slow
def test_a_cost_of_one_always_drafts():
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    drafted, out = (eagle_jax.generate(target, head, PROMPTS, cycle_cost=cost, **RUN) for cost in (None, 1))
    assert out.tokens == drafted.tokens
    np.testing.assert_array_equal(out.accepted, drafted.accepted)


def test_few_cycles_are_spent_on_drafts_that_do_not_pay():
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    options = {"max_new_tokens": 300, "eos_ids": ()}
    plain = eagle_jax.generate(target, None, PROMPTS[3:], **options)
    out = eagle_jax.generate(target, head, PROMPTS[3:], cycle_cost=2.6, **options)
    assert out.tokens == plain.tokens
    saved = int(plain.cycles[0] - out.cycles[0])
    assert 0 < saved <= 6 * head.tree.depth  # three failures at most fit in 300 tokens, each of two cycles or so
    assert (out.accepted[0, 1:] * np.arange(1, head.tree.depth + 1)).sum() == saved


@pytest.mark.slow
def test_a_mesh_runs_the_same_steps(monkeypatch):
    monkeypatch.setattr(adaptive, "BURST", 3)
    target = tiny_target()
    head = tiny_head("eagle3", TREES["k3n12"]).rebind(target)
    cost = 1.4 + next(COSTS)
    alone = eagle_jax.generate(target, head, PROMPTS, cycle_cost=cost, **RUN)
    spread = eagle_jax.shard(target, head, make_mesh(2, 1))
    out = eagle_jax.generate(*spread, PROMPTS, cycle_cost=cost, **RUN)
    assert out.tokens == alone.tokens
    np.testing.assert_array_equal(out.accepted, alone.accepted)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        *((cost, "be a number of plain steps, at least 1") for cost in (0.5, True, "2", float("nan"), float("inf"))),
    ],
)
def test_a_bad_cost_is_an_error(cost, message):
    with pytest.raises(ValueError, match=rf"cycle_cost must {message}.*infer\.cycle"):
        eagle_jax.generate(tiny_target(), tiny_head("eagle3", TREES["k3n12"]), PROMPTS, cycle_cost=cost)


@pytest.mark.parametrize("cost", [2, CycleCost((1, 4), (1.0, 2.0))])
def test_lookahead_has_no_cost(cost):
    target = tiny_target()
    with pytest.raises(ValueError, match="cycle_cost must be None for a drafter that reads the target's choices"):
        eagle_jax.generate(target, eagle_jax.lookahead(target), PROMPTS, cycle_cost=cost)
    engine = request_of(target, eagle_jax.lookahead(target), PROMPTS).engine._replace(
        cycle_cost=CycleCost((2,), (2.0,))
    )
    request = request_of(target, eagle_jax.lookahead(target), PROMPTS)
    with pytest.raises(ValueError, match="cycle_cost must be None"):
        jax.eval_shape(
            lambda: loop.generate(*request._replace(engine=engine, sizes=request.sizes._replace(slots=None)))
        )
