"""Makes the report's tables and figures of the drafts themselves, which `infer.acceptance` records without a clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.evaluate.positions import Calibration, expected_tokens, pooled
from infer.common import figures
from infer.common.drafts import rule_words, tree_words
from infer.common.estimates import share
from infer.common.results import Recording
from infer.common.tables import table
from infer.papers.sources import NAMES, Section, Sources, at_temperatures, by_label, foremost, in_order, title

RANKS = 4
"""Siblings that tables and figures show."""


class Chain(NamedTuple):
    """Chains of one length, pooled over tasks. `tested` and `accepted` count by position."""

    length: int
    tokens: int
    cycles: int
    tested: list[int]
    accepted: list[int]


def labels(sources: Sources) -> Section:
    """Returns what every label drafted: weights, tree, acceptance rule."""
    found: dict[str, list[Any]] = {}
    for cell in in_order([*sources.timed, *sources.recorded]):
        found.setdefault(json.dumps([cell.method, cell.draft], sort_keys=True), []).append(cell)
    rows = []
    for cells in found.values():
        names, draft, method = dict.fromkeys(cell.label for cell in cells), cells[0].draft, cells[0].method
        words = [", ".join(f"`{name}`" for name in names), NAMES.get(method, method), draft["weights"] or "-"]
        rows.append([*words, tree_words(draft), rule_words(draft), str(draft["rows"])])
    head = ["label", "method", "weights", "drafts", "accepted by", "rows of a pass"]
    return Section("What each label is", table(head, rows, left=5))


def positions(sources: Sources) -> Section | None:
    """Returns acceptance by depth and rank among siblings (EAGLE-2, figure 5)."""
    parts, pictures = [], {}
    for temperature, cells in at_temperatures(sources.recorded).items():
        rows, shown = [], {}
        found = by_label(cells)
        for label, own in found.items():
            reached, accepted = (pooled([cell.positions[name] for cell in own]) for name in ("reached", "accepted"))
            if not reached.any():
                continue
            first = [share(int(a), int(r)) for a, r in zip(accepted[0], reached[0], strict=True)]
            rows.append([title(label), *first[:RANKS], *["-"] * (RANKS - len(first))])
            if label in foremost(found):
                rates = np.divide(accepted, reached, out=np.full(reached.shape, np.nan), where=reached > 0)
                curves = [{depth + 1: rate for depth, rate in enumerate(column)} for column in rates.T[:RANKS]]
                shown[title(label)] = {f"sibling {rank + 1}": curve for rank, curve in enumerate(curves)}
        if not rows:
            continue
        name = f"positions_t{temperature:g}.png"
        pictures[name] = figures.lines(shown, "depth of the node", "accepted of those reached")
        head = [f"temperature {temperature:g}, depth 1", *(f"sibling {rank + 1}" for rank in range(RANKS))]
        parts += [table(head, rows), f"![acceptance by depth and rank among siblings]({name})"]
    text = (
        "Of the nodes that the target reached (their parent was accepted), the share that it accepted, with the 95% "
        "Wilson interval. The figure has the other depths. A dynamic tree fills a position only where the draft was "
        "confident of it."
    )
    return Section("Acceptance by tree position", "\n\n".join([text, *parts]), pictures) if parts else None


def calibration(sources: Sources) -> Section | None:
    """Returns acceptance against the confidence of the draft (EAGLE-2, figure 6)."""
    shown: dict[str, dict[str, Any]] = {}
    tables: dict[int, list[list[str]]] = {}
    for temperature, every in at_temperatures(sources.recorded).items():
        found = by_label(every)
        for label, cells in found.items():
            bins = [cell.calibration for cell in cells if cell.calibration is not None]
            if len(bins) < len(cells):
                continue
            if len({len(one["count"]) for one in bins}) > 1:
                raise ValueError(f"--bins must be the same for all tasks of {label}. Leave one of the files out.")
            count, accepted = (np.sum([one[name] for one in bins], axis=0) for name in ("count", "accepted"))
            sums = [np.nan_to_num(np.array(one["confidence"], float)) * one["count"] for one in bins]
            full = count > 0
            mean = np.divide(np.sum(sums, axis=0), count, out=np.full(len(count), np.nan), where=full)
            if label in foremost(found):
                curve = mean[full], accepted[full] / count[full], count[full]
                shown.setdefault(f"temperature {temperature:g}", {})[title(label)] = curve
            error = Calibration(count, mean, accepted).error
            shares = [f"{a / n:.2f} of {n}" if n else "-" for a, n in zip(accepted, count, strict=True)]
            rows = tables.setdefault(len(count), [])
            rows.append([title(label), f"{temperature:g}", "-" if error is None else f"{error:.3f}", *shares])
    if not tables:
        return None
    parts = [
        "Confidence is the probability that the draft gave a node after its parent. By bin of confidence: of the nodes "
        "that the target reached, the share that it accepted. The calibration error is the mean over nodes of the "
        "distance between the two."
    ]
    for many, rows in tables.items():
        head = ["method", "T", "calibration error", *(f"{b / many:g}-{(b + 1) / many:g}" for b in range(many))]
        parts.append(table(head, rows))
    parts.append("![acceptance over confidence](calibration.png)")
    pictures = {"calibration.png": figures.calibration(shown)}
    return Section("Confidence of the draft against acceptance", "\n\n".join(parts), pictures)


def n_alpha(sources: Sources) -> Section | None:
    """Returns n-alpha of the longest chains (EAGLE-3, figure 7)."""
    chains = {key: found[-1] for key, found in pooled_chains(sources.recorded).items()}
    if not chains:
        return None
    deepest = max(chain.length for chain in chains.values())
    rows, shown = [], dict[str, dict[str, dict[int, float | None]]]()
    for (name, temperature), chain in chains.items():
        counts = list(zip(chain.accepted, chain.tested, strict=True))
        rows.append([name, f"{temperature:g}", *(share(a, t) for a, t in counts), *["-"] * (deepest - len(counts))])
        curve = {n: a / t if t else None for n, (a, t) in enumerate(counts)}
        shown.setdefault(f"temperature {temperature:g}", {})[name] = curve
    parts = [
        "Of the drafts of a chain that n accepted drafts precede, the share that the target accepted, with the 95% "
        "Wilson interval.",
        table(["method", "T", *(f"{n}-alpha" for n in range(deepest))], rows),
        "![n-alpha over n](n_alpha.png)",
    ]
    picture = figures.lines(shown, "n, accepted drafts before", "n-alpha")
    return Section("n-alpha", "\n\n".join(parts), {"n_alpha.png": picture})


def expected(sources: Sources) -> Section | None:
    """Returns tokens per pass that (1 - a^(K+1)) / (1 - a) expects, beside those measured."""
    rows, shown = [], dict[str, dict[str, dict[int, float | None]]]()
    pooled = {key: found for key, found in pooled_chains(sources.recorded).items() if sum(found[-1].tested)}
    every = sorted({chain.length for found in pooled.values() for chain in found})
    for (name, temperature), found in pooled.items():
        rate = sum(found[-1].accepted) / sum(found[-1].tested)
        curves = {
            "measured": {chain.length: chain.tokens / chain.cycles for chain in found if chain.cycles},
            "expected": {chain.length: expected_tokens(rate, chain.length) for chain in found},
        }
        for words, curve in curves.items():
            numbers = [f"{curve[length]:.2f}" if length in curve else "-" for length in every]
            rows.append([f"{name}, {words}", f"{temperature:g}", f"{rate:.3f}", *numbers])
            shown.setdefault(f"temperature {temperature:g}", {})[f"{name}, {words}"] = dict(curve)
    if not rows:
        return None
    picture = figures.lines(shown, "K, drafts in the chain", "tokens per target pass", broken="expected")
    parts = [
        "a is the share of accepted among all drafts of the longest chain that the target reached; (1 - a^(K+1)) / "
        "(1 - a) tokens per pass are expected.",
        table(["method", "T", "a", *(f"K={length}" for length in every)], rows),
        "![tokens per pass over the length of the chain](expected.png)",
    ]
    return Section("Expected tokens per pass", "\n\n".join(parts), {"expected.png": picture})


def pooled_chains(cells: Sequence[Recording]) -> Mapping[tuple[str, float], list[Chain]]:
    """Pools chains over tasks, by label and temperature, shortest first. Equal chains of two labels are one."""
    found: dict[tuple[str, float], list[Chain]] = {}
    for temperature, every in at_temperatures(cell for cell in cells if cell.chains).items():
        for label, own in by_label(every).items():
            shared = [{chain["length"]: chain for chain in cell.chains} for cell in own]
            chains = []
            for length in sorted(set.intersection(*map(set, shared))):
                each = [of[length] for of in shared]
                tokens, cycles = sum(one["tokens"] for one in each), sum(one["cycles"] for one in each)
                tested = np.sum([one["tested"] for one in each], axis=0).tolist()
                accepted = np.sum([one["accepted"] for one in each], axis=0).tolist()
                chains.append(Chain(length, tokens, cycles, tested, accepted))
            if chains and chains not in found.values():
                found[title(label), temperature] = chains
    return found
