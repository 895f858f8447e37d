"""Loads a method of the user's own: `own:module:function`, such as own:my_drafter:pair_lookup."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import eagle_jax

PREFIX = "own:"


def is_own(method: str) -> bool:
    """Returns whether a method is a function of the user."""
    return method.startswith(PREFIX)


def find(method: str) -> Callable[[eagle_jax.Target], Any]:
    """Imports the function that takes a target and returns a `Drafter` or `BoundDrafter`.

    Raises:
      ValueError: no such module, also inside it, or no such function of one argument.
    """
    _, module, function = method.split(":")
    try:
        made = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"module of {method!r} must be importable, got: {error}. "
                         "Run in its folder, or add that to PYTHONPATH.") from error  # fmt: skip
    try:
        inspect.signature(made).bind(None)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"{method!r} must take one argument, the target, got {made} ({error}). Mend it.") from error
    return made  # type: ignore[return-value]


def bind(method: str, target: eagle_jax.Target) -> eagle_jax.BoundDrafter:
    """Returns the method bound to `target`.

    Raises:
      ValueError: as `find`, or the function returns no drafter.
    """
    made = find(method)(target)
    if isinstance(made, eagle_jax.BoundDrafter):
        return made
    if not isinstance(made, eagle_jax.Drafter):
        raise ValueError(f"{method!r} must return a Drafter or BoundDrafter, got {type(made).__name__}. Mend it.")
    return eagle_jax.BoundDrafter.of(made, target, name=method)
