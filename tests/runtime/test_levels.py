"""Checks when drafting ends: where no further level promises more tokens per cost of the cycle."""

from __future__ import annotations

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from eagle_jax import TreeConfig
from eagle_jax.core import CycleCost, adaptive, prefill, step
from eagle_jax.runtime.generation import request_of
from tests.models import random_prompts, tiny_head, tiny_target

DEPTH = 5


def running(*rows: bool):
    prompts = random_prompts([5] * len(rows), 12)
    return prefill(*request_of(tiny_target(), None, prompts))._replace(done=~jnp.array(rows))


STATE = {count: running(*[True] * count) for count in (1, 2)}


def goes_on(cost, candidates, frontier, drafted, state=None, payoff=None):
    """The rule's answer to probabilities of candidates and of the frontier, one list per row."""
    state = STATE[len(frontier)] if state is None else state
    scores, front = (jnp.log(jnp.array(rows, jnp.float32)) for rows in (candidates, frontier))
    levels = np.arange(scores.shape[1]) // 2 + 1
    prices = cost.prices(cost.rows[-1])
    return bool(adaptive.deepens(payoff or adaptive.start(), state, prices, DEPTH, scores, levels, front, drafted))


def by_definition(cost, candidates, frontier, drafted):
    """Tokens per cost of the best size, with no further level and with every number of them."""
    worth = []
    for more in range(DEPTH - drafted + 1):
        found = []
        for rows, passes in zip(cost.rows, cost.passes, strict=True):
            tokens = 0.0
            sure = [adaptive.SURE ** (1 + index // 2) for index in range(6)]
            known_of, front_of = np.minimum(candidates, sure), np.minimum(frontier, adaptive.SURE**drafted)
            for known, front in zip(known_of.tolist(), front_of.tolist(), strict=True):
                fall = max(front) ** (1 / drafted)  # the likeliest path's, per level
                new = [value * fall**level for value in front for level in range(1, more + 1)]
                tokens += sum(sorted([*known, *new])[::-1][: rows - 1]) / len(frontier)
            whole = cost.draft + passes + cost.level * (drafted + more) + cost.token * tokens
            found.append((1 + tokens) / whole)
        worth.append(max(found))
    return worth


values = st.lists(st.floats(0.001, 1.0), min_size=6, max_size=6)


@settings(max_examples=60)
@given(
    st.lists(values, min_size=2, max_size=2), st.integers(1, DEPTH), st.floats(0.0, 0.3), st.sampled_from((0.0, 0.1)),
    st.floats(1.0, 3.0), st.sampled_from((0.0, 0.5)),
)  # fmt: skip
def test_the_rule_is_its_definition(candidates, drafted, level, token, passes, draft):
    cost = CycleCost((1, 3, 7), (1.0, 1.2, 1.2 * passes), level, token, draft)
    frontier = [sorted(row)[2:4] for row in candidates]
    now, *later = by_definition(cost, candidates, frontier, drafted)
    if all(abs(one - now) > 1e-4 for one in later):
        assert goes_on(cost, candidates, frontier, drafted) == any(one > now for one in later)


SURE = [[0.9, 0.05, 0.81, 0.05, 0.729, 0.05]]
CHAIN = [[0.7, 0.12, 0.49, 0.08, 0.34, 0.06]]


def test_a_level_that_no_size_has_room_for_is_not_drafted():
    """A level costs less than the frontier is likely, but the better sizes are full of likelier nodes."""
    steep = CycleCost((1, 4, 7), (1.0, 1.6, 2.5), 0.08)
    assert not goes_on(steep, CHAIN, [[0.34, 0.06]], 3)
    assert goes_on(CycleCost((1, 4, 7), (1.0, 1.6, 1.6), 0.08), CHAIN, [[0.34, 0.06]], 3), "larger trees are free"
    assert goes_on(CycleCost((1, 5, 7), (1.0, 1.6, 2.5), 0.08), SURE, [[0.729, 0.05]], 3), "a sure text goes on"
    assert not goes_on(CycleCost((1, 5, 7), (1.0, 1.6, 2.5), 0.08), SURE, [[0.729, 0.05]], DEPTH), "no level is left"
    assert not goes_on(CycleCost((1, 5, 7), (1.0, 1.6, 2.5), 0.8), SURE, [[0.729, 0.05]], 3), "a dear level"


def test_a_level_that_pays_only_with_the_next_ones_is_drafted():
    """A pass of 7 rows pays for six sure nodes, not for four."""
    cost = CycleCost((1, 3, 7), (1.0, 1.2, 2.2), 0.01)
    row, front = [0.9, 0.88, 0.87, 0, 0, 0], [[0.87, 0.0]]
    now, once, twice = by_definition(cost, [row], front, 3)
    assert once < now < twice
    assert goes_on(cost, [row], front, 3)


@pytest.mark.parametrize("first", [True, False])
def test_a_row_that_is_over_does_not_decide(first):
    cost, flat = CycleCost((1, 4, 7), (1.0, 1.3, 1.6), 0.1), [[0.3, 0.2, 0.1, 0.1, 0.05, 0.05]]
    rows, fronts = (
        (SURE + flat, [[0.729, 0.05], [0.05, 0.05]]) if first else (flat + SURE, [[0.05, 0.05], [0.729, 0.05]])
    )
    assert goes_on(cost, rows, fronts, 3, running(first, not first))
    assert not goes_on(cost, rows, fronts, 3, running(not first, first))


def test_a_head_that_promises_too_much_is_not_believed():
    cost = CycleCost((1, 5, 7), (1.0, 1.6, 2.5), 0.2)
    liar = adaptive.start()._replace(shift=jnp.float32(-3))
    assert goes_on(cost, SURE, [[0.729, 0.05]], 3)
    assert not goes_on(cost, SURE, [[0.729, 0.05]], 3, payoff=liar)


def test_candidates_have_their_depths():
    """With a top-k of 2 the first level has two candidates, and each further one four."""
    drafter, seen = tiny_head("eagle3", TreeConfig(3, 2, 5)), []

    def pays(scores, levels, frontier, drafted):
        seen.append((scores.shape, levels.tolist()))
        return jnp.bool_(True)

    params, batch, sampling, engine, sizes = request_of(tiny_target(), drafter, random_prompts([5], 12))
    state = prefill(params, batch, sampling, engine, sizes)
    limited = engine.drafter.with_limit(pays, jnp.ones(1, bool))
    step(params, state, sampling, engine._replace(drafter=limited))
    assert seen[0] == ((1, 10), [1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
