"""Result files of `infer.acceptance`: one cell per method, task and temperature, read strictly; no times."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.staging import write_whole
from infer.common.drafts import check_draft
from infer.common.reading import (
    check_columns,
    check_names,
    fields_of,
    is_count,
    is_counts,
    is_number,
    read_object,
    remedy,
    schema_of,
)

SCHEMA = "eagle_jax.acceptance/2"
COUNTS = {"question": "name", "tokens": "count", "cycles": "count"}
COLUMNS = COUNTS | {
    "siblings_reached": "table", "siblings_accepted": "table",
    "bins_count": "table or null", "bins_accepted": "table or null",
}  # fmt: skip
CHAIN = COUNTS | {"tested": "table", "accepted": "table"}
"""Columns of `Cell.by_question`, and of that of a chain."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One method on one task at one temperature.

    Attributes:
      method: name of the papers. label: the method and its setting, as asked for.
      task, temperature: what was answered, and how; 0 is greedy.
      questions: conversations. replies: turns that were answered. tokens: emitted after each reply's first token.
      cycles: target passes, summed over replies. tau: tokens / cycles; None without a cycle.
      positions: `drafted`, `reached`, `accepted`, each [D][K] counts by depth and rank (`eagle_jax.evaluate.positions`).
      nodes: `parents`, `drafted`, `reached`, `accepted`, each [N], of a tree of one shape; None for a dynamic tree.
      calibration: `count`, `confidence`, `accepted`, each [M] by bin of confidence (an empty bin's is null), and
        `error`, the expected calibration error; None where the drafts have no confidence that it could be held to.
      uncalibrated: why `calibration` is None.
      chains: by length: `length`, `tokens`, `cycles`, and `tested`, `accepted`, each [length], the counts of n-alpha,
        with the same `by_question`; empty for a method that drafts no chain of a given length.
      draft: what was really drafted, with which weights, and by which rule it was accepted (`infer/common/drafts.py`).
      by_question: a list per column, one entry per question: `question` (its name), `tokens`, `cycles`; of depth 1 by
        rank `siblings_reached` and `siblings_accepted`; by bin of the calibration `bins_count` and `bins_accepted`,
        null where there is none.
    """

    method: str
    label: str
    task: str
    temperature: float
    questions: int
    replies: int
    tokens: int
    cycles: int
    tau: float | None
    positions: dict[str, list[list[int]]]
    nodes: dict[str, list[int]] | None
    calibration: dict[str, Any] | None
    uncalibrated: str | None
    chains: list[dict[str, Any]]
    draft: dict[str, Any]
    by_question: dict[str, Any]

    @property
    def key(self) -> tuple[str, str, float]:
        """What it is unique by: label, task, temperature."""
        return self.label, self.task, self.temperature


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What such a file holds; `machine` and `revision` are where and by which code it was recorded."""

    machine: str
    revision: str | None
    settings: dict[str, Any]
    cells: list[Cell]

    def as_json(self) -> dict[str, Any]:
        """The JSON object."""
        own = {"schema": SCHEMA, "machine": self.machine, "revision": self.revision, "settings": self.settings}
        return own | {"cells": [dataclasses.asdict(cell) for cell in self.cells]}


def write(recorded: Recorded, path: Path) -> None:
    """Writes a file as a whole: a reader sees the old one or the new one."""
    write_whole(path, json.dumps(recorded.as_json(), indent=1, allow_nan=False) + "\n")


def read(path: str | os.PathLike[str]) -> Recorded:
    """Reads such a file.

    Raises:
      ValueError: naming the file and what is wrong: no JSON, another schema, a cell that lacks a field, is of another
        kind, counts more accepted than reached, or is there twice.
    """
    content = read_object(path)
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} is {schema_of(content)}, expected {SCHEMA!r}: give a result.json that this version's "
            "infer.acceptance wrote"
        )
    with remedy("infer.acceptance"):
        return _recorded(content, str(path))


def _recorded(content: dict[str, Any], path: str) -> Recorded:
    for name, kind in (("machine", str), ("revision", (str, type(None))), ("settings", dict), ("cells", list)):
        if name not in content or not isinstance(content[name], kind):
            raise ValueError(f"{path}: {name} is missing or of another kind than infer.acceptance writes")
    cells = [_cell(entry, f"{path}, cell {number}") for number, entry in enumerate(content["cells"])]
    if twice := [cell for number, cell in enumerate(cells) if cell.key in {other.key for other in cells[:number]}]:
        raise ValueError(f"{path}: {describe(twice[0])} is there twice")
    return Recorded(content["machine"], content["revision"], content["settings"], cells)


def describe(cell: Cell) -> str:
    """A cell in words."""
    return f"{cell.label} on {cell.task} at temperature {cell.temperature:g}"


def _table(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_counts, value)) and len({len(row) for row in value}) <= 1


def _confidences(value: Any) -> bool:
    return isinstance(value, list) and all(entry is None or is_number(entry) for entry in value)


_FORMS: dict[str, dict[str, Any]] = {
    "positions": dict.fromkeys(("drafted", "reached", "accepted"), _table),
    "nodes": {"parents": lambda value: isinstance(value, list)}
    | dict.fromkeys(("drafted", "reached", "accepted"), is_counts),
    "calibration": {
        "count": is_counts,
        "confidence": _confidences,
        "accepted": is_counts,
        "error": lambda value: value is None or is_number(value),
    },
    "chains": {"length": is_count, "tokens": is_count, "cycles": is_count, "tested": is_counts, "accepted": is_counts,
               "by_question": lambda value: isinstance(value, dict)},
}  # fmt: skip


def _cell(entry: Any, where: str) -> Cell:
    entry = fields_of(Cell, entry, where)
    check_draft(entry["draft"], where)
    check_columns(entry["by_question"], COLUMNS, where, {name: entry[name] for name in ("tokens", "cycles")})
    if not isinstance(entry["chains"], list):
        raise ValueError(f"{where}: chains is {entry['chains']!r}, expected a list")
    for name, form in _FORMS.items():
        values = entry[name] if name == "chains" else [entry[name]]
        for value in values:
            if value is None and name in ("nodes", "calibration"):
                continue
            check_names(value, list(form), f"{where}, {name}")
            if wrong := [part for part, test in form.items() if not test(value[part])]:
                raise ValueError(
                    f"{where}, {name}: {wrong[0]} is {value[wrong[0]]!r}, which infer.acceptance writes not"
                )
            if len({len(part) for part in value.values() if isinstance(part, list)}) > 1:
                raise ValueError(f"{where}, {name}: its lists differ in length")
    tables = entry["positions"]["accepted"], entry["positions"]["reached"]
    for accepted, reached in zip(*tables, strict=True):
        _no_more(accepted, reached, "reached", f"{where}, positions")
    if (nodes := entry["nodes"]) is not None:
        _no_more(nodes["accepted"], nodes["reached"], "reached", f"{where}, nodes")
    for chain in entry["chains"]:
        _no_more(chain["accepted"], chain["tested"], "tested", f"{where}, chains")
        check_columns(chain["by_question"], CHAIN, f"{where}, chains", {k: chain[k] for k in ("tokens", "cycles")})
        if chain["length"] != len(chain["tested"]):
            raise ValueError(f"{where}, chains: {len(chain['tested'])} positions of a chain of {chain['length']}")
    if (bins := entry["calibration"]) is not None:
        _no_more(bins["accepted"], bins["count"], "count", f"{where}, calibration")
        if any(count and mean is None for count, mean in zip(bins["count"], bins["confidence"], strict=True)):
            raise ValueError(f"{where}, calibration: a bin with nodes has no confidence")
    if (entry["calibration"] is None) == (entry["uncalibrated"] is None):
        raise ValueError(f"{where}: either calibration or the reason why there is none, uncalibrated, must be null")
    return Cell(**entry)


def _no_more(accepted: Sequence[int], of: Sequence[int], name: str, where: str) -> None:
    if len(accepted) != len(of) or any(part > whole for part, whole in zip(accepted, of, strict=True)):
        raise ValueError(f"{where}: more accepted than {name}")
