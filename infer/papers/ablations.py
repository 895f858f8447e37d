"""The sections of `infer.papers.report` that compare settings of one method, and say what each setting is.

What each label is, tau at the papers' own trees, EAGLE-2's ablation, acceptance rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from infer.common.drafts import rule_words, tree_words
from infer.papers.cells import both, find, mean, means, number, pair, smallest, tasks_of, uneven
from infer.papers.evidence import (
    NAMES,
    RULES,
    Evidence,
    Section,
    distinct,
    in_order,
    missing,
    one_row,
    table,
    title,
    unablated,
    unruled,
)

PUBLISHED_ABLATION = {
    frozenset[str](): 4.98,
    frozenset({"norerank"}): 4.86,
    frozenset({"confidence"}): 4.39,
    frozenset({"confidence", "norerank"}): 3.92,
}
"""Tau as printed in the EAGLE-2 paper (arXiv:2406.16858): Vicuna-7B, MT-bench, temperature 0."""
PAPERS: dict[str, tuple[str, ...]] = {
    "sps": ("sps",),
    "pld": ("pld",),
    "lookahead": ("lookahead",),
    "medusa": ("medusa@static",),
    "hydra": ("hydra@static",),
    "eagle1": ("eagle1", "eagle2@static"),
    "hass": ("hass@6x10x59",),
    "eagle2": ("eagle2@6x10x59",),
    "eagle3": ("eagle3@8x10x59",),
}
"""By method of table 1, labels of its tree as published: its size suits a GPU, whatever pays on the machine at hand."""
ABLATION = {
    frozenset[str](): "value and rerank (EAGLE-2)",
    frozenset({"norerank"}): "no rerank",
    frozenset({"confidence"}): "no value: expanded by confidence",
    frozenset({"confidence", "norerank"}): "neither",
}


def ablation(evidence: Evidence) -> Section:
    """EAGLE-2's ablation: the frontier by confidence and not by value, no rerank, both; timed, and recorded."""
    heading = "EAGLE-2's ablation"
    parts: list[str] = []
    cells: Sequence[Any]
    for cells, what in (
        (evidence.bench, "Speedup and tau"),
        (evidence.cells, "Tau alone, recorded by infer.acceptance"),
    ):
        bases = distinct(unablated(cell.label)[0] for cell in cells if unablated(cell.label)[1])
        if bases:
            parts.append(f"{what}, of one head and one size of tree; what is left out is named.")
        for base in bases:
            parts += _ablated(base, [cell for cell in cells if unablated(cell.label)[0] == base])
    if parts:
        return Section(heading, "\n\n".join(parts))
    base = "eagle2@6x10x59"
    labels = ",".join([base, f"{base}/confidence", f"{base}/norerank", f"{base}/confidence/norerank"])
    return missing(
        heading, "no label with confidence or norerank", f'python -m infer.acceptance --methods {labels} --chains ""'
    )


def _ablated(base: str, own: Sequence[Any]) -> list[str]:
    """A table per temperature, of one head and one size of tree."""
    parts = []
    for temperature in sorted({cell.temperature for cell in own}):
        cells = [cell for cell in own if cell.temperature == temperature]
        batch = ""
        if timed := hasattr(cells[0], "batch"):
            cells, size = smallest(cells, temperature)
            batch = f", batch {size}"
        tasks, rows = tasks_of(cells), []
        for without, words in ABLATION.items():
            found = [
                next((c for c in cells if unablated(c.label)[1] == without and c.task == task), None) for task in tasks
            ]
            shown = [*map(both, found), pair(*means(found))] if timed else tau_row(found)
            printed = [f"{PUBLISHED_ABLATION[without]:.2f}"] if temperature == 0 else []
            rows.append([words, *shown, *printed])
        head = [f"{title(base)}, temperature {temperature:g}{batch}", *tasks, "mean"]
        head += ["published tau (EAGLE-2 paper, Vicuna-7B, MT-bench)"] * (temperature == 0)
        parts += [*uneven(cells), table(head, rows)]
    return parts


def labels(evidence: Evidence) -> Section:
    """What every label really drafted."""
    heading = "What each label is"
    cells: list[Any] = [*evidence.bench, *evidence.cells]
    if not cells:
        return missing(heading, "no method was timed or recorded", "python -m infer.bench --methods vanilla,eagle2")
    drafts: dict[str, Any] = {}
    for cell in in_order(cells):
        drafts.setdefault(json.dumps([cell.method, cell.draft], sort_keys=True), cell)
    rows = []
    for what, first in drafts.items():
        names = distinct(cell.label for cell in cells if json.dumps([cell.method, cell.draft], sort_keys=True) == what)
        weights = first.draft["weights"] or "-"
        rows.append([", ".join(f"`{name}`" for name in sorted(names, key=len)), NAMES.get(first.method, first.method),
                     weights, tree_words(first.draft), rule_words(first.draft), str(first.draft["rows"])])  # fmt: skip
    text = (
        "As it was loaded and measured, not as it is asked for; labels of one row are one thing, and one row of every "
        "table that compares methods. Ranked by: what candidates are ordered by at temperature > 0. "
        "Of the two bundled heads of EAGLE-1/2's kind `bundled eagle1` was taught as EAGLE teaches, on the target's "
        "features, and is EAGLE-2's as well, which changed the tree alone; `bundled hass` was taught as HASS teaches, "
        "on its own outputs."
    )
    head = ["label", "method", "weights", "drafts", "accepted by", "rows of a pass"]
    return Section(heading, text + "\n\n" + table(head, rows, left=5))


def taus(evidence: Evidence) -> Section:
    """Tau of every recorded tree, those of the papers among them: no clock is read, so that width costs nothing."""
    heading = "Tau at the papers' own trees"
    shown = one_row(cell for cell in evidence.cells if not unablated(cell.label)[1] and not unruled(cell.label)[1])
    if not shown:
        own = ",".join(names[0] for names in PAPERS.values())
        return missing(heading, "no recorded trees", f'python -m infer.acceptance --methods {own} --chains ""')
    parts = [
        "Tokens per target pass as `infer.acceptance` recorded them, whatever the pass costs. The papers' own trees "
        f"are {', '.join(f'`{names[0]}`' for names in PAPERS.values())}."
    ]
    for temperature in sorted({cell.temperature for cell in shown}):
        cells = [cell for cell in shown if cell.temperature == temperature]
        tasks = tasks_of(cells)
        rows = [
            [title(label), f"{next(cell for cell in cells if cell.label == label).draft['rows'] - 1}",
             *tau_row([find(cells, label, task) for task in tasks])]
            for label in distinct(cell.label for cell in cells)
        ]  # fmt: skip
        head = [f"temperature {temperature:g}", "nodes", *tasks, "mean"]
        parts += [*uneven(cells), table(head, rows)]
    return Section(heading, "\n\n".join(parts))


def tau_row(found: Sequence[Any]) -> list[str]:
    """Tau by task, and their mean."""
    values = [None if cell is None else cell.tau for cell in found]
    return [*map(number, values), number(mean(values))]


def rules(evidence: Evidence) -> Section:
    """Acceptance rules of one method and tree: the deterministic one, and those of drafts that are sampled."""
    heading = "Acceptance rules"
    command = (
        "python -m infer.bench --methods eagle2@chain4,eagle2@chain4/rejection,eagle2@chain4/block --temperatures 1"
    )
    parts = [
        "One method and one tree, by what accepts its drafts. `deterministic` ranks candidates with the noise of the "
        "target's draw in view, and keeps plain decoding's text; the others draw the drafts, and keep its law."
    ]
    for base, temperature in _ruled(evidence.bench):
        cells, batch = smallest([cell for cell in evidence.bench if unruled(cell.label)[0] == base], temperature)
        kind = f"{title(base)}, temperature {temperature:g}, batch {batch}: speedup and tau"
        parts += _by_rule(kind, cells, lambda found: [*map(both, found), pair(*means(found))])
    for base, temperature in _ruled(evidence.cells):
        own = [cell for cell in evidence.cells if unruled(cell.label)[0] == base and cell.temperature == temperature]
        parts += _by_rule(f"{title(base)}, temperature {temperature:g}: recorded tau", own, tau_row)
    if len(parts) == 1:
        return missing(heading, "no label with deterministic, rejection, block or traversal", command)
    return Section(heading, "\n\n".join(parts))


def _ruled(cells: Sequence[Any]) -> list[tuple[str, float]]:
    """Methods with a tree of which a label names a rule, at every temperature."""
    named = [cell for cell in cells if unruled(cell.label)[1]]
    bases, heats = distinct(unruled(cell.label)[0] for cell in named), sorted({cell.temperature for cell in named})
    return [(base, heat) for heat in heats for base in bases
            if any((unruled(cell.label)[0], cell.temperature) == (base, heat) for cell in named)]  # fmt: skip


def _by_rule(kind: str, cells: Sequence[Any], numbers: Callable[[list[Any]], list[str]]) -> list[str]:
    """A table with a row per rule, and what is uneven about it."""
    tasks, ruled = tasks_of([cell for cell in cells if unruled(cell.label)[1]]), by_rule(cells)
    rows = []
    for rule, own in ruled.items():
        found = [next((cell for cell in own if cell.task == task), None) for task in tasks]
        if any(found):
            rows.append([rule, *numbers(found)])
    shown = [cell for own in ruled.values() for cell in own if cell.task in tasks]
    return [*uneven(shown), table([kind, *tasks, "mean"], rows)]


def by_rule(cells: Sequence[Any]) -> dict[str, list[Any]]:
    """Cells of one tree by the rule that accepted: that of a label which names it, measured beside the other rules."""
    found: dict[tuple[str, str], Any] = {}
    for cell in sorted(cells, key=lambda cell: unruled(cell.label)[1] is None):
        found.setdefault((cell.draft["rule"], cell.task), cell)
    rules = distinct(rule for rule in RULES if any(rule == other for other, _ in found))
    return {rule: [cell for (other, _), cell in found.items() if other == rule] for rule in rules}
