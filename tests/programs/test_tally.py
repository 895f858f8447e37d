"""The numbers of a result against numbers computed by hand."""

from __future__ import annotations

import pytest

from infer.common import estimates
from infer.common.calls import Answer
from infer.common.methods import NOTHING
from infer.common.results import Group, Result, TimedQuestions
from infer.common.tables import markdown
from infer.common.tally import Call, cell

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
"""Two repetitions of a batch of two rows, then one row alone."""


def test_a_cell():
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
    assert estimates.tau([found]).value == found.tau  # the same numbers, by question
    assert estimates.speedup([found]).value == pytest.approx(found.speedup, rel=1e-5)


def test_a_method_that_does_not_count_its_passes():
    other = [
        Call(0, ["a", "b"], Answer([[1], [6, 7, 8]]), FIRST, [4.0, 4.0], [1.0, 1.0]),
        Call(0, ["a"], Answer([[1, 2]]), SECOND, [1.0, 1.0], [0.5, 0.5]),
    ]
    found = cell("transformers", GROUP, other, PLAIN, NOTHING)
    assert (found.passes, found.cycles, found.tau, found.accepted, found.ms_per_pass) == (None,) * 5
    assert found.identical == 2
    assert found.by_question.cycles is None
    assert estimates.tau([found]) is None


def test_replies_of_one_token_have_nothing_to_decode():
    answer = Answer([[1]], [0], [[0]])
    calls = [Call(0, ["a"], answer, answer, [1.0], [0.9])]
    found = cell("vanilla", GROUP, calls, calls, NOTHING)
    assert (found.tau, found.decode_speedup, found.ms_per_pass) == (None,) * 3
    assert found.speedup == 1


def test_the_table():
    cells = [
        cell("vanilla", GROUP, PLAIN, PLAIN, NOTHING),
        cell("eagle3@chain2", GROUP, DRAFTED, PLAIN, NOTHING),
    ]
    text = markdown(Result("a machine", None, {}, cells))
    assert "| 0 | 2 | talk | eagle3@chain2 | 4 | 2.23x (1.67 to 2.80) | 2.97x | 1.75 | 458.33 | 2/3 |" in text
    assert "| 0 | 2 | eagle3@chain2 | 2.23 | - | 1.75 | " in text  # both questions are of one call: no interval
    assert text.endswith("Machine: a machine\n")
