"""Checks what drafted nodes are expected to yield: chances of scores, how they are learned, and which rows count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.core import DraftTree, adaptive, make_sampling, prefill
from eagle_jax.runtime.generation import request_of
from tests.models import cycle_result, prices, random_prompts, tiny_target

PROMPTS = random_prompts([5, 31, 1, 17], 12)


def start(rows, **options):
    return prefill(*request_of(tiny_target(), None, PROMPTS[:rows], **options))


def chain(*probabilities):
    tokens = jnp.zeros((1, len(probabilities) + 1), jnp.int32)
    return DraftTree(tokens, jnp.array([[-1, 0, 1]]), jnp.log(jnp.array([[1.0, *probabilities]])))


def test_odds_are_those_of_the_scores_times_a_factor():
    scores = jnp.log(jnp.array([[0.5, 0.2, 0.0, 1.0]]))
    for factor in (1.0, 2.0, 0.25):
        payoff = adaptive.start()._replace(shift=jnp.log(jnp.float32(factor)))
        odds = factor * np.array([1, 0.25, 0, 19])  # a probability of 1 counts 0.95
        np.testing.assert_allclose(adaptive.chances(payoff, scores, 1)[0], odds / (1 + odds), rtol=1e-5)
        two = adaptive.chances(payoff, 2 * scores, np.array([[2, 2, 2, 2]]))[0]  # two tokens, each as likely as one
        np.testing.assert_allclose(two, (odds / (1 + odds)) ** 2, rtol=1e-5)


@pytest.mark.parametrize(("temperature", "shift"), [(0.0, adaptive.GREEDY_SHIFT), (1.0, 0.0)])
def test_a_likely_token_is_likelier_at_temperature_0(temperature, shift):
    believed = adaptive.trusted(adaptive.start()._replace(shift=jnp.float32(-1)), make_sampling(temperature))
    assert float(believed.shift) == pytest.approx(shift - 1)


@pytest.mark.parametrize(("emitted", "shift"), [(1, -0.75), (3, 1.25)])
def test_the_factor_follows_what_is_accepted(emitted, shift):
    """By hand: of a chain of 0.5 and 0.5^2 there are 0.75 tokens expected, and 0.5 / 2 + 2 * 0.25 / 2 more per unit."""
    state = start(1)
    choice = adaptive.choose(adaptive.start(), state, chain(0.5, 0.25), prices({3: 1.4}), 2)
    assert float(choice.hoped) == pytest.approx(0.75) and float(choice.spread) == pytest.approx(0.5)
    begun = adaptive.start()._replace(shift=jnp.float32(0.1), evidence=jnp.float32(3.2))
    after = adaptive.judge(begun, state, cycle_result([emitted]), choice)
    evidence = 3.2 * (1 - 1 / adaptive.MEMORY) + 0.5
    assert float(after.evidence) == pytest.approx(evidence)
    assert float(after.shift) == pytest.approx(0.1 + shift / (evidence + adaptive.CAUTION))


def test_every_running_row_is_evidence():
    """Three of four rows run, and accept both drafts, where 0.75 are expected: all three count, not their mean."""
    state = start(4)._replace(done=jnp.array([False, True, False, False]))
    tree = jax.tree.map(lambda column: jnp.repeat(column, 4, axis=0), chain(0.5, 0.25))
    choice = adaptive.choose(adaptive.start(), state, tree, prices({3: 1.4}), 2)
    after = adaptive.judge(adaptive.start(), state, cycle_result([3, 1, 3, 3]), choice)
    assert float(after.evidence) == pytest.approx(3 * 0.5)
    assert float(after.shift) == pytest.approx(3 * 1.25 / (3 * 0.5 + adaptive.CAUTION))


def test_chances_are_learned():
    """Half of the nodes with a score of 0.2 are accepted: a chance of 0.5 is found."""
    state, payoff = start(1), adaptive.start()
    tree = DraftTree(jnp.zeros((1, 2), jnp.int32), jnp.array([[-1, 0]]), jnp.log(jnp.array([[1.0, 0.2]])))
    for turn in range(400):
        choice = adaptive.choose(payoff, state, tree, prices({2: 1.0}), 1)
        payoff = adaptive.judge(payoff, state, cycle_result([1 + turn % 2]), choice)
    assert float(adaptive.chances(payoff, tree.scores, 1)[0, 1]) == pytest.approx(0.5, abs=0.02)


def test_rows_with_more_tokens_left_count_more():
    """By hand: 100 and 90 tokens are left, on a scale of sqrt(100) / 2: weights of e^20 and e^18."""
    state = start(2, max_new_tokens=[101, 91])
    tree = DraftTree(
        jnp.zeros((2, 2), jnp.int32), jnp.array([[-1, 0]] * 2), jnp.log(jnp.array([[1.0, 0.5], [1.0, 0.0]]))
    )
    for refilled, share in ((False, 1 / (1 + np.exp(-2))), (True, 0.5)):
        choice = adaptive.choose(adaptive.start(), state, tree, prices({2: 1.0}), 1, refilled=refilled)
        gained = float(choice.worth) + float(choice.lag)
        assert gained == pytest.approx(1 + share * 0.5, rel=1e-4)
        assert float(choice.hoped) == pytest.approx(0.25)
        payoff = adaptive.judge(adaptive.start(), state, cycle_result([3, 1]), choice, refilled)
        assert float(payoff.gained) + float(choice.lag) == pytest.approx(1 + 2 * share, rel=1e-4)
    over = state._replace(done=jnp.array([True, False]))
    choice = adaptive.choose(adaptive.start(), over, tree, prices({2: 1.0}), 1)
    assert float(choice.worth) == pytest.approx(1)


def test_a_row_far_behind_decides_alone():
    tree = DraftTree(jnp.zeros((2, 2), jnp.int32), jnp.array([[-1, 0]] * 2), jnp.log(jnp.array([[1.0, 0.5]] * 2)))

    def lag(*budgets):
        state = start(2, max_new_tokens=list(budgets))
        return float(adaptive.choose(adaptive.start(), state, tree, prices({2: 1.0}), 1).lag)

    assert lag(101, 101) > 0.02 and lag(101, 31) == pytest.approx(0, abs=1e-4)
