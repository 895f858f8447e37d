"""Writes output in shards. A process killed at any moment neither loses nor repeats a row.

A shard is `shard-00000.jsonl` when it is whole. Until then `shard-00000.jsonl.partial` is its journal: a line for every
batch of source rows, with their texts. The settings of the run are in `settings.json`.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints import TEMPORARY, named_errors, write_whole

Report = dict[str, Any]
"""Counts by name, and dicts of counts by reason."""


def add_reports(*reports: Mapping[str, Any]) -> Report:
    """Adds up reports, name by name."""
    total: Report = {}
    for report in reports:
        for name, value in report.items():
            if isinstance(value, Mapping):
                total[name] = dict(collections.Counter(total.get(name, {})) + collections.Counter(value))
            else:
                total[name] = total.get(name, 0) + value
    return total


def remember(directory: Path, settings: Mapping[str, Any]) -> None:
    """Records the settings of a directory, or checks that the recorded ones are equal.

    Raises:
      ValueError: it was begun with other settings, which are named.
    """
    path, current = directory / "settings.json", json.loads(json.dumps(settings))
    if not path.is_file():
        write_whole(path, json.dumps(current, indent=2) + "\n")
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    if names := [name for name in {**found, **current} if found.get(name) != current.get(name)]:
        changed = "; ".join(f"{name} was {found.get(name)!r} and is now {current.get(name)!r}" for name in names)
        raise ValueError(f"settings must be those of {directory}, got others ({changed}). Choose another directory.")


class Shard:
    """One shard of a directory.

    Attributes:
      path: of the whole shard. done: source rows whose texts are on disk.
    """

    def __init__(self, directory: Path, number: int) -> None:
        self.path = directory / f"shard-{number:05d}.jsonl"
        self._journal = self.path.with_name(self.path.name + ".partial")
        self._report = self.path.with_suffix(".json")
        leftovers = directory.glob(f"{TEMPORARY}{self.path.stem}.json*")  # left by a killed `write_whole`
        for leftover in [*leftovers, *[self._journal] * self.whole]:
            leftover.unlink(missing_ok=True)
        self.done = {row for entry in self._entries() for row in entry["rows"]}

    @property
    def whole(self) -> bool:
        """Returns whether every row of the shard is done."""
        return self.path.is_file()

    def report(self) -> Report:
        """Returns the sum of the reports of its batches."""
        if self.whole:
            return json.loads(self._report.read_text(encoding="utf-8"))
        return add_reports(*(entry["report"] for entry in self._entries()))

    def append(self, rows: list[int], texts: list[dict[str, Any]], report: Report) -> None:
        """Writes a batch to disk before it returns."""
        line = json.dumps({"rows": rows, "texts": texts, "report": report})
        with named_errors(self._journal), self._journal.open("ab") as journal:
            journal.write(line.encode() + b"\n")
            journal.flush()
            os.fsync(journal.fileno())
        self.done |= set(rows)

    def finish(self) -> None:
        """Converts the journal to the finished shard."""
        write_whole(self._report, json.dumps(self.report()) + "\n")
        texts = (json.dumps(text) + "\n" for entry in self._entries() for text in entry["texts"])
        write_whole(self.path, "".join(texts))  # from here on it is whole
        self._journal.unlink(missing_ok=True)

    def _entries(self) -> list[dict[str, Any]]:
        """Reads the journal, without a last line that a kill cut off."""
        if not self._journal.is_file():
            return []
        whole, newline, torn = self._journal.read_bytes().rpartition(b"\n")
        if torn:
            os.truncate(self._journal, len(whole + newline))
        return [json.loads(line) for line in whole.splitlines() if line]
