"""Recording of drafts, on a pair small enough to run it in seconds."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import EAGLE1_PARENTS, TreeConfig
from eagle_jax.evaluate import Cycles
from infer import acceptance
from infer.common.results import Calibration, CountedQuestions, Recorded, read
from infer.common.tasks import keys_of
from infer.papers import __main__ as papers


@pytest.fixture
def quick(pair, tasks, tmp_path):
    """Returns arguments of a quick run."""

    def quick(**given):
        defaults = {"max_new_tokens": 6, "temperatures": "0", "chains": "1,2", "out": tmp_path / "out"}
        return acceptance.Args(**(defaults | {"data": tasks, "tasks": "talk"} | given))

    return quick


def test_a_method_without_weights(quick, capsys, tmp_path):
    """The whole program where little is to be compiled, and a report of its file."""
    args = quick(methods="pld@2x1", batch=2)
    report = acceptance.main(args)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    (cell,) = read(args.out / "result.json", Recorded).cells
    assert (cell.method, cell.label, cell.questions, cell.replies) == ("pld", "pld@2x1", 2, 3)
    assert cell.tokens == 3 * 5  # the first of six tokens comes from the prompt's pass
    assert cell.tau == pytest.approx(cell.tokens / cell.cycles, abs=1e-4)
    columns = cell.by_question
    assert [name.split(":")[0] for name in columns.question] == ["1", "2"]
    assert columns.tokens == [10, 5] and sum(columns.cycles) == cell.cycles
    assert cell.calibration is None and cell.chains == []
    made = papers.main(papers.Args(files=(args.out / "result.json",), out=tmp_path / "report"))
    assert made["sections"] == ["What each label is", "Tau of recorded trees at temperature 0"]
    again = dataclasses.replace(args, resume=True, methods="pld@2x1,vanilla")
    assert acceptance.main(again) == report  # all is there: nothing is recorded again
    with pytest.raises(ValueError, match="max_new_tokens was 6 and is 8"):
        acceptance.main(dataclasses.replace(again, max_new_tokens=8))


def test_numbers_of_cycles():
    """One chain of two, drafted twice: accepted whole, then its first token alone, which ends the reply."""
    chain, scores = [-1, 0, 1], [0.0, math.log(0.5), math.log(0.25)]
    cycles = Cycles(
        np.array([2, 1], np.int32), np.zeros((2, 3), np.int32), np.array([chain] * 2, np.int32),
        np.array([scores] * 2, np.float32), np.array([[True, True, True], [True, True, False]]),
        np.array([[False, True, True], [False, True, False]]), np.array([3, 1], np.int32),
    )  # fmt: skip
    count, confidence = [0] * 4 + [3] + [0] * 5, [None] * 4 + [0.5] + [None] * 5
    assert acceptance.calibration_of(cycles, sampled=False) == Calibration(count, confidence, count)
    assert acceptance.calibration_of(cycles, sampled=True) is None
    assert acceptance.calibration_of(cycles._replace(reached=np.zeros((2, 3), bool)), sampled=False) is None
    found = acceptance.by_question(cycles, ["a", "b", "a", "c"])
    assert found == CountedQuestions(["a", "b", "c"], [3, 1, 0], [1, 1, 0])
    assert acceptance.follow(None, SimpleNamespace(), [1, 2], {}) == []


@pytest.mark.slow
def test_a_report_reads_the_recording_of_a_head(quick, tmp_path):
    args = quick(methods="eagle3")
    acceptance.main(args)
    (cell,) = read(args.out / "result.json", Recorded).cells
    assert sum(cell.positions.drafted[0]) == 2 * cell.cycles  # two children of the root in every cycle
    assert cell.calibration.count
    assert [(chain.length, chain.tokens) for chain in cell.chains] == [(1, 15), (2, 15)]
    made = papers.main(papers.Args(files=(args.out / "result.json",), out=tmp_path / "report"))
    assert {"n_alpha.png", "positions_t0.png", "calibration.png", "expected.png"} <= set(made["figures"])


@pytest.mark.slow
def test_the_counts_are_those_of_generate(quick):
    """The text of the turns is plain decoding's; tau is of generate on the same prompts and keys."""
    args = quick(methods="eagle2@chain3,eagle2@static", temperatures="0.7", batch=2, chains="")
    acceptance.main(args)
    chain, static = read(args.out / "result.json", Recorded).cells
    target, head, tokenizer = eagle_jax.load_demo("eagle1")
    options = {"max_new_tokens": 6, "temperature": 0.7}
    names = chain.by_question.question
    keys = [keys_of(0, names, 0), keys_of(0, names[:1], 1)]
    first = [tokenizer.encode("abc"), tokenizer.encode("de")]
    reply = tokenizer.decode(eagle_jax.generate(target, None, first, key=keys[0], **options).tokens[0])
    batches = [first, [tokenizer.encode(f"abc\n\n{reply}\n\nagain")]]
    for cell, tree in ((chain, TreeConfig.chain(3)), (static, TreeConfig.static(EAGLE1_PARENTS))):
        outs = [
            eagle_jax.generate(target, head.with_tree(tree), prompts, key=key, **options)
            for prompts, key in zip(batches, keys, strict=True)
        ]
        assert cell.cycles == sum(int(out.cycles.sum()) for out in outs)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": "vanilla"}, "--methods must name a method that drafts"),
        ({"chains": "0,1"}, "--chains must be whole numbers of at least 1"),
        ({"batch": 0}, "--batch"),
        ({"tasks": "long"}, r"--tasks must have prompts that fit the model's \d+ positions, got none in long"),
    ],
)
def test_what_is_refused(quick, given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        acceptance.main(quick(**{"methods": "pld"} | given))
    assert not (tmp_path / "out").exists()
