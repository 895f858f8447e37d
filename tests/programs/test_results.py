"""Checks result files, their cells, and the estimates from them, against SciPy and numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from infer.common.methods import NOTHING
from infer.common.results import Group, Result, TimedQuestions, continued, read
from infer.common.tables import Estimate, difference, markdown, mean, questions_of, ratio, share, speedup, tau
from infer.common.timing import Answer, Call, cell
from tests.programs.conftest import NOISE, bench_cell, bench_file, recorded_file, recording


def test_what_is_written_is_read_back(tmp_path):
    cells = [bench_cell("vanilla", "gsm8k", 1.0, 1.0), bench_cell("transformers", "gsm8k", 0.5, None)]
    found = read(bench_file(tmp_path / "runs" / "result.json", *cells, limit=3), Result)
    assert found.cells == cells and found.settings["limit"] == 3
    assert found.cells[0].group == Group("gsm8k", 0.0, 1)
    recorded = [recording("eagle3", "gsm8k"), recording("pld", "gsm8k", calibration=None, chains=[])]
    path = recorded_file(tmp_path / "recorded.json", *recorded)
    assert read(path).cells == recorded


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('eagle_jax.bench/4"', 'eagle_jax.tune/1"', r"Invalid value 'eagle_jax.tune/1' - at `\$.schema`"),
        ('"questions":5', '"questions":-5', r">= 0 - at `\$.cells\[0\].questions`"),
        ("{", "| task |", "JSON is malformed"),
    ],
)
def test_another_file_is_an_error(old, new, message, tmp_path):
    path = bench_file(tmp_path / "result.json", bench_cell("eagle3", "gsm8k", 2.0, 4.0))
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=rf"^{path} must be a result file: .*{message}.*Give a result\.json"):
        read(path)


def test_a_repeated_cell_is_an_error(tmp_path):
    path = bench_file(tmp_path / "twice.json", *[bench_cell("eagle3", "gsm8k", 2.0, 4.0)] * 2)
    with pytest.raises(ValueError, match=r"twice\.json must have a cell once, got \('eagle3', 'gsm8k', 0\.0, 1\) twi"):
        read(path)


def test_a_result_is_continued_with_the_same_settings(tmp_path):
    path, cells = tmp_path / "result.json", [bench_cell("eagle3", "gsm8k", 2.0, 4.0)]
    assert continued(Result("a laptop", "abc", {}, []), path, ()).cells == []
    bench_file(path, *cells, seed=0, tasks="gsm8k", **{"questions of gsm8k": "1f", "chat template": "a"})
    new = Result("a laptop", "def", {"seed": 0, "tasks": "nq", "questions of nq": "2e", "chat template": "a"}, [])
    found = continued(new, path, ["tasks"])
    assert (found.cells, found.revision) == (cells, "abc1234, def")
    assert found.settings["questions of gsm8k"] == "1f" and found.settings["tasks"] == "nq"
    for changed in ({"seed": 1}, {"questions of gsm8k": "3d"}, {"chat template": "b"}):
        ((name, value),) = changed.items()
        with pytest.raises(ValueError, match=rf"^--resume must have the settings of .*: {name} was .* is {value!r}\."):
            continued(Result("a laptop", None, new.settings | changed, []), path, ["tasks"])
    with pytest.raises(ValueError, match="machine was a laptop and is a server"):
        continued(Result("a server", None, new.settings, []), path, ["tasks"])


GROUP = Group("talk", 0.0, 2)
FIRST = Answer([[1, 2, 3, 4, 5], [6, 7, 8]], [4, 2], [[4, 0, 0], [2, 0, 0]])
SECOND = Answer([[1, 2]], [1], [[1, 0, 0]])
FAST = Answer([[1, 2, 3, 4, 5], [6, 7, 9]], [2, 1], [[1, 0, 1], [0, 1, 0]])
PLAIN = [
    Call(0, ["a", "b"], FIRST, FIRST, [4.0, 6.0], [1.0, 2.0]),
    Call(0, ["a"], SECOND, SECOND, [1.0, 1.0], [0.5, 0.5]),
]
DRAFTED = [
    Call(0, ["a", "b"], FAST, FIRST, [2.0, 2.0], [1.0, 1.0]),
    Call(0, ["a"], Answer([[1, 2]], [1], [[0, 1, 0]]), SECOND, [1.0, 0.5], [0.5, 0.25]),
]
"""Calls of two repetitions: a batch of two rows, then one row."""


def test_the_cell_of_a_method():
    found = cell("eagle3@chain2", GROUP, DRAFTED, PLAIN, NOTHING)
    assert (found.questions, found.replies, found.tokens) == (2, 3, 10)
    assert (found.passes, found.cycles) == (3, 4)  # 2 of the batch's longest row + 1; 2 + 1 + 1
    assert found.tok_s == pytest.approx((10 / 3 + 10 / 2.5) / 2, rel=1e-5)
    # Plain decoding takes 5 and 7 seconds: 2 and 10/7 tokens per second.
    assert found.speedup_range == pytest.approx([5 / 3, 2.8], rel=1e-5)
    assert found.speedup == pytest.approx((5 / 3 + 2.8) / 2, rel=1e-5)
    # Seven tokens follow the first ones, in 1.5 and 1.25 seconds; plainly in 3.5 and 4.5.
    assert found.decode_speedup == pytest.approx((3.5 / 1.5 + 4.5 / 1.25) / 2, rel=1e-5)
    assert found.tau == 7 / 4
    assert found.accepted == [1, 2, 1]
    assert found.ms_per_pass == pytest.approx(1000 * 1.375 / 3, rel=1e-5)
    assert found.identical == 2
    # Question a: 5 and 2 tokens, half of the batch's seconds and its own; b: 3 tokens, the other half.
    assert found.by_question == TimedQuestions(
        question=["a", "b"], call=[0, 0], replies=[2, 1], tokens=[7, 3], cycles=[3, 1],
        seconds=[[2.0, 1.0], [1.5, 1.0]], plain_tokens=[7, 3], plain_seconds=[[3.0, 2.0], [4.0, 3.0]],
    )  # fmt: skip
    assert tau([found]).value == found.tau  # the same numbers, by question
    assert speedup([found]).value == pytest.approx(found.speedup, rel=1e-5)


def test_a_method_that_does_not_count_its_passes():
    other = [
        Call(0, ["a", "b"], Answer([[1], [6, 7, 8]]), FIRST, [4.0, 4.0], [1.0, 1.0]),
        Call(0, ["a"], Answer([[1, 2]]), SECOND, [1.0, 1.0], [0.5, 0.5]),
    ]
    found = cell("transformers", GROUP, other, PLAIN, NOTHING)
    assert (found.passes, found.cycles, found.tau, found.accepted, found.ms_per_pass) == (None,) * 5
    assert found.identical == 2
    assert found.by_question.cycles is None
    assert tau([found]) is None


def test_replies_of_one_token_have_no_decoding_speed():
    answer = Answer([[1]], [0], [[0]])
    calls = [Call(0, ["a"], answer, answer, [1.0], [0.9])]
    found = cell("vanilla", GROUP, calls, calls, NOTHING)
    assert (found.tau, found.decode_speedup, found.ms_per_pass) == (None,) * 3
    assert found.speedup == 1


def test_the_printed_table():
    cells = [cell("vanilla", GROUP, PLAIN, PLAIN, NOTHING), cell("eagle3@chain2", GROUP, DRAFTED, PLAIN, NOTHING)]
    text = markdown(Result("a machine", None, {}, cells))
    assert "| 0 | 2 | talk | eagle3@chain2 | 4 | 2.23x (1.67 to 2.80) | 2.97x | 1.75 | 458.33 | 2/3 |" in text
    assert "| 0 | 2 | eagle3@chain2 | 2.23 | - | 1.75 | " in text  # both questions are of one call: no interval
    assert text.endswith("Machine: a machine\n")


def ratio_of(task: str, values: np.ndarray) -> Estimate:
    """Estimates the mean of the values, as tokens over one cycle each."""
    return ratio([(task, row) for row in range(len(values))], [values], [np.ones(len(values))])


def test_intervals_are_those_of_scipy():
    """One task has Student's interval, two tasks have Welch's."""
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


def test_tau_and_speedup_of_cells():
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
