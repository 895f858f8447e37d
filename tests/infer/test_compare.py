"""The one standard by which claims are judged: errors are those of resampled questions, verdicts follow from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from infer import compare
from infer.compare import NO, UNKNOWN, YES, Difference, Estimate
from tests.infer.result_files import bench_cell, record_cell

NAMES = [f"q{number}" for number in range(40)]


def cells(seed: int):
    """Two recordings of one task, whose questions are easy or hard for both."""
    rng = np.random.default_rng(seed)
    easy = rng.uniform(1.5, 4.0, len(NAMES))
    found = []
    for gain in (0.0, 0.3):
        cycles = rng.integers(10, 30, len(NAMES))
        tokens = np.rint(cycles * (easy + gain + rng.normal(0, 0.2, len(NAMES)))).astype(int)
        columns = {"question": NAMES, "tokens": tokens.tolist(), "cycles": cycles.tolist()}
        found.append(record_cell("eagle2", "gsm8k", by_question=columns))
    return found


def resampled(cell, places: np.ndarray) -> float:
    columns = {name: np.array(column)[places] for name, column in cell.by_question.items()}
    return columns["tokens"].sum() / columns["cycles"].sum()


def test_the_error_is_that_of_resampled_questions():
    """Paired: what makes a question easy for both falls out; alone it does not."""
    low, high = cells(0)
    one, two = compare.tau([low]), compare.tau([high])
    assert one.value == resampled(low, np.arange(len(NAMES)))
    found, rng = compare.difference(one, two), np.random.default_rng(1)
    draws = [rng.integers(0, len(NAMES), len(NAMES)) for _ in range(4000)]
    paired = np.std([resampled(high, places) - resampled(low, places) for places in draws])
    alone = np.std([resampled(low, places) for places in draws])
    assert found.error == pytest.approx(paired, rel=0.1)
    assert compare.difference(Estimate(0.0), one).error == pytest.approx(alone, rel=0.1)
    assert found.error < alone / 2


def test_a_speedup_has_its_error_too():
    rng = np.random.default_rng(0)
    seconds, plain = rng.uniform(1, 2, 5).tolist(), rng.uniform(2, 4, 5).tolist()
    own = bench_cell("eagle2", "gsm8k", 2.0, 4.0)
    own = dataclasses.replace(own, by_question=own.by_question | {"seconds": [seconds], "plain_seconds": [plain]})
    found = compare.speedup([own])
    tokens = np.array(own.by_question["tokens"], float)
    assert found.value == pytest.approx(sum(plain) / sum(seconds))
    nudge = 1e-6  # what a question adds is how the ratio changes with its weight
    for at, part in enumerate(found.parts.values()):
        weight = np.ones(5)
        weight[at] += nudge
        sums = [(weight * column).sum() for column in (tokens, seconds, tokens, plain)]
        slope = (sums[0] / sums[1] / (sums[2] / sums[3]) - found.value) / nudge
        assert part == pytest.approx(slope * math.sqrt(5 / 4), rel=1e-3, abs=1e-6)


def test_a_mean_over_tasks_counts_each_alike():
    one, other = cells(0)[0], dataclasses.replace(cells(1)[0], task="nq")
    taus = [compare.tau([cell]) for cell in (one, other)]
    both = compare.tau([one, other])
    assert both.value == pytest.approx((taus[0].value + taus[1].value) / 2)
    errors = [compare.difference(Estimate(0.0), tau).error for tau in taus]
    assert compare.difference(Estimate(0.0), both).error == pytest.approx(math.hypot(*errors) / 2)


def test_only_the_questions_that_count():
    low, high = cells(0)
    keys = {("gsm8k", name) for name in NAMES[:7]}
    assert compare.tau([low], keys).value == resampled(low, np.arange(7))
    fewer = dataclasses.replace(high, by_question={name: column[5:] for name, column in high.by_question.items()})
    assert compare.shared([low], [fewer]) == {("gsm8k", name) for name in NAMES[5:]}
    single = compare.tau([low], {("gsm8k", "q0")})
    assert compare.judge([compare.difference(single, Estimate(single.value + 100))]) == UNKNOWN


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([(0.3, 0.1)], YES),
        ([(0.2, 0.1)], UNKNOWN),
        ([(-0.1, 0.1)], UNKNOWN),
        ([(-0.3, 0.1)], NO),
        ([(0.3, 0.1), (0.1, 0.1)], UNKNOWN),
        ([(0.3, 0.1), (0.1, 0.1), (-0.3, 0.1)], NO),
        ([], UNKNOWN),
    ],
)
def test_verdicts(differences, verdict):
    assert compare.judge([Difference(*one) for one in differences]) == verdict


@pytest.mark.parametrize(
    ("values", "verdict"),
    [([1.0, 1.0, 2.0], YES), ([1.0, 1.1], UNKNOWN), ([1.0, 2.0, 1.5, 3.0], NO), ([2.0, 1.0], NO)],
)
def test_a_row_rises_where_its_ends_differ_and_no_neighbours_fall(values: Sequence[float], verdict):
    assert compare.trend([Estimate(value, variance=0.01) for value in values]) == verdict


def test_a_share_of_all_or_none_is_not_certain():
    assert compare.share(10, 10).variance == pytest.approx(0.9 * 0.1 / 10)
    assert compare.share(0, 10).variance == pytest.approx(0.9 * 0.1 / 10)
    assert compare.share(3, 10) == Estimate(0.3, {}, pytest.approx(0.021))
