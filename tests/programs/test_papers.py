"""Checks the report of result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infer.common.results import Positions
from infer.papers import __main__ as papers
from infer.papers import drafting, figures
from infer.papers.sources import gather, title
from tests.programs.conftest import NOISE, bench_cell, bench_file, draft_of, recorded_file, recording

TASKS = ("gsm8k", "mt_bench")
TIMED = [bench_cell("vanilla", task, 1.0, 1.0) for task in TASKS]
TIMED += [bench_cell("eagle3", task, 2.0, 4.0, NOISE) for task in TASKS]
TIMED += [bench_cell("transformers", "gsm8k", 0.5, None)]
ROWS = [
    "| EAGLE-3 | 2.00x, 4.00 | 2.00x, 4.00 | 2.00 | 1.80 to 2.20 | 4.00 | 3.80 to 4.20 | 10 |",
    "| transformers | 0.50x, - | - | - | - | - | - | 5 |",
    "| no rerank | 2.25 | 2.25 to 2.25 | -0.25 | -0.25 to -0.25 | 10 |",
    "| EAGLE-3 | 7 | 2.00 | 2.00 | 2.00 | 2.00 to 2.00 | 10 |",
    "| EAGLE-3 | 0.60 (0.39 to 0.78) of 20 | 0.10 (0.03 to 0.30) of 20 |",
    "| EAGLE-3 | 0 | 0.25 | 0.50 (0.22 to 0.78) of 8 | - | 1.00 (0.76 to 1.00) of 12 |",
    "| EAGLE-3 | 200, 2.00x (1.66 to 2.34) | 120, 1.20x (1.20 to 1.20) |",
    "| EAGLE-2, 4x2x7, expected | 0 | 0.56 (0.39 to 0.72) of 32 | 1.56 | 1.88 |",
    "| EAGLE-3 | 2.00 | 1.80 to 2.20 | 4.00 | 3.80 to 4.20 | 1.50 | 1.50 to 1.50 | 3.00 |",
]
FIGURES = {
    "speedup_t0.png", "speedup_t1.png", "throughput_t0.png", "temperature.png",
    "positions_t0.png", "calibration.png", "n_alpha.png", "expected.png",
}  # fmt: skip


def test_the_report_has_every_section(tmp_path, capsys):
    hot = [bench_cell("eagle3", task, 1.5, 3.0, temperature=1.0) for task in TASKS]
    large = [bench_cell(label, "gsm8k", speedup, 3.0, batch=4) for label, speedup in (("vanilla", 1), ("eagle3", 1.2))]
    trees = [recording(label, task, tau) for task in TASKS for label, tau in (
        ("eagle3", 2.0), ("eagle2@4x2x7", 2.5), ("eagle2@4x2x7/norerank", 2.25))]  # fmt: skip
    files = bench_file(tmp_path / "b.json", *TIMED, *hot, *large), recorded_file(tmp_path / "r.json", *trees)
    report = papers.main(papers.Args(files=files, out=tmp_path / "out"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    text = Path(report["report"]).read_text(encoding="utf-8")
    assert [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")] == report["sections"]
    assert [row for row in ROWS if row not in text] == []
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {*report["figures"]} == FIGURES
    for name in FIGURES:
        assert f"]({name})" in text and (tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG"


def test_a_section_without_data_is_left_out(tmp_path):
    bare = recorded_file(tmp_path / "r.json", recording("pld", "gsm8k", calibration=None, chains=[]))
    timed = "Speedup and tau at temperature 0"
    recorded = ["Tau of recorded trees at temperature 0", "Acceptance by tree position"]
    for file, titles in ((bench_file(tmp_path / "b.json", *TIMED), [timed]), (bare, recorded)):
        report = papers.main(papers.Args(files=(file,), out=tmp_path / "out"))
        assert report["sections"] == ["What each label is", *titles]


def test_files_merge(tmp_path):
    """Plain decoding comes from the file with most batch sizes, and a recording from the file that has its chains."""
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
        (bench_cell("eagle3", "gsm8k", 2.1, 4.0), {}, r"eagle3 on gsm8k .* must be the same in .*1\.json and"),
        (bench_cell("pld", "gsm8k", 2.1, 4.0), {"machine": "a server"}, "machine must be the same in .* got 'a lap"),
        (bench_cell("pld", "gsm8k", 2.1, 4.0), {"target": "a/b"}, "target must be the same in .* got None and 'a/b'"),
        (bench_cell("eagle3", "nq", 2.0, 4.0, draft=draft_of("eagle2")), {}, "draft of eagle3 must be the same"),
    ],
)  # fmt: skip
def test_files_of_different_settings_are_an_error(other, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        gather([bench_file(tmp_path / "1.json", *TIMED), bench_file(tmp_path / "2.json", other, **options)])


def test_a_figure_shows_all_of_every_panel():
    """Panels of one y axis have one scale, whichever has the largest number."""
    figure = figures.lines({"one": {"a": {1: 0.2, 2: 0.3}}, "two": {"a": {1: 0.4, 2: 0.9}}}, "x", "y")
    assert all(axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 0.9 for axes in figure.axes)


def test_a_position_of_few_nodes_is_not_drawn(tmp_path):
    """One accepted of two nodes would be drawn as a rate of a half."""
    tables = Positions([[30, 30], [30, 2]], [[30, 30], [30, 2]], [[15, 3], [6, 1]])
    file = recorded_file(tmp_path / "r.json", recording("eagle3", "gsm8k", positions=tables))
    (draw,) = drafting.positions(gather([file])).figures.values()
    drawn = {line.get_label(): line.get_xydata().tolist() for line in draw().axes[0].lines}
    assert drawn == {"sibling 1": [[1, 0.5], [2, 0.2]], "sibling 2": [[1, 0.1]]}
