"""docs/results.md and what it is made of: the page follows from the result files that are kept beside it."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

import infer.acceptance
import infer.bench
from eagle_jax.programs import arguments
from infer import recorded, report, results
from infer.cells import means
from infer.evidence import ORDER, distinct, title

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "docs" / "results"
PAGE = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines()
]
REPORT = next(shlex.split(line) for line in COMMANDS if "infer.report" in line)
"""The command that makes the report, in words."""
FILES = [word for word in REPORT if word.endswith(".json")]


def lines_of(text: str) -> set[str]:
    return {line for line in text.splitlines() if line.startswith("|")}


def test_the_report_is_made_of_the_kept_files(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    made = report.main(report.Args(tuple(map(Path, FILES)), tmp_path))
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == (FOLDER / "report.md").read_text(encoding="utf-8")
    assert set(made["figures"]) == {path.name for path in FOLDER.glob("*.png")}
    assert made["missing"] == []


def test_every_table_of_the_page_is_the_reports():
    rows = lines_of(PAGE)
    assert len(rows) > 30
    assert rows <= lines_of((FOLDER / "report.md").read_text(encoding="utf-8"))


def test_every_kept_file_was_written_by_a_command_of_the_page():
    """What a command sets, and what it leaves at its default, is how its file was measured."""
    programs = {
        "infer.bench": (infer.bench.Args, results.read),
        "infer.acceptance": (infer.acceptance.Args, recorded.read),
    }
    seen = set()
    for line in COMMANDS:
        program, *words = shlex.split(line)[2:]
        if program not in programs:
            continue
        kind, read = programs[program]
        args = arguments(kind, None, words)
        path = FOLDER / f"{args.out.name}.json"
        found = {
            name: value for name, value in read(path).settings.items() if name not in ("data", "questions", "draws")
        }
        assert found == {name: dataclasses.asdict(args)[name] for name in found}, path
        seen.add(f"docs/results/{path.name}")
    assert seen == {path for path in FILES if Path(path).parent.name == "results"}


def readme_rows(*timed: results.Result) -> list[str]:
    """The rows of the README's table: each method from the first run that timed it."""
    rows = {}
    for result, label in [(run, name) for run in timed for name in run.labels]:
        if title(label) in rows:
            continue
        columns = []
        for temperature in (0.0, 1.0):
            cells = [cell for cell in result.cells if (cell.label, cell.temperature) == (label, temperature)]
            speedup, tau = means(cells)
            texts = f"{sum(cell.identical for cell in cells)}/{sum(cell.compared for cell in cells)}"
            columns += [f"{speedup:.2f}x", "-" if tau is None else f"{tau:.2f}", texts]
        rows[title(label)] = f"| {title(label)} | {' | '.join(columns)} |"
    return [rows[name] for name in map(title, ORDER) if name in rows]


def test_the_table_of_the_readme_is_what_was_measured():
    timed = [results.read(FOLDER / f"{name}.json") for name in ("bench", "eagle2")]
    assert all(len({(cell.task, cell.temperature) for cell in result.cells}) == 18 for result in timed)
    head = README.index("| method |")
    table = README[head:].split("\n\n")[0].splitlines()[2:]
    assert table == readme_rows(*timed)
    assert all(result.machine in " ".join(README.split()) for result in timed)


def test_what_the_noise_in_view_is_worth():
    """The README's sentence on `sampled_ranking`: tau over that of drafts ranked without it, task by task."""
    blind, seeing = (results.read(FOLDER / f"{name}.json") for name in ("untempered", "bench"))
    ratios: dict[float, list[float]] = {}
    for cell in blind.cells:
        if cell.method in ("hass", "eagle3"):
            ratios.setdefault(cell.temperature, []).append(seeing.cell(cell.method, cell.group).tau / cell.tau)
    ends = {heat: (round(min(found), 1), round(max(found), 1)) for heat, found in ratios.items()}
    assert ends == {1.0: (1.4, 1.6), 1.5: (1.9, 2.1)}
    assert "1.4 to 1.6 times as many at temperature 1 and twice as many at 1.5" in " ".join(README.split())


@pytest.mark.parametrize("figure", sorted(path.name for path in FOLDER.glob("*.png")))
def test_every_figure_is_shown(figure):
    assert f"({figure})" in (FOLDER / "report.md").read_text(encoding="utf-8")


def test_one_machine_one_code():
    """All speeds are of one machine, and of one revision but for tables of their own, at temperature 0 alone."""
    paths = [path for path in FOLDER.glob("*.json") if results.SCHEMA in path.read_text()[:200]]
    timed = {path.stem: results.read(path) for path in paths}
    assert len(timed) >= 5
    assert len(distinct(result.machine for result in timed.values())) == 1
    alone = timed.pop("batches"), timed.pop("ablation")
    assert {cell.temperature for result in alone for cell in result.cells} == {0.0}
    assert len(distinct(result.revision for result in timed.values())) == 1
    assert all("draws" in result.more for result in timed.values() if any(cell.temperature for cell in result.cells))
