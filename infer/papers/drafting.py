"""Makes the report's tables and figures of drafts, which `infer.acceptance` records without a clock."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle_jax import evaluate as counted
from infer.common.results import Chain, Recording
from infer.common.tables import number, share, table
from infer.papers import figures
from infer.papers.sources import NAMES, Section, Sources, drawn_labels, grouped, in_order, title

RANKS = 4
"""Siblings that tables and figures show."""
FEWEST = 20
"""Reached nodes of a position below which the figure leaves it out: a rate of fewer is noise."""


def label_rows(sources: Sources) -> Section:
    """Returns what every label drafted: weights, tree, acceptance rule."""
    found: dict[Any, list[str]] = {}
    for cell in in_order([*sources.timed, *sources.recorded]):
        own = found.setdefault((cell.method, cell.draft), [])
        own += [f"`{cell.label}`"] if f"`{cell.label}`" not in own else []
    rows = [
        [", ".join(names), NAMES.get(method, method), draft.weights or "-", draft.tree, draft.rule, str(draft.rows)]
        for (method, draft), names in found.items()
    ]
    head = ["label", "method", "weights", "drafts", "accepted by", "rows of a pass"]
    return Section("What each label is", "The rows of a pass are the root and its drafts.", [table(head, rows, left=5)])


def positions(sources: Sources) -> Section:
    """Returns acceptance by depth and rank among siblings (EAGLE-2, figure 5)."""
    tables, pictures = [], {}
    for temperature, cells in grouped(sources.recorded, "temperature").items():
        rows, shown = [], {}
        found = grouped(cells, "label")
        for label, own in found.items():
            reached = counted.pooled([cell.positions.reached for cell in own])
            accepted = counted.pooled([cell.positions.accepted for cell in own])
            if not reached.any():
                continue
            first = [share(int(a), int(r)) for a, r in zip(accepted[0], reached[0], strict=True)]
            rows.append([title(label), *first[:RANKS], *["-"] * (RANKS - len(first))])
            if label in drawn_labels(found):
                shown[title(label)] = {f"sibling {rank + 1}": _rates(accepted[:, rank], reached[:, rank])
                                       for rank in range(min(RANKS, reached.shape[1]))}  # fmt: skip
        if rows:
            head = [f"temperature {temperature:g}, depth 1", *(f"sibling {rank + 1}" for rank in range(RANKS))]
            tables.append(table(head, rows))
            draw = functools.partial(figures.lines, shown, "depth of the node", "accepted of those reached")
            pictures[f"positions_t{temperature:g}.png"] = draw
    text = (
        "Of the nodes that the target reached (their parent was accepted), the share that it accepted, with the 95% "
        f"Wilson interval. The figure has the other depths, where at least {FEWEST} nodes were reached. A dynamic tree "
        "fills a position only where the draft was confident of it."
    )
    return Section("Acceptance by tree position", text, tables, pictures)


def _rates(accepted: np.ndarray, reached: np.ndarray) -> dict[int, float]:
    counts = zip(accepted, reached, strict=True)
    return {depth: hits / tries for depth, (hits, tries) in enumerate(counts, 1) if tries >= FEWEST}


def calibration(sources: Sources) -> Section:
    """Returns acceptance against the confidence of the draft (EAGLE-2, figure 6)."""
    shown: dict[str, dict[str, Any]] = {}
    rows = []
    for temperature, every in grouped(sources.recorded, "temperature").items():
        found = grouped(every, "label")
        for label, cells in found.items():
            bins = [cell.calibration for cell in cells if cell.calibration is not None]
            if len(bins) < len(cells):
                continue
            count, accepted = (np.sum([getattr(one, name) for one in bins], axis=0) for name in ("count", "accepted"))
            total = np.sum([np.nan_to_num(np.array(one.confidence, float)) * one.count for one in bins], axis=0)
            full = count > 0
            mean = np.divide(total, count, out=np.full(len(count), np.nan), where=full)
            if label in drawn_labels(found):
                curve = mean[full], accepted[full] / count[full], count[full]
                shown.setdefault(f"temperature {temperature:g}", {})[title(label)] = curve
            error = counted.Calibration(count, mean, accepted).error
            shares = [share(int(a), int(n)) for a, n in zip(accepted, count, strict=True)]
            rows.append([title(label), f"{temperature:g}", number(error), *shares])
    text = (
        "Confidence is the probability that the draft gave a node after its parent. By bin of confidence: of the nodes "
        "that the target reached, the share that it accepted, with the 95% Wilson interval. The calibration error is "
        "the mean over nodes of the distance between the two."
    )
    many = len(rows[0]) - 3 if rows else 0
    head = ["method", "T", "calibration error", *(f"{b / many:g}-{(b + 1) / many:g}" for b in range(many))]
    pictures = {"calibration.png": functools.partial(figures.calibration, shown)}
    return Section("Confidence of the draft against acceptance", text, [table(head, rows)] if rows else [], pictures)


def n_alpha(sources: Sources) -> Section:
    """Returns n-alpha of the longest chains (EAGLE-3, figure 7)."""
    text = (
        "Of the drafts of a chain that n accepted drafts precede, the share that the target accepted, with the 95% "
        "Wilson interval."
    )
    chains = {key: found[-1] for key, found in pooled_chains(sources.recorded).items()}
    deepest = max((chain.length for chain in chains.values()), default=0)
    rows, shown = [], dict[str, dict[str, dict[int, float | None]]]()
    for (name, temperature), chain in chains.items():
        counts = list(zip(chain.accepted, chain.tested, strict=True))
        rows.append([name, f"{temperature:g}", *(share(a, t) for a, t in counts), *["-"] * (deepest - len(counts))])
        curve = {n: a / t if t else None for n, (a, t) in enumerate(counts)}
        shown.setdefault(f"temperature {temperature:g}", {})[name] = curve
    tables = [table(["method", "T", *(f"{n}-alpha" for n in range(deepest))], rows)] if rows else []
    draw = functools.partial(figures.lines, shown, "n, accepted drafts before", "n-alpha")
    return Section("n-alpha", text, tables, {"n_alpha.png": draw})


def expected(sources: Sources) -> Section:
    """Compares measured tokens per pass with (1 - a^(K+1)) / (1 - a), as expected (arXiv:2211.17192)."""
    rows, shown = [], dict[str, dict[str, dict[int, float | None]]]()
    pooled = {key: found for key, found in pooled_chains(sources.recorded).items() if sum(found[-1].tested)}
    every = sorted({chain.length for found in pooled.values() for chain in found})
    for (name, temperature), found in pooled.items():
        accepted, tested = sum(found[-1].accepted), sum(found[-1].tested)
        rate = accepted / tested
        measured = {chain.length: chain.tokens / chain.cycles if chain.cycles else None for chain in found}
        theory = {chain.length: sum(rate**n for n in range(chain.length + 1)) for chain in found}
        for words, curve in (("measured", measured), ("expected", theory)):
            numbers = [number(curve.get(length)) for length in every]
            rows.append([f"{name}, {words}", f"{temperature:g}", share(accepted, tested), *numbers])
            shown.setdefault(f"temperature {temperature:g}", {})[f"{name}, {words}"] = dict(curve)
    text = (
        "a is the share of accepted among all drafts of the longest chain that the target reached, with the 95% Wilson "
        "interval; (1 - a^(K+1)) / (1 - a) tokens per pass are expected."
    )
    tables = [table(["method", "T", "a", *(f"K={length}" for length in every)], rows)] if rows else []
    axes = "K, drafts in the chain", "tokens per target pass"
    draw = functools.partial(figures.lines, shown, *axes, broken="expected")
    return Section("Expected tokens per pass", text, tables, {"expected.png": draw})


def pooled_chains(cells: Sequence[Recording]) -> dict[tuple[str, float], list[Chain]]:
    """Pools chains over tasks by label and temperature, shortest first; equal chains count once."""
    found: dict[tuple[str, float], list[Chain]] = {}
    counts = "tokens", "cycles", "tested", "accepted"
    for temperature, every in grouped([cell for cell in cells if cell.chains], "temperature").items():
        for label, own in grouped(every, "label").items():
            by_length = grouped([chain for cell in own for chain in cell.chains], "length")
            chains = [
                Chain(length, *(np.sum([getattr(chain, name) for chain in each], axis=0).tolist() for name in counts))
                for length, each in sorted(by_length.items())
                if len(each) == len(own)  # recorded on every task
            ]
            if chains and chains not in found.values():
                found[title(label), temperature] = chains
    return found
