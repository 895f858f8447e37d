"""Describes what a method drafted, as result files record it: the same label may be another tree elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict

from eagle_jax.config import static_depths


class Draft(TypedDict):
    """What was drafted, with which weights, and by which rule it was accepted.

    Attributes:
      rows: of a target pass. weights: a path, hub id or "bundled ..."; None without weights.
      ranking: what candidates are ranked by at temperature > 0; None where they are drawn, or there is no choice.
      rule: the acceptance rule. parents: of a static tree, separated by spaces.
    """

    kind: Literal["none", "lookup", "lookahead", "chain", "static", "dynamic", "own"]
    rows: int
    weights: str | None
    ranking: str | None
    rule: str
    length: NotRequired[int]
    ngram: NotRequired[int]
    shortest: NotRequired[int]
    latest: NotRequired[bool]
    window: NotRequired[int]
    guesses: NotRequired[int]
    depth: NotRequired[int]
    top_k: NotRequired[int]
    nodes: NotRequired[int]
    rank_by: NotRequired[str]
    rerank: NotRequired[bool]
    top_p: NotRequired[float]
    parents: NotRequired[str]


FIELDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "lookup": ("length", "ngram"),
    "lookahead": ("ngram", "window", "guesses"),
    "chain": ("depth",),
    "static": ("parents",),
    "dynamic": ("depth", "top_k", "nodes", "rank_by", "rerank"),
    "own": ("depth", "nodes"),
}
"""By kind, the fields that describe it besides those that every draft has."""
PLAIN: dict[str, Any] = {"kind": "none", "rows": 1, "weights": None, "ranking": None, "rule": "deterministic"}
"""Plain decoding drafts nothing."""


def check_draft(draft: Any) -> None:
    """Checks that a draft has the fields of its kind.

    Raises:
      ValueError: a field is missing.
    """
    if missing := [name for name in FIELDS[draft["kind"]] if name not in draft]:
        raise ValueError(f"draft of kind {draft['kind']} must have {', '.join(missing)}")


def tree_words(draft: Any) -> str:
    """Describes the tree in a few words, for a table."""
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
        depths = static_depths([int(parent) for parent in draft["parents"].split()])
        levels = "+".join(str(depths.count(level)) for level in range(1, max(depths) + 1))
        text = f"static, {len(depths)} nodes: {levels}"
    else:
        text = f"dynamic, depth {draft['depth']}, top {draft['top_k']}, {draft['nodes']} nodes"
        text += " by confidence" if draft["rank_by"] == "confidence" else ""
        text += "" if draft["rerank"] else ", no rerank"
    return text + (f", top-p {draft['top_p']:g}" if "top_p" in draft else "")


def rule_words(draft: Any) -> str:
    """Names the acceptance rule, and what a deterministic one ranks by at temperature > 0."""
    return draft["rule"] + (f", ranked by {draft['ranking']}" if draft["ranking"] else "")


def written(parents: Sequence[int]) -> str:
    """Returns a static tree in the form of `parents`."""
    return " ".join(map(str, parents))
