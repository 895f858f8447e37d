"""The sections of `infer.papers.report` about the drafts themselves, which no clock is read for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.evaluate.positions import (
    Calibration,
    best_chain,
    chain_speedup,
    expected_tokens,
    expected_tokens_by_position,
    pooled,
)
from infer.common.recorded import Cell
from infer.papers import figures
from infer.papers.compare import Key
from infer.papers.evidence import (
    ORDER,
    Evidence,
    Section,
    distinct,
    foremost,
    missing,
    one_row,
    table,
    title,
    unablated,
)

COMMAND = "python -m infer.acceptance --methods eagle2,eagle3"
STUDY = {"eagle2": 4.05, "top-feature-loss": None, "top": 5.37, "eagle3": 6.13}
"""Runs of train.demo.study that are EAGLE-3's ablation, and tau as printed in its paper: Llama-3.1-8B, MT-bench."""
RANKS = 4
"""Siblings that a table of positions shows; wider trees have more."""
ALPHAS = (0.5, 0.7, 0.9)
COSTS = (0.02, 0.05, 0.1, 0.2, 0.5)


_TREE = re.compile(r"(?<=@)(\d+x\d+x\d+|chain\d+|static)(/|$)")
"""What a label says of the tree, which its chains do not have."""


class Chain(NamedTuple):
    """Chains of one length, pooled over tasks; `tested` and `accepted` by position. `apart`: by task and question."""

    length: int
    tokens: int
    cycles: int
    tested: list[int]
    accepted: list[int]
    apart: list[tuple[str, dict[str, Any]]]

    def of(self, column: str, position: int | None = None) -> dict[Key, float]:
        """By question a column of `apart`: of a position, or the sum over all; tokens and cycles have one number."""

        def number(value: Any) -> float:
            return float(value if isinstance(value, int) else sum(value) if position is None else value[position])

        return {
            (task, (name,)): number(value)
            for task, columns in self.apart
            for name, value in zip(columns["question"], columns[column], strict=True)
        }

    @property
    def alpha(self) -> list[float | None]:
        """n-alpha."""
        return [hits / tries if tries else None for hits, tries in zip(self.accepted, self.tested, strict=True)]

    @property
    def acceptance(self) -> float | None:
        """Accepted of all drafts that the target looked at, whatever their position: the a of the formula."""
        return sum(self.accepted) / sum(self.tested) if sum(self.tested) else None


def study(evidence: Evidence) -> Section:
    """EAGLE-3's ablation: no feature loss, fused features."""
    heading = "EAGLE-3's ablation"
    runs = [] if evidence.study is None else list(evidence.study["runs"].values())
    rows = []
    for name, printed in STUDY.items():
        for run in (run for run in runs if run["run"] == name):
            measured = run["measured"]
            low, high = measured["interval"]
            sources = [f"{measured['by_source'][source]:.2f}" for source in measured["by_source"]]
            known = "-" if printed is None else f"{printed:.2f}"
            rows.append([run["title"], str(run.get("seed", 0)), f"{measured['tau']:.2f}", f"{low:.2f}-{high:.2f}",
                         *sources, known])  # fmt: skip
    if not rows:
        return missing(heading, "no study.json", "python -m train.demo.study")
    sources = list(next(run for run in runs if run["run"] in STUDY)["measured"]["by_source"])
    head = ["head", "seed", "tau", "95%", *sources, "published tau (EAGLE-3 paper, Llama-3.1-8B, MT-bench)"]
    return Section(heading, "Heads of one target, trained for as many updates on the same replies (`train.demo.study`).\n\n"
                   + table(head, rows))  # fmt: skip


def positions(evidence: Evidence) -> Section:
    """Acceptance by tree position (EAGLE-2, figure 5)."""
    heading = "Acceptance by tree position"
    groups = _groups(evidence)
    if not groups:
        return missing(heading, "no recorded trees", COMMAND)
    parts = [
        "Share of the nodes that the target looked at (their parent was accepted) and accepted, pooled over tasks. "
        "In a dynamic tree a position is filled only where the draft was confident of it; a static tree "
        "(`eagle2@static`) shows the positions themselves, as the paper's figure does."
    ]
    pictures = {}
    for temperature in distinct(heat for _, heat in groups):
        rows, panels = [], {}
        drawn = foremost(label for label, heat in groups if heat == temperature)
        for label in distinct(label for label, heat in groups if heat == temperature):
            cells = groups[label, temperature]
            reached, accepted = (pooled([cell.positions[name] for cell in cells]) for name in ("reached", "accepted"))
            if not reached.any():
                rows.append([title(label), "-", *["-"] * RANKS])  # nothing was drafted that the target looked at
                continue
            if label in drawn:
                panels[title(label)] = (reached, accepted)
            for depth in range(len(reached)):
                cells_of = [_share(int(a), int(r)) for a, r in zip(accepted[depth], reached[depth], strict=True)]
                cells_of = [*cells_of[:RANKS], *["-"] * (RANKS - len(cells_of))]
                rows.append([title(label) if depth == 0 else "", str(depth + 1), *cells_of])
        parts.append(table([f"T={temperature:g}", "depth", *(f"sibling {rank + 1}" for rank in range(RANKS))], rows))
        if panels:
            name = f"positions_t{temperature:g}.png"
            pictures[name] = figures.positions(panels)
            parts.append(f"![acceptance by depth and rank among siblings]({name})")
        nodes = {
            title(label): cells
            for (label, heat), cells in groups.items()
            if heat == temperature and label in drawn and _shape(cells)
        }
        if nodes:
            name = f"nodes_t{temperature:g}.png"
            pictures[name] = figures.nodes({label: _node_counts(cells) for label, cells in nodes.items()})
            parts.append(f"By node of the static trees, in the order of the tree:\n\n![acceptance by node]({name})")
    return Section(heading, "\n\n".join(parts), pictures)


def calibration(evidence: Evidence) -> Section:
    """Confidence of the draft against acceptance (EAGLE-2, figure 6)."""
    heading = "Confidence of the draft against acceptance"
    groups = _groups(evidence)
    if not groups:
        return missing(heading, "no recorded trees", COMMAND)
    parts = [
        "Confidence is the probability that the draft gave a node after its parent. Of the nodes that the target "
        "looked at, by confidence: the share that it accepted. The calibration error is the mean over nodes of the "
        "distance of the two, by bin."
    ]
    panels: dict[float, dict[str, Any]] = {}
    rows: list[tuple[int, list[str]]] = []
    reasons: dict[str, str] = {}
    drawn = foremost(label for label, _ in groups)
    for (label, temperature), cells in groups.items():
        known = [cell.calibration for cell in cells if cell.calibration is not None]
        if len(known) < len(cells):
            reasons.setdefault(title(label), distinct(cell.uncalibrated for cell in cells if cell.uncalibrated)[0])
            continue
        if len({len(found["count"]) for found in known}) > 1:
            raise ValueError(f"{label} was recorded with another number of --bins on one task than on another")
        count, accepted = (np.sum([found[name] for found in known], axis=0) for name in ("count", "accepted"))
        means = [np.nan_to_num(np.array(found["confidence"], float)) for found in known]
        total = np.sum([mean * found["count"] for mean, found in zip(means, known, strict=True)], axis=0)
        full = count > 0
        mean = np.divide(total, count, out=np.full(len(count), np.nan), where=full)
        error = Calibration(count, mean, accepted).error
        if label in drawn:
            panels.setdefault(temperature, {})[title(label)] = (mean[full], (accepted[full] / count[full]), count[full])
        shares = [_share(int(a), int(n)) for a, n in zip(accepted, count, strict=True)]
        rows.append(
            (len(shares), [title(label), f"{temperature:g}", "-" if error is None else f"{error:.3f}", *shares])
        )
    for bins in sorted({number for number, _ in rows}):
        edges = [f"{b / bins:g}-{(b + 1) / bins:g}" for b in range(bins)]
        head = ["method", "T", "calibration error", *edges]
        parts.append(table(head, [row for number, row in rows if number == bins]))
    parts += [f"{label} has none: {reason}." for label, reason in reasons.items()]
    if not panels:
        return Section(heading, "\n\n".join(parts))
    parts.append("![acceptance over confidence](calibration.png)")
    return Section(heading, "\n\n".join(parts), {"calibration.png": figures.calibration(panels)})


def n_alpha(evidence: Evidence) -> Section:
    """n-alpha of chains (EAGLE-3, figure 7)."""
    heading = "n-alpha"
    chains = {key: max(found, key=lambda chain: chain.length) for key, found in pooled_chains(evidence).items()}
    if not chains:
        return missing(heading, "no recorded chains", COMMAND)
    deepest = max(chain.length for chain in chains.values())
    rows = []
    panels: dict[float, dict[str, list[float | None]]] = {}
    for (name, temperature), chain in chains.items():
        shares = [_share(a, t) for a, t in zip(chain.accepted, chain.tested, strict=True)]
        rows.append([name, f"{temperature:g}", *shares, *["-"] * (deepest - len(shares))])
        panels.setdefault(temperature, {})[name] = chain.alpha
    text = [
        "Share of the drafts of a chain that the target accepted, of those that n accepted drafts precede "
        "(accepted/looked at), pooled over tasks. Flat: the head drafts as well from its own states as from the "
        "target's.",
        table(["method", "T", *(f"{n}-alpha" for n in range(deepest))], rows),
        "![n-alpha over n](n_alpha.png)",
    ]
    return Section(heading, "\n\n".join(text), {"n_alpha.png": figures.n_alpha(panels)})


def expected(evidence: Evidence, costs: Mapping[str, float]) -> Section:
    """Tokens per pass that (1 - a^(K+1)) / (1 - a) expects, beside those measured, and the best K.

    Args:
      costs: what a drafted token was measured to cost, by label (`speeds.chain_costs`).
    """
    heading = "Expected tokens per pass, and the best chain"
    chains = {key: found for key, found in pooled_chains(evidence).items() if len(found) > 1}
    parts, pictures = [], {}
    if chains:
        rows = []
        panels: dict[float, dict[str, figures.Lengths]] = {}
        every = sorted({chain.length for found in chains.values() for chain in found})
        lines_of = ("measured", "(1 - a^(K+1)) / (1 - a)", "1 + a0 + a0 a1 + ...")
        for (name, temperature), found in chains.items():
            longest = max(found, key=lambda chain: chain.length)
            rate = longest.acceptance
            curve = figures.Lengths([], [], [])
            exact = []
            for chain in found:
                if rate is None or not chain.cycles:
                    continue
                seen = chain.tokens / chain.cycles
                flat = expected_tokens(rate, chain.length)
                each = expected_tokens_by_position(longest.alpha[: chain.length])
                curve.lengths.append(chain.length)
                curve.measured.append(seen)
                curve.formula.append(flat)
                exact.append(each)
            for words, values in zip(lines_of, (curve.measured, curve.formula, exact), strict=True):
                by_length = dict(zip(curve.lengths, values, strict=True))
                numbers = [f"{by_length[length]:.2f}" if length in by_length else "-" for length in every]
                first = [name, f"{temperature:g}", f"{rate or 0:.3f}"] if words == lines_of[0] else [""] * 3
                rows.append([*first, words, *numbers])
            panels.setdefault(temperature, {})[name] = curve
        head = ["method", "T", "a", "tokens per pass", *(f"K={length}" for length in every)]
        parts += [
            "a is the share of accepted among all drafts of the longest chain that the target looked at; the "
            "formula takes every draft to be accepted with it, independently. The third line takes each position's own "
            "rate (n-alpha).",
            table(head, rows),
            "![tokens per pass over the length of the chain](expected.png)",
        ]
        pictures["expected.png"] = figures.expected(panels)
    else:
        parts.append(f"Not in these files: chains of several lengths. `{COMMAND}` gives them.")
    named = {f"c={cost:g}": cost for cost in COSTS}
    named |= {f"c={cost:.2f}, measured: {title(label)}": cost for label, cost in costs.items()}
    rows = []
    for alpha in ALPHAS:
        found_best = [(best_chain(alpha, cost), cost) for cost in named.values()]
        rows.append([f"{alpha:g}", *(f"{k} ({chain_speedup(alpha, k, cost):.2f}x)" for k, cost in found_best)])
    parts += [
        "The K that maximises (1 - a^(K+1)) / ((1 - a)(1 + c K)), and that expected speedup (Leviathan et al., "
        "arXiv:2211.17192, theorem 3.8), by arithmetic alone; c is the time of a draft pass over that of a target "
        "pass. A measured c is (a cycle's time / a plain step's - 1) / K of one prompt at a time: all that a drafted "
        "token adds.",
        table(["a", *named], rows),
    ]
    return Section(heading, "\n\n".join(parts), pictures, there=bool(chains))


def _groups(evidence: Evidence) -> dict[tuple[str, float], list[Cell]]:
    """Cells by label and temperature, one per task, the ablations left out; temperatures ascending."""
    cells = one_row(cell for cell in evidence.cells if not unablated(cell.label)[1])
    keys = sorted(distinct((cell.label, cell.temperature) for cell in cells), key=lambda key: key[1])
    return {key: [cell for cell in cells if (cell.label, cell.temperature) == key] for key in keys}


def pooled_chains(evidence: Evidence) -> dict[tuple[str, float], list[Chain]]:
    """Chains by name of the head and temperature, pooled over tasks; labels that differ in the tree share them."""
    found: dict[tuple[str, float], list[Chain]] = {}
    seen: list[tuple[str, float, list[Chain]]] = []
    # Of several methods with one head the papers' latest is the name of its chains, which are no method's own.
    groups = sorted(_groups(evidence).items(), key=lambda group: (-group[0][1], -_place(group[1][0])))
    for (label, temperature), every in groups:
        if not (cells := [cell for cell in every if cell.chains]):  # on some of the tasks, perhaps
            continue
        shared = [{chain["length"]: chain for chain in cell.chains} for cell in cells]
        chains = []
        for length in sorted(set.intersection(*(set(chains) for chains in shared))):
            each = [chains[length] for chains in shared]
            apart = [(cell.task, chain["by_question"]) for cell, chain in zip(cells, each, strict=True)]
            tokens, cycles = (sum(chain[name] for chain in each) for name in ("tokens", "cycles"))
            tested, accepted = (np.sum([c[name] for c in each], axis=0).tolist() for name in ("tested", "accepted"))
            chains.append(Chain(length, tokens, cycles, tested, accepted, apart))
        weights = str(cells[0].draft["weights"])  # whatever the method is called
        if not chains or (weights, temperature, chains) in seen:
            continue
        seen.append((weights, temperature, chains))
        name = title(_TREE.sub("", label).removesuffix("@"))
        found[title(label) if (name, temperature) in found else name, temperature] = chains
    return dict(reversed(found.items()))


def _place(cell: Cell) -> int:
    return ORDER.index(cell.method) if cell.method in ORDER else len(ORDER)


def _shape(cells: Sequence[Cell]) -> list[int] | None:
    """Parents of a static tree that branches, the same on all tasks; None for any other."""
    shapes = [None if cell.nodes is None else cell.nodes["parents"] for cell in cells]
    first = shapes[0]
    branches = first is not None and any(count > 1 for count in map(first.count, first))
    return first if branches and all(shape == first for shape in shapes) else None


def _node_counts(cells: Sequence[Cell]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    nodes = [cell.nodes for cell in cells if cell.nodes is not None]
    reached, accepted = (np.sum([node[name] for node in nodes], axis=0) for name in ("reached", "accepted"))
    return np.array(nodes[0]["parents"], int), reached, accepted


def _share(accepted: int, reached: int) -> str:
    return f"{accepted / reached:.2f} ({accepted}/{reached})" if reached else "-"
