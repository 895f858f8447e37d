"""`train.demo.study`: its runs differ in what they say, are made once, and are reported as they were measured."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import types

import numpy as np
import pytest

import train.demo.study as study
import train.head
from eagle_jax.settings import load_yaml
from infer.common.programs import arguments
from train.demo.study_report import tables, write_report


def test_every_run_is_a_run_of_the_trainer(repository):
    """With one thing changed: what the name says."""
    base = load_yaml(train.head.Args, repository / "configs" / "study_demo.yaml")
    seen = {}
    for name, setting in study.RUNS.items():
        words = shlex.split(setting.options.format(layers=16))
        args = arguments(train.head.Args, None, ["--config", str(repository / "configs" / "study_demo.yaml"), *words])
        changed = {field for field in vars(args) if getattr(args, field) != getattr(base, field)}
        assert not changed & {"steps", "rows", "length", "seed", "target"}, "the budget is not the same"
        seen[name] = (setting.eighths, *sorted((field, getattr(args, field)) for field in changed))
    assert len(set(seen.values())) == len(seen), "two runs are the same"
    assert seen["top"] == (8, ("taps", (16,)))


def rows(folder, count):
    path = folder / "shard.jsonl"
    path.write_text("".join(json.dumps({"row": i}) + "\n" for i in range(count)))
    return str(path)


def test_parts_lie_within_each_other(tmp_path):
    parts = study.divide((rows(tmp_path, 100),), tmp_path / "parts")
    texts = [parts[n].read_text().splitlines() for n in study.SHARES]
    assert [len(text) for text in texts] == [12, 25, 50, 100]
    for smaller, larger in itertools.pairwise(texts):
        assert set(smaller) < set(larger)
    assert sorted(json.loads(line)["row"] for line in texts[-1]) == list(range(100))
    assert [json.loads(line)["row"] for line in texts[-1]] != list(range(100)), "the last source would be left out"
    before = {path: path.stat().st_mtime_ns for path in parts.values()}
    assert study.divide((rows(tmp_path, 100),), tmp_path / "parts") == parts
    assert before == {path: path.stat().st_mtime_ns for path in parts.values()}
    with pytest.raises(ValueError, match="7 replies are too few to be divided by eight"):
        study.divide((rows(tmp_path, 7),), tmp_path / "others")


def test_a_run_is_made_once_and_its_failure_is_told(tmp_path, monkeypatch):
    replies, out, calls = tmp_path / "replies.jsonl", tmp_path / "run", tmp_path / "calls"
    replies.write_text("a")
    program = tmp_path / "program"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(calls)!r}, 'a').write('called\\n')\n"
        "if 'fail' in sys.argv: sys.exit('error: --rate 0.0 must be above 0')\nprint('{\"loss\": 2.5}')\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(study.sys, "executable", str(program))
    with pytest.raises(ValueError, match=r"^run: train.head ended with 1: --rate 0.0 must be above 0$"):
        study.train(["fail"], replies, out)
    assert study.train(["--seed", "1"], replies, out) == {"loss": 2.5}
    assert study.train(["--seed", "1"], replies, out) == {"loss": 2.5}
    assert calls.read_text().count("called") == 2
    replies.write_text("b")
    with pytest.raises(ValueError, match="a run of other options or replies: give another --out"):
        study.train(["--seed", "1"], replies, out)


def test_the_interval_is_over_prompts():
    rng = np.random.default_rng(1)
    cycles = rng.integers(20, 60, 400)
    new = cycles * 3 + rng.integers(-20, 21, 400)
    low, high = study.interval(new, cycles)
    assert low < new.sum() / cycles.sum() < high
    assert study.interval(np.full(5, 30), np.full(5, 10)) == (3.0, 3.0)
    # A standard error by the delta method: residuals over the mean number of cycles.
    tau = new.sum() / cycles.sum()
    error = (new - tau * cycles).std() / cycles.mean() / np.sqrt(len(new))
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.1)


def record(run, title, eighths, tau, seed=0):
    measured = {"tau": tau, "interval": [tau - 0.1, tau + 0.2], "by_source": {"gsm8k": tau, "chat": tau - 0.5},
                "n_alpha": [0.7, 0.6, 0.5, 0.4, None, None], "tested": [9, 8, 7, 6, 0, 0]}  # fmt: skip
    return {
        "run": run,
        "title": title,
        "eighths": eighths,
        "seed": seed,
        "trained": {"seconds": 90.0},
        "measured": measured,
    }


def test_the_report_says_what_was_measured(tmp_path):
    runs = {
        "a": record("eagle2", "EAGLE-1/2", 8, 3.25),
        "b": record("eagle3", "EAGLE-3", 8, 3.5),
        "c": record("eagle3-1of8", "EAGLE-3", 1, 2.65),
    }
    report = {"runs": runs, "replies": {"1": 10, "2": 20, "4": 40, "8": 80}}
    found = tables(report)
    whole, scaling = found.values()
    assert "| EAGLE-3 | 0 | **3.50** | 3.40-3.70 | 3.50 | 3.00 | 0.70 | 0.60 | 0.50 | 0.40 | - | - |" in whole
    assert "2.65" not in whole, "a part of the data is another comparison"
    assert "| EAGLE-3 | 1x | 10 | 0 | 2.65 | 2.55-2.85 |\n| EAGLE-3 | 8x | 80 | 0 | 3.50" in scaling
    write_report(report, tmp_path)
    assert json.loads((tmp_path / "study.json").read_text()) == report
    assert whole in (tmp_path / "study.md").read_text()
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {f"study_{name}.png" for name in ("ablation", "n_alpha", "scaling", "losses")}


def test_a_name_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--only eagle4: there is no such run; there are eagle2, eagle3, top"):
        study.main(study.Args(("x",), ("y",), tmp_path, tmp_path, only="eagle2,eagle4"))
    assert not list(tmp_path.iterdir())


def test_a_measurement_is_kept_by_its_prompts_and_stop_tokens():
    """Another tokenizer or chat template makes other prompts."""
    args = types.SimpleNamespace(prompts=2, max_new_tokens=8, max_prompt=64, tree="4,2,7")
    names = {study.measurement(args, {"a": asked}, stops) for asked in ([[1, 2]], [[1, 3]]) for stops in ((1,), (1, 2))}
    assert len(names) == 4
    assert study.measurement(args, {"a": [[1, 2]]}, (1,)) in names
