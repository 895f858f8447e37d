"""Checks the fields of configurations."""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A configuration is invalid; the message names the field, its rule and the remedy."""


_hints = functools.cache(get_type_hints)  # evaluates every annotation, at each call


def check_fields(config: Any, *sizes: str) -> None:
    """Checks every `Literal` field of a dataclass, and that the fields `sizes` are positive integers.

    Raises:
      ConfigError: naming the field.
    """
    cls: Any = type(config)
    for name, hint in _hints(cls).items():
        value, choices = getattr(config, name), get_args(hint)
        if get_origin(hint) is Literal and value not in choices:
            raise ConfigError(
                f"{cls.__name__}.{name} must be one of {', '.join(map(repr, choices))}, got {value!r}. Choose one."
            )
    for name in sizes:
        check_integer(f"{cls.__name__}.{name}", getattr(config, name))


def check_integer(name: str, value: Any, least: int = 1) -> None:
    """Checks an integer.

    Raises:
      ConfigError: `value` is not an integer of at least `least`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}. Give such an integer.")
