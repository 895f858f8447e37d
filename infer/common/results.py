"""Result files of `infer.bench`: one cell per method and group, read strictly.

A group is a task, a temperature and a batch size; its methods were measured in turns. `infer.papers.report` makes tables and
figures of such files.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle_jax.checkpoints.staging import write_whole
from infer.common.drafts import check_draft
from infer.common.reading import check_columns, fields_of, read_object, remedy, schema_of

SCHEMA = "eagle_jax.bench/3"
COLUMNS = {"question": "name", "call": "count", "replies": "count", "tokens": "count", "cycles": "count or null",
           "seconds": "seconds", "plain_tokens": "count", "plain_seconds": "seconds"}  # fmt: skip
"""Of `Cell.by_question`."""


class Group(NamedTuple):
    """What is measured in turns. `temperature` 0 is greedy; `batch` is conversations at a time."""

    task: str
    temperature: float
    batch: int


@dataclasses.dataclass(frozen=True)
class SpecBench:
    """The definitions of Spec-Bench (arXiv:2401.07851, evaluation/speed.py).

    Attributes:
      mean_accepted_tokens: mean over all cycles of accepted drafts + 1, whether or not the reply went on so far; None
        for a method that does not count cycles.
      tok_s: mean over questions of (new tokens of all turns / seconds of all turns).
      speedup: that mean over plain decoding's.
    """

    mean_accepted_tokens: float | None
    tok_s: float
    speedup: float


@dataclasses.dataclass(frozen=True)
class Category:
    """One category of the task's questions; fields as in `Cell`."""

    tau: float | None
    speedup: float
    spec_bench: SpecBench


@dataclasses.dataclass(frozen=True)
class Cell:
    """One method on one group. None stands for what a method does not tell (`transformers` counts no passes).

    Attributes:
      method: name of the papers. label: as asked for, the method and its setting; unique within a group.
      task, temperature, batch: the group.
      questions: conversations. replies: turns that were answered. tokens: new tokens of all replies.
      passes: target passes after the prefills: cycles of the longest row of each batch. cycles: summed over rows.
      seconds: of all calls, prompts included, one sum per repetition. prefill_seconds: of the prefills alone.
      tok_s: median over repetitions of tokens / seconds. tok_s_range: least and most.
      decode_tok_s: median of (tokens - replies) / (seconds - prefill_seconds); None where every reply is one token.
      speedup: median over repetitions of this tok_s over plain decoding's of the same repetition. speedup_range: least
        and most. decode_speedup: the same of decoding alone.
      tau: tokens per cycle, pooled: (tokens - replies) / cycles; None without a cycle.
      accepted: histogram: cycles in which 0, 1, ..., D drafted tokens were accepted.
      ms_per_pass: milliseconds of decoding alone per target pass.
      identical: replies that are plain decoding's. compared: replies that were compared.
      spec_bench: by the definitions of Spec-Bench.
      categories: the same by category, where the task has more than one.
      draft: what was really drafted, with which weights, and by which rule it was accepted (`infer/common/drafts.py`).
      by_question: a list per column, one entry per question: `question` (its name), `call` (those of one number were
        answered in one call), `replies`, `tokens`, `cycles` (null where not counted), `seconds` (a list per
        repetition), and plain decoding's `plain_tokens`, `plain_seconds`.
    """

    method: str
    label: str
    task: str
    temperature: float
    batch: int
    questions: int
    replies: int
    tokens: int
    passes: int | None
    cycles: int | None
    seconds: list[float]
    prefill_seconds: list[float]
    tok_s: float
    tok_s_range: list[float]
    decode_tok_s: float | None
    speedup: float
    speedup_range: list[float]
    decode_speedup: float | None
    tau: float | None
    accepted: list[int] | None
    ms_per_pass: float | None
    identical: int
    compared: int
    spec_bench: SpecBench
    categories: dict[str, Category]
    draft: dict[str, Any]
    by_question: dict[str, Any]

    @property
    def group(self) -> Group:
        """What it was measured in turns with."""
        return Group(self.task, self.temperature, self.batch)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a result file holds.

    Attributes:
      machine: processor or accelerator and versions. revision: of the code, if it is a checkout.
      settings: the arguments of the run. cells: every method of every finished group.
      more: what else the file has, such as `golden` and `groups` (finished groups, and the turns left out of each).
    """

    machine: str
    revision: str | None
    settings: dict[str, Any]
    cells: list[Cell]
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def groups(self) -> list[Group]:
        """Groups that have cells, in the order of the file."""
        return list(dict.fromkeys(cell.group for cell in self.cells))

    @property
    def labels(self) -> list[str]:
        """Methods with their settings, in the order of the file."""
        return list(dict.fromkeys(cell.label for cell in self.cells))

    def cell(self, label: str, group: Group) -> Cell | None:
        """The cell of a method in a group; None where it was not measured."""
        return next((cell for cell in self.cells if cell.label == label and cell.group == group), None)

    def as_json(self) -> dict[str, Any]:
        """The JSON object."""
        own = {"machine": self.machine, "revision": self.revision, "settings": self.settings}
        return {"schema": SCHEMA} | own | {"cells": [dataclasses.asdict(cell) for cell in self.cells]} | self.more


def write(result: Result, path: Path) -> None:
    """Writes a result file as a whole: a reader sees the old one or the new one."""
    write_whole(path, json.dumps(result.as_json(), indent=1, allow_nan=False) + "\n")


def read(path: str | os.PathLike[str]) -> Result:
    """Reads a result file.

    Raises:
      ValueError: naming the file and what is wrong with it: no JSON, another schema, a cell that lacks a field or has
        one of another kind, a method twice in a group.
    """
    content = read_object(path)
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} is {schema_of(content)}, expected {SCHEMA!r}: give a result.json that this version's "
            "infer.bench wrote"
        )
    with remedy("infer.bench"):
        return _result(content, str(path))


def _result(content: dict[str, Any], path: str) -> Result:
    for name, kinds in (("machine", str), ("revision", (str, type(None))), ("settings", dict), ("cells", list)):
        if name not in content or not isinstance(content[name], kinds):
            raise ValueError(f"{path}: {name} is missing or of another kind than infer.bench writes")
    cells = [_cell(entry, f"{path}, cell {number}") for number, entry in enumerate(content["cells"])]
    seen: set[tuple[str, Group]] = set()
    for cell in cells:
        if (cell.label, cell.group) in seen:
            raise ValueError(f"{path}: {cell.label} is there twice for {describe(cell.group)}")
        seen.add((cell.label, cell.group))
    own = ("schema", "machine", "revision", "settings", "cells")
    more = {name: value for name, value in content.items() if name not in own}
    return Result(content["machine"], content["revision"], content["settings"], cells, more)


def merge(results: Sequence[Result]) -> Result:
    """Several files as one: all cells, the settings in which they agree; `more` is dropped.

    Raises:
      ValueError: no result, results of several machines, or a method measured twice on a group.
    """
    if not results:
        raise ValueError("no result is given: name at least one result.json of infer.bench")
    machines = list(dict.fromkeys(result.machine for result in results))
    if len(machines) > 1:
        raise ValueError(f"results of several machines do not belong in one table: {'; '.join(machines)}")
    seen: set[tuple[str, Group]] = set()
    for cell in (cell for result in results for cell in result.cells):
        if (cell.label, cell.group) in seen:
            raise ValueError(f"{cell.label} was measured twice for {describe(cell.group)}: leave one of the files out")
        seen.add((cell.label, cell.group))
    first = results[0].settings
    agreed = {
        name: value
        for name, value in first.items()
        if all(name in result.settings and result.settings[name] == value for result in results)
    }
    revisions = dict.fromkeys(result.revision for result in results if result.revision)
    cells = [cell for result in results for cell in result.cells]
    return Result(machines[0], ", ".join(revisions) or None, agreed, cells)


def describe(group: Group) -> str:
    """A group in words."""
    return f"{group.task} at temperature {group.temperature:g}, batch {group.batch}"


def _spec_bench(entry: Any, where: str) -> SpecBench:
    return SpecBench(**fields_of(SpecBench, entry, where))


def _cell(entry: Any, where: str) -> Cell:
    fields = fields_of(Cell, entry, where)
    if not isinstance(fields["categories"], dict):
        raise ValueError(f"{where}: categories is {fields['categories']!r}, expected an object")
    check_draft(fields["draft"], where)
    sums = {name: fields[name] for name in ("replies", "tokens", "cycles")}
    check_columns(fields["by_question"], COLUMNS, where, sums)
    fields["spec_bench"] = _spec_bench(fields["spec_bench"], f"{where}, spec_bench")
    categories = {}
    for name, value in fields["categories"].items():
        here = f"{where}, category {name}"
        record = fields_of(Category, value, here)
        record["spec_bench"] = _spec_bench(record["spec_bench"], f"{here}, spec_bench")
        categories[name] = Category(**record)
    return Cell(**(fields | {"categories": categories}))
