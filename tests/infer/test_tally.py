"""The numbers of a result against numbers computed by hand."""

from __future__ import annotations

import pytest

from infer.common import estimates
from infer.common.calls import Answer
from infer.common.drafts import PLAIN
from infer.common.results import Group, Result, SpecBench
from infer.common.tables import markdown
from infer.common.tally import Tally, cell, names_of
from infer.common.tasks import Question

GROUP = Group("talk", 0.0, 2)


@pytest.fixture
def tallies():
    """Plain decoding and a drafter on two batches of two repetitions: a batch of two rows, then one row alone."""
    plain, drafted = Tally(), Tally()
    first = Answer([[1, 2, 3, 4, 5], [6, 7, 8]], [4, 2], [[4, 0, 0], [2, 0, 0]])
    fast = Answer([[1, 2, 3, 4, 5], [6, 7, 9]], [2, 1], [[1, 0, 1], [0, 1, 0]])
    plain.add(0, ["a", "b"], ["math", "qa"], first, first, [4.0, 6.0], [1.0, 2.0])
    drafted.add(0, ["a", "b"], ["math", "qa"], fast, first, [2.0, 2.0], [1.0, 1.0])
    second = Answer([[1, 2]], [1], [[1, 0, 0]])
    plain.add(0, ["a"], ["math"], second, second, [1.0, 1.0], [0.5, 0.5])
    drafted.add(0, ["a"], ["math"], Answer([[1, 2]], [1], [[0, 1, 0]]), second, [1.0, 0.5], [0.5, 0.25])
    return plain, drafted


def test_a_cell(tallies):
    plain, drafted = tallies
    told = cell("eagle3", "eagle3@chain2", GROUP, drafted, plain, PLAIN)
    assert (told.questions, told.replies, told.tokens) == (2, 3, 10)
    assert (told.passes, told.cycles) == (3, 4)  # 2 of the batch's longest row + 1; 2 + 1 + 1
    assert told.seconds == [3.0, 2.5]
    assert told.prefill_seconds == [1.5, 1.25]
    assert told.tok_s_range == pytest.approx([10 / 3, 4.0], rel=1e-5)
    assert told.tok_s == pytest.approx((10 / 3 + 4) / 2, rel=1e-5)
    # Plain decoding takes 5 and 7 seconds: 2 and 10/7 tokens per second.
    assert told.speedup_range == pytest.approx([5 / 3, 2.8], rel=1e-5)
    assert told.speedup == pytest.approx((5 / 3 + 2.8) / 2, rel=1e-5)
    # Seven tokens follow the first ones, in 1.5 and 1.25 seconds; plainly in 3.5 and 4.5.
    assert told.decode_tok_s == pytest.approx((7 / 1.5 + 7 / 1.25) / 2, rel=1e-5)
    assert told.decode_speedup == pytest.approx((3.5 / 1.5 + 4.5 / 1.25) / 2, rel=1e-5)
    assert told.tau == 7 / 4
    assert told.accepted == [1, 2, 1]
    assert told.ms_per_pass == pytest.approx(1000 * 1.375 / 3, rel=1e-5)
    assert (told.identical, told.compared) == (2, 3)
    assert told.draft == PLAIN
    # Question a: 5 and 2 tokens, half of the batch's seconds and its own; b: 3 tokens, the other half.
    assert told.by_question == {
        "question": ["a", "b"], "call": [0, 0], "replies": [2, 1], "tokens": [7, 3], "cycles": [3, 1],
        "seconds": [[2.0, 1.0], [1.5, 1.0]], "plain_tokens": [7, 3], "plain_seconds": [[3.0, 2.0], [4.0, 3.0]],
    }  # fmt: skip
    assert estimates.tau([told]).value == told.tau  # the same numbers, by question
    assert estimates.speedup([told]).value == pytest.approx(told.speedup, rel=1e-5)


def test_the_definitions_of_spec_bench(tallies):
    plain, drafted = tallies
    told = cell("eagle3", "eagle3", GROUP, drafted, plain, PLAIN).spec_bench
    assert told.mean_accepted_tokens == 2.0  # (0*1 + 1*2 + 2*1) / 4 + 1
    # Question 0: 7 tokens in 1 + 1 and 1 + 0.5 seconds (half of the batch's, and its own); question 1: 3 in 1 and 1.
    ours = [(7 / 2 + 3) / 2, (7 / 1.5 + 3) / 2]
    base = [(7 / 3 + 3 / 2) / 2, (7 / 4 + 3 / 3) / 2]
    assert told.tok_s == pytest.approx(sum(ours) / 2, rel=1e-5)
    assert told.speedup == pytest.approx((ours[0] / base[0] + ours[1] / base[1]) / 2, rel=1e-5)
    assert cell("vanilla", "vanilla", GROUP, plain, plain, PLAIN).spec_bench.mean_accepted_tokens == 1.0


def test_categories(tallies):
    plain, drafted = tallies
    told = cell("eagle3", "eagle3", GROUP, drafted, plain, PLAIN).categories
    assert set(told) == {"mt_bench", "qa"}  # math is one of MT-bench's, beside another
    assert told["mt_bench"].tau == pytest.approx((4 + 1) / 3, rel=1e-5)
    assert told["mt_bench"].speedup == pytest.approx((3 / 2 + 4 / 1.5) / 2, rel=1e-5)
    assert told["qa"].tau == 2.0
    assert told["qa"].spec_bench == SpecBench(2.0, 3.0, 2.5)  # twice and three times as fast

    talk, again = Tally(), Answer([[1, 2], [3, 4]], [1, 1], [[1], [1]])
    talk.add(0, ["a", "b"], ["math", "coding"], again, again, [1.0], [0.5])
    assert set(cell("vanilla", "vanilla", GROUP, talk, talk, PLAIN).categories) == {"math", "coding"}
    alone = Tally()
    alone.add(0, ["a", "b"], ["qa", "qa"], again, again, [1.0], [0.5])
    assert cell("vanilla", "vanilla", GROUP, alone, alone, PLAIN).categories == {}


def test_a_method_that_does_not_count_its_passes(tallies):
    plain, _ = tallies
    silent = Tally()
    texts = Answer([[1], [6, 7, 8]]), Answer([[1, 2], [6, 7, 8]])
    silent.add(0, ["a", "b"], ["math", "qa"], *texts, [4.0, 4.0], [1.0, 1.0])
    silent.add(0, ["a"], ["math"], Answer([[1, 2]]), Answer([[1, 2]]), [1.0, 1.0], [0.5, 0.5])
    told = cell("transformers", "transformers", GROUP, silent, plain, PLAIN)
    assert (told.passes, told.cycles, told.tau, told.accepted, told.ms_per_pass) == (None,) * 5
    assert told.spec_bench.mean_accepted_tokens is None
    assert told.identical == 2
    assert told.by_question["cycles"] is None
    assert estimates.tau([told]) is None


def test_replies_of_one_token_have_nothing_to_decode():
    tally, answer = Tally(), Answer([[1]], [0], [[0]])
    tally.add(0, ["a"], [""], answer, answer, [1.0], [0.9])
    told = cell("vanilla", "vanilla", GROUP, tally, tally, PLAIN)
    assert (told.tau, told.decode_tok_s, told.decode_speedup, told.ms_per_pass) == (None,) * 4
    assert told.spec_bench.mean_accepted_tokens is None
    assert told.speedup == 1


def test_questions_have_names_that_tell_them_apart():
    """The same in every file, whatever stands before them; another text under the same id is another question."""
    one, two, other = Question("1", "", ("a",)), Question("2", "qa", ("b", "c")), Question("1", "", ("b",))
    names = names_of([one, two, other, one])
    assert len(set(names)) == 4
    assert names_of([two, one]) == [names[1], names[0]]
    assert names_of([Question("1", "math", ("a",))]) == names[:1]


def test_the_table(tallies):
    plain, drafted = tallies
    cells = [
        cell("vanilla", "vanilla", GROUP, plain, plain, PLAIN),
        cell("eagle3", "eagle3@chain2", GROUP, drafted, plain, PLAIN),
    ]
    told = markdown(Result("a machine", None, {}, cells))
    assert "| 0 | 2 | talk | eagle3@chain2 | 4 | 2.23x (1.67 to 2.80) | 2.97x | 1.75 | 458.33 | 2/3 |" in told
    assert "| 0 | 2 | eagle3@chain2 | 2.23x | - | 1.75 | " in told  # both questions are of one call: no interval
    assert "| 0 | 2 | talk | qa | eagle3@chain2 | 2.50x | 2.00 | 2.00 | 3 | 2.50x |" in told
    assert told.endswith("Machine: a machine\n")
