"""The report of result files, and the measurements that it runs where no file is given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_jax.config import ConfigError
from infer.papers import __main__ as papers
from infer.papers import measure
from infer.papers.sources import gather, title
from tests.infer.result_files import bench_cell, bench_file, draft_of, recorded_file, recording

NOISE = (0.3, -0.1, 0.2, -0.4, 0.0)
TASKS = ("gsm8k", "mt_bench")
TIMED = [bench_cell("vanilla", task, 1.0, 1.0) for task in TASKS]
TIMED += [bench_cell("eagle3", task, 2.0, 4.0, NOISE) for task in TASKS]
TIMED += [bench_cell("transformers", "gsm8k", 0.5, None)]


@pytest.fixture
def files(tmp_path):
    """A result file of each program, with data for every section."""
    hot = [bench_cell("eagle3", task, 1.5, 3.0, temperature=1.0) for task in TASKS]
    large = [
        bench_cell(label, "gsm8k", speedup, 3.0, batch=4) for label, speedup in (("vanilla", 1.0), ("eagle3", 1.2))
    ]
    trees = [recording(label, task, tau) for task in TASKS for label, tau in (
        ("eagle3", 2.0), ("eagle2@4x2x7", 2.5), ("eagle2@4x2x7/norerank", 2.25))]  # fmt: skip
    bench = bench_file(tmp_path / "bench.json", *TIMED, *hot, *large)
    return bench, recorded_file(tmp_path / "recorded.json", *trees)


def test_the_report_has_every_section(files, tmp_path, capsys):
    report = papers.main(papers.Args(files=files, out=tmp_path / "out"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    text = Path(report["report"]).read_text(encoding="utf-8")
    assert [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")] == report["sections"]
    assert "| EAGLE-3 | 2.00x, 4.00 | 2.00x, 4.00 | 2.00 | 1.80 to 2.20 | 4.00 | 3.80 to 4.20 | 10 |" in text
    assert "| transformers | 0.50x, - | - | - | - | - | - | 5 |" in text
    assert "| no rerank | 2.25 | 2.25 to 2.25 | -0.25 | -0.25 to -0.25 | 10 |" in text
    assert "| EAGLE-3 | 7 | 2.00 | 2.00 | 2.00 | 2.00 to 2.00 | 10 |" in text
    assert "| EAGLE-3 | 0.60 (0.39 to 0.78) of 20 | 0.10 (0.03 to 0.30) of 20 |" in text
    assert "| EAGLE-3 | 0 | 0.250 | 0.50 of 8 | - | 1.00 of 12 |" in text
    assert "| EAGLE-3 | 200, 2.00x (1.66 to 2.34) | 120, 1.20x (1.20 to 1.20) |" in text
    assert "| EAGLE-2, 4x2x7, expected | 0 | 0.562 | 1.56 | 1.88 |" in text
    assert "| EAGLE-3 | 2.00 | 1.80 to 2.20 | 4.00 | 3.80 to 4.20 | 1.50 | 1.50 to 1.50 | 3.00 |" in text
    drawn = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert drawn == {*report["figures"]} == {
        "speedup_t0.png", "speedup_t1.png", "accepted_t0.png", "accepted_t1.png", "throughput_t0.png",
        "temperature.png", "positions_t0.png", "calibration.png", "n_alpha.png", "expected.png",
    }  # fmt: skip
    for name in drawn:
        assert f"]({name})" in text and (tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG"
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    papers.main(papers.Args(files=files[::-1], out=tmp_path / "again"))
    for path, content in before.items():  # the order of the files changes the list of them alone
        if path.suffix == ".png":
            assert (tmp_path / "again" / path.name).read_bytes() == content


def test_a_section_without_data_is_left_out(tmp_path):
    report = papers.main(papers.Args(files=(bench_file(tmp_path / "b.json", *TIMED),), out=tmp_path / "out"))
    assert report["sections"] == ["What each label is", "Speedup and tau at temperature 0"]


def test_files_merge(tmp_path):
    """Plain decoding is that of the file which timed it at most sizes; of two equal recordings the one with chains."""
    small = bench_file(tmp_path / "1.json", *TIMED)
    large = [bench_cell("vanilla", "gsm8k", 1.0, 1.0, batch=batch, tok_s=70.0) for batch in (1, 2)]
    sources = gather([small, bench_file(tmp_path / "2.json", *large)])
    assert [cell.tok_s for cell in sources.timed if cell.label == "vanilla" and cell.task == "gsm8k"] == [70.0, 70.0]
    bare = recorded_file(tmp_path / "3.json", recording("eagle3", "gsm8k", chains=[]))
    (cell,) = gather([bare, recorded_file(tmp_path / "4.json", recording("eagle3", "gsm8k"))]).recorded
    assert len(cell.chains) == 2
    assert title("eagle3@6x10x59/untempered") == "EAGLE-3, 6x10x59 untempered"


@pytest.mark.parametrize(
    ("other", "options", "message"),
    [
        (bench_cell("eagle3", "gsm8k", 2.1, 4.0), {}, r"1\.json and .*2\.json both have eagle3 on gsm8k at"),
        (bench_cell("pld", "gsm8k", 2.1, 4.0), {"machine": "a server"}, "machine must be the same in .* got 'a lap"),
        (bench_cell("pld", "gsm8k", 2.1, 4.0), {"target": "a/b"}, "target must be the same in .* got None and 'a/b'"),
        (bench_cell("eagle3", "nq", 2.0, 4.0, draft=draft_of("eagle2")), {}, "eagle3 must be the same tree"),
    ],
)  # fmt: skip
def test_files_that_do_not_belong_together_are_refused(other, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        gather([bench_file(tmp_path / "1.json", *TIMED), bench_file(tmp_path / "2.json", other, **options)])


def test_a_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"RESULT\.json must be a file, got .*nowhere\.json\. Give what infer\.bench"):
        papers.main(papers.Args(files=(tmp_path / "nowhere.json",), out=tmp_path / "out"))


@pytest.fixture
def started(monkeypatch):
    """Collects the commands instead of running them."""
    found: list[list[str]] = []

    def run(words, check):
        found.append(words[1:])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(measure.subprocess, "run", run)
    monkeypatch.setattr(papers, "write_report", lambda files, out: None)
    return found


def test_measurements_run_in_order_and_what_was_begun_goes_on(started, tmp_path):
    (tmp_path / "drawn").mkdir()
    (tmp_path / "drawn" / "result.json").write_text("{}")
    papers.main(papers.Args(tasks="chat,math", limit=2, out=tmp_path, only="drawn,batches"))
    batches, drawn = started
    assert (batches[1], drawn[1]) == ("infer.bench", "infer.acceptance")
    assert batches[batches.index("--batches") + 1] == "1,2"
    assert all(words[words.index("--limit") + 1] == "2" and "chat,math" in words for words in started)
    assert [words[-1] == "--resume" for words in started] == [False, True]


def test_a_batch_is_no_larger_than_the_tasks(started, tmp_path):
    """`chat` has ten questions: infer.bench would refuse 64 of them, after hours of other runs."""
    papers.main(papers.Args(tasks="chat,math", out=tmp_path, only="batches"))
    assert started[0][started[0].index("--batches") + 1] == "1,2,4,8"


def test_an_own_target_is_measured_with_the_heads_it_has(started, tmp_path, capsys):
    options = {"target": "/some/model", "eagle3": "/some/head", "tasks": "chat", "limit": 1, "dtype": "bfloat16"}
    papers.main(papers.Args(out=tmp_path, **options))
    labels = {label for words in started for label in words[words.index("--methods") + 1].split(",")}
    assert labels == {"pld", "lookahead", "eagle3", "eagle3@untempered", "eagle3@chain3", "eagle3@8x10x59",
                      "eagle3@8x10x59/untempered", "eagle3@8x10x59/top_p0.9"}  # fmt: skip
    assert all(words[words.index("--dtype") + 1] == "bfloat16" for words in started)
    assert "ablation: without hass, which have no weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "tables"}, "--only must be some of bench, ablation.* got tables"),
        ({"limit": 0}, "limit"),
        ({"tasks": "nowhere"}, "nowhere"),
        ({"dtype": "float8"}, "dtype"),
        ({"target": "/some/model", "only": "ablation"}, "--only must name a measurement whose methods have weights"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(options, message, started, tmp_path):
    with pytest.raises((ValueError, ConfigError), match=message):
        papers.main(papers.Args(**({"out": tmp_path / "out", "tasks": "chat"} | options)))
    assert not started and not (tmp_path / "out").exists()


def test_a_program_that_fails_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"infer.bench ended with status 1: see above"):
        measure.run_all({"bench": ["-m", "infer.bench", "--methods", "nothing"]}, tmp_path)


@pytest.mark.slow
def test_a_report_of_the_bundled_pair(repository, tmp_path):
    command = [sys.executable, "-m", "infer.papers", "--only", "ablation,untempered", "--tasks", "chat", "--limit", "1",
               "--max-new-tokens", "8", "--out", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.strip().splitlines()[-1])
    assert "EAGLE-2's ablation" in Path(made["report"]).read_text(encoding="utf-8")
