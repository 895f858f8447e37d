"""Reads YAML files and mappings into dataclasses. An unknown key or a wrong type is an error."""

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
      ConfigError: a key is unknown (the message has the nearest one) or missing, or a value has the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(str(key), list(fields), n=1)
            remedy = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(fields)}."
            raise ConfigError(f"{where}: key must be a known one, got {key!r}. {remedy}")
    built = {key: _fit(hints[key], value, f"{where}: {key}") for key, value in values.items()}
    absent = [field for name, field in fields.items() if name not in built]
    required = [field.name for field in absent if field.default is field.default_factory is dataclasses.MISSING]
    if required:
        raise ConfigError(f"{where}: the keys {', '.join(required)} must be given, got none. Add them.")
    try:
        return cls(**built)
    except ValueError as error:  # ConfigError is one
        raise ConfigError(f"{where}: {error}") from error


def _fit(hint: Any, value: Any, where: str) -> Any:
    """Converts `value` to the annotated type `hint`; only conversions that hide no mistake are done."""
    origin, arms = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):  # here always `X | None`
        return None if value is None else _fit(next(arm for arm in arms if arm is not type(None)), value, where)
    if origin is Literal:
        if value in arms:
            return value
        raise ConfigError(f"{where} must be one of {', '.join(map(repr, arms))}, got {value!r}. Choose one.")
    if origin is tuple and isinstance(value, list | tuple):  # here always `tuple[X, ...]`
        return tuple(_fit(arms[0], entry, f"{where}[{index}]") for index, entry in enumerate(value))
    if origin is tuple:
        example = "Leave it out." if value is None else f"Write [{value}]."
        raise ConfigError(f"{where} must be a list, got {value!r}. {example}")
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
    quoted = hint is str and not isinstance(value, Mapping | list | None)
    remedy = "Put it in quotes." if quoted else "Give a value of this type."
    raise ConfigError(f"{where} must be {expected}, got {value!r} ({type(value).__name__}). {remedy}")


class _UniqueKeyLoader(yaml.SafeLoader):
    """Raises on a repeated key, of which PyYAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"line {line}: {key!r} must be given once, got it twice. Remove one.")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_yaml(cls: type[T], path: str | Path) -> T:
    """Reads a YAML file into the dataclass `cls`.

    Raises:
      ConfigError: the file cannot be read, is not a mapping in YAML, or does not fit `cls`.
    """
    path = Path(path)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)  # a SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ConfigError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: {' '.join(reason.split())}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} must be a mapping of keys to values, got a {type(values).__name__}. Use keys.")
    return from_mapping(cls, values, where=str(path))
