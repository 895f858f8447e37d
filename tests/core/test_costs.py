"""Checks costs of a cycle: wrong values are refused by the name of the field, and others follow the cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.core import CycleCost, Verified, costs, loop
from eagle_jax.core.cache import CACHE_BLOCK, slots_read
from eagle_jax.core.checked import update_up_to
from eagle_jax.drafters import vanilla_drafter
from eagle_jax.runtime.generation import request_of
from tests.models import TREES, random_prompts, tiny_head, tiny_target

LONG = CycleCost((1, 5), (1.0, 1.4), 0.1, 0.2, 0.3, slots=1024.0)
SHORT = CycleCost((1, 5), (1.0, 3.0), 0.3, 0.1, 0.5, slots=512.0, longer=LONG)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (((4, 1, 13), (1.0, 2.0, 3.0)), r"rows must ascend from at least 1, got \(4, 1, 13\)"),
        (((0, 1), (1.0, 2.0)), r"rows must ascend from at least 1, got \(0, 1\)"),
        (((), ()), r"rows must ascend from at least 1, got \(\)"),
        (((1, 13), (1.0,)), r"passes must have a cost per number of rows \(2\), got 1"),
        (((1, 13), (1.0, 0.0)), r"passes\[1\] must be above 0 and finite, got 0.0"),
        (((1, 13), (1.0, float("nan"))), r"passes\[1\] must be above 0 and finite, got nan"),
        (
            ((1, 13), (24.6, 35.0)),
            r"passes\[0\] must be near 1, since a pass of one row is a plain step, got 24.6. Div",
        ),
        (((1, 13), (1.0, 2.0), -1.0), "level must be at least 0 and finite, got -1.0"),
        (((1, 13), (1.0, 2.0), 0.0, -1.0), "token must be at least 0 and finite, got -1.0"),
        (((1, 13), (1.0, 2.0), 0.0, float("inf")), "token must be at least 0 and finite, got inf"),
    ],
)
def test_bad_costs_are_an_error(given, message):
    with pytest.raises(ValueError, match=rf"CycleCost\.{message}"):
        CycleCost(*given)


@pytest.mark.parametrize(
    ("name", "value", "axes", "message"),
    [
        ("rows", 8, 1, "rows must be a list of integers, got 8"),
        ("rows", (1, 2.5), 1, r"rows must be a list of integers, got \(1, 2.5\)"),
        ("passes", "12", 1, "passes must be a list of numbers, got '12'"),
        ("passes", ("1", "2"), 1, r"passes must be a list of numbers, got \('1', '2'\)"),
        ("passes", (1.0, (2.0, 3.0)), 1, "passes must be a list of numbers, got"),
        ("level", None, 0, "level must be a number, got None"),
    ],
)
def test_costs_of_another_kind_are_an_error(name, value, axes, message):
    """The tests' type checks would stop them at the class itself."""
    with pytest.raises(ValueError, match=rf"CycleCost\.{message}.*infer\.cycle"):
        costs._numbers(name, value, axes, whole=name == "rows")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 0.0}, "slots must be at least 1 and finite, got 0"),
        ({"slots": None}, r"slots and CycleCost.longer.slots must both be given, got None and 1024\.0"),
        ({"slots": 1024.0}, r"longer must have more slots, got 1024\.0, then 1024\.0"),
        (
            {"longer": dataclasses.replace(LONG, slots=None)},
            r"slots and CycleCost.longer.slots must both be given, got 512\.0 and None",
        ),
        ({"rows": (1, 4)}, r"longer must have the rows \(1, 4\), got \(1, 5\)"),
        ({"longer": {"rows": [1, 5]}}, "longer must have the fields of a CycleCost, got {'rows': "),
    ],
)
def test_costs_of_more_slots_must_continue_those_of_fewer(changes, message):
    with pytest.raises(ValueError, match=rf"CycleCost\.{message}"):
        dataclasses.replace(SHORT, **changes)


def test_costs_of_a_file_are_those_that_were_written():
    again = CycleCost(**dataclasses.asdict(SHORT))
    assert again == SHORT and hash(again) == hash(SHORT)


@pytest.mark.parametrize(("slots", "share"), [(1, 0.0), (512, 0.0), (640, 0.25), (1024, 1.0), (4096, 1.0)])
def test_costs_between_two_caches_are_interpolated(slots, share):
    """By hand: 3 rows lie halfway between 1 and 5."""
    prices = jax.jit(lambda slots: SHORT.prices(3, slots)[1:])(jnp.float32(slots))
    expected = [[1.0, 2.0 - 0.8 * share], 0.3 - 0.2 * share, 0.1 + 0.1 * share, 0.5 - 0.2 * share]
    jax.tree.map(lambda found, number: np.testing.assert_allclose(found, number, rtol=1e-5), list(prices),
                 [np.array(expected[0]), *expected[1:]])  # fmt: skip
    assert SHORT.prices(3).rows == (1, 3) and SHORT.prices(3, all_sizes=False).rows == (3,)


def test_attention_reads_blocks_that_hold_tokens():
    """By hand: one block, two, and none, of two and a half."""
    cache = tiny_target().fn.init_cache(3, CACHE_BLOCK * 5 // 2)
    lengths = [1, CACHE_BLOCK + 1, 0]
    assert float(slots_read(cache._replace(length=jnp.array(lengths)))) == pytest.approx((3 * CACHE_BLOCK + 1) / 3)
    full = cache._replace(length=jnp.full(3, CACHE_BLOCK * 5 // 2))
    assert float(slots_read(full)) == CACHE_BLOCK * 5 // 2


def test_a_tree_that_pays_in_a_large_cache_alone():
    """A cost of 0.1 per level, or of 9: one program drafts, the other takes plain steps after its first cycles."""
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    prompts, rows = random_prompts([5, 7], 12), head.tree.num_nodes + 1
    cheap = CycleCost((1, rows), (1.0, 1.0), 0.01, slots=256.0)
    cost = CycleCost((1, rows), (1.0, 9.0), 9.0, slots=64.0, longer=cheap)
    for tokens, pays in ((16, False), (250, True)):
        options = {"max_new_tokens": tokens, "eos_ids": ()}
        plain = eagle_jax.generate(target, None, prompts, **options)
        out = eagle_jax.generate(target, head, prompts, cycle_cost=cost, **options)
        assert out.tokens == plain.tokens
        assert (out.payoff.saved > 0) == pays


@pytest.mark.parametrize(("counts", "width"), [([0, 1], 1), ([2, 0], 4), ([4, 1], 4), ([5, 2], 6), ([0, 0], 0)])
def test_the_drafter_reads_no_more_than_was_emitted(counts, width):
    """A state that adds up what it reads: the width of the path, and the tokens of both rows."""

    def update(params, state, verified):
        seen = jnp.arange(verified.tokens.shape[1])[None] < verified.count[:, None]
        return state + jnp.array([verified.tokens.shape[1], jnp.sum(jnp.where(seen, verified.tokens, 0))])

    path = jnp.arange(12).reshape(2, 6)
    verified = Verified(path, path, jnp.zeros((2, 6, 3)), jnp.zeros(2, jnp.int32), jnp.array(counts))
    drafter = vanilla_drafter()._replace(update=update)
    found = update_up_to((1, 4, 6), drafter, {}, jnp.zeros(2, jnp.int32), verified)
    assert found.tolist() == [width, sum(range(counts[0])) + sum(range(6, 6 + counts[1]))]
    assert update_up_to((6,), drafter, {}, jnp.zeros(2, jnp.int32), verified)[0] == 6


def test_costs_must_reach_the_whole_tree_and_be_a_cycle_cost_in_the_engine():
    prompts = random_prompts([5, 7], 12)
    head = tiny_head("eagle3", TREES["k3n12"])
    with pytest.raises(ValueError, match=r"CycleCost must reach the 13 rows of this tree .*, got rows up to 4\. Give"):
        eagle_jax.generate(tiny_target(), head, prompts, cycle_cost=CycleCost((1, 4), (1.0, 2.0)))
    request = request_of(tiny_target(), head, prompts)
    with pytest.raises(ValueError, match=r"engine\.cycle_cost must be a CycleCost or None, got 1\.9\. Of a float"):
        loop.generate(*request._replace(engine=request.engine._replace(cycle_cost=1.9)))
