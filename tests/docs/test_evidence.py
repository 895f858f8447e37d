"""What docs/evidence.md shows is what the study's result file holds."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from train.demo.study import RUNS
from train.demo.study_report import ABLATION, LOSSES, N_ALPHA, tables

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "evidence.md").read_text(encoding="utf-8")
REPORT = json.loads((DOCS / "evidence" / "study.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("title", tables(REPORT))
def test_a_table_is_that_of_the_results(title):
    assert tables(REPORT)[title] in TEXT


def test_every_run_is_there():
    """None of the comparisons lacks a side, and a run that is not there is said to be missing."""
    found = {record["run"] for record in REPORT["runs"].values()}
    assert {*ABLATION, *N_ALPHA, *LOSSES} <= set(RUNS)
    missing = set(RUNS) - found
    assert all(f"`{name}`" in TEXT for name in missing), missing


def test_the_same_budget_for_each():
    runs = list(REPORT["runs"].values())
    assert len({re.search(r"--steps (\d+)", record["command"])[1] for record in runs}) == 1
    assert len({record["measured"]["prompts"] for record in runs}) == 1
    # Beyond that every command is the same but for what `RUNS` gives it, and the page says what.
    shared = set()
    for record in runs:
        own = set(shlex.split(RUNS[record["run"]].options.format(layers=16)))
        words = record["command"].split()
        options = dict(zip(words[3::2], words[4::2], strict=False))
        assert own <= set(words)
        places = {"--data", "--features", "--seed"}
        shared.add(tuple(sorted((k, v) for k, v in options.items() if k not in own | places)))
    assert len(shared) == 1, shared
    rates = {re.search(r"--rate (\S+)", record["command"])[1] for record in runs if "--rate" in record["command"]}
    assert all(f" {rate} " in TEXT for rate in rates | {"4e-3"})


def test_the_bundled_heads_table_is_that_of_their_runs():
    runs = json.loads((DOCS / "evidence" / "heads.json").read_text(encoding="utf-8"))["runs"]
    for title, record in runs.items():
        (row,) = [line for line in TEXT.splitlines() if line.startswith(f"| {title} |")]
        found = [cell.strip() for cell in row.split("|")[2:6]]
        taus = {line["step"]: f"{line['tau']:.2f}" for line in record["measured"]}
        assert found == [taus.get(step, "-") for step in (600, 1200, 1800, 2400)]
    assert len(runs) == 4


def test_figures_are_there_and_shown():
    shown = set(re.findall(r"!\[[^\]]+\]\(evidence/([\w.]+)\)", TEXT))
    assert shown == {path.name for path in (DOCS / "evidence").glob("*.png")}
    assert {f"study_{name}.png" for name in ("ablation", "n_alpha", "scaling", "losses")} <= shown
