"""What a method really drafted, as result files record it: the same label may stand for another tree elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from eagle_jax.config import static_depths

FIELDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "lookup": ("length", "ngram"),
    "lookahead": ("ngram", "window", "guesses"),
    "chain": ("depth",),
    "static": ("parents",),
    "dynamic": ("depth", "top_k", "nodes", "rank_by", "rerank"),
    "own": ("depth", "nodes"),
}
"""By kind, what describes it besides `COMMON`."""
OPTIONAL = {"lookup": ("shortest", "latest")} | dict.fromkeys(("chain", "static", "dynamic"), ("top_p",))
"""By kind, what it may have as well, where it is not as usual."""
COMMON = ("kind", "rows", "weights", "ranking", "rule")
"""Rows of a target pass; weights, or null; at temperature > 0 what candidates are ranked by (null: they are drawn, or
there is no choice); the acceptance rule."""
PLAIN: dict[str, Any] = {"kind": "none", "rows": 1, "weights": None, "ranking": None, "rule": "deterministic"}
"""Nothing is drafted."""


def check_draft(draft: Any, where: str) -> None:
    """Refuses what describes no drafts.

    Raises:
      ValueError: naming the field.
    """
    if not isinstance(draft, dict) or not isinstance(draft.get("kind"), str) or draft["kind"] not in FIELDS:
        raise ValueError(f"{where}: draft is {draft!r}, expected an object with a kind of {', '.join(FIELDS)}")
    wanted = {*COMMON, *FIELDS[draft["kind"]]}
    if odd := sorted(wanted ^ (set(draft) - {*OPTIONAL.get(draft["kind"], ())})):
        raise ValueError(f"{where}: draft lacks or has unknown {', '.join(odd)}")
    for name, value in draft.items():
        if not _KINDS.get(name, lambda number: type(number) is int and number > 0)(value):
            raise ValueError(f"{where}: draft has {name} {value!r}, which no benchmark writes")


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _parents(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"(-1|\d+)( (-1|\d+))*", value))


_KINDS: dict[str, Callable[[Any], bool]] = {
    "kind": _text, "rule": _text, "rank_by": _text, "parents": _parents,
    "weights": lambda value: value is None or isinstance(value, str),
    "ranking": lambda value: value is None or isinstance(value, str),
    "rerank": lambda value: isinstance(value, bool),
    "latest": lambda value: value is True,
    "top_p": lambda value: type(value) in (int, float) and 0 < value < 1,
}  # fmt: skip
"""By field; all others are positive counts."""


def tree_words(draft: dict[str, Any]) -> str:
    """The tree, short enough for a table."""
    kind = draft["kind"]
    if kind == "none":
        return "nothing"
    if kind == "lookup":
        size = f"{draft['shortest']} to {draft['ngram']}" if "shortest" in draft else f"{draft['ngram']} at most"
        place = ", where it stood last" if "latest" in draft else ""
        return f"{draft['length']} tokens behind an n-gram of {size}{place}"
    if kind == "lookahead":
        return f"N={draft['ngram']}, W={draft['window']}, G={draft['guesses']}"
    if kind == "own":
        return f"{draft['nodes']} nodes in {draft['depth']} levels"
    if kind == "chain":
        text = f"chain of {draft['depth']}"
    elif kind == "static":
        depths = static_depths(_numbers(draft["parents"]))
        levels = "+".join(str(depths.count(level)) for level in range(1, max(depths) + 1))
        text = f"static, {len(depths)} nodes: {levels}"
    else:
        text = f"dynamic, depth {draft['depth']}, top {draft['top_k']}, {draft['nodes']} nodes"
        text += " by confidence" if draft["rank_by"] == "confidence" else ""
        text += "" if draft["rerank"] else ", no rerank"
    return text + (f", top-p {draft['top_p']:g}" if "top_p" in draft else "")


def rule_words(draft: dict[str, Any]) -> str:
    """The acceptance rule, and by what a deterministic one ranks at temperature > 0."""
    return draft["rule"] + (f", ranked by {draft['ranking']}" if draft["ranking"] else "")


def written(parents: Sequence[int]) -> str:
    """A static tree as `parents` holds it."""
    return " ".join(map(str, parents))


def _numbers(parents: str) -> list[int]:
    return [int(parent) for parent in parents.split()]
