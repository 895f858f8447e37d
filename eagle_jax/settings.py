"""Reads YAML files and mappings into dataclasses; an unknown or ill-typed key is an error."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from eagle_jax.config import ConfigError

T = TypeVar("T")


def from_mapping(cls: type[T], values: Mapping[str, Any], *, where: str = "config") -> T:
    """Builds the dataclass `cls` from `values`, recursing into dataclass fields.

    Raises:
      ConfigError: for an unknown key (naming the nearest known one), or a missing or ill-typed value.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(str(key), list(fields), n=1)
            nearest = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(fields)}."
            raise ConfigError(f"{where}: unknown key {key!r}. {nearest}")
    built = {key: _fit(hints[key], value, f"{where}: {key}") for key, value in values.items()}
    required = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in required if name not in built]:
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    try:
        return cls(**built)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _fit(hint: Any, value: Any, where: str) -> Any:
    """Converts `value` to the annotated type `hint`, unless the conversion could hide a mistake."""
    origin, arms = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):  # here always `X | None`
        return None if value is None else _fit(next(arm for arm in arms if arm is not type(None)), value, where)
    if origin is Literal:
        if value in arms:
            return value
        raise ConfigError(f"{where}={value!r} must be one of {', '.join(map(repr, arms))}")
    if origin is tuple and isinstance(value, list | tuple):  # here always `tuple[X, ...]`
        return tuple(_fit(arms[0], entry, f"{where}[{index}]") for index, entry in enumerate(value))
    if origin is tuple:
        found = "is empty: it must be a list" if value is None else f"={value!r} must be a list, such as [{value}]"
        raise ConfigError(f"{where}{' ' * (value is None)}{found}")
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_mapping(hint, value, where=where)  # type: ignore[arg-type]
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)  # YAML 1.1 reads 1e-4 as a string
    plain = origin or hint
    if hint is Any or (
        isinstance(plain, type) and isinstance(value, plain) and (hint is bool or not isinstance(value, bool))
    ):
        return value
    expected = hint.__name__ if isinstance(hint, type) else str(hint)
    quoted = "" if hint is not str or isinstance(value, Mapping | list | None) else ": put it in quotes"
    raise ConfigError(f"{where}={value!r} must be {expected}, found {type(value).__name__}{quoted}")


class _UniqueKeyLoader(yaml.SafeLoader):
    """Raises on a repeated key; PyYAML itself would keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: {key!r} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_yaml(cls: type[T], path: str | Path) -> T:
    """Reads a YAML file into the dataclass `cls`; an unknown key is an error that names the nearest known one.

    Raises:
      ConfigError: the file is missing, is no YAML, is not a mapping, or does not fit `cls`.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)  # a SafeLoader
    except (yaml.YAMLError, ConfigError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found {type(values).__name__}")
    return from_mapping(cls, values, where=str(path))
