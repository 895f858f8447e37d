"""What the papers claim, held against result files: the first section of `infer.report`.

Every claim says when it holds; none is judged by hand. A claim that no file has the numbers for is left out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from eagle_jax.positions import expected_tokens, pooled
from infer.ablations import ABLATION, PUBLISHED_ABLATION
from infer.cells import mean, means, smallest, tasks_of
from infer.drafting import STUDY, pooled_chains
from infer.evidence import BASELINES, Evidence, Section, distinct, missing, rule_of, table, title, unablated, unruled
from infer.recorded import Cell as Recording
from infer.results import Cell
from infer.speeds import PUBLISHED

FEW = 30
"""Nodes below which a rate is not compared with another."""
STATIC = {"eagle2@static": "eagle1"}
"""Labels that are a method of the papers by another name: EAGLE is an EAGLE-2 head with the static tree."""


class Claim(NamedTuple):
    """A claim of a paper, what was measured, and whether that agrees."""

    claim: str
    published: str
    here: str
    holds: bool


def claims(evidence: Evidence) -> Section:
    """The table of claims."""
    heading = "The papers' claims"
    found = [claim for check in CHECKS for claim in check(evidence)]
    if not found:
        return missing(
            heading, "nothing that a claim is about", "python -m infer.bench --methods vanilla,eagle2,eagle3"
        )
    rows = [[claim, published, here, "yes" if holds else "no"] for claim, published, here, holds in found]
    text = (
        "Published numbers are of other models on GPUs; what is compared is the order, not the size. "
        "Means over tasks, batch 1, temperature 0 where nothing else is said."
    )
    return Section(heading, text + "\n\n" + table(["claim", "published", "here", "holds"], rows, left=4))


def _same_text(evidence: Evidence) -> list[Claim]:
    cells = [cell for cell in evidence.bench if cell.label not in BASELINES and not _sampled(cell)]
    if not cells:
        return []
    identical, compared = sum(cell.identical for cell in cells), sum(cell.compared for cell in cells)
    here = f"{identical:,} of {compared:,} replies identical, {len(distinct(cell.label for cell in cells))} methods"
    claim = "The text is plain decoding's (where drafts are not sampled: at every temperature)"
    return [Claim(claim, "the same law", here, identical == compared)]


def _faster(evidence: Evidence) -> list[Claim]:
    speeds = {label: speed for label, (speed, _) in _table_1(evidence, 0.0).items() if label not in BASELINES}
    if len(speeds) < 2:
        return []
    here = ", ".join(f"{title(label)} {speed:.2f}x" for label, speed in speeds.items())
    lowest = min(ratio for method in PUBLISHED["Vicuna-13B"].values() for ratio, _ in method.values())
    return [Claim("Every method is faster than plain decoding", f"{lowest:.2f}x and more", here,
                  min(speeds.values()) > 1)]  # fmt: skip


def _order(evidence: Evidence) -> list[Claim]:
    printed = {method: tasks["mt_bench"][1] for method, tasks in PUBLISHED["Vicuna-13B"].items()}
    cells, _ = smallest([cell for cell in evidence.bench if cell.task == "mt_bench"], 0.0)
    named = {STATIC.get(cell.label, cell.label): cell.tau for cell in cells}
    here = {name: tau for name, tau in named.items() if name in printed and tau is not None}
    if len(here) < 3:
        return []
    pairs = list(itertools.combinations(sorted(here, key=lambda name: printed[name]), 2))
    right = sum(here[low] < here[high] for low, high in pairs)

    def words(of: dict[str, float]) -> str:
        return " < ".join(f"{title(name)} {of[name]:.2f}" for name in sorted(here, key=lambda name: of[name]))

    return [Claim("Order of tau on MT-bench", words(printed), f"{words(here)}; {right} of {len(pairs)} pairs in order",
                  right == len(pairs))]  # fmt: skip


def _heat(evidence: Evidence) -> list[Claim]:
    found: list[Claim] = []
    shown = [cell for cell in evidence.bench if not unablated(cell.label)[1] and not unruled(cell.label)[1]]
    heats = sorted({cell.temperature for cell in shown})
    for pair in itertools.pairwise(heats):
        cells = [[cell for cell in smallest(shown, heat)[0] if cell.label not in BASELINES] for heat in pair]
        words, holds = [], True
        for label in distinct(cell.label for cell in cells[0]):
            own = [{cell.task: cell.speedup for cell in of if cell.label == label} for of in cells]
            if tasks := own[0].keys() & own[1].keys():
                before, after = (mean([of[task] for task in sorted(tasks)]) or 0.0 for of in own)
                words.append(f"{title(label)} {before:.2f}x to {after:.2f}x")
                holds = holds and after < before
        if words:
            printed = "lower (EAGLE-3 paper, table 1)" if pair[1] <= 1 else "-"
            claim = f"Speedup falls from temperature {pair[0]:g} to {pair[1]:g}"
            found.append(Claim(claim, printed, ", ".join(words), holds))
    return found


def _dynamic(evidence: Evidence) -> list[Claim]:
    found = []
    cells = [cell for cell in evidence.cells if cell.temperature == 0]
    for static in distinct(cell.label for cell in cells if cell.label.endswith("@static") and cell.nodes):
        own = [cell for cell in cells if cell.label == static]
        nodes = len((own[0].nodes or {})["parents"])
        same = re.compile(rf"{re.escape(own[0].method)}@\d+x\d+x{nodes}")
        for dynamic in distinct(cell.label for cell in cells if same.fullmatch(cell.label)):
            tasks = {cell.task for cell in own} & {cell.task for cell in cells if cell.label == dynamic}
            before, after = (_tau(cell for cell in cells if cell.label == label and cell.task in tasks)
                             for label in (static, dynamic))  # fmt: skip
            here = f"{title(static)} {before:.2f}, {title(dynamic)} {after:.2f}"
            found.append(Claim(f"A dynamic tree accepts more than a static one of as many nodes ({nodes})",
                               "EAGLE 3.98, EAGLE-2 4.83 (Vicuna-13B, MT-bench)", here, after > before))  # fmt: skip
    return found


def _eagle_3(evidence: Evidence) -> list[Claim]:
    found = _table_1(evidence, 0.0)
    if "eagle2" not in found or "eagle3" not in found:
        return []
    (_, two), (_, three) = found["eagle2"], found["eagle3"]
    return [Claim("EAGLE-3 accepts more than EAGLE-2", "4.05 and 6.13 (Llama-3.1-8B, MT-bench)",
                  f"{two:.2f} and {three:.2f}", (three or 0) > (two or 0))]  # fmt: skip


def _eagle_2s_ablation(evidence: Evidence) -> list[Claim]:
    found = []
    for base in distinct(unablated(cell.label)[0] for cell in evidence.bench if unablated(cell.label)[1]):
        cells, _ = smallest([cell for cell in evidence.bench if unablated(cell.label)[0] == base], 0.0)
        taus = {}
        for without in ABLATION:
            own = [cell for cell in cells if unablated(cell.label)[1] == without]
            taus[without] = mean([cell.tau for cell in own]) if tasks_of(own) == tasks_of(cells) else None
        whole, rest = taus[frozenset()], [tau for without, tau in taus.items() if without]
        if whole is None or any(tau is None for tau in rest):
            continue
        here = ", ".join(f"{words} {taus[without]:.2f}" for without, words in ABLATION.items())
        printed = ", ".join(f"{PUBLISHED_ABLATION[without]:.2f}" for without in ABLATION)
        holds = all(whole >= (tau or 0) for tau in rest)
        found.append(Claim(f"Value and rerank each raise tau ({title(base)})", printed, here, holds))
    return found


def _eagle_3s_ablation(evidence: Evidence) -> list[Claim]:
    runs = {} if evidence.study is None else {run["run"]: run for run in evidence.study["runs"].values()}
    names = [name for name, printed in STUDY.items() if printed is not None]
    if not all(name in runs for name in names):
        return []
    taus = [runs[name]["measured"]["tau"] for name in names]
    here = ", ".join(f"{runs[name]['title']} {tau:.2f}" for name, tau in zip(names, taus, strict=True))
    printed = ", ".join(f"{STUDY[name]:.2f}" for name in names)
    return [Claim("No feature loss, then fused features, each raise tau (heads trained alike)", printed, here,
                  taus == sorted(taus) and len(set(taus)) == len(taus))]  # fmt: skip


def _by_position(evidence: Evidence) -> list[Claim]:
    found = []
    cells = [cell for cell in evidence.cells if cell.temperature == 0 and cell.label.endswith("@static")]
    for label in distinct(cell.label for cell in cells):
        own = [cell for cell in cells if cell.label == label]
        reached, accepted = (pooled([cell.positions[name] for cell in own]) for name in ("reached", "accepted"))
        if not reached.size or reached[0].min() < FEW:
            continue
        rates = accepted[0] / reached[0]
        here = ", ".join(f"{rate:.2f}" for rate in rates) + f" ({title(label)})"
        found.append(Claim("Acceptance at depth 1 falls from sibling to sibling", "EAGLE-2, figure 5", here,
                           bool(np.all(np.diff(rates) < 0))))  # fmt: skip
    return found


def _calibrated(evidence: Evidence) -> list[Claim]:
    found = []
    for label in distinct(cell.label for cell in evidence.cells if "@" not in cell.label and cell.calibration):
        own = [cell for cell in evidence.cells if cell.label == label and cell.temperature == 0]
        known = [cell.calibration for cell in own if cell.calibration]
        if not own or len(known) < len(own) or len({len(one["count"]) for one in known}) > 1:
            continue
        count, accepted = (np.sum([one[name] for one in known], axis=0) for name in ("count", "accepted"))
        full = count >= FEW
        rates = accepted[full] / count[full]
        here = f"{title(label)}: " + ", ".join(f"{rate:.2f}" for rate in rates)
        chance = rates * (1 - rates) / count[full]
        falls = rates[:-1] - rates[1:] > 2 * np.sqrt(chance[:-1] + chance[1:])  # more than two standard errors
        found.append(Claim("Acceptance rises with the draft's confidence, bin by bin", "EAGLE-2, figure 6", here,
                           len(rates) > 1 and bool(rates[-1] > rates[0]) and not falls.any()))  # fmt: skip
    return found


def _flat(evidence: Evidence) -> list[Claim]:
    """EAGLE-3's figure 7: EAGLE's rate falls with n, EAGLE-3's hardly does."""
    found = {}
    for (name, heat), chains in pooled_chains(evidence).items():
        longest = max(chains, key=lambda chain: chain.length)
        seen = [n for n, tested in enumerate(longest.tested) if tested >= FEW]
        if heat == 0 and name in (title("eagle2"), title("eagle3")) and len(seen) > 1:
            alpha = longest.alpha
            found[name] = seen[-1], alpha[0] or 0.0, alpha[seen[-1]] or 0.0
    if len(found) < 2:
        return []
    here = ", ".join(f"{name} {first:.2f} to {last:.2f} (n = {n})" for name, (n, first, last) in found.items())
    falls = {name: first - last for name, (_, first, last) in found.items()}
    return [Claim("n-alpha falls with n for EAGLE-2, hardly for EAGLE-3", "EAGLE-3, figure 7", here,
                  falls[title("eagle2")] > 0 and falls[title("eagle3")] < falls[title("eagle2")])]  # fmt: skip


def _batches(evidence: Evidence) -> list[Claim]:
    found = []
    cells = [cell for cell in evidence.bench if cell.temperature == 0 and cell.label not in BASELINES]
    for label in distinct(cell.label for cell in cells):
        own = {cell.batch: cell.speedup for cell in cells if cell.label == label}
        if len({cell.task for cell in cells if cell.label == label}) == 1 and len(own) > 1:
            sizes = sorted(own)
            here = ", ".join(f"batch {size} {own[size]:.2f}x" for size in sizes)
            falls = all(own[large] < own[small] for small, large in itertools.pairwise(sizes))
            found.append(Claim(f"The larger the batch, the smaller the speedup ({title(label)})",
                               "1.81x at batch 2, 1.38x at 64 (SGLang)", here, falls))  # fmt: skip
    return found


def _formula(evidence: Evidence) -> list[Claim]:
    worst: dict[str, tuple[float, int]] = {}
    for (name, heat), chains in pooled_chains(evidence).items():
        rate = max(chains, key=lambda chain: chain.length).acceptance
        if heat or rate is None:
            continue
        errors = [(expected_tokens(rate, chain.length) / (chain.tokens / chain.cycles) - 1, chain.length)
                  for chain in chains if chain.cycles]  # fmt: skip
        worst[name] = max(errors, key=lambda pair: abs(pair[0]), default=(0.0, 0))
    if not worst:
        return []
    here = ", ".join(f"{name} {error:+.0%} at K = {length}" for name, (error, length) in worst.items())
    return [Claim("(1 - a^(K+1)) / (1 - a) is the number of tokens per pass, within 10%", "Leviathan et al., eq. 1",
                  f"farthest off: {here}", all(abs(error) <= 0.1 for error, _ in worst.values()))]  # fmt: skip


def _rules(evidence: Evidence) -> list[Claim]:
    found = []
    ruled = [cell for cell in evidence.bench if unruled(cell.label)[1] and cell.temperature > 0]
    for base in distinct(unruled(cell.label)[0] for cell in ruled):
        heat = min(cell.temperature for cell in ruled)
        cells, _ = smallest([cell for cell in ruled if unruled(cell.label)[0] == base], heat)
        taus = {unruled(label)[1]: means([cell for cell in cells if cell.label == label])[1]
                for label in distinct(cell.label for cell in cells)}  # fmt: skip
        plain = taus.get("rejection")
        for rule, paper in (("block", "proven (arXiv:2403.10444)"), ("traversal", "reported (arXiv:2505.12398)")):
            better = taus.get(rule)
            if plain is not None and better is not None:
                here = f"{title(base)}: {plain:.2f} and {better:.2f}, temperature {heat:g}"
                found.append(Claim(f"{rule.capitalize()} verification accepts at least as much as token by token",
                                   paper, here, better >= plain))  # fmt: skip
    return found


CHECKS: tuple[Callable[[Evidence], list[Claim]], ...] = (
    _same_text, _order, _faster, _heat, _eagle_3, _eagle_3s_ablation, _dynamic, _eagle_2s_ablation, _by_position,
    _calibrated, _flat, _formula, _batches, _rules,
)  # fmt: skip


def _sampled(cell: Cell) -> bool:
    """Whether drafts were drawn, so that the text follows the law with other draws."""
    return cell.temperature > 0 and rule_of(cell.label) != "deterministic"


def _table_1(evidence: Evidence, temperature: float) -> dict[str, tuple[float, float | None]]:
    """Mean speedup and tau of what was timed on every task of a temperature, by label."""
    cells, _ = smallest(evidence.bench, temperature)
    cells = [cell for cell in cells if not unablated(cell.label)[1] and not unruled(cell.label)[1]]
    found = {}
    for label in distinct(cell.label for cell in cells):
        own: Sequence[Cell] = [cell for cell in cells if cell.label == label]
        speed, tau = means(own)
        if tasks_of(own) == tasks_of(cells) and speed is not None:
            found[label] = speed, tau
    return found


def _tau(cells: Iterable[Recording]) -> float:
    """Pooled, as the papers do."""
    tokens, cycles = np.sum([(cell.tokens, cell.cycles) for cell in cells], axis=0)
    return float(tokens / max(1, cycles))
