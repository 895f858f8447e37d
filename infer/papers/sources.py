"""Reads result files for the report, merges their cells, and names methods as the papers do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from infer.common.results import Cell, File, Recorded, Recording, Result, describe, read_as

NAMES = {
    "vanilla": "plain decoding",
    "sps": "SpS",
    "pld": "PLD",
    "lookahead": "Lookahead",
    "medusa": "Medusa",
    "hydra": "Hydra",
    "eagle1": "EAGLE",
    "hass": "HASS",
    "eagle2": "EAGLE-2",
    "eagle3": "EAGLE-3",
    "transformers": "transformers",
}
"""Methods in the order of the papers' tables; others come last."""
BASELINES = ("vanilla", "transformers")
"""Methods that every run of infer.bench times anew."""
SAME = ("target", "dtype", "max_new_tokens", "seed")
"""Settings that all files of a report share."""


class Section(NamedTuple):
    """A part of the report: its heading, its Markdown text, and figures by file name that the text shows."""

    title: str
    text: str
    figures: Mapping[str, Any] = MappingProxyType({})


class Sources(NamedTuple):
    """Result files, and their cells in the papers' order: timed by infer.bench, recorded by infer.acceptance."""

    files: Sequence[tuple[Path, File]]
    timed: list[Cell]
    recorded: list[Recording]


def gather(paths: Sequence[Path]) -> Sources:
    """Reads result files and merges their cells.

    Plain decoding of a task comes from the file that timed it at the most batch sizes.

    Raises:
      ValueError: a file that is no result, or files that do not belong in one table.
    """
    for path in paths:
        if not path.is_file():
            raise ValueError(
                f"RESULT.json must be a file, got {path}. Give what infer.bench or infer.acceptance wrote."
            )
    files: list[tuple[Path, File]] = [(path, read_as(path, Result, Recorded)) for path in paths]
    shared: dict[str, tuple[Path, Any]] = {}
    found: dict[Any, tuple[Path, Any]] = {}
    baselines: dict[Any, dict[Path, list[Cell]]] = {}
    drafts: dict[str, tuple[Path, Any]] = {}
    for path, file in files:
        same = {name: file.settings[name] for name in SAME if name in file.settings}
        same |= {"machine": file.machine} if isinstance(file, Result) else {}
        for name, value in same.items():
            at, known = shared.setdefault(name, (path, value))
            if known != value:
                raise ValueError(f"{name} must be the same in {at} and {path}, got {known!r} and {value!r}. "
                                 "Make a report of each.")  # fmt: skip
        for cell in file.cells:
            at, draft = drafts.setdefault(cell.label, (path, cell.draft))
            if draft != cell.draft:
                raise ValueError(f"{cell.label} must be the same tree and weights in {at} and {path}. Leave one out.")
            if cell.label in BASELINES:
                key = (cell.label, cell.task, cell.temperature)
                baselines.setdefault(key, {}).setdefault(path, []).append(cell)
                continue
            at, known = found.setdefault((type(cell), cell.key), (path, cell))
            if _without_chains(known) != _without_chains(cell):
                raise ValueError(f"{at} and {path} both have {describe(cell)}, with other numbers. Leave one out.")
            if isinstance(cell, Recording) and cell.chains:
                found[type(cell), cell.key] = path, cell
    plain = [cell for by_file in baselines.values() for cell in max(by_file.values(), key=len)]
    merged = in_order([*plain, *(cell for _, cell in found.values())])
    timed = [cell for cell in merged if isinstance(cell, Cell)]
    return Sources(files, timed, [cell for cell in merged if isinstance(cell, Recording)])


def _without_chains(cell: Any) -> Any:
    """Returns a recording without its chains: one of two equal recordings may have followed none."""
    return dataclasses.replace(cell, chains=[]) if isinstance(cell, Recording) else cell


def in_order(cells: Iterable[Any]) -> list[Any]:
    """Sorts cells by the papers' order of methods, then by label."""
    order = list(NAMES)
    return sorted(
        cells, key=lambda cell: (order.index(cell.method) if cell.method in NAMES else len(order), cell.label)
    )


def title(label: str) -> str:
    """Returns a label in the papers' words: `eagle3@6x10x59` is EAGLE-3, 6x10x59."""
    name, _, setting = label.partition("@")
    return NAMES.get(name, name) + (f", {setting.replace('/', ' ')}" if setting else "")


def tasks_of(cells: Iterable[Any]) -> list[str]:
    """Returns the tasks of cells, sorted."""
    return sorted({cell.task for cell in cells})


def foremost(labels: Iterable[str]) -> list[str]:
    """Returns the labels that figures draw: those with no setting but their tree, or all where there are none."""
    labels = list(labels)
    return [label for label in labels if "/" not in label] or labels


def at_temperatures(cells: Iterable[Any]) -> dict[float, list[Any]]:
    """Groups cells by temperature, ascending."""
    found: dict[float, list[Any]] = {}
    for cell in cells:
        found.setdefault(cell.temperature, []).append(cell)
    return dict(sorted(found.items()))


def by_label(cells: Iterable[Any]) -> dict[str, list[Any]]:
    """Groups cells by label."""
    found: dict[str, list[Any]] = {}
    for cell in cells:
        found.setdefault(cell.label, []).append(cell)
    return found
