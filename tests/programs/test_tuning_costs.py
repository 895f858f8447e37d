"""Checks how the costs of a cycle follow from the measured seconds of its parts."""

from __future__ import annotations

import pytest

from eagle_jax.config import TreeConfig
from infer.tuning import costs as costing
from infer.tuning.costs import Costs
from infer.tuning.trials import Prompt
from tests.models import TREES


def test_all_levels_of_an_empty_cycle_count():
    """By hand: a level takes 0.1 seconds, and an empty cycle of four levels 0.5 more than a plain step of 1."""
    tree = TREES["no-rerank"]
    costs = Costs([1, 13], [1.0, 2.0], {"eagle3": [(4, 3, 0.4)]}, empty={"eagle3": 0.5}, levels={"eagle3": 4})
    assert costs.parts("eagle3", tree).draft == pytest.approx(0.1, abs=1e-3)


def test_costs_of_a_larger_cache_follow():
    """By hand: two rows are a size, because they are much cheaper than four in the larger cache."""
    few = Costs([1, 2, 4], [1.0, 1.96, 2.0], {"pld": [(1, 1, 0.4)]}, slots=256.0)
    many = Costs([1, 2, 4], [2.0, 2.2, 3.0], {"pld": [(1, 1, 0.6)]}, 0.5, slots=512.0)
    tree = TreeConfig.chain(3)
    cost = few.parts("pld", tree, many)
    assert cost.rows == cost.longer.rows == (1, 2, 4) and (cost.slots, cost.longer.slots) == (256, 512)
    assert cost.passes == (1.0, 1.96, 2.0) and cost.longer.passes == (1.0, 1.1, 1.5)
    assert (cost.token, cost.longer.token) == (0, 0.25)
    assert few.parts("pld", tree).rows == (1, 4)
    assert few.parts("pld", tree, many._replace(slots=256.0)) == few.parts("pld", tree)
    near = costing.between(few, many, 0.25)
    assert near.passes == [1.25, pytest.approx(2.02), 2.25]
    assert near.draw == 0.125 and near.drafts == {"pld": [(1, 1, pytest.approx(0.45))]}


def test_costs_are_measured_at_the_ends_of_different_lengths():
    prompts = {length: [Prompt([0] * length, None), Prompt([0], None)] for length in (5, 40, 68, 69)}
    assert costing.ends_of([prompts[40], prompts[5], prompts[68]]) == [prompts[40]]
    assert costing.ends_of([prompts[40], prompts[5], prompts[69]]) == [prompts[5], prompts[69]]
