"""A claim of a paper, and how two methods' recordings are held against each other; `infer.papers.claims` has the claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from infer.common.recorded import Cell as Recording
from infer.papers import compare
from infer.papers.ablations import PAPERS
from infer.papers.compare import UNKNOWN, difference, judge
from infer.papers.evidence import Evidence

FEW = 30
"""Nodes below which a rate is not compared with another."""


class Claim(NamedTuple):
    """A claim of a paper, what was measured, and whether that agrees: yes, no, or cannot tell."""

    claim: str
    published: str
    here: str
    holds: str


def recorded(evidence: Evidence, temperature: float) -> list[Recording]:
    """What was recorded at a temperature."""
    return [cell for cell in evidence.cells if cell.temperature == temperature]


def at_papers_tree(evidence: Evidence, method: str, tasks: Sequence[str] | None = None) -> list[Recording]:
    """Greedy recordings of a method with the tree of its paper."""
    for label in PAPERS[method]:
        own = [cell for cell in recorded(evidence, 0.0) if cell.label == label]
        if found := [cell for cell in own if tasks is None or cell.task in tasks]:
            return found
    return []


def paired(low: Sequence[Any], high: Sequence[Any], *names: str) -> tuple[str, str]:
    """What two methods' taus are on the questions that both answered, and whether the second's is above; "" if none."""
    keys = compare.shared(low, high) if low and high else set()
    one, two = (compare.tau(cells, keys) if keys else None for cells in (low, high))
    if one is None or two is None:
        return "", UNKNOWN
    step = difference(one, two)
    words = ", ".join(f"{name} {tau.value:.2f}" for name, tau in zip(names, (one, two), strict=True))
    return f"{words} (difference {step}, {len(keys)} questions)", judge([step])
