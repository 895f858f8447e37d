"""Reads result files for the report, merges their cells, and names methods as the papers do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from infer.common.results import Cell, File, Recording, read

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
    "vllm": "vLLM",
}
"""Methods in the order of the papers' tables; others come last."""
BASELINES = ("vanilla", "transformers")
"""Methods that every run of infer.bench times again."""
SAME = ("target", "dtype", "max_new_tokens", "seed")
"""Settings that all files of a report share."""


class Section(NamedTuple):
    """Holds a part of the report. A section without tables has no data and is left out."""

    title: str
    text: str  # explains the tables
    tables: Sequence[str]
    figures: Mapping[str, Callable[[], Any]] = MappingProxyType({})  # by file name what draws them


class Sources(NamedTuple):
    """Holds result files, and their cells in the papers' order: timed and recorded ones."""

    files: Mapping[Path, File]
    timed: list[Cell]
    recorded: list[Recording]


def gather(paths: Sequence[Path]) -> Sources:
    """Reads result files and merges their cells.

    Plain decoding of a task comes from the file that timed it at the most batch sizes.

    Raises:
      ValueError: a file of another kind, or files that do not belong in one table.
    """
    files: dict[Path, File] = {path: read(path) for path in paths}
    shared: dict[Any, tuple[Path, Any]] = {}
    found: dict[Any, Any] = {}
    baselines: dict[Any, dict[Path, list[Cell]]] = {}

    def check_same(what: str, path: Path, value: Any) -> None:
        first, known = shared.setdefault(what, (path, value))
        if known != value:
            raise ValueError(f"{what} must be the same in {first} and {path}, got {known!r:.60} and {value!r:.60}. "
                             "Leave one of the files out.")  # fmt: skip

    for path, file in files.items():
        for name in SAME:
            if name in file.settings:
                check_same(name, path, file.settings[name])
        for cell in file.cells:
            check_same(f"draft of {cell.label}", path, cell.draft)
            if isinstance(cell, Cell):
                check_same("machine", path, file.machine)
            if cell.label in BASELINES:
                baselines.setdefault((cell.label, cell.task, cell.temperature), {}).setdefault(path, []).append(cell)
                continue
            bare = msgspec.structs.replace(cell, chains=[]) if isinstance(cell, Recording) else cell
            check_same(f"{cell.label} on {cell.task} {cell.key}", path, bare)  # one of two may lack the chains
            if getattr(cell, "chains", ()) or cell.key not in found:
                found[cell.key] = cell
    plain = [cell for by_file in baselines.values() for cell in max(by_file.values(), key=len)]
    merged = in_order([*plain, *found.values()])
    timed = [cell for cell in merged if isinstance(cell, Cell)]
    return Sources(files, timed, [cell for cell in merged if isinstance(cell, Recording)])


def in_order(cells: Iterable[Any]) -> list[Any]:
    """Sorts cells by the papers' order of methods, then by label."""
    places = {name: place for place, name in enumerate(NAMES)}
    return sorted(cells, key=lambda cell: (places.get(cell.method, len(places)), cell.label))


def title(label: str) -> str:
    """Returns a label in the papers' words: `eagle3@6x10x59` is EAGLE-3, 6x10x59."""
    name, _, setting = label.partition("@")
    return NAMES.get(name, name) + (f", {setting.replace('/', ' ')}" if setting else "")


def drawn_labels(labels: Iterable[str]) -> list[str]:
    """Returns the labels that figures draw: those with no setting but a tree, else all."""
    labels = list(labels)
    return [label for label in labels if "/" not in label] or labels


def grouped(cells: Iterable[Any], field: str) -> dict[Any, list[Any]]:
    """Groups cells by a field such as "label", in their order; by "temperature" ascending."""
    found: dict[Any, list[Any]] = {}
    for cell in cells:
        found.setdefault(getattr(cell, field), []).append(cell)
    return dict(sorted(found.items())) if field == "temperature" else found
