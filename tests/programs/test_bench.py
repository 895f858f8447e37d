"""The benchmark, on a pair small enough to run it in seconds."""

from __future__ import annotations

import json

import jax
import pytest

from eagle_jax.checkpoints import save_medusa_checkpoint, save_target_checkpoint
from eagle_jax.config import MedusaConfig
from eagle_jax.models.medusa import init_medusa_params
from infer import bench
from infer.common.methods import Places, load_pair
from infer.common.results import Group, Result, read


@pytest.fixture
def quick(pair, tasks, tmp_path):
    """Returns arguments of a quick run into an empty folder; nothing beside the engine is measured."""

    def quick(**given):
        defaults = {"max_new_tokens": 6, "repeats": 1, "transformers": False, "out": tmp_path / "out"}
        return bench.Args(**(defaults | {"data": tasks, "tasks": "talk"} | given))

    return quick


def test_report(quick, capsys, tmp_path, own_module):
    """Heads, a chain, batches, a method of the user's own, a turn that is too long: all in one run."""
    own = f"own:{own_module}:lookup"
    report = bench.main(quick(tasks="talk,long", methods=f"eagle3@chain2,{own}", repeats=2))
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


@pytest.mark.slow
def test_every_method_is_measured_by_its_name(quick, tmp_path):
    target = load_pair(Places())[0]
    save_target_checkpoint(target.config, target.params, tmp_path / "small", "float32")
    names, given = ["sps", "pld@4", "lookahead@3x2x2", "medusa", "hydra@chain2"], {"draft_model": tmp_path / "small"}
    for kind in ("medusa", "hydra"):
        config, given[kind] = MedusaConfig(kind, 32, 258, num_heads=2), tmp_path / kind
        save_medusa_checkpoint(config, init_medusa_params(config, jax.random.key(1)), tmp_path / kind, "float32")
    bench.main(quick(methods=",".join(names), limit=1, **{name: str(path) for name, path in given.items()}))
    cells = read(tmp_path / "out" / "result.json", Result).cells
    assert [cell.label for cell in cells] == ["vanilla", *names]
    assert [cell.method for cell in cells] == ["vanilla", "sps", "pld", "lookahead", "medusa", "hydra"]
    assert all(cell.identical == 2 for cell in cells)
    assert cells[1].tau > 2  # it is the target itself


def test_a_killed_run_goes_on_and_gives_the_same(quick, tmp_path, monkeypatch):
    options = {"methods": "pld@2", "batches": "1,2"}
    measure, groups = bench.measure, []

    def measured(current, methods, group, args):
        groups.append(group)
        if len(groups) == 2:
            raise KeyboardInterrupt
        return measure(current, methods, group, args)

    monkeypatch.setattr(bench, "measure", measured)
    with pytest.raises(KeyboardInterrupt):
        bench.main(quick(**options))
    path = tmp_path / "out" / "result.json"
    kept = read(path, Result)
    assert {cell.group for cell in kept.cells} == {Group("talk", 0.0, 1)}
    with pytest.raises(ValueError, match=r"--out must be a folder without a result\.json"):
        bench.main(quick(**options))
    with pytest.raises(ValueError, match=r"--resume must have the settings of .*: methods was"):
        bench.main(quick(**options | {"methods": "pld@3"}, resume=True))
    bench.main(quick(**options, resume=True))
    assert groups == [Group("talk", 0.0, 1), Group("talk", 0.0, 2), Group("talk", 0.0, 2)]
    found = read(path, Result)
    one, _, two, _ = found.cells
    assert (one.tokens, one.cycles) == (two.tokens, two.cycles)
    assert two.passes < one.passes == one.cycles  # rows of a batch share their passes
    assert found.cells[:2] == kept.cells
    bench.main(quick(**options, out=tmp_path / "whole"))
    untimed = ("task", "temperature", "batch", "label", "replies", "tokens", "passes", "cycles", "tau", "accepted")
    whole = read(tmp_path / "whole" / "result.json", Result)
    assert [[getattr(cell, name) for name in untimed] for cell in found.cells] == [
        [getattr(cell, name) for name in untimed] for cell in whole.cells
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limit": 0}, "--limit"),
        ({"seed": -1}, "--seed"),
        ({"max_new_tokens": 10**6}, r"--max-new-tokens must be below the model's \d+ positions, got 1000000"),
        ({"tasks": "chats"}, "task must be bundled .* got 'chats'"),
        ({"methods": "hydra", "target": "a/b"}, "--hydra must be given for hydra with --target"),
        ({"dtype": "bfloat16"}, "the small pair is float32, not bfloat16"),
        ({"temperatures": "nan"}, "--temperatures"),
        ({"batches": "0"}, "--batches"),
        ({"batches": "1,4"}, "--batches must be at most the 2 questions of talk, got 4"),
    ],
)
def test_what_is_refused(quick, tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        bench.main(quick(**given))
    assert not (tmp_path / "out").exists()
