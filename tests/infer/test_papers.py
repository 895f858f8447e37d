"""One command for all tables of the papers: what it runs, in what order, and what it refuses before it begins."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_jax.config import ConfigError
from infer.papers import __main__
from infer.papers.__main__ import RUNS, Args

PAGE = (Path(__main__.REPOSITORY) / "docs" / "results.md").read_text(encoding="utf-8")


@pytest.fixture
def started(monkeypatch):
    """Collects the commands instead of running them."""
    found: list[list[str]] = []
    monkeypatch.setattr(__main__, "start", found.append)
    return found


def test_the_commands_are_those_of_the_page():
    shown = [shlex.split(line)[1:] for line in PAGE.splitlines() if line.startswith("python -m infer.")]
    own = [__main__.command(name, Args(out=Path("runs"))) for name in RUNS]
    assert [words for words in shown if words[1] in ("infer.bench", "infer.acceptance")] == own


def test_all_run_in_order_and_then_the_report(started, tmp_path):
    __main__.main(Args(tasks="chat", limit=2, out=tmp_path, only="trees,batches"))
    batches, trees, report = started
    assert (batches[1], trees[1], report[1]) == ("infer.bench", "infer.acceptance", "infer.papers.report")
    assert batches[batches.index("--batches") + 1] == "1,2"
    assert all(words[words.index("--limit") + 1] == "2" and "chat" in words for words in (batches, trees))
    made = [str(tmp_path / name / "result.json") for name in ("batches", "trees")]
    assert report[2:] == [*made, str(__main__.STUDY), "--out", str(tmp_path / "report")]


def test_a_batch_is_no_larger_than_the_tasks(started, tmp_path):
    """`chat` has ten questions: infer.bench would refuse 64 of them, after hours of other runs."""
    __main__.main(Args(tasks="chat,math", out=tmp_path, only="batches"))
    assert started[0][started[0].index("--batches") + 1] == "1,2,4,8"


def test_what_was_begun_goes_on(started, tmp_path):
    (tmp_path / "drawn").mkdir()
    (tmp_path / "drawn" / "result.json").write_text("{}")
    __main__.main(Args(tasks="chat", limit=1, out=tmp_path, only="drawn,trees"))
    assert [words[-1] == "--resume" for words in started] == [False, True, False]
    __main__.main(Args(tasks="chat", limit=1, out=tmp_path, only="trees"))
    assert str(tmp_path / "drawn" / "result.json") in started[-1]


def test_an_own_target_is_asked_only_for_what_it_has(started, tmp_path, capsys):
    options = {"target": "/some/model", "eagle3": "/some/head", "tasks": "chat", "limit": 1, "dtype": "bfloat16"}
    __main__.main(Args(out=tmp_path, **options))
    labels = {label for words in started[:-1] for label in words[words.index("--methods") + 1].split(",")}
    assert labels == {"pld", "lookahead", "eagle3", "eagle3@untempered", "eagle3@chain3", "eagle3@8x10x59",
                      "eagle3@8x10x59/untempered", "eagle3@8x10x59/top_p0.9"}  # fmt: skip
    assert all(words[words.index("--dtype") + 1] == "bfloat16" for words in started[:-1])
    assert str(__main__.STUDY) not in started[-1]
    assert "ablation: without hass, of which no weights were given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "tables"}, "--only tables: there are bench, ablation"),
        ({"limit": 0}, "--limit 0 must be at least 1"),
        ({"tasks": "nowhere"}, "nowhere"),
        ({"dtype": "float8"}, "--dtype float8 must be one of"),
        ({"target": "/some/model", "only": "ablation"}, "no weights for any method of --only"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(options, message, started, tmp_path):
    with pytest.raises((ValueError, ConfigError), match=message):
        __main__.main(Args(**({"out": tmp_path / "out", "tasks": "chat"} | options)))
    assert not started and not (tmp_path / "out").exists()


def test_a_program_that_fails_is_named():
    with pytest.raises(ValueError, match=r"infer.papers.report ended with status 1"):
        __main__.start(["-m", "infer.papers.report", "/nowhere/result.json"])


@pytest.mark.slow
def test_a_report_of_the_bundled_pair(repository, tmp_path):
    command = [sys.executable, "-m", "infer.papers", "--only", "ablation,untempered", "--tasks", "chat", "--limit", "1",
               "--max-new-tokens", "8", "--out", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.strip().splitlines()[-1])
    assert "EAGLE-2's ablation" in Path(made["page"]).read_text(encoding="utf-8")
