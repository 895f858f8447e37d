"""What the readers of result files share: every refusal says which file, what is wrong with it, and what to do."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def remedy(program: str) -> Iterator[None]:
    """Adds what to do to the message of a `ValueError` about a broken file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}: leave the file out, or measure it anew with {program}") from error


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
      ValueError: no JSON, or no object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON file ({error}): give the result.json that a program wrote") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}: give the result.json that a program wrote")
    return content


def schema_of(content: Mapping[str, Any]) -> str:
    """What a file says that it is, in words."""
    return f"of schema {content['schema']!r}" if "schema" in content else "without a schema"


def check_columns(entry: Any, wanted: Mapping[str, str], where: str) -> None:
    """Refuses what is not one entry per question in every column.

    Args:
      wanted: by column "name", "count", "counts or null" or "seconds" (a list of them per repetition).

    Raises:
      ValueError: naming the column.
    """
    if not isinstance(entry, dict) or set(entry) != set(wanted):
        raise ValueError(f"{where}: by_question must have {', '.join(wanted)}")
    size = len(entry["question"]) if isinstance(entry["question"], list) else -1
    for column, kind in wanted.items():
        value = entry[column]
        if kind == "counts or null" and value is None:
            continue
        rows = value if kind == "seconds" and isinstance(value, list) else [value]
        good = {"name": (str,), "seconds": (int, float)}.get(kind, (int,))
        if not all(isinstance(row, list) and len(row) == size and {*map(type, row)} <= {*good} for row in rows):
            raise ValueError(f"{where}: by_question, {column} is {value!r}, expected one {kind} per question")
    if len(set(entry["question"])) != size:
        raise ValueError(f"{where}: by_question names a question twice")
