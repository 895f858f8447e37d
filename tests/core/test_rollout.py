"""Checks replies written in lanes that refill themselves against `generate`, and that lanes do not idle."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.core import FINITE, Batch, CycleCost, Engine, Sizes, adaptive, make_sampling
from eagle_jax.core.lanes import Jobs, Replies, advance_rollout, rollout, start_rollout
from eagle_jax.drafters import vanilla_drafter
from tests.tables import TARGET, batch_of, generate_jit, parameters, random_table, table_drafter

VOCAB, SIZES = 9, Sizes(max_tokens=12, chunk=4)
TREE = TreeConfig(2, 2, 4)
PROMPTS = [[1], [2, 3, 4, 5, 6], [3, 1], [5, 6, 7], [8, 1, 2, 3, 4, 5, 6, 7], [4, 4], [0, 2, 1]]
rollout_jit = jax.jit(rollout, static_argnames=("engine", "sizes", "lanes", "room"))


def jobs_of(batch: Batch, samples: int) -> Jobs:
    """Returns the jobs whose replies are those of a batch that has every prompt `samples` times."""
    return Jobs(batch.prompts[::samples], batch.lengths[::samples], batch.budget, batch.eos_ids, batch.keys)


def check_same(replies: Replies, state: Any, width: int) -> None:
    """Checks that replies are what `generate` returned."""
    assert replies.finished.all()
    counts = np.asarray(state.num_tokens)
    np.testing.assert_array_equal(replies.num_tokens, counts)
    written = np.arange(width)[None] < counts[:, None]
    for name in ("tokens", "log_probs"):
        ours, theirs = getattr(replies, name), getattr(state, name)
        if theirs is not None:
            np.testing.assert_array_equal(np.asarray(ours)[:, :width][written], np.asarray(theirs)[:, :width][written])
    for name in ("cycles", "accepted", "not_finite", "bad_drafts"):
        np.testing.assert_array_equal(getattr(replies, name), getattr(state, name))


@pytest.mark.parametrize(("lanes", "room", "samples", "temperature"), [
    (1, 1, 1, 1.0), (3, 2, 1, 0.0), (2, 3, 3, 1.0),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((8, 2, 2, 0.0), (16, 4, 1, 1.0))),
])  # fmt: skip
def test_replies_are_those_of_generate(lanes, room, samples, temperature):
    rng = np.random.default_rng(lanes)
    prompts = [prompt for prompt in PROMPTS for _ in range(samples)]
    budget = rng.integers(1, SIZES.max_tokens + 1, len(prompts)).tolist()
    stops = [rng.choice(VOCAB, rng.integers(0, 2), replace=False).tolist() for _ in prompts]
    batch, params = batch_of(prompts, budget, stops, SIZES.chunk), parameters(random_table(VOCAB))
    engine = Engine(TARGET, table_drafter(TREE, VOCAB), log_probs="target")
    sampling = make_sampling(temperature)
    done = rollout_jit(params, jobs_of(batch, samples), sampling, engine=engine, sizes=SIZES, lanes=lanes, room=room)
    check_same(done.replies, generate_jit(params, batch, sampling, engine=engine, sizes=SIZES), SIZES.max_tokens)
    assert done.lanes.drafter.sound[: len(prompts)].all()
    assert int(done.first) < len(PROMPTS) <= int(done.first) + room, "prompts are read in order, each once"


@pytest.mark.parametrize(("lanes", "samples", "passes"), [
    pytest.param(3, 2, (1.0, 1.0, 1.0), marks=pytest.mark.slow),  # every cycle pays
    pytest.param(3, 2, (1.0, 2.0, 2.0), marks=pytest.mark.slow),  # smaller trees
    (9, 1, (9.0, 9.0, 9.0)),  # no cycle pays: bursts, which end when two of the lanes are free
])  # fmt: skip
def test_replies_are_those_of_generate_whatever_a_cycle_costs(lanes, samples, passes, monkeypatch):
    for name, value in {"BURST": 20, "LOSS": 1.0, "SLACK": 1.0}.items():
        monkeypatch.setattr(adaptive, name, value)
    rng, sizes = np.random.default_rng(lanes), Sizes(max_tokens=24, chunk=4)
    prompts = [prompt for prompt in PROMPTS for _ in range(3 * samples)]
    budget = rng.integers(1, sizes.max_tokens + 1, len(prompts)).tolist()
    batch, params = batch_of(prompts, budget, [[3]] * len(prompts), sizes.chunk), parameters(random_table(VOCAB))
    plain = Engine(TARGET, vanilla_drafter(), log_probs="target")
    cost = CycleCost((2 if passes[0] == 9 else 1, 3, 5), passes, 0.01)
    engine = Engine(TARGET, table_drafter(TREE, VOCAB), log_probs="target", cycle_cost=cost)
    sampling, jobs = make_sampling(1.0), jobs_of(batch, samples * 3)
    done = rollout_jit(params, jobs, sampling, engine=engine, sizes=sizes, lanes=lanes, room=2)
    if passes[0] == 9:  # the same if the drafter also reads what no later draft needs
        assert not done.lanes.drafter.sound.all()
        monkeypatch.setattr(adaptive, "drafts_later", lambda payoff, left: True)
        every = jax.jit(functools.partial(rollout, engine=engine, sizes=sizes, lanes=lanes, room=2))
        less, done = done, every(params, jobs, sampling)
        jax.tree.map(np.testing.assert_array_equal, less.replies, done.replies)
    state = generate_jit(params, batch, sampling, engine=plain, sizes=sizes)
    assert done.replies.finished.all()
    counts = np.asarray(state.num_tokens)
    np.testing.assert_array_equal(done.replies.num_tokens, counts)
    written = np.arange(sizes.max_tokens)[None] < counts[:, None]
    for name in ("tokens", "log_probs"):
        ours, theirs = (np.asarray(getattr(one, name))[:, : sizes.max_tokens][written] for one in (done.replies, state))
        np.testing.assert_array_equal(ours, theirs)
    cycles, accepted = np.asarray(done.replies.cycles), np.asarray(done.replies.accepted)
    np.testing.assert_array_equal(accepted.sum(1), cycles)
    saved = (np.asarray(state.cycles) - cycles).sum()
    assert saved > 0 or passes[0] == 9
    assert done.lanes.drafter.sound.all()
    # Lanes idle at the end, and few of them in a burst: with all of them it took 39 passes where it takes 29.
    assert cycles.sum() / lanes <= done.passes <= 1.1 * cycles.sum() / lanes + 0.7 * cycles.max()


def test_a_rollout_in_parts_is_the_same():
    batch = batch_of(PROMPTS, [12] * len(PROMPTS), [[]] * len(PROMPTS), SIZES.chunk)
    params, jobs = parameters(random_table(VOCAB)), jobs_of(batch, 1)
    engine, sampling = Engine(TARGET, vanilla_drafter()), make_sampling(1.0)
    alone = functools.partial(advance_rollout)  # programs of other tests, of the same function, do not count
    advance = jax.jit(alone, static_argnames=("engine", "sizes", "cycles"), donate_argnums=1)
    state = start_rollout(params, jobs, sampling, engine, SIZES, 2, 1)
    seen = []
    while not state.replies.finished.all():
        state = advance(params, state, jobs, sampling, engine=engine, sizes=SIZES, cycles=5)
        seen.append(int(state.replies.finished.sum()))
    assert seen == sorted(seen) and 0 < seen[2] < len(PROMPTS)
    check_same(state.replies, generate_jit(params, batch, sampling, engine=engine, sizes=SIZES), SIZES.max_tokens)
    assert advance._cache_size() == 1


def test_a_reply_without_finite_logits_ends_alone():
    table = random_table(VOCAB)
    table[:, 7, :] = np.nan
    batch = batch_of(PROMPTS, [4] * len(PROMPTS), [[]] * len(PROMPTS), SIZES.chunk)
    engine, sampling, params = Engine(TARGET, vanilla_drafter()), make_sampling(1.0), parameters(table)
    done = rollout_jit(params, jobs_of(batch, 1), sampling, engine=engine, sizes=SIZES, lanes=2, room=2)
    state = generate_jit(params, batch, sampling, engine=engine, sizes=SIZES)
    assert 0 < (np.asarray(state.not_finite) != FINITE).sum() < len(PROMPTS)
    check_same(done.replies, state, SIZES.max_tokens)


@pytest.mark.parametrize("drafter", [vanilla_drafter(), table_drafter(TREE, VOCAB)], ids=["plain", "tree"])
def test_lanes_do_not_idle(drafter):
    """256 replies of lognormal lengths, the longest 20 times the median, in 16 lanes; long budgets come first."""
    rng, sizes = np.random.default_rng(0), Sizes(max_tokens=200, chunk=4)
    draws = np.exp(rng.normal(size=256))
    budget = np.maximum(1, np.round(10 * draws / np.median(draws))).astype(int).clip(max=200)
    budget[np.argmax(budget)] = 200
    for budgets in (np.sort(budget)[::-1], budget):
        batch = batch_of([[1, 2, 3]] * 256, budgets.tolist(), [[]] * 256, sizes.chunk)
        done = rollout_jit(
            parameters(random_table(VOCAB)), jobs_of(batch, 1), make_sampling(1.0), engine=Engine(TARGET, drafter),
            sizes=sizes, lanes=16, room=4,
        )  # fmt: skip
        cycles, passes = np.asarray(done.replies.cycles), int(done.passes)
        assert done.replies.num_tokens.tolist() == budgets.tolist()
        bound = cycles.sum() / 16
        # A lane idles only while no job is left, so for less than the longest job.
        assert bound <= passes <= (1.1 * bound if budgets is not budget else bound + cycles.max())
        assert passes < 0.7 * sum(int(cycles[at : at + 16].max()) for at in range(0, 256, 16)) or budgets is not budget


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lanes": 0}, "lanes and room must be at least 1, got 0 and 1"),
        ({"jobs": 0}, "jobs must be a multiple of the 0 prompts, got 0"),
        ({"jobs": 8}, "jobs must be a multiple of the 7 prompts, got 8"),
        ({"slots": 9}, "slots must be at least required_slots, 21, got 9"),
        ({"reads_choices": True}, "cycle_cost must be None for a drafter that reads the target's choices"),
    ],
)
def test_bad_arguments_raise(changes, message):
    batch = batch_of(PROMPTS, [12] * len(PROMPTS), [[]] * len(PROMPTS), SIZES.chunk)
    jobs = jobs_of(batch, 1)
    if "jobs" in changes:
        jobs = jobs._replace(budget=jnp.ones((changes["jobs"],), jnp.int32), lengths=jobs.lengths[: changes["jobs"]])
    drafter = vanilla_drafter()._replace(reads_choices=changes.get("reads_choices", False))
    engine = Engine(TARGET, drafter, cycle_cost=CycleCost((1,), (1.0,)))
    start = functools.partial(start_rollout, parameters(random_table(VOCAB)), jobs, make_sampling(0.0), engine)
    with pytest.raises(ValueError, match=message):
        start(SIZES._replace(slots=changes.get("slots")), changes.get("lanes", 2), 1)
