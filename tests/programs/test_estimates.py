"""Intervals of tau and speedup, against SciPy and against draws whose true value is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from infer.common.estimates import Estimate, difference, mean, questions_of, ratio, share, speedup, tau
from tests.programs.result_files import NOISE, bench_cell, recording


def ratio_of(task: str, values: np.ndarray) -> Estimate:
    """Tokens over one cycle each: the mean of the values, whose interval SciPy gives."""
    return ratio([(task, row) for row in range(len(values))], [values], [np.ones(len(values))])


def test_intervals_are_those_of_scipy():
    """One task: Student's. Two: Welch's, of half the difference of one and the negative of the other."""
    one, two = np.array([2.0, 2.5, 3.5, 1.0, 4.0]), np.array([1.0, 1.2, 0.9])
    low, high = stats.ttest_1samp(one, 0).confidence_interval(0.95)
    assert ratio_of("a", one).value == one.mean()
    assert ratio_of("a", one).interval() == f"{low:.2f} to {high:.2f}"
    found = mean([ratio_of("a", one), ratio_of("b", two)])
    low, high = stats.ttest_ind(one, -two, equal_var=False).confidence_interval(0.95)
    assert found.value == pytest.approx((one.mean() + two.mean()) / 2)
    assert found.half_width() == pytest.approx((high - low) / 4)


def test_a_difference_is_paired_by_question():
    low, high = (tau([recording("eagle2", "gsm8k", value, NOISE)]) for value in (2.0, 2.5))
    step = difference(high, low)
    assert step.value == pytest.approx(0.5)
    assert low.half_width() > 0.1 and step.half_width() == pytest.approx(0, abs=1e-9)
    other = tau([recording("eagle2", "gsm8k", 2.0, NOISE[::-1])])
    apart = stats.ttest_rel(np.array(NOISE) + 2.5, np.array(NOISE[::-1]) + 2.0).confidence_interval(0.95)
    assert difference(high, other).half_width() == pytest.approx((apart.high - apart.low) / 2)


def test_a_speedup_agrees_with_the_bootstrap():
    four = np.random.default_rng(1).uniform(1, 2, (4, 40))
    found = ratio([("a", row) for row in range(40)], four[:2], four[2:])
    drawn = stats.bootstrap(
        four, lambda *of, axis: of[0].sum(axis) * of[1].sum(axis) / of[2].sum(axis) / of[3].sum(axis),
        paired=True, method="basic", n_resamples=4000, rng=2,
    )  # fmt: skip
    interval = drawn.confidence_interval
    assert found.half_width() == pytest.approx((interval.high - interval.low) / 2, rel=0.1)


def test_a_share_has_wilsons_interval():
    assert share(5, 10) == "0.50 (0.24 to 0.76) of 10"
    assert share(0, 10) == "0.00 (0.00 to 0.28) of 10"
    assert share(0, 0) == "-"


def test_estimates_of_cells():
    cell = bench_cell("eagle3", "gsm8k", 2.0, 4.0, NOISE)
    assert tau([cell]).value == pytest.approx(4.0)
    assert speedup([cell]).value == pytest.approx(2.0)
    assert tau([cell], {("gsm8k", "q0")}).value == pytest.approx(4.3)
    assert speedup([cell], {("gsm8k", "q0")}).value == pytest.approx(2.3)
    assert tau([cell, bench_cell("eagle3", "nq", 1.0, 2.0)]).value == pytest.approx(3.0)
    assert tau([bench_cell("transformers", "gsm8k", 0.5, None)]) is None
    assert questions_of([cell]) == {("gsm8k", f"q{number}") for number in range(5)}


def test_questions_of_one_call_count_as_one():
    cell = bench_cell("eagle3", "gsm8k", 2.0, 4.0, NOISE)
    assert len(speedup([cell]).parts) == 5
    cell.by_question.call = [0, 0, 0, 1, 1]
    assert len(speedup([cell]).parts) == 2
    cell.by_question.call = [0] * 5
    assert speedup([cell]).interval() == "-"
    assert Estimate(1.0, {("a", 0): 0.0, ("a", 1): 0.0}).interval() == "1.00 to 1.00"
