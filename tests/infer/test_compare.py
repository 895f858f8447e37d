"""The one standard by which claims are judged: errors are those of resampled questions, verdicts follow from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from infer.papers import compare
from infer.papers.compare import NO, UNKNOWN, YES, Difference, Estimate
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
        whole = record_cell("eagle2", "gsm8k")
        found.append(dataclasses.replace(whole, by_question=columns))
    return found


def resampled(cell, places: np.ndarray) -> float:
    columns = {name: np.array(cell.by_question[name])[places] for name in ("tokens", "cycles")}
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
        ([(0.19, 0.1)], UNKNOWN),
        ([(-0.1, 0.1)], UNKNOWN),
        ([(-0.3, 0.1)], NO),
        ([(0.3, 0.1), (0.1, 0.1)], UNKNOWN),
        ([(0.3, 0.1), (0.1, 0.1), (-0.3, 0.1)], NO),
        ([], UNKNOWN),
    ],
)
def test_verdicts(differences, verdict):
    assert compare.judge([Difference(*one) for one in differences]) == verdict


def test_few_questions_tell_less():
    """Student's t: of two questions on one task the interval is six times as wide as of many."""
    assert Difference(1.0, 0.1).reach() == pytest.approx(0.196, abs=1e-3)
    assert Difference(1.0, 0.1, 4).reach() == pytest.approx(0.2776, abs=1e-3)
    assert Difference(1.0, 0.1, 1).reach() == pytest.approx(1.2706, abs=1e-3)
    assert Difference(1.0, 0.1, 0).reach() == math.inf
    assert compare.judge([Difference(1.0, 0.1, 0)]) == UNKNOWN
    low, high = cells(0)
    two = compare.difference(*(compare.tau([cell], {("gsm8k", "q0"), ("gsm8k", "q1")}) for cell in (low, high)))
    assert two.freedom == 1
    assert compare.difference(*(compare.tau([cell]) for cell in (low, high))).freedom == len(NAMES) - 1


def test_a_task_of_few_questions_is_not_lent_the_certainty_of_another():
    """95% of the intervals hold the truth, also where four questions vary as much as forty others do not."""
    rng, held, of = np.random.default_rng(5), {"welch": 0, "pooled": 0}, 4000
    for _ in range(of):
        parts: dict[compare.Key, float] = {}
        value = 0.0
        for task, count, width in (("gsm8k", 4, 1.0), ("nq", 40, 0.1)):
            draws = rng.normal(0, width, count)
            value += draws.mean() / 2
            grown = (draws - draws.mean()) / count / 2 * math.sqrt(count / (count - 1))
            parts |= {(task, (f"q{at}",)): float(part) for at, part in enumerate(grown)}
        found = compare.difference(Estimate(0.0), Estimate(value, parts))
        held["welch"] += abs(value) < found.reach()
        held["pooled"] += abs(value) < found._replace(freedom=42).reach()
    assert held["welch"] / of == pytest.approx(0.95, abs=0.01)
    assert held["pooled"] / of < 0.9


def test_the_degrees_of_freedom_are_welchs():
    def freedom(**tasks: list[float]) -> float:
        keys = {(task, (f"q{at}",)): part for task, parts in tasks.items() for at, part in enumerate(parts)}
        return compare.difference(Estimate(0.0), Estimate(1.0, keys)).freedom

    assert freedom(a=[1.0, -1.0]) == 1
    assert freedom(a=[1.0, -1.0, 0.0], b=[1.0, -1.0, 0.0]) == pytest.approx(4)
    assert freedom(a=[1.0, -1.0, 0.0], b=[0.0] * 9) == pytest.approx(2)
    assert freedom(a=[2.0, -2.0], b=[1.0, -1.0, 0.0]) == pytest.approx(10**2 / (8**2 + 2**2 / 2))
    assert freedom(a=[0.0, 0.0], b=[0.0, 0.0, 0.0]) == 3
    assert freedom(a=[1.0], b=[1.0, -1.0]) == 0


def test_many_comparisons_do_not_make_a_no_by_chance():
    """One of thirty that are really equal lies below 0 by two standard errors often enough."""
    unlucky = Difference(-0.22, 0.1)
    assert compare.judge([unlucky]) == NO
    assert compare.judge([unlucky, *[Difference(0.5, 0.1)] * 29]) == UNKNOWN
    assert compare.judge([Difference(-0.4, 0.1), *[Difference(0.5, 0.1)] * 29]) == NO


def test_rows_of_a_call_count_as_one():
    """Their times are those of the call, divided: as single questions they would all agree."""
    names, tokens = NAMES[:8], [100] * 8
    columns = {"question": names, "replies": [1] * 8, "tokens": tokens, "cycles": None, "plain_tokens": tokens}
    calls = [1.0] * 4 + [2.0] * 4
    own = bench_cell("eagle2", "gsm8k", 2.0, None, batch=4)
    columns |= {"seconds": [[1.0] * 8], "plain_seconds": [calls]}

    def together(*numbers: int):
        return dataclasses.replace(own, by_question=columns | {"call": list(numbers)})

    found = compare.speedup([together(0, 0, 0, 0, 1, 1, 1, 1)])
    assert found.value == pytest.approx(1.5)
    assert set(found.parts) == {("gsm8k", tuple(names[:4])), ("gsm8k", tuple(names[4:]))}
    # Two calls, 1x and 2x: the standard error of their mean is 0.5.
    assert compare.difference(Estimate(0.0), found) == Difference(pytest.approx(1.5), pytest.approx(0.5), 1)
    assert compare.difference(Estimate(1.0), compare.speedup([together(*[0] * 8)])).reach() == math.inf
    # Of the first batch of four one question was too long: places do not say which were together.
    odd = compare.speedup([together(0, 0, 0, 1, 1, 1, 1, 2)])
    assert [len(questions) for _, questions in odd.parts] == [3, 4, 1]
    # Against single questions: those of a call are taken together there as well.
    single = compare.speedup([together(*range(8))])
    assert len(single.parts) == 8
    assert compare.difference(single, found).freedom == 1


@pytest.mark.parametrize(
    ("values", "verdict"),
    [([1.0, 1.0, 2.0], YES), ([1.0, 1.1], UNKNOWN), ([1.0, 2.0, 1.5, 3.0], NO), ([2.0, 1.0], NO)],
)
def test_a_row_rises_where_its_ends_differ_and_no_neighbours_fall(values: Sequence[float], verdict):
    assert compare.trend([Estimate(value, variance=0.01) for value in values]) == verdict


def test_a_rate_has_the_error_of_its_questions():
    """Nodes of one question are no independent trials: siblings exclude each other, easy places come in runs."""
    rng = np.random.default_rng(3)
    tried, share = rng.integers(5, 20, 40), rng.uniform(0.2, 0.9, 40)
    hits = rng.binomial(tried, share)
    keys = [("gsm8k", (name,)) for name in NAMES]
    found = compare.rate(
        dict(zip(keys, map(float, hits), strict=True)), dict(zip(keys, map(float, tried), strict=True))
    )
    assert found.value == hits.sum() / tried.sum()
    draws = [rng.integers(0, 40, 40) for _ in range(4000)]
    spread = np.std([hits[places].sum() / tried[places].sum() for places in draws])
    assert compare.difference(Estimate(0.0), found).error == pytest.approx(spread, rel=0.1)
    naive = math.sqrt(found.value * (1 - found.value) / tried.sum())
    assert spread > 1.3 * naive


def test_a_rate_of_all_or_none_is_not_certain():
    tried = {("gsm8k", (name,)): 2.0 for name in NAMES[:5]}
    for accepted in (tried, dict.fromkeys(tried, 0.0)):
        assert compare.rate(accepted, tried).variance == pytest.approx(0.9 * 0.1 / 10)
