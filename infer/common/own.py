"""Loads a method of the user's own: `own:module:function`, such as own:my_drafter:pair_lookup."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import eagle_jax
from eagle_jax.core import verify
from eagle_jax.runtime.drafters import TreeDrafter
from infer.common import drafts

PREFIX = "own:"


def is_own(method: str) -> bool:
    """Returns whether a method is a function of the user."""
    return method.startswith(PREFIX)


def check_name(text: str) -> None:
    """Raises on a label that names no function.

    Raises:
      ValueError: another format than own:module:function, or a setting.
    """
    if "@" in text:
        raise ValueError(f"{text!r}: a method of your own takes no setting: name a function for each")
    if not re.fullmatch(r"own:[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
        raise ValueError(f"{text!r} must read own:module:function, such as own:my_drafter:pair_lookup")


def find(method: str) -> Callable[[eagle_jax.Target], Any]:
    """Imports the function that takes a target and returns a `Drafter` or `BoundDrafter`.

    Raises:
      ValueError: no such module (`import` searches the working directory first), or no such function in it.
    """
    _, module, function = method.split(":")
    try:
        made = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise ValueError(
            f"{method!r}: there is no module {module}: run in the folder of {module.partition('.')[0]}.py, or put "
            "that into PYTHONPATH"
        ) from error
    if not callable(made):
        raise ValueError(f"{method!r}: {module} has no function {function}")
    return made


def bind(method: str, target: eagle_jax.Target) -> eagle_jax.BoundDrafter:
    """Returns the method bound to `target`.

    Raises:
      ValueError: as `find`; the function takes other arguments, or returns no drafter.
    """
    function = find(method)
    try:
        inspect.signature(function).bind(target)
    except TypeError as error:
        raise ValueError(f"{method!r} must take one argument, the target ({error})") from error
    made = function(target)
    if isinstance(made, eagle_jax.BoundDrafter):
        return made
    if not isinstance(made, eagle_jax.Drafter):
        raise ValueError(
            f"{method!r} returned a {type(made).__name__}, expected an eagle_jax.Drafter or BoundDrafter: a function "
            "of the target that makes the method"
        )
    return eagle_jax.BoundDrafter.of(made, target, name=method)


def draft(bound: eagle_jax.BoundDrafter) -> dict[str, Any]:
    """Describes its drafts as result files record them."""
    own = bound.plain
    rule = "deterministic" if own.verify in (None, verify.deterministic) else "its own"
    if isinstance(bound, TreeDrafter):
        rule = bound.tree.verification
    return drafts.PLAIN | {
        "kind": "own", "rows": own.num_nodes + 1, "depth": own.depth, "nodes": own.num_nodes, "rule": rule
    }  # fmt: skip
