"""docs/results.md and what it is made of: the page follows from the result files that are kept beside it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from infer.papers.evidence import distinct

import infer.acceptance
import infer.bench
from docs import tables
from infer.common import recorded, results
from infer.common.programs import arguments
from infer.papers import evidence, repetition, report

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "docs" / "results"
PAGE = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines()
]
REPORT = next(shlex.split(line) for line in COMMANDS if "infer.papers.report" in line)
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
    assert rows - repeated() <= lines_of((FOLDER / "report.md").read_text(encoding="utf-8"))


def repeated() -> set[str]:
    """The one table that no report has, of `infer.papers.repetition`; its own test holds it to what was counted."""
    kept = json.loads((REPOSITORY / "docs" / "measured" / "repetition.json").read_text(encoding="utf-8"))
    return lines_of(evidence.table(repetition.HEAD, repetition.rows(kept["cells"])))


def test_copying_the_tables_anew_changes_nothing():
    """`python -m docs.tables`: what it writes is what is there, and a number that was changed by hand comes back."""
    report = (FOLDER / "report.md").read_text(encoding="utf-8")
    text, unknown = tables.copied(PAGE, report)
    assert text == PAGE
    assert set(unknown) <= repeated()
    cold, hot = (
        PAGE[PAGE.index(f"\n{words}") :].split("\n\n")[1] for words in ("Temperature 0: sp", "Temperature 1:\n")
    )
    for table, heat in ((cold, "0"), (hot, "1")):  # two tables with one head
        assert table in report[report.index(f"## Speedup and tau at temperature {heat}\n") :].split("\n## ")[0]
    assert cold != hot
    with pytest.raises(ValueError, match="the report has 2 such tables, the page 1"):
        tables.copied(PAGE.replace(cold, ""), report)
    row = next(line for line in PAGE.splitlines() if line.startswith("| EAGLE-2, 6x10x59 | 59 |"))
    assert tables.copied(PAGE.replace(row, row.replace("59 | 6", "59 | 7")), report)[0] == PAGE
    timed = list(map(results.read, tables.TIMED))
    assert tables.with_speeds(README.replace("| PLD | 1", "| PLD | 2"), timed) == README


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


def test_the_table_of_the_readme_is_what_was_measured():
    timed = list(map(results.read, tables.TIMED))
    assert all(len({(cell.task, cell.temperature) for cell in result.cells}) == 18 for result in timed)
    assert tables.with_speeds(README, timed) == README
    own = [cell for cell in timed[0].cells if (cell.label, cell.temperature) == ("hass", 0.0)]
    speed, tau = (sum(getattr(cell, name) for cell in own) / 6 for name in ("speedup", "tau"))
    assert f"| HASS | {speed:.2f}x | {tau:.2f} | {sum(cell.identical for cell in own)}/" in README
    assert all(result.machine in " ".join(README.split()) for result in timed)
    assert all(str(result.revision) in README for result in timed)


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


def test_every_file_is_of_committed_code():
    for path in map(REPOSITORY.joinpath, FILES):
        assert "-dirty" not in str(json.loads(path.read_text(encoding="utf-8")).get("revision")), path


def test_the_prose_on_large_batches_follows_from_the_passes():
    """What a cycle costs and brings in plain passes; plain decoding needs one for every token of the longest row."""
    cells = {(cell.method, cell.batch): cell for cell in results.read(FOLDER / "batches.json").cells}
    cost, gain = {}, {}
    for method in ("hass", "eagle3"):
        for batch in (16, 32, 64):
            plain, drafted = cells["vanilla", batch], cells[method, batch]
            cost[method, batch] = round(drafted.ms_per_pass / plain.ms_per_pass, 1)
            gain[method, batch] = round(plain.passes / drafted.passes, 1)
    assert (min(cost.values()), max(cost.values())) == (2.0, 2.3)
    assert (gain["hass", 16], gain["hass", 64]) == (2.7, 2.4)
    spent = {name: [round(cells[name, batch].ms_per_pass) for batch in (16, 32, 64)] for name in ("vanilla", "hass")}
    assert spent == {"vanilla": [8, 16, 32], "hass": [18, 31, 64]}
    says("a plain pass from 8 to 16 to 32 ms and a cycle's from 18 to 31 to 64 ms",
         "a cycle costs 2.0 to 2.3 passes", "from 2.7 plain passes to 2.4")  # fmt: skip


def table(beginning: str) -> dict[str, dict[str, float]]:
    """The page's first table whose header begins so: of every row and column the last number of the cell, tau."""
    lines = PAGE[PAGE.index(f"| {beginning}") :].split("\n\n")[0].splitlines()
    head = [cell.strip() for cell in lines[0].strip("|").split("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    numbers = [[re.findall(r"-?\d+\.\d+", cell) for cell in row] for row in rows]
    return {
        row[0]: {name: float(found[-1]) for name, found in zip(head, cells, strict=True) if found}
        for row, cells in zip(rows, numbers, strict=True)
    }


def says(*sentences: str) -> None:
    words = " ".join(PAGE.split())
    for sentence in sentences:
        assert sentence in words, sentence


def test_the_prose_on_trees_follows_from_the_tables():
    both, no_rerank, no_value, neither = (
        "value and rerank (EAGLE-2)",
        "no rerank",
        "no value: expanded by confidence",
        "neither",
    )
    gains = []
    for heat in (0, 1):
        mean = {name: row["mean"] for name, row in table(f"EAGLE-2, 6x10x59, temperature {heat} ").items()}
        value, rerank = mean[both] - mean[no_value], mean[both] - mean[no_rerank]
        alone = mean[no_rerank] - mean[neither], mean[no_value] - mean[neither]
        gains.append([round(gain, 1) for gain in (value, alone[0], rerank, alone[1])])
    assert gains == [[0.4, 0.8, -0.1, 0.3], [0.4, 0.8, 0.1, 0.5]]
    says("expanding by value gains 0.4 of tau at both temperatures, twice that where there is no rerank",
         "The rerank gains 0.3 and 0.5 in trees that are expanded by confidence",
         "it gains 0.1 at temperature 1 and loses 0.1 at 0")  # fmt: skip
    cold, hot = table("temperature 0 | nodes"), table("temperature 1 | nodes")
    wider = [rows["EAGLE-2, 5x10x25"]["mean"] - rows["EAGLE"]["mean"] for rows in (cold, hot)]
    assert max(abs(wider[0] - 0.14), abs(wider[1] - 0.33)) < 0.011  # the table's means are rounded
    says("the dynamic tree accepts 0.14 more per pass than the static one at temperature 0, 0.33 at 1")
    heads = [(rows["HASS, 6x10x59"]["mean"], rows["EAGLE-2, 6x10x59"]["mean"]) for rows in (cold, hot)]
    assert abs(heads[0][0] - heads[0][1] - 0.3) < 0.011 and heads[1][0] == heads[1][1]
    says("accepts 0.30 more per pass than EAGLE's", f"both accept {heads[1][0]:.2f}")
    order = ["Lookahead", "Medusa, static", "Hydra, static", "EAGLE", "EAGLE-2, 6x10x59", "EAGLE-3, 8x10x59"]
    means_cold, means_hot = ([rows[name]["mean"] for name in order] for rows in (cold, hot))
    assert means_cold == sorted(means_cold)
    assert [*means_hot[:4], means_hot[5], means_hot[4]] == sorted(means_hot)
    blind = {"Medusa": "Medusa, static", "EAGLE": "EAGLE, static", "Hydra++": "Hydra, static",
             "EAGLE-3": "EAGLE-3, 8x10x59", "EAGLE-2": "EAGLE-2, 6x10x59", "HASS": "HASS, 6x10x59"}  # fmt: skip
    found = {name: hot[f"{label} untempered"]["mean"] for name, label in blind.items()}
    assert list(found.values()) == sorted(found.values())
    says(", ".join(f"{name} {tau:.2f}" for name, tau in found.items()) + f"; SpS, whose drafts are drawn and accepted "
         f"as in its paper, has {hot['SpS']['mean']:.2f}")  # fmt: skip
    wide = [rows[f"{label} top_p0.9"]["mean"] - rows[label]["mean"] for rows in (cold, hot)
            for label in ("EAGLE-2, 6x10x59", "EAGLE-3, 8x10x59")]  # fmt: skip
    assert max(map(abs, wide)) < 0.06
    says(
        "Lookahead, Medusa, Hydra, EAGLE, and then EAGLE-2 and EAGLE-3, at temperature 0 "
        "(at 1 the last two change places)"
    )
