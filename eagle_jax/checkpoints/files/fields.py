"""Reads typed values from the JSON files of a checkpoint; an error names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from eagle_jax.checkpoints.files.errors import CheckpointError

LARGEST = 2**31 - 1
"""Largest size or token id: both are int32 on the device."""
_LARGEST_FLOAT = 3.4028234663852886e38  # of float32
_SHOWN = 80  # characters of a wrong value in a message
_REMEDY = "Correct the value, or fetch the file again from where the weights came from."


class Fields:
    """Reads the keys of one JSON object by type.

    A key that is missing takes the default, and is an error without one. A key that is null is an error, unless
    `null=True`, which reads it like a missing one.

    Attributes:
      values: the object. where: its file, for messages. inside: the key that holds the object, followed by a dot.
    """

    def __init__(self, values: Mapping[str, Any], where: object, inside: str = "") -> None:
        self.values = values
        self.where = where
        self.inside = inside

    def given(self, key: str) -> bool:
        """Returns whether the key exists and is not null."""
        return self.values.get(key) is not None

    def integer(
        self, key: str, default: int | None = None, *, null: bool = False, least: int = 1, most: int = LARGEST
    ) -> int:
        """Reads an integer from `least` to `most`."""
        if self._takes_default(key, default, null):
            return default  # type: ignore[return-value]
        value: Any = self.values.get(key)
        if not _is_integer(value) or not least <= value <= most:
            too_large = _is_integer(value) and value > most
            self.fail(key, f"an integer from {least} to {most}" if too_large or least != 1 else "a positive integer")
        return value

    def number(self, key: str, default: float | None = None, *, null: bool = False) -> float:
        """Reads a positive number within float32."""
        if self._takes_default(key, default, null):
            return default  # type: ignore[return-value]
        value: Any = self.values.get(key)
        if not (_is_integer(value) or isinstance(value, float)) or not 0 < value <= _LARGEST_FLOAT:
            self.fail(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False, *, null: bool = False) -> bool:
        """Reads true or false."""
        if self._takes_default(key, default, null):
            return default
        value = self.values.get(key)
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None, *, null: bool = False) -> str:
        """Reads a string."""
        if self._takes_default(key, default, null):
            return default  # type: ignore[return-value]
        value = self.values.get(key)
        if not isinstance(value, str):
            self.fail(key, "a string")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Reads token ids or layer numbers: an integer or a list; empty if the key is missing or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        listed = value if isinstance(value, list | tuple) else [value]
        if not all(_is_integer(item) and abs(item) <= LARGEST for item in listed):
            self.fail(key, "an integer or a list of integers")
        return tuple(listed)

    def names(self, key: str) -> tuple[str, ...]:
        """Reads a list of strings; empty if the key is missing or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            self.fail(key, "a list of strings")
        return tuple(value)

    def mapping(self, key: str) -> Fields:
        """Reads a nested object; empty if the key is missing or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.fail(key, "an object of keys and values")
        return Fields(value or {}, self.where, f"{self.inside}{key}.")

    def fail(self, key: str, rule: str, remedy: str = _REMEDY) -> NoReturn:
        """Raises the error of a key that breaks a rule.

        Raises:
          CheckpointError: always.
        """
        got = shown(self.values[key]) if key in self.values else "no value"
        raise CheckpointError(f"{self.where}: {self.inside}{key} must be {rule}, got {got}. {remedy}")

    def _takes_default(self, key: str, default: object, null: bool) -> bool:
        if default is None:
            return False
        return key not in self.values or (null and self.values[key] is None)


def shown(value: Any) -> str:
    """Formats a value for a message, shortened."""
    if _is_integer(value) and abs(value) > 10**_SHOWN:  # Python does not print integers of many thousand digits
        return "an integer of more than 80 digits"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
