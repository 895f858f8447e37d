"""Checks `rollout`: the texts of `generate`, prompt by prompt; interruption, memory, bad input."""

from __future__ import annotations

import itertools
import signal

import numpy as np
import pytest

import eagle_jax
from eagle_jax.core import CycleCost
from eagle_jax.parallel import make_mesh
from eagle_jax.runtime import errors, generation, rollouts
from eagle_jax.runtime.profile import Chosen
from tests.models import DRAFTERS, random_prompts, tiny_target

PROMPTS = random_prompts([5, 31, 1, 17, 8, 3], 12)
RUN = dict(max_new_tokens=[30, 7, 25, 1, 32, 12], eos_ids=[[3], [5], [], [1, 2], [0, 7, 9, 11, 10], [4]])


def repeated(values, samples):
    return [value for value in values for _ in range(samples)]


@pytest.mark.parametrize(("name", "samples", "temperature"), [
    (None, 1, 0.0), ("eagle3-k3n12", 3, 1.0), ("lookahead", 1, 0.0),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("small-dynamic", 1, 1.0), ("eagle3-k3n12", 1, 0.0), ("eagle1-static", 1, 1.0),
        ("lookup", 2, 1.0), ("medusa-static", 1, 0.0),
    )),
])  # fmt: skip
def test_texts_are_those_of_generate(name, samples, temperature):
    target = tiny_target()
    drafter = None if name is None else DRAFTERS[name](target)
    options = dict(temperature=temperature, key=7, log_probs="target")
    ours = eagle_jax.rollout(target, drafter, PROMPTS, lanes=3, samples_per_prompt=samples, **RUN, **options)
    every = {name: repeated(values, samples) for name, values in RUN.items()}
    theirs = eagle_jax.generate(target, drafter, repeated(PROMPTS, samples), **every, **options)
    assert ours.tokens == theirs.tokens and ours.finished.all()
    for own, other in zip(ours.log_probs, theirs.log_probs, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)
    np.testing.assert_array_equal(ours.cycles, theirs.cycles)
    assert ours.tau == theirs.tau
    assert theirs.cycles.sum() / 3 <= ours.passes <= theirs.cycles.sum() / 3 + theirs.cycles.max()


def test_lanes_are_spread_over_a_mesh():
    target = tiny_target()
    spread, drafter = eagle_jax.shard(target, DRAFTERS["eagle3-k3n12"](target), make_mesh(data=2, tensor=2))
    options = dict(temperature=1.0, key=3, samples_per_prompt=2, lanes=3, **RUN)
    cost = CycleCost((1, 5, 13), (1.0, 1.3, 2.0), 0.05)
    ours = eagle_jax.rollout(spread, drafter, PROMPTS, cycle_cost=cost, **options)
    assert ours.tokens == eagle_jax.rollout(target, None, PROMPTS, **options).tokens


def test_costs_and_profiles_choose_for_the_lanes(monkeypatch):
    target, asked = tiny_target(), []
    cost = CycleCost((1, 5, 13), (1.0, 3.0, 4.0), 0.5)
    drafter = DRAFTERS["eagle3-k3n12"](target)

    class Choosing:
        def choose(self, batch, temperature, prompt):
            asked.append((batch, temperature, prompt))
            return Chosen(drafter, cost)

    monkeypatch.setattr(generation, "bound_profile", lambda profile, target: Choosing())
    out = eagle_jax.rollout(target, "auto", PROMPTS, profile="profile.yaml", lanes=3, **RUN)
    eagle_jax.rollout(target, "auto", PROMPTS[:1], profile="profile.yaml", samples_per_prompt=2, max_new_tokens=1)
    assert list(dict.fromkeys(asked)) == [(3, 0.0, 31), (2, 0.0, 5)]  # no more lanes than replies
    assert out.tokens == eagle_jax.rollout(target, None, PROMPTS, lanes=3, **RUN).tokens
    always = eagle_jax.rollout(target, drafter, PROMPTS, lanes=3, **RUN)
    assert always.cycles.sum() < out.cycles.sum(), "dear drafts are followed by plain steps"
    assert always.payoff is None and out.payoff.saved < 0
    paused = out.payoff._replace(wait=np.int32(200), saved=np.float32(-9))
    again = eagle_jax.rollout(target, "auto", PROMPTS, profile="profile.yaml", lanes=3, payoff=paused, **RUN)
    assert again.tokens == out.tokens
    assert 0 < again.payoff.wait < 200 and not again.accepted[:, 1:].any(), "the plain steps did not go on"


def test_numbers_of_prompts_and_budgets_share_a_program():
    target, before = tiny_target(), rollouts.advance_program._cache_size()
    for key, budgets in ((0, [9, 3, 4, 5, 6, 7]), (1, [1, 8, 8, 2, 30])):
        options = dict(max_new_tokens=budgets, temperature=0.5, key=key)
        ours = eagle_jax.rollout(target, None, PROMPTS[: len(budgets)], lanes=2, room=1, **options)
        assert ours.tokens == eagle_jax.generate(target, None, PROMPTS[: len(budgets)], **options).tokens
        assert len(ours.tokens) == len(ours.finished) == len(ours.cycles) == len(budgets)
    assert rollouts.advance_program._cache_size() == before + 1


@pytest.fixture
def press(monkeypatch):
    """Presses Ctrl-C so often after the call of that number, before its result is assigned."""
    before, advance = signal.signal(signal.SIGINT, signal.default_int_handler), rollouts.advance_program
    monkeypatch.setattr(rollouts, "PASSES", 31)

    def at(number, times=1):
        calls = itertools.count(1)

        def pressed(*args, **options):
            state = advance(*args, **options)
            if next(calls) == number:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return state

        monkeypatch.setattr(rollouts, "advance_program", pressed)

    yield at
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_rollout_returns_what_is_finished(press):
    target = tiny_target()
    press(1)
    out = eagle_jax.rollout(target, None, PROMPTS, lanes=2, max_new_tokens=[30, 7, 25, 1, 30, 12], eos_ids=())
    whole = eagle_jax.generate(target, None, PROMPTS, max_new_tokens=[30, 7, 25, 1, 30, 12], eos_ids=())
    assert out.finished.tolist() == [True, False, False, False, True, False]
    assert out.interrupted
    for done, text, expected in zip(out.finished, out.tokens, whole.tokens, strict=True):
        assert text == (expected if done else [])


def test_a_rollout_without_a_reply_or_interrupted_twice_raises(press):
    press(1)
    with pytest.raises(KeyboardInterrupt):
        eagle_jax.rollout(tiny_target(), None, PROMPTS[:2], lanes=2, max_new_tokens=200, eos_ids=())
    press(1, times=2)
    with pytest.raises(KeyboardInterrupt):
        eagle_jax.rollout(tiny_target(), None, PROMPTS[:2], lanes=2, max_new_tokens=2, eos_ids=())
    press(1)
    whole = eagle_jax.rollout(tiny_target(), None, PROMPTS[:2], lanes=2, max_new_tokens=2, eos_ids=())
    assert whole.interrupted and whole.finished.all()


def test_memory_is_that_of_lanes_and_room(monkeypatch):
    target, rows = tiny_target(), []
    monkeypatch.setattr(rollouts, "check_fits", lambda request, replies: rows.append(len(request.batch.prompts)))
    eagle_jax.rollout(target, None, PROMPTS * 4, lanes=8, max_new_tokens=2)
    assert rows == [12]  # two prompts are read beside the two before them
    monkeypatch.undo()
    monkeypatch.setattr(errors, "_limit", lambda _: 1000)
    monkeypatch.setattr(rollouts, "start_program", lambda *_, **__: pytest.fail("went on to compile"))
    with pytest.raises(MemoryError, match=r"caches of 12 rows .* the lanes of a rollout"):
        eagle_jax.rollout(target, None, PROMPTS * 4, lanes=8, max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lanes=0), "lanes must be an integer of at least 1, got 0"),
        (dict(samples_per_prompt=0), "samples_per_prompt must be an integer of at least 1"),
        (dict(room=0), "room must be an integer of at least 1, got 0"),
        (dict(drafter="auto"), "profile must be given with drafter"),
        (dict(cycle_cost=0.5), "cycle_cost must be a number of plain steps, at least 1"),
        (dict(temperature=1.0), "key must be given at temperature > 0"),
        (dict(temperature=1.0, key=np.zeros((5, 2), np.uint32)), "an array of 6 keys .one per reply."),
        (dict(max_new_tokens=[1]), "max_new_tokens must be a number, or one per prompt .6., got 1"),
    ],
)
def test_bad_arguments_raise(options, message, monkeypatch):
    monkeypatch.setattr(rollouts, "start_program", lambda *_, **__: pytest.fail("went on to compile"))
    with pytest.raises(ValueError, match=message):
        eagle_jax.rollout(tiny_target(), **{"drafter": None, "prompts": PROMPTS, **options})
