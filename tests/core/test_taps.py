"""Checks the kept features of tabular targets: the state of every committed position, in order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.core import CycleCost, Engine, Sizes, adaptive, extend, make_sampling, prefill, step
from eagle_jax.core.prompts import empty_caches, empty_features
from eagle_jax.drafters import vanilla_drafter
from tests.core.test_rollout import jobs_of, rollout_jit
from tests.tables import TARGET, batch_of, generate_jit, parameters, random_table, run, table_drafter, texts_of

VOCAB, SIZES = 9, Sizes(max_tokens=12, chunk=4)
PROMPTS = [[1], [2, 3, 4, 5, 6], [3, 1], [5, 6, 7], [8, 1, 2, 3, 4, 5, 6, 7], [4, 4], [0, 2, 1]]
BUDGET, STOPS = [12, 9, 1, 12, 7, 12, 12], [[], [], [], [4], [], [0, 3], []]
DRAFTERS = {"plain": vanilla_drafter(), "tree": table_drafter(TreeConfig(2, 2, 4), VOCAB)}


def check(features, prompts, texts):
    """The table's feature of a tap is (token, position) + 1000 times the tap."""
    for rows, prompt, text in zip(features, prompts, texts, strict=True):
        read = [*prompt, *text][:-1] if text else prompt
        pairs = np.array([[token, place] for place, token in enumerate(read)])
        np.testing.assert_array_equal(np.asarray(rows)[: len(read)], np.hstack([pairs + 2000, pairs + 5000]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_features_are_those_of_the_committed_tokens(name, temperature):
    batch, params = batch_of(PROMPTS, BUDGET, STOPS, SIZES.chunk), parameters(random_table(VOCAB))
    options = dict(taps=(2, 5), log_probs="target")
    state = run(params, batch, make_sampling(temperature), DRAFTERS[name], SIZES, **options)
    check(state.features, PROMPTS, texts_of(state))
    plain = generate_jit(params, batch, make_sampling(temperature), engine=Engine(TARGET, DRAFTERS[name]), sizes=SIZES)
    assert texts_of(plain) == texts_of(state) and plain.features is None
    assert state.features.shape == (len(PROMPTS), state.cache.slots, 4)
    if name == "tree":
        assert state.accepted[:, 1:].sum() > 0


def test_a_ladder_and_its_plain_steps_keep_them(monkeypatch):
    monkeypatch.setattr(adaptive, "BURST", 3)
    monkeypatch.setattr(adaptive, "SLACK", 0.0)
    monkeypatch.setattr(adaptive, "LOSS", 1.0)  # short bursts
    batch, params = batch_of(PROMPTS, BUDGET, STOPS, SIZES.chunk), parameters(random_table(VOCAB))
    cost = CycleCost((2, 3, 5), (3.5, 3.6, 3.7))  # a cycle emits three tokens at most: plain steps follow the others
    state = run(params, batch, make_sampling(0.0), DRAFTERS["tree"], SIZES, taps=(2, 5), cycle_cost=cost)
    check(state.features, PROMPTS, texts_of(state))
    drafted = run(params, batch, make_sampling(0.0), DRAFTERS["tree"], SIZES)
    assert state.cycles.sum() > drafted.cycles.sum() and state.accepted[:, 1:].sum() > 0


@pytest.mark.parametrize(("lanes", "room", "samples"), [
    pytest.param(1, 1, 1, marks=pytest.mark.slow), (3, 2, 3), pytest.param(16, 4, 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_replies_have_the_features_of_generate(lanes, room, samples):
    prompts = [prompt for prompt in PROMPTS for _ in range(samples)]
    budget, stops = ([value for value in values for _ in range(samples)] for values in (BUDGET, STOPS))
    batch, params = batch_of(prompts, budget, stops, SIZES.chunk), parameters(random_table(VOCAB))
    engine, sampling = Engine(TARGET, DRAFTERS["tree"], taps=(2, 5)), make_sampling(1.0)
    done = rollout_jit(params, jobs_of(batch, samples), sampling, engine=engine, sizes=SIZES, lanes=lanes, room=room)
    texts = [row[:count].tolist() for row, count in zip(*map(np.asarray, done.replies[:2]), strict=True)]
    check(done.replies.features, prompts, texts)
    assert texts == texts_of(generate_jit(params, batch, sampling, engine=engine, sizes=SIZES))


def test_extending_a_text_goes_on_in_the_same_buffer():
    params, sampling = parameters(random_table(VOCAB)), make_sampling(0.0)
    engine, sizes = Engine(TARGET, DRAFTERS["tree"], taps=(2, 5)), SIZES._replace(slots=60)
    first, second = (batch_of([text], [4], [[]], SIZES.chunk) for text in ([2, 3, 4, 5, 6], [7, 1, 1]))
    state = jax.jit(prefill, static_argnums=(3, 4))(params, first, sampling, engine, sizes)
    last = int(state.root[0])
    second = second._replace(prompts=second.prompts.at[0, 0].set(last))
    goes_on = jax.jit(extend, static_argnums=(5, 6))
    state = goes_on(params, state.cache, state.drafter, second, sampling, engine, sizes, state.features)
    state, _ = jax.jit(step, static_argnums=3)(params, state, sampling, engine)
    check(state.features, [[2, 3, 4, 5, 6, last, 1, 1]], texts_of(state))


def test_an_engine_with_taps_and_a_state_without_raise():
    params, sampling = parameters(random_table(VOCAB)), make_sampling(0.0)
    batch, plain = batch_of([[1, 2]], [4], [[]], SIZES.chunk), Engine(TARGET, DRAFTERS["tree"])
    tapped = plain._replace(taps=(2,))
    with pytest.raises(ValueError, match=r"engine.taps must be the same in prefill and step, got \(2,\) in step"):
        step(params, prefill(params, batch, sampling, plain, SIZES), sampling, tapped)
    with pytest.raises(ValueError, match=r"engine.taps must be the same in prefill and step, got None in step"):
        step(params, prefill(params, batch, sampling, tapped, SIZES), sampling, plain)
    caches = empty_caches(params, plain, 1, 40)
    with pytest.raises(ValueError, match=r"features must be given .* got taps \(2,\) and no features"):
        extend(params, *caches, batch, sampling, tapped, SIZES)
    with pytest.raises(ValueError, match=r"features must be given .* got taps None and these features"):
        extend(params, *caches, batch, sampling, plain, SIZES, empty_features(params, tapped, 1, 40))
    assert empty_features(params, plain, 1, 40) is None
    assert jax.tree.map(jnp.shape, empty_features(params, tapped, 3, 40)) == (3, 40, 2)
