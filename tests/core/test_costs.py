"""Checks that costs of a cycle with a wrong value are refused by the name of the field."""

from __future__ import annotations

import pytest

from eagle_jax.core import CycleCost, costs


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
