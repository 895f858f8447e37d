"""Checks that calls continue what earlier ones have learnt about their drafts, and that no text changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.core import CycleCost, adaptive, generate, prefill
from eagle_jax.runtime import generation
from eagle_jax.runtime.generation import request_of
from tests.models import TREES, cycle_result, random_prompts, tiny_head, tiny_target

PROMPTS = random_prompts([5, 31, 1, 17], 12)


def test_calls_continue_what_earlier_ones_have_learnt():
    """Plain steps that a call has begun end in the next one; in a good time another text is a new chance."""
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    options = {"max_new_tokens": 300, "eos_ids": ()}
    plain = eagle_jax.generate(target, None, PROMPTS[3:], **options)
    first = eagle_jax.generate(target, head, PROMPTS[3:], cycle_cost=2.6, **options)
    assert first.payoff.wait > 0 and first.payoff.saved < -adaptive.TRIAL
    paused = first.payoff._replace(wait=np.int32(400))
    programs = generation.generate_program._cache_size()
    second = eagle_jax.generate(target, head, PROMPTS[3:], cycle_cost=2.6, payoff=paused, **options)
    assert generation.generate_program._cache_size() == programs
    assert second.tokens == first.tokens == plain.tokens
    assert second.cycles.tolist() == plain.cycles.tolist() and second.payoff.wait == 400 - 299
    pays = paused._replace(saved=np.float32(1))
    third = eagle_jax.generate(target, head, PROMPTS[3:], cycle_cost=2.6, payoff=pays, **options)
    assert third.tokens == plain.tokens and third.cycles[0] < plain.cycles[0]
    assert plain.payoff is None
    assert eagle_jax.generate(target, None, PROMPTS[3:], cycle_cost=2, payoff=pays, **options).payoff is pays


@pytest.mark.parametrize(("wait", "least", "most"), [
    (299, 1, 1), (298, 31 + 288, 31 + 299), (31, 31 + 32, 31 + 256)
])  # fmt: skip
def test_the_drafter_reads_only_what_later_drafts_need(wait, least, most):
    """A prompt of 31 tokens and a reply of 300 that begins with `wait` plain steps.

    Of the first two calls one drafts nothing, and its drafter reads the last token of the prompt alone, and one drafts
    the last token; the third drafts in vain, at last for longer than
    the rest of its reply.
    """
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    request = request_of(target, head, PROMPTS[1:2], max_new_tokens=300, eos_ids=(), cycle_cost=2.6)
    begun = adaptive.start()._replace(wait=jnp.int32(wait), saved=jnp.float32(-9))
    state = jax.jit(generate, static_argnames=("engine", "sizes"))(
        *request[:3], engine=request.engine, sizes=request.sizes, payoff=begun
    )
    plain = eagle_jax.generate(target, None, PROMPTS[1:2], max_new_tokens=300, eos_ids=())
    assert state.tokens[0, :300].tolist() == plain.tokens[0]
    read = np.count_nonzero(np.any(np.asarray(state.drafter.cache.keys[0][0]), axis=(0, 1)))
    assert least <= read <= most


def test_a_new_call_is_a_new_chance_where_drafts_have_saved_steps():
    paused = adaptive.start()._replace(wait=jnp.int32(700), pause=jnp.int32(512), balance=jnp.float32(-1))
    for saved, *expected in (
        (-9.0, 700, 512, -1),
        (-3.0, 700, 512, -1),
        (-2.9, 0, adaptive.BURST, 0),
        (0.5, 0, adaptive.BURST, 0),
    ):
        begun = adaptive.resume(paused._replace(saved=jnp.float32(saved)))
        assert [int(begun.wait), int(begun.pause), float(begun.balance)] == expected
    # A bad cycle at once is no failure.
    state = prefill(*request_of(tiny_target(), None, PROMPTS[:1], max_new_tokens=129))
    assert int(adaptive.judge(begun, state, cycle_result([1]), adaptive.Choice(0, 2.0, 1.0, 1.5)).wait) == 0
    gain = adaptive.start()._replace(saved=jnp.float32(9), balance=jnp.float32(1.5))
    assert float(adaptive.resume(gain).balance) == 1.5


def test_drafts_that_a_tuning_promises_may_fail_at_first():
    """Cycles that cost 1.55 and accept nothing, in a reply of 64 tokens, where the scores promise little.

    Without a promise they end when 2% of the reply are lost; with one they may lose more than 2 plain steps.
    """
    state = prefill(*request_of(tiny_target(), None, PROMPTS[:1], max_new_tokens=64))
    tries = {}
    for expected in (None, 0.9, 1.6):
        payoff, tries[expected] = adaptive.start(expected), 0
        while int(payoff.wait) == 0:
            payoff = adaptive.judge(payoff, state, cycle_result([1]), adaptive.Choice(0, 1.55, 1.0, 0.9))
            tries[expected] += 1
    assert tries == {None: 3, 0.9: 3, 1.6: 5}


def test_half_of_what_drafts_have_saved_may_be_lost_again():
    """Cycles that cost 2 yield 4 tokens until 12 plain steps are saved, and then 1 for ever."""
    state = prefill(*request_of(tiny_target(), None, PROMPTS[:1], max_new_tokens=128))
    payoff, tries, waits, lost, steps = adaptive.start(), [0], [], 0.0, 0
    for _ in range(6):
        payoff = adaptive.judge(payoff, state, cycle_result([4]), adaptive.Choice(0, 2.0, 1.0, 1.5))
    while steps < 3000:
        payoff = adaptive.judge(payoff, state, cycle_result([1]), adaptive.Choice(0, 2.0, 1.0, 1.5))
        tries[-1], lost = tries[-1] + 1, lost + 1
        if wait := int(payoff.wait):
            waits.append(wait)
            payoff, steps = adaptive.repay(payoff, payoff.wait), steps + wait
            tries.append(0)
    # Without savings 5 cycles lose 2.5 steps and the 2.5 that the balance keeps. After 7 cycles 3.7 of 11.4 are left.
    assert tries[0] == 7 and max(tries[1:]) <= 5
    assert waits[0] == adaptive.BURST
    assert lost - 12 <= adaptive.LOSS * steps + 2 * adaptive.SLACK


@pytest.mark.parametrize("emitted", [1, 4])
def test_a_call_remembers_so_many_saved_steps(emitted):
    """Cycles that cost 2 save 1.9 plain steps each, or lose 1.1; plain steps change nothing."""
    state = prefill(*request_of(tiny_target(), None, PROMPTS[:1], max_new_tokens=128))
    payoff = adaptive.start()
    for turn in range(30):
        payoff = adaptive.judge(payoff, state, cycle_result([emitted]), adaptive.Choice(0, 2.0, 1.0, 1.5))
        assert float(payoff.saved) == pytest.approx(min(max((emitted - 2.1) * (turn + 1), -20), 20))
        payoff = adaptive.repay(payoff, payoff.wait)


def test_a_payoff_is_that_of_an_earlier_output():
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    for call in (eagle_jax.generate, eagle_jax.rollout):
        with pytest.raises(ValueError, match=r"payoff must be that of an earlier output, got 3\. Pass out\.payoff"):
            call(target, head, PROMPTS, cycle_cost=2, payoff=3)
        broken = adaptive.start()._replace(gained=jnp.float32(float("nan")))
        with pytest.raises(ValueError, match=r"payoff\.gained must be a finite number, got .*nan"):
            call(target, head, PROMPTS, cycle_cost=2, payoff=broken)
        with pytest.raises(ValueError, match="payoff must come with cycle_cost, got none"):
            call(target, head, PROMPTS, payoff=adaptive.start())
        for name, value in (
            ("wait", -5),
            ("wait", np.nan),
            ("pause", 2.5),
            ("saved", None),
            ("gained", np.zeros(2, np.float32)),
        ):
            with pytest.raises(ValueError, match=rf"payoff\.{name} must be a (whole|finite) number"):
                call(target, head, PROMPTS, cycle_cost=2, payoff=adaptive.start()._replace(**{name: value}))


def test_one_cost_is_a_number_or_an_array_without_axes():
    head = tiny_head("eagle3", TREES["k3n12"])
    for cost in (2, np.array(2.0), np.float32(2), jnp.float32(2)):
        assert request_of(tiny_target(), head, PROMPTS, cycle_cost=cost).engine.cycle_cost == CycleCost((13,), (2.0,))
    report = {"cycle_cost": {}, "ms": {}}  # the whole last line of infer.cycle
    for cost, remedy in (
        (np.complex64(2), "what infer"),
        (np.array([2.0]), "what infer"),
        (report, r'CycleCost\(\*\*cost\["cycle_cost"\]\)'),
    ):
        with pytest.raises(ValueError, match=f"cycle_cost must be a number of plain steps.* Pass {remedy}"):
            request_of(tiny_target(), head, PROMPTS, cycle_cost=cost)
