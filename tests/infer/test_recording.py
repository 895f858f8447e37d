"""Recording of drafts, on a pair small enough to run it in seconds."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import EAGLE1_PARENTS, TreeConfig
from eagle_jax.evaluate.acceptance import Cycles
from infer import acceptance
from infer.common.calls import keys_of
from infer.common.results import Recorded, Recording, read_as
from infer.papers.__main__ import write_report

QUICK = {"max_new_tokens": 6, "temperatures": "0", "chains": "1,2"}


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "use_compilation_cache", lambda: None)
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [{"question_id": 1, "turns": ["abc", "again"]}, {"question_id": 2, "turns": ["de"]}]
    (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (folder / "long.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["x" * 3000]}), encoding="utf-8")
    return folder


def arguments(folder: Path, **own) -> acceptance.Args:
    return acceptance.Args(**({"tasks": "talk", "data": folder, "out": folder.parent / "out"} | QUICK | own))


def test_a_method_without_weights(pair, tasks, capsys):
    """The whole program where little is to be compiled."""
    args = arguments(tasks, methods="pld@2x1", tasks="again", batch=2)
    lines = [{"question_id": number, "turns": [text]} for number, text in enumerate(("abcabcabc", "xyxyxyxyx"))]
    (tasks / "again.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    printed = acceptance.main(args)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == printed
    (cell,) = read_as(args.out / "result.json", Recorded).cells
    assert (cell.method, cell.label, cell.questions, cell.replies) == ("pld", "pld@2x1", 2, 2)
    assert cell.tokens == 2 * 5  # the first of six tokens comes from the prompt's pass
    assert cell.tau == pytest.approx(cell.tokens / cell.cycles, abs=1e-4)
    assert cell.draft["kind"] == "lookup"
    columns = cell.by_question
    assert [name.split(":")[0] for name in columns["question"]] == ["0", "1"]
    assert columns["tokens"] == [5, 5]
    assert sum(columns["cycles"]) == cell.cycles
    assert cell.calibration is None
    assert cell.uncalibrated
    assert cell.chains == []
    made = write_report([args.out / "result.json"], tasks.parent / "report")
    assert "n-alpha" not in made["sections"]
    again = dataclasses.replace(args, resume=True)
    assert acceptance.main(again) == printed  # all is there: nothing is recorded again
    with pytest.raises(ValueError, match="is there already: go on with it"):
        acceptance.main(args)
    with pytest.raises(ValueError, match="was recorded with max_new_tokens 6, not 8"):
        acceptance.main(dataclasses.replace(again, max_new_tokens=8))
    (tasks / "again.jsonl").write_text('{"turns": ["other"]}', encoding="utf-8")
    with pytest.raises(ValueError, match="was recorded with other questions of again"):
        acceptance.main(again)


def test_what_cycles_say():
    """One chain of two, drafted twice: accepted whole, then its first token alone, which ends the reply."""
    chain, scores = [-1, 0, 1], [0.0, math.log(0.5), math.log(0.25)]
    cycles = Cycles(
        np.zeros(2, np.int32), np.zeros((2, 3), np.int32), np.array([chain] * 2, np.int32),
        np.array([scores] * 2, np.float32), np.array([[True, True, True], [True, True, False]]),
        np.array([[False, True, True], [False, True, False]]), np.array([3, 1], np.int32),
    )  # fmt: skip
    ranked = SimpleNamespace(drafter=SimpleNamespace(verify=None))
    found = acceptance.count(cycles, ranked, 1.0, 2)
    assert (found["tokens"], found["cycles"], found["tau"]) == (4, 2, 2.0)
    assert found["positions"] == {"drafted": [[2], [2]], "reached": [[2], [1]], "accepted": [[2], [1]]}
    assert found["calibration"] == {"count": [3, 0], "confidence": [0.5, None], "accepted": [3, 0], "error": 0.5}
    sampled = SimpleNamespace(drafter=SimpleNamespace(verify=len))
    assert "accepted by p/q" in acceptance.count(cycles, sampled, 1.0, 2)["uncalibrated"]
    assert acceptance.count(cycles, sampled, 0.0, 2)["calibration"] == found["calibration"]  # greedy, all rules agree
    two = acceptance.by_question(cycles._replace(prompt=np.array([2, 1], np.int32)), ["a", "b", "a", "c"])
    assert two == {"question": ["a", "b", "c"], "tokens": [3, 1, 0], "cycles": [1, 1, 0]}
    none = cycles._replace(reached=np.zeros((2, 3), bool))
    assert acceptance.count(none, ranked, 1.0, 2)["uncalibrated"] == "the target reached no drafted node"
    assert acceptance.follow(None, ranked, [1, 2], {}) == []


@pytest.mark.slow
def test_a_recording_goes_on_and_a_report_reads_it(pair, tasks, capsys):
    args = arguments(tasks, methods="vanilla,eagle3")
    printed = acceptance.main(args)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == printed
    (cell,) = read_as(args.out / "result.json", Recorded).cells
    assert (cell.method, cell.label, cell.questions, cell.replies) == ("eagle3", "eagle3", 2, 3)
    assert cell.tokens == 3 * 5  # the first of six tokens comes from the prompt's pass
    assert cell.tau == pytest.approx(cell.tokens / cell.cycles, abs=1e-4)
    assert sum(cell.positions["drafted"][0]) == 2 * cell.cycles  # two children of the root in every cycle
    assert cell.calibration["count"]
    assert [chain["length"] for chain in cell.chains] == [1, 2]
    assert [chain["tokens"] for chain in cell.chains] == [15, 15]
    assert sum(cell.by_question["cycles"]) == cell.cycles

    # What is there is not recorded again, and what is new is added.
    wider = dataclasses.replace(args, methods="eagle3,pld", resume=True)
    old = (args.out / "result.json").read_text(encoding="utf-8")
    settings = json.loads(old)["settings"]
    other = settings | {"tokenizer": settings["tokenizer"] | {"stop tokens": [3]}}
    (args.out / "result.json").write_text(json.dumps(json.loads(old) | {"settings": other}))
    with pytest.raises(ValueError, match="gone on with: stop tokens changed since it was begun"):
        acceptance.main(wider)
    (args.out / "result.json").write_text(old)
    acceptance.main(wider)
    again = read_as(args.out / "result.json", Recorded)
    assert [found.label for found in again.cells] == ["eagle3", "pld"]
    assert again.cells[0] == Recording(**json.loads(old)["cells"][0])
    assert again.cells[1].chains == []
    made = write_report([args.out / "result.json"], tasks.parent / "report")
    assert {"n_alpha.png", "positions_t0.png", "calibration.png", "expected.png"} <= set(made["figures"])


@pytest.mark.slow
def test_the_counts_are_those_of_generate(pair, tasks):
    """The text of the turns is plain decoding's, tau is that of generate on the same prompts with the same keys."""
    args = arguments(tasks, methods="eagle2@chain3,eagle2@static", temperatures="0.7", batch=2, chains="")
    acceptance.main(args)
    chain, static = read_as(args.out / "result.json", Recorded).cells
    target, head, tokenizer = eagle_jax.load_demo("eagle1")
    options = {"max_new_tokens": 6, "temperature": 0.7}
    names = chain.by_question["question"]  # that of the shorter prompt first
    keys = [keys_of(0, names, 0), keys_of(0, names[1:], 1)]
    first = [tokenizer.encode("de"), tokenizer.encode("abc")]  # the shorter one first
    reply = tokenizer.decode(eagle_jax.generate(target, None, first, key=keys[0], **options).tokens[1])
    batches = [first, [tokenizer.encode(f"abc\n\n{reply}\n\nagain")]]
    for cell, tree in ((chain, TreeConfig.chain(3)), (static, TreeConfig.static(EAGLE1_PARENTS))):
        outs = [
            eagle_jax.generate(target, head.with_tree(tree), prompts, key=key, **options)
            for prompts, key in zip(batches, keys, strict=True)
        ]
        assert cell.cycles == sum(int(out.cycles.sum()) for out in outs)


@pytest.mark.slow
def test_sampled_drafts_have_no_calibration_and_tell_why(pair, tasks):
    args = arguments(tasks, methods="eagle2@chain2/rejection,eagle2@chain2/block", temperatures="1", chains="2")
    acceptance.main(args)
    rejection, block = read_as(args.out / "result.json", Recorded).cells
    assert rejection.calibration is None
    assert "accepted by p/q" in rejection.uncalibrated
    assert [chain["length"] for chain in rejection.chains] == [2]
    assert block.chains == []


def test_what_is_refused(pair, tasks):
    def refused(match: str, **own) -> None:
        with pytest.raises(ValueError, match=match):
            acceptance.main(arguments(tasks, **own))
        assert not (tasks.parent / "out").exists()

    refused("--methods must name a method that drafts", methods="vanilla")
    refused("unknown method 'typical'", methods="typical")
    refused("--temperatures '0,-1' must be numbers of at least 0", temperatures="0,-1")
    refused("--chains 'a' must be whole numbers", chains="a")
    refused("--chains '0,1' must be whole numbers of at least 1", chains="0,1")
    refused("--bins 0 must be at least 1", bins=0)
    refused("neither a file nor a name", tasks="chats")
    refused("names two tasks that are called talk: measure them apart", tasks=f"talk,{tasks / 'talk.jsonl'}")
    refused(r"every turn of long is too long for the model's \d+ positions: lower --max-new-tokens", tasks="long")
