"""The benchmark, on a pair small enough to run it in seconds."""

from __future__ import annotations

import json

import jax
import pytest

from eagle_jax.checkpoints import save_medusa_checkpoint, save_target_checkpoint
from eagle_jax.config import ConfigError, MedusaConfig
from eagle_jax.models.medusa import init_medusa_params
from infer import bench
from infer.common import results
from infer.common.results import Group


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [
        {"question_id": 1, "category": "math", "turns": ["abc", "again"]},
        {"question_id": 2, "category": "qa", "turns": ["de"]},
    ]
    (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (folder / "long.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["x" * 3000]}), encoding="utf-8")
    return folder


@pytest.fixture
def quick(tmp_path):
    """Arguments of a quick run into an empty folder; nothing beside the engine is measured."""

    def quick(**given):
        defaults = {"max_new_tokens": 6, "repeats": 1, "transformers": False, "golden": False, "out": tmp_path / "out"}
        return bench.Args(**(defaults | {"data": tmp_path / "tasks", "tasks": "talk"} | given))

    return quick


def test_report(pair, tasks, quick, capsys, tmp_path):
    report = bench.main(quick(tasks="talk,long", methods="eagle2,eagle3@chain2", repeats=2))
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == report
    assert report["schema"] == results.SCHEMA
    assert report["settings"]["limit"] == 10
    assert "out" not in report["settings"]
    told = results.read(tmp_path / "out" / "result.json")
    assert {"result": str(tmp_path / "out" / "result.json")} | bench.short(told) == report
    assert [cell["speedup"] for cell in report["cells"]] == [cell.speedup for cell in told.cells]
    assert not any("by_question" in cell for cell in report["cells"])
    assert told.labels == ["vanilla", "eagle2", "eagle3@chain2"]
    assert told.groups == [Group("talk", 0.0, 1)]  # no turn of the other task fits the model
    assert told.more["groups"][1] == {"task": "long", "temperature": 0.0, "batch": 1, "left_out": 1}
    assert "long at temperature 0, batch 1: 1 turns left out" in printed
    for cell in told.cells:
        assert (cell.questions, cell.replies, cell.identical, cell.compared) == (2, 3, 3, 3)
        assert len(cell.seconds) == len(cell.prefill_seconds) == 2
        assert all(part > 0 for part in cell.prefill_seconds)
        assert sum(cell.accepted) == cell.cycles == cell.passes
        assert cell.tau == pytest.approx((cell.tokens - cell.replies) / cell.cycles, rel=1e-5)
        assert cell.tok_s_range[0] <= cell.tok_s <= cell.tok_s_range[1]
        assert set(cell.categories) == {"mt_bench", "qa"}
        assert sum(cell.by_question["tokens"]) == cell.tokens
        assert cell.by_question["replies"] == [2, 1]
        assert f"| 0 | 1 | talk | {cell.label} |" in printed
    plain, chain = told.cells[0], told.cell("eagle3@chain2", told.groups[0])
    assert plain.tau == plain.speedup == plain.spec_bench.mean_accepted_tokens == 1
    assert chain.method == "eagle3"
    assert (chain.draft["kind"], chain.draft["depth"], chain.draft["rows"]) == ("chain", 2, 3)
    assert chain.draft["weights"] == "bundled eagle3"
    assert len(chain.accepted) == 3
    assert (tmp_path / "out" / "table.md").read_text() in printed
    for name in ("speedup_t0", "accepted_t0"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_batches(pair, tasks, quick, tmp_path):
    bench.main(quick(methods="eagle3", tasks=str(tasks / "talk.jsonl"), batches="1,2", tree="1,2,2"))
    told = results.read(tmp_path / "out" / "result.json")
    assert told.groups == [Group("talk", 0.0, batch) for batch in (1, 2)]
    assert told.labels == ["vanilla", "eagle3"]  # what eagle3 is compared with is always measured
    assert all(cell.identical == cell.compared == 3 for cell in told.cells)
    one, two = (told.cell("vanilla", Group("talk", 0.0, batch)) for batch in (1, 2))
    assert (one.tokens, one.cycles) == (two.tokens, two.cycles)
    assert two.passes < one.passes == one.cycles  # rows of a batch share their passes
    assert (tmp_path / "out" / "throughput_t0.png").stat().st_size > 1000


@pytest.mark.slow
def test_every_method_is_measured_by_its_name(pair, tasks, quick, tmp_path):
    target = bench.load_pair(bench.Sources())[0]
    save_target_checkpoint(target.config, target.params, tmp_path / "small", "float32")
    names, given = (
        ("sps", "pld@4", "lookahead@3x2x2", "medusa", "hydra@chain2"),
        {"draft_model": str(tmp_path / "small")},
    )
    for kind in ("medusa", "hydra"):
        config, given[kind] = MedusaConfig(kind, 32, 258, num_heads=2), str(tmp_path / kind)
        save_medusa_checkpoint(config, init_medusa_params(config, jax.random.key(1)), tmp_path / kind, "float32")
    bench.main(quick(methods=",".join(names), limit=1, **given))
    told = results.read(tmp_path / "out" / "result.json")
    assert told.labels == ["vanilla", *names]
    assert [cell.method for cell in told.cells] == ["vanilla", "sps", "pld", "lookahead", "medusa", "hydra"]
    assert all(cell.identical == cell.compared == 2 for cell in told.cells)
    assert told.cells[1].tau > 2  # it is the target itself


UNTIMED = ("task", "temperature", "batch", "label", "replies", "tokens", "passes", "cycles", "tau", "accepted")


def test_a_killed_run_goes_on_and_gives_the_same(pair, tasks, quick, tmp_path, monkeypatch, capsys):
    args = quick(methods="eagle2", temperatures="0,1", limit=1)
    measure, calls = bench.measure, []

    def measured(*given):
        calls.append(given[4])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(bench, "measure", measured)
    with pytest.raises(KeyboardInterrupt):
        bench.main(args)
    assert "1 of 2 measurements are kept in" in (told := capsys.readouterr().err) and "--resume goes on" in told
    kept = results.read(tmp_path / "out" / "result.json")
    assert kept.groups == [Group("talk", 0.0, 1)]
    with pytest.raises(ValueError, match=r"out/result\.json is there already: go on with it by --resume, or give"):
        bench.main(args)
    bench.main(quick(methods="eagle2", temperatures="0,1", limit=1, resume=True))
    told = results.read(tmp_path / "out" / "result.json")
    assert calls == [Group("talk", 0.0, 1), Group("talk", 1.0, 1), Group("talk", 1.0, 1)]
    assert told.cells[:2] == kept.cells
    bench.main(quick(methods="eagle2", temperatures="0,1", limit=1, out=tmp_path / "whole"))
    whole = results.read(tmp_path / "whole" / "result.json")
    assert [[getattr(cell, name) for name in UNTIMED] for cell in told.cells] == [
        [getattr(cell, name) for name in UNTIMED] for cell in whole.cells
    ]
    # Nothing is left to do: the result is printed again, and no model loaded for it.
    monkeypatch.setattr(bench, "load_pair", None)
    bench.main(quick(methods="eagle2", temperatures="0", limit=1, resume=True))
    assert len(calls) == 5
    assert results.read(tmp_path / "out" / "result.json").cells == told.cells


def test_a_result_of_something_else_is_not_gone_on_with(pair, tasks, quick, tmp_path):
    bench.main(quick(methods="vanilla", limit=1))
    path = tmp_path / "out" / "result.json"
    with pytest.raises(ValueError, match=r"cannot be gone on with: --seed was 0 and is now \d+; .*Give these again"):
        bench.main(quick(methods="vanilla", limit=1, seed=3, dtype="bfloat16", resume=True))
    with pytest.raises(ValueError, match="the methods were vanilla"):
        bench.main(quick(methods="eagle2", limit=1, resume=True))
    before = json.loads(path.read_text())
    hot = {"task": "talk", "temperature": 1.0, "batch": 1, "left_out": 0}
    old = before | {"groups": [*before["groups"], hot]}
    path.write_text(json.dumps({name: value for name, value in old.items() if name != "draws"}))
    with pytest.raises(ValueError, match="its questions shared their draws"):
        bench.main(quick(methods="vanilla", limit=1, resume=True))
    path.write_text(json.dumps(before))
    with pytest.raises(ValueError, match=r"--template-args was \[\] and is now \['a=1'\]"):
        bench.main(quick(methods="vanilla", limit=1, resume=True, template_args=("a=1",)))
    rendered = before["tokenizer"] | {"chat template": "another"}
    path.write_text(json.dumps(before | {"tokenizer": rendered}))
    with pytest.raises(ValueError, match="gone on with: chat template changed since it was begun"):
        bench.main(quick(methods="vanilla", limit=1, temperatures="1", resume=True))
    path.write_text(json.dumps(before))
    (tasks / "talk.jsonl").write_text(json.dumps({"turns": ["other"]}))
    with pytest.raises(ValueError, match="talk had other questions"):
        bench.main(quick(methods="vanilla", limit=1, resume=True))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": "eagle_jax.tune/1"}))
    with pytest.raises(
        ValueError, match=r"result\.json must have the schema 'eagle_jax\.bench/3', got 'eagle_jax\.tune/1'"
    ):
        bench.main(quick(methods="vanilla", limit=1, resume=True))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"other holds no result of infer\.bench but notes\.txt: give another --out"):
        bench.main(quick(methods="vanilla", limit=1, out=tmp_path / "other"))
    with pytest.raises(ValueError, match=r"notes\.txt is a file: give a directory"):
        bench.main(quick(methods="vanilla", limit=1, out=tmp_path / "other" / "notes.txt"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limit": 0}, "--limit 0 must be at least 1"),
        ({"seed": -1}, "--seed -1 must lie in 0 to"),
        ({"max_new_tokens": 10**6}, "--max-new-tokens 1000000 leaves no room for a prompt: the model has"),
        ({"tasks": " , "}, "--tasks is empty: give at least one value"),
        ({"tasks": "chats"}, "neither a file nor a name"),
        ({"methods": ""}, "--methods is empty: give at least one value"),
        ({"methods": "vanilla,typical"}, "unknown method 'typical': there are vanilla, sps, pld, lookahead, medusa, "),
        ({"methods": "hydra", "target": "a/b"}, "hydra with --target needs --hydra PATH, the heads of that"),
        ({"methods": "sps", "target": "a/b"}, "sps with --target needs --draft-model PATH, a small model"),
        ({"methods": "eagle3", "target": "some/model"}, "eagle3 with --target needs --eagle3 PATH"),
        ({"dtype": "bfloat16"}, "the small pair is float32, not bfloat16"),
        ({"temperatures": "0,warm"}, "--temperatures '0,warm' must be numbers of at least 0, separated by commas"),
        ({"temperatures": "nan"}, "--temperatures 'nan' must be numbers"),
        ({"batches": "0"}, "--batches '0' must be whole numbers of at least 1"),
        ({"batches": "1,4"}, "--batches 4 is more than the questions of talk: raise --limit, or lower --batches"),
    ],
)
def test_what_is_refused(pair, tasks, quick, tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        bench.main(quick(**given))
    assert not (tmp_path / "out").exists()


def test_two_tasks_of_one_name_are_refused(pair, tasks, quick, tmp_path):
    (tmp_path / "talk.jsonl").write_text(json.dumps({"turns": ["a"]}))
    with pytest.raises(ValueError, match="--tasks names two tasks that are called talk"):
        bench.main(quick(tasks=f"talk,{tmp_path / 'talk.jsonl'}"))


def test_a_tree_that_a_head_cannot_fill_is_refused_before_anything_is_measured(pair, tasks, quick, tmp_path):
    with pytest.raises(ConfigError, match="eagle3@2x300x400"):
        bench.main(quick(methods="eagle3@2x300x400"))
    assert not (tmp_path / "out").exists()
