"""Tuning and checking a profile, on a pair small enough to run it in seconds."""

from __future__ import annotations

import json

import pytest
import yaml

import eagle_jax
from infer import tune


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, texts in {"talk": ["abc", "de"], "sums": ["1+1=2 1+1="], "long": ["x" * 3000]}.items():
        lines = [json.dumps({"question_id": number, "turns": [text]}) for number, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def quick(pair, monkeypatch, tasks, tmp_path):
    """Arguments of a short run on the small pair, in whose place a profile finds its bundled heads too."""
    monkeypatch.setattr(tune, "use_compilation_cache", lambda: None)
    demo = eagle_jax.load_demo
    monkeypatch.setattr("eagle_jax.profile.load_drafter", lambda path, target: demo(str(path).split("/")[-1])[1])
    return dict(
        methods="eagle3", tasks="talk,sums", data=tasks, limit=2, max_new_tokens=6, temperatures="0", depths="1,2",
        top_ks="2", nodes="2,4", widths="1,4", lengths="2", candidates=2, repeats=2, turns=2, out=tmp_path / "p.yaml",
    )  # fmt: skip


def last(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_tune_and_check(quick, pair, capsys):
    assert tune.main(tune.Args(**quick)) == 0
    report = last(capsys)
    (row,) = report["settings"]["float32"]
    assert row["searched"] == 3
    assert len(row["candidates"]) == 2
    assert row["identical"] == "6/6"
    for found in row["candidates"].values():
        assert found["predicted"] > 0 and found["measured"] > 0
        assert found["error"] == pytest.approx(found["predicted"] / found["measured"] - 1, abs=0.02)
    text = quick["out"].read_text()
    assert text.count("\n") <= 40
    (entry,) = yaml.safe_load(text)["entries"]
    assert (entry["batch"], entry["temperature"]) == (1, 0.0)
    assert (entry["method"] == "vanilla") == (row["chosen"] == "vanilla")

    status = tune.main(tune.Args(**quick | {"check": quick["out"], "batches": "1,2"}))
    checked = last(capsys)
    assert [one["batch"] for one in checked["settings"]] == [1, 2]
    assert all(one["identical"] == "3/3" for one in checked["settings"])
    assert checked["worst"] == min(one["worst"] for one in checked["settings"])
    assert status == (0 if checked["worst"] >= 0.95 else 1)
