"""Defines the errors of checkpoints, and reads typed values from their JSON files."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

LARGEST = 2**31 - 1
"""Largest size or token id: both are int32 on the device."""
_LARGEST_FLOAT = 3.4028234663852886e38  # largest float32
_SHOWN = 80  # characters of a wrong value in a message
_REMEDY = "Correct the value, or download the file again from where the weights came from."


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file or tensor and the remedy."""


def notice(message: str) -> None:
    """Warns that two facts of a checkpoint contradict, and which of them is used."""
    warnings.warn(message, UserWarning, stacklevel=3)


@dataclasses.dataclass(frozen=True)
class Fields:
    """Reads the keys of one JSON object by type; an error names the file and the key.

    A key that is missing takes the default, and is an error without one. A key that is null is an error, unless
    `null=True`, which reads it like a missing one.

    Attributes:
      values: the object. where: its file, for messages. inside: the key that holds the object, followed by a dot.
      names: the names that this file has for some keys, as `attribute_map` of `transformers`.
    """

    values: Mapping[str, Any]
    where: object
    inside: str = ""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def given(self, key: str) -> bool:
        """Returns whether the key exists and is not null."""
        return self.values.get(self.names.get(key, key)) is not None

    def integer(
        self, key: str, default: int | None = None, *, null: bool = False, least: int = 1, most: int = LARGEST
    ) -> int:
        """Reads an integer from `least` to `most`."""
        return self._read(
            key, default, null, f"an integer from {least} to {most}",
            lambda value: _is_integer(value) and least <= value <= most,
        )  # fmt: skip

    def number(self, key: str, default: float | None = None, *, null: bool = False) -> float:
        """Reads a positive number within float32."""
        return float(self._read(key, default, null, "a positive number", _is_positive))

    def flag(self, key: str, default: bool = False, *, null: bool = False) -> bool:
        """Reads true or false."""
        return self._read(key, default, null, "true or false", lambda value: isinstance(value, bool))

    def text(self, key: str, default: str | None = None, *, null: bool = False) -> str:
        """Reads a string."""
        return self._read(key, default, null, "a string", lambda value: isinstance(value, str))

    def ids(self, key: str) -> tuple[int, ...]:
        """Reads token ids or layer numbers: an integer or a list; empty if the key is missing or null."""
        value = self._read(
            key, (), True, "an integer or a list of integers",
            lambda value: all(_is_integer(item) and abs(item) <= LARGEST for item in _listed(value)),
        )  # fmt: skip
        return tuple(_listed(value))

    def numbers(self, key: str) -> tuple[float, ...]:
        """Reads a list of positive numbers."""
        listed = self._read(
            key, None, False, "a list of positive numbers",
            lambda value: isinstance(value, list | tuple) and all(map(_is_positive, value)),
        )  # fmt: skip
        return tuple(map(float, listed))

    def names_of(self, key: str) -> tuple[str, ...]:
        """Reads a list of strings; empty if the key is missing or null."""
        return tuple(
            self._read(
                key, (), True, "a list of strings",
                lambda value: isinstance(value, list | tuple) and all(isinstance(item, str) for item in value),
            )
        )  # fmt: skip

    def mapping(self, key: str) -> Fields:
        """Reads a nested object; empty if the key is missing or null."""
        value = self._read(key, {}, True, "an object of keys and values", lambda value: isinstance(value, Mapping))
        return Fields(value, self.where, f"{self.inside}{key}.")

    def contradict(self, key: str, source: str, used: Any, value: Any = None) -> None:
        """Warns if a key differs from the value in use, which another source gives.

        Args:
          source: the other source and its verb, such as "the file has". value: replaces the value of the key.
        """
        value = self.values.get(key) if value is None else value
        if value is not None and value != used:
            notice(f"{self.where}: {self.inside}{key} is {shown(value)}, but {source} {shown(used)}: uses the latter.")

    def fail(self, key: str, rule: str, remedy: str = _REMEDY) -> NoReturn:
        """Raises the `CheckpointError` of a key that breaks a rule."""
        name = self.names.get(key, key)
        got = shown(self.values[name]) if name in self.values else "no value"
        raise CheckpointError(f"{self.where}: {self.inside}{name} must be {rule}, got {got}. {remedy}")

    def _read(self, key: str, default: Any, null: bool, rule: str, accepts: Callable[[Any], bool]) -> Any:
        name = self.names.get(key, key)
        value = self.values.get(name)
        if default is not None and (name not in self.values or (null and value is None)):
            return default
        if not accepts(value):
            self.fail(key, rule)
        return value


def shown(value: Any) -> str:
    """Formats a value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return (_is_integer(value) or isinstance(value, float)) and 0 < value <= _LARGEST_FLOAT


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]
