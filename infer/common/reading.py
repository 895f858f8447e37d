"""What the readers of result files share: every refusal says which file, what is wrong with it, and what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def is_count(value: Any) -> bool:
    """Whether a JSON value is a number of things."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_counts(value: Any) -> bool:
    """Whether a JSON value is a list of counts."""
    return isinstance(value, list) and all(map(is_count, value))


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a string", lambda value: isinstance(value, str)),
    "int": ("a count", is_count),
    "float": ("a number", is_number),
    "list[float]": ("a list of numbers", lambda value: isinstance(value, list) and all(map(is_number, value))),
    "list[int]": ("a list of counts", is_counts),
}
"""By the annotation of a field, which is a string in the modules that declare them."""


def fields_of(cls: type, entry: Any, where: str) -> dict[str, Any]:
    """The fields of a dataclass; those of which `_KINDS` says nothing are left to the caller.

    Raises:
      ValueError: no object, a field that is missing, unknown, or of another kind than annotated.
    """
    fields = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    check_names(entry, list(fields), where)
    for name, said in fields.items():
        kind, value = said.removesuffix(" | None"), entry[name]
        if kind in _KINDS and not (value is None and kind != said) and not _KINDS[kind][1](value):
            null = " or null" if kind != said else ""
            raise ValueError(f"{where}: {name} is {value!r}, expected {_KINDS[kind][0]}{null}")
    return dict(entry)


def check_names(entry: Any, names: Sequence[str], where: str) -> None:
    """Refuses what is no object with exactly these names.

    Raises:
      ValueError: naming what is missing or unknown.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: {type(entry).__name__} instead of an object")
    if missing := [name for name in names if name not in entry]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if unknown := [name for name in entry if name not in names]:
        near = difflib.get_close_matches(unknown[0], names, n=1)
        raise ValueError(f"{where} has an unknown field {unknown[0]!r}" + (f"; there is {near[0]!r}" if near else ""))


def check_columns(entry: Any, wanted: Mapping[str, str], where: str, sums: Mapping[str, int | None] = {}) -> None:
    """Refuses what is not one entry per question in every column.

    Args:
      wanted: by column "name", "count", "table" (a list of counts, as long for all), either "or null", or "seconds" (a
        list of positive numbers per repetition). sums: what columns of counts add up to; None is not known.

    Raises:
      ValueError: naming the column.
    """
    if not isinstance(entry, dict) or set(entry) != set(wanted):
        raise ValueError(f"{where}: by_question must have {', '.join(wanted)}")
    size = len(entry["question"]) if isinstance(entry["question"], list) else -1
    for column, said in wanted.items():
        value, kind = entry[column], said.removesuffix(" or null")
        if value is None and kind != said:
            continue
        rows = value if kind == "seconds" and isinstance(value, list) and value else [value]
        if not all(isinstance(row, list) and len(row) == size and _of_kind(row, kind) for row in rows):
            raise ValueError(f"{where}: by_question, {column} is {value!r}, expected one {kind} per question")
        if sums.get(column) not in (None, sum(value) if kind == "count" else None):
            raise ValueError(f"{where}: by_question, {column} adds up to {sum(value)} and not {sums[column]}")
    if len(set(entry["question"])) != size:
        raise ValueError(f"{where}: by_question names a question twice")
    if len({len(entry[column]) for column, kind in wanted.items() if kind == "seconds"}) > 1:
        raise ValueError(f"{where}: by_question has other repetitions of plain decoding than of the method")


def _of_kind(row: list[Any], kind: str) -> bool:
    if kind == "name":
        return all(isinstance(one, str) for one in row)
    if kind == "seconds":
        return all(type(one) in (int, float) and 0 < one < math.inf for one in row)
    if kind == "count":
        return all(type(one) is int and one >= 0 for one in row)
    return all(isinstance(one, list) and _of_kind(one, "count") for one in row) and len(set(map(len, row))) <= 1
