"""Checks whole runs of the benchmark and of the recording of drafts, on a small random pair."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core import CycleCost
from eagle_jax.evaluate import Cycles
from infer import acceptance, bench
from infer.common.results import Calibration, CountedQuestions, Group, Recorded, Result, read
from infer.common.runs import Turn
from infer.common.tasks import keys_of
from infer.papers import __main__ as papers
from infer.tuning.costs import Costs


@pytest.fixture
def quick(pair, tasks, tmp_path):
    """Returns arguments of a quick run of a program into an empty folder."""

    def quick(program, **given):
        own = {"repeats": 1, "transformers": False} if program is bench else {"chains": "1,2"}
        options = {"max_new_tokens": 6, "temperatures": "0", "data": tasks, "tasks": "talk", "out": tmp_path / "out"}
        return program.Args(**(options | own | given))

    return quick


@pytest.mark.slow
def test_a_run_writes_and_prints_every_cell(quick, capsys, tmp_path, own_module):
    """The run has a chain, a method of the user's own, and a turn that is too long for the model."""
    own = f"own:{own_module}:lookup"
    report = bench.main(quick(bench, tasks="talk,long", methods=f"eagle3@chain2,{own}", repeats=2))
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == report
    assert report["settings"]["limit"] == 10 and "out" not in report["settings"]
    found = read(tmp_path / "out" / "result.json", Result)
    assert [cell["speedup"] for cell in report["cells"]] == [cell.speedup for cell in found.cells]
    assert [cell.label for cell in found.cells] == ["vanilla", "eagle3@chain2", own]
    assert {cell.group for cell in found.cells} == {Group("talk", 0.0, 1)}  # no turn of the other task fits the model
    assert "long at temperature 0, batch 1: 1 turns are too long" in printed
    for cell in found.cells:
        assert (cell.questions, cell.replies, cell.identical) == (2, 3, 3)
        assert sum(cell.accepted) == cell.cycles == cell.passes
        assert cell.tau == pytest.approx((cell.tokens - cell.replies) / cell.cycles, rel=1e-5)
        assert cell.speedup_range[0] <= cell.speedup <= cell.speedup_range[1]
        assert sum(cell.by_question.tokens) == cell.tokens and cell.by_question.replies == [2, 1]
        assert len(cell.by_question.seconds) == 2
        assert f"| 0 | 1 | talk | {cell.label} |" in printed
    plain, chain, mine = found.cells
    assert plain.tau == plain.speedup == 1
    assert (chain.method, chain.draft.tree, chain.draft.rows) == ("eagle3", "chain of 2", 3)
    assert chain.draft.weights == "bundled eagle3" and len(chain.accepted) == 3
    assert mine.draft.tree == "3 nodes in 3 levels"
    assert (tmp_path / "out" / "table.md").read_text() in printed


def test_a_tree_is_measured_with_its_costs_too(quick, monkeypatch):
    label, used = "eagle3@2x2x3", set()
    generate = eagle_jax.generate
    monkeypatch.setattr(
        eagle_jax, "generate", lambda *args, **given: used.add(given["cycle_cost"]) or generate(*args, **given)
    )
    report = bench.main(quick(bench, methods=label, by_cost=label))
    plain, fixed, chosen = report["cells"]
    assert [plain["label"], fixed["label"], chosen["label"]] == ["vanilla", label, f"{label}, by cost"]
    assert fixed["identical"] == chosen["identical"] == chosen["replies"]
    (cost,) = report["costs"]
    assert (cost["label"], cost["temperature"], cost["batch"]) == (label, 0, 1)
    names = "rows", "passes", "level", "token", "draft", "slots"
    assert used == {None, CycleCost(**{name: cost[name] for name in names})}
    assert set(cost["rows"]) - {2} == {1, 4} and cost["passes"][0] == 1 and cost["level"] > 0


@pytest.mark.parametrize(
    ("lengths", "ends"), [([9, 2, 5, 4], [4]), ([7], [7]), ([3, 8, 6], [6]), ([9, 73, 80, 5, 9], [5, 80])]
)
def test_costs_are_measured_on_the_shortest_and_the_longest_prompts(lengths, ends, monkeypatch):
    """A longer prompt makes a plain step longer, and a tree cheaper in plain steps; near ones are as one."""
    keys, measured = jax.random.split(jax.random.key(0), 1), []
    monkeypatch.setattr(bench, "turns", lambda part, *_: iter([Turn(0, ["a"], [[0] * part[0]], keys, True, [])]))

    def measure_costs(_, by_tree, prompts, *rest):
        measured.extend(len(prompt.tokens) for prompt in prompts)
        passes = [1.0, 1.5, 2.0 + len(measured)]
        return Costs([1, 2, 4], passes, {label: [(1, 1, 0.0)] for label in by_tree}, slots=float(measured[-1]))

    monkeypatch.setattr(bench, "measure_costs", measure_costs)
    task = SimpleNamespace(name="sums", questions=lengths)
    current = SimpleNamespace(result=SimpleNamespace(costs=[]), tasks=[task], target=None)
    drafters = {"chain": SimpleNamespace(tree=TreeConfig.chain(3))}
    found = bench.costs_of(drafters, current, Group("sums", 0.0, 1), SimpleNamespace(max_new_tokens=8, repeats=1))
    later = CycleCost((1, 2, 4), (1.0, 1.5, 4.0), slots=80.0) if len(ends) == 2 else None
    assert measured == ends
    assert found == {"chain": CycleCost((1, 2, 4), (1.0, 1.5, 3.0), slots=float(ends[0]), longer=later)}


@pytest.mark.parametrize(("by_cost", "message"), [
    ("eagle3@chain4", "--by-cost must name methods of --methods, got eagle3@chain4"),
    ("pld@3", "--by-cost must name chains and dynamic trees, got pld@3"),
])  # fmt: skip
def test_costs_are_of_methods_with_trees(quick, by_cost, message, monkeypatch):
    monkeypatch.setattr(bench, "costs_of", lambda *_: pytest.fail("went on to measure"))
    with pytest.raises(ValueError, match=message):
        bench.main(quick(bench, methods="eagle3@chain2,pld@3", by_cost=by_cost))


def test_a_resumed_run_equals_an_uninterrupted_run(quick, tmp_path, monkeypatch):
    options = {"methods": "pld@2", "batches": "1,2"}
    measure, groups = bench.measure, []

    def measured(current, methods, group, args):
        groups.append(group)
        if len(groups) == 2:
            raise KeyboardInterrupt
        return measure(current, methods, group, args)

    monkeypatch.setattr(bench, "measure", measured)
    with pytest.raises(KeyboardInterrupt):
        bench.main(quick(bench, **options))
    path = tmp_path / "out" / "result.json"
    kept = read(path, Result)
    assert {cell.group for cell in kept.cells} == {Group("talk", 0.0, 1)}
    with pytest.raises(ValueError, match=r"--out must be a folder without a result\.json"):
        bench.main(quick(bench, **options))
    with pytest.raises(ValueError, match=r"--resume must have the settings of .*: methods was"):
        bench.main(quick(bench, **options | {"methods": "pld@3"}, resume=True))
    bench.main(quick(bench, **options, resume=True))
    assert groups == [Group("talk", 0.0, 1), Group("talk", 0.0, 2), Group("talk", 0.0, 2)]
    found = read(path, Result)
    one, _, two, _ = found.cells
    assert (one.tokens, one.cycles) == (two.tokens, two.cycles)
    assert two.passes < one.passes == one.cycles  # rows of a batch share their passes
    assert found.cells[:2] == kept.cells
    bench.main(quick(bench, **options, out=tmp_path / "whole"))
    untimed = ("task", "temperature", "batch", "label", "replies", "tokens", "passes", "cycles", "tau", "accepted")
    whole = read(tmp_path / "whole" / "result.json", Result)
    assert [[getattr(cell, name) for name in untimed] for cell in found.cells] == [
        [getattr(cell, name) for name in untimed] for cell in whole.cells
    ]


def test_a_recording_counts_tokens_and_cycles_by_question(quick, capsys):
    args = quick(acceptance, methods="pld@2x1", batch=2, weights="int8")
    report = acceptance.main(args)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    found = read(args.out / "result.json", Recorded)
    (cell,) = found.cells
    assert found.settings["weights"] == "int8"
    assert (cell.method, cell.label, cell.questions, cell.replies) == ("pld", "pld@2x1", 2, 3)
    assert cell.tokens == 3 * 5  # the first of six tokens comes from the prompt's pass
    assert cell.tau == pytest.approx(cell.tokens / cell.cycles, abs=1e-4)
    columns = cell.by_question
    assert [name.split(":")[0] for name in columns.question] == ["1", "2"]
    assert columns.tokens == [10, 5] and sum(columns.cycles) == cell.cycles
    assert cell.calibration is None and cell.chains == []
    again = dataclasses.replace(args, resume=True, methods="pld@2x1,vanilla")
    assert acceptance.main(again) == report  # all is there: nothing is recorded again
    with pytest.raises(ValueError, match="weights was 'int8' and is None; max_new_tokens was 6 and is 8"):
        acceptance.main(dataclasses.replace(again, max_new_tokens=8, weights=None))


def test_calibration_and_counts_follow_from_cycles():
    """A chain of two is drafted twice: the target accepts all of it, then its first token, which ends the reply."""
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
def test_the_recording_of_a_head_counts_cycles_of_generate(quick, tmp_path):
    """Earlier replies of a conversation are plain decoding's text. A report is made of the recording."""
    args = quick(acceptance, methods="eagle2", temperatures="0.7", batch=2)
    acceptance.main(args)
    (cell,) = read(args.out / "result.json", Recorded).cells
    assert sum(cell.positions.drafted[0]) == 2 * cell.cycles  # two children of the root in every cycle
    assert cell.calibration.count
    assert [(chain.length, chain.tokens) for chain in cell.chains] == [(1, cell.tokens), (2, cell.tokens)]
    target, head, tokenizer = eagle_jax.load_demo("eagle1")
    options = {"max_new_tokens": 6, "temperature": 0.7}
    names = cell.by_question.question
    keys = [keys_of(0, names, 0), keys_of(0, names[:1], 1)]
    first = [tokenizer.encode("abc"), tokenizer.encode("de")]
    reply = tokenizer.decode(eagle_jax.generate(target, None, first, key=keys[0], **options).tokens[0])
    batches = [first, [tokenizer.encode(f"abc\n\n{reply}\n\nagain")]]
    outs = [
        eagle_jax.generate(target, head, prompts, key=key, **options)
        for prompts, key in zip(batches, keys, strict=True)
    ]
    assert cell.cycles == sum(int(out.cycles.sum()) for out in outs)
    made = papers.main(papers.Args(files=(args.out / "result.json",), out=tmp_path / "report"))
    assert {"n_alpha.png", "positions_t0.7.png", "calibration.png", "expected.png"} <= set(made["figures"])


@pytest.mark.parametrize(
    ("program", "given", "message"),
    [
        (bench, {"limit": 0}, "--limit"),
        (bench, {"seed": -1}, "--seed"),
        (bench, {"max_new_tokens": 10**6}, r"--max-new-tokens must be below the model's \d+ positions, got 1000000"),
        (bench, {"methods": "hydra", "target": "a/b"}, "--hydra must be given for hydra with --target"),
        (bench, {"dtype": "bfloat16"}, "the small pair is float32, not bfloat16"),
        (bench, {"temperatures": "nan"}, "--temperatures"),
        (bench, {"batches": "1,4"}, "--batches must be at most the 2 questions of talk, got 4"),
        (acceptance, {"methods": "vanilla"}, "--methods must name a method that drafts"),
        (acceptance, {"chains": "0,1"}, "--chains must be whole numbers of at least 1"),
        (acceptance, {"batch": 0}, "--batch"),
        (acceptance, {"tasks": "long"}, r"--tasks must have prompts that fit the model's \d+ positions, got none in l"),
    ],
)
def test_a_bad_option_is_an_error_before_the_run(quick, tmp_path, program, given, message):
    with pytest.raises(ValueError, match=message):
        program.main(quick(program, **given))
    assert not (tmp_path / "out").exists()
