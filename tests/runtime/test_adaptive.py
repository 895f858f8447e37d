"""Checks `cycle_cost`: plain steps between drafted cycles change no text, and the drafter reads what they confirmed."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.core import RowRandomness, adaptive, loop, prefill, required_slots
from eagle_jax.parallel import make_mesh
from eagle_jax.runtime.generation import request_of
from tests.models import DRAFTERS, DRAWN, TREES, random_prompts, tiny_head, tiny_target

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
    monkeypatch.setattr(adaptive, "WINDOW", 1)
    target = tiny_target()
    drafter = DRAFTERS[name](target)
    options = RUN | {"temperature": temperature, "log_probs": "law"}
    plain, drafted = (eagle_jax.generate(target, one, PROMPTS, **options) for one in (None, drafter))
    cost = drafter.drafter.depth + 0.5 + next(COSTS)  # more than a cycle can emit: bursts follow every window
    out = eagle_jax.generate(target, drafter, PROMPTS, cycle_cost=cost, **options)
    assert out.tokens == plain.tokens
    for ours, theirs in zip(out.log_probs, plain.log_probs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert out.accepted.sum(1).tolist() == out.cycles.tolist()
    assert drafted.cycles.sum() < out.cycles.sum() <= plain.cycles.sum(), "no plain step ran"
    if (name, temperature) in FAST:
        assert out.cycles.sum() < plain.cycles.sum(), "nothing was accepted"


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
    state = loop._burst(request.params, prefill(*request), request.sampling, request.engine)
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


def test_failed_windows_are_followed_by_longer_pauses():
    """Windows of four cycles; a cycle costs 2 plain steps."""
    state = prefill(*request_of(tiny_target(), None, PROMPTS[:3]))._replace(done=jnp.array([False, False, True]))
    progress, waits = adaptive.start(state), []
    for emitted in [1] * 12 + [3] * 16 + [1] * 13:
        progress = adaptive.judge(progress, state, jnp.array([emitted, emitted, 0]), 2.0)
        waits.append(int(progress.wait))
        progress = progress._replace(wait=jnp.int32(0))  # as bursts leave it
    assert [(cycle, wait) for cycle, wait in enumerate(waits, 1) if wait] == [
        (4, 1),
        (8, 4),
        (12, 16),
        (37, 1),
        (41, 4),
    ]


def test_a_burst_fits_in_the_caches():
    """A head writes all rows of a burst, also those beyond its last token."""
    request = request_of(tiny_target(), tiny_head("eagle3", TREES["k3n12"]), PROMPTS, cycle_cost=2.0, max_new_tokens=32)
    width, (max_tokens, chunk, slots) = request.batch.prompts.shape[1], request.sizes
    needed = required_slots(width, max_tokens, adaptive.BURST, chunk)
    assert slots >= needed
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
    plain = eagle_jax.generate(target, None, PROMPTS[:1], **options)
    out = eagle_jax.generate(target, head, PROMPTS[:1], cycle_cost=50, **options)
    assert out.tokens == plain.tokens
    # Windows of four cycles, then 32, 128 and 512 plain steps: twelve cycles at most were drafted.
    saved = int(plain.cycles[0] - out.cycles[0])
    assert 0 < saved <= 12 * head.tree.depth
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


@pytest.mark.parametrize("cost", [0.5, True, "2", float("nan"), float("inf")])
def test_a_bad_cost_is_an_error(cost):
    with pytest.raises(ValueError, match=r"cycle_cost must be a number of plain steps, at least 1, got .*infer\.cycle"):
        eagle_jax.generate(tiny_target(), tiny_head("eagle3", TREES["k3n12"]), PROMPTS, cycle_cost=cost)


def test_lookahead_has_no_cost():
    target = tiny_target()
    with pytest.raises(ValueError, match="cycle_cost must be None for a drafter that reads the target's choices"):
        eagle_jax.generate(target, eagle_jax.lookahead(target), PROMPTS, cycle_cost=2)
    engine = request_of(target, eagle_jax.lookahead(target), PROMPTS).engine._replace(cycle_cost=2.0)
    request = request_of(target, eagle_jax.lookahead(target), PROMPTS)
    with pytest.raises(ValueError, match="cycle_cost must be None"):
        jax.eval_shape(
            lambda: loop.generate(*request._replace(engine=engine, sizes=request.sizes._replace(slots=None)))
        )
