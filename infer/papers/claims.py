"""What the papers claim, held against result files: the first section of `infer.papers.report`.

Every claim says when it holds; none is judged by hand. A claim that no file has the numbers for is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from eagle_jax.evaluate.positions import expected_tokens
from infer.common.results import Cell
from infer.papers import compare
from infer.papers.ablations import ABLATION, PUBLISHED_ABLATION, by_rule
from infer.papers.agreement import FEW, Claim, at_papers_tree, paired, recorded
from infer.papers.cells import one_batch, smallest, smallest_of, tasks_of
from infer.papers.compare import NO, UNKNOWN, YES, Estimate, difference, judge, less, negative, rate, trend
from infer.papers.drafting import STUDY, Chain, pooled_chains
from infer.papers.evidence import (
    BASELINES,
    Evidence,
    Section,
    distinct,
    missing,
    one_row,
    shared_noise,
    table,
    title,
    unablated,
    unruled,
)
from infer.tuning.speeds import PUBLISHED


def claims(evidence: Evidence) -> Section:
    """The table of claims."""
    heading = "The papers' claims"
    found = [claim for check in CHECKS for claim in check(evidence)]
    if not found:
        return missing(heading, "nothing that a claim is about", "python -m infer.bench --methods eagle2,eagle3")
    text = (
        "Published numbers are of other models on GPUs; what is compared is the order, not the size. Means over tasks, "
        "batch 1, temperature 0 where nothing else is said. One standard for all: a difference counts where its 95% "
        "interval leaves out 0, by Student's t (Welch's over tasks) over the questions that both answered (those of "
        "one call as one). A claim holds where every difference it is about is above 0 so; it fails where one is "
        "below, by an interval wide enough for all of them (Bonferroni); else it cannot be told. Of a row of numbers "
        "that rises or falls the ends have to differ so, and no neighbours in the other direction; a step between may "
        "be of no size. Only identical texts need no interval: one that differs is one too many."
        f"{shared_noise(evidence.sources)}\n\n"
    )
    return Section(heading, text + table(["claim", "published", "here", "holds"], found, left=4))


def _same_text(evidence: Evidence) -> list[Claim]:
    cells = [cell for cell in evidence.bench if cell.label not in BASELINES and not _sampled(cell)]
    if not cells:
        return []
    identical, compared = sum(cell.identical for cell in cells), sum(cell.compared for cell in cells)
    settings, methods = _many(one_row(cells), "label", "setting"), _many(cells, "method", "method")
    here = f"{identical:,} of {compared:,} replies identical, {settings} of {methods}"
    claim = "The text is plain decoding's (where drafts are not sampled: at every temperature)"
    return [Claim(claim, "the same law", here, YES if identical == compared else NO)]


def _many(cells: Sequence[Any], field: str, word: str) -> str:
    count = len({getattr(cell, field) for cell in cells})
    return f"{count} {word}{'s' * (count > 1)}"


def _faster(evidence: Evidence) -> list[Claim]:
    """Of whatever was timed on all tasks, in the trees that were timed."""
    found = {label: compare.speedup(cells) for label, cells in _table_1(evidence, 0.0).items()}
    speeds = {label: speed for label, speed in found.items() if speed is not None}
    if len(speeds) < 2:
        return []
    here = ", ".join(f"{title(label)} {speed.value:.2f}x" for label, speed in speeds.items())
    lowest = min(ratio for method in PUBLISHED["Vicuna-13B"].values() for ratio, _ in method.values())
    return [Claim("Every method is faster than plain decoding", f"{lowest:.2f}x and more", here,
                  judge(difference(Estimate(1.0), speed) for speed in speeds.values()))]  # fmt: skip


def _order(evidence: Evidence) -> list[Claim]:
    """By the papers' own trees, recorded: narrow trees that pay on a small machine would say nothing of the methods."""
    printed = {method: tasks["mt_bench"][1] for method, tasks in PUBLISHED["Vicuna-13B"].items()}
    cells = {method: own for method in printed if (own := at_papers_tree(evidence, method, ("mt_bench",)))}
    keys = compare.shared(*cells.values()) if cells else set()
    taus = {method: tau for method, own in cells.items() if keys and (tau := compare.tau(own, keys))}
    if len(taus) < 3:
        return []
    pairs = list(itertools.combinations(sorted(taus, key=lambda name: printed[name]), 2))
    steps = [difference(taus[low], taus[high]) for low, high in pairs]
    verdicts = [judge([step]) for step in steps]

    def words(of: dict[str, float]) -> str:
        return " < ".join(f"{title(name)} {of[name]:.2f}" for name in sorted(of, key=lambda name: of[name]))

    counts = f"of {len(pairs)} pairs {verdicts.count(YES)} in order, {verdicts.count(NO)} reversed"
    here = f"{words({name: tau.value for name, tau in taus.items()})}; {counts}"
    return [Claim("Order of tau on MT-bench, each method with its paper's tree", words(printed), here, judge(steps))]


def _heat(evidence: Evidence) -> list[Claim]:
    """Drafts that the head's law ranks alone, as in the papers, apart from those ranked with the draw in view."""
    shown = one_row(
        cell for cell in evidence.bench
        if cell.label not in BASELINES and not unablated(cell.label)[1] and not unruled(cell.label)[1]
    )  # fmt: skip
    blind = {cell.label for cell in shown if cell.draft["ranking"] in ("untempered", "law")}
    kinds = {
        "": [cell for cell in shown if cell.label not in blind],
        ", ranked by the head's law alone": [cell for cell in shown if cell.label in blind],
    }
    heats = list(itertools.pairwise(sorted({cell.temperature for cell in shown})))
    found = (_cooler(cells, *pair, words) for pair in heats for words, cells in kinds.items())
    return [claim for claim in found if claim is not None]


def _cooler(shown: Sequence[Cell], low: float, high: float, kind: str) -> Claim | None:
    """Of every label the questions that both temperatures have, at one batch size."""
    words, steps, without = [], [], []
    for label in distinct(cell.label for cell in shown):
        own = one_batch([cell for cell in shown if cell.label == label and cell.temperature in (low, high)])
        both = [[cell for cell in own if cell.temperature == heat] for heat in (low, high)]
        if not all(both):
            continue
        if not (keys := compare.shared(*both)):
            without.append(title(label))
            continue
        before, after = (compare.speedup(of, keys) for of in both)
        assert before is not None, label  # of one question at least
        assert after is not None, label
        words.append(f"{title(label)} {before.value:.2f}x to {after.value:.2f}x ({len(keys)} questions)")
        steps.append(difference(after, before))
    if not words:
        return None
    here = ", ".join(words) + (f"; no question in common: {', '.join(without)}" if without else "")
    printed = "lower (EAGLE-3 paper, table 1)" if high <= 1 else "-"
    return Claim(f"Speedup falls from temperature {low:g} to {high:g}{kind} (the same questions)", printed, here,
                 judge(steps))  # fmt: skip


def _dynamic(evidence: Evidence) -> list[Claim]:
    found = []
    cells = one_row(cell for cell in evidence.cells if cell.temperature == 0)
    by_label = {label: [cell for cell in cells if cell.label == label] for label in distinct(c.label for c in cells)}
    done = []
    for static, own in by_label.items():
        what = own[0].draft
        if what["kind"] != "static" or what["rule"] != "deterministic" or what in done:
            continue
        done.append(what)
        nodes = len(what["parents"].split())
        for dynamic, other in by_label.items():
            wanted = {"kind": "dynamic", "nodes": nodes, "rank_by": "value", "rerank": True}
            wanted |= {name: what[name] for name in ("weights", "ranking")}
            if any(other[0].draft.get(name) != value for name, value in wanted.items()):
                continue
            here, verdict = paired(own, other, f"{title(static)}", f"{title(dynamic)}")
            if here:
                claim = f"A dynamic tree accepts more than a static one of as many nodes ({nodes})"
                printed = "EAGLE 3.98, EAGLE-2 with 49 4.83 (Vicuna-13B, MT-bench)"
                found.append(Claim(claim, printed, here, verdict))
    return found


def _taught(evidence: Evidence) -> list[Claim]:
    """Heads of EAGLE-1/2's kind in one dynamic tree, taught on the target's features or on their own outputs."""
    dynamic = [cell for cell in recorded(evidence, 0.0) if cell.draft["kind"] == "dynamic"]
    eagle = [cell for cell in dynamic if cell.method in ("eagle1", "eagle2")]
    hass = [cell for cell in dynamic if cell.method == "hass"]
    found, done = [], []
    for high in hass:
        low = [cell for cell in eagle if _but_for_weights(cell) == _but_for_weights(high)]
        if not low or low[0].draft["weights"] == high.draft["weights"] or high.draft in done:
            continue
        done.append(high.draft)
        own = [cell for cell in hass if cell.label == high.label]
        names = (f"taught as EAGLE ({title(low[0].label)})", f"as HASS ({title(high.label)})")
        here, verdict = paired([cell for cell in low if cell.label == low[0].label], own, *names)
        if here:
            found.append(Claim("A head taught on its own outputs accepts more than EAGLE's in the same tree",
                               "HASS (arXiv:2408.15766) against EAGLE-2", here, verdict))  # fmt: skip
    return found


def _but_for_weights(cell: Any) -> dict[str, Any]:
    return {name: value for name, value in cell.draft.items() if name != "weights"}


def _eagle_3(evidence: Evidence) -> list[Claim]:
    two, three = (at_papers_tree(evidence, method) for method in ("eagle2", "eagle3"))
    heads = [f"{name} (`{own[0].label}`)" for name, own in (("EAGLE-2", two), ("EAGLE-3", three)) if own]
    here, verdict = paired(two, three, *heads) if len(heads) == 2 else ("", UNKNOWN)
    claim = "EAGLE-3 accepts more than EAGLE-2, each with its paper's tree"
    return [Claim(claim, "4.05 and 6.13 (Llama-3.1-8B, MT-bench)", here, verdict)] if here else []


def _eagle_2s_ablation(evidence: Evidence) -> list[Claim]:
    """By recorded tau, and by that of timed runs: the trees differ in size."""
    found = []
    for cells, how in ((recorded(evidence, 0.0), "recorded"), (smallest(evidence.bench, 0.0)[0], "timed")):
        for base in distinct(unablated(cell.label)[0] for cell in cells if unablated(cell.label)[1]):
            own = [cell for cell in cells if unablated(cell.label)[0] == base]
            parts = [[cell for cell in own if unablated(cell.label)[1] == without] for without in ABLATION]
            keys = compare.shared(*parts) if all(parts) else set()
            taus = [tau for part in parts if keys and (tau := compare.tau(part, keys))]
            if len(taus) < len(ABLATION):
                continue
            here = ", ".join(f"{words} {tau.value:.2f}" for words, tau in zip(ABLATION.values(), taus, strict=True))
            printed = ", ".join(f"{PUBLISHED_ABLATION[without]:.2f}" for without in ABLATION)
            found.append(Claim(f"Value and rerank each raise tau ({title(base)}, {how})", printed, here,
                               judge(difference(tau, taus[0]) for tau in taus[1:])))  # fmt: skip
    return found


def _eagle_3s_ablation(evidence: Evidence) -> list[Claim]:
    runs: dict[str, Any] = {}
    for run in [] if evidence.study is None else evidence.study["runs"].values():
        runs.setdefault(run["run"], run)  # one seed each: the first
    names = [name for name, printed in STUDY.items() if printed is not None]
    if not all(name in runs for name in names):
        return []
    measured = [runs[name]["measured"] for name in names]
    # Its intervals are of 95%, 1.96 standard errors to either side.
    taus = [Estimate(one["tau"], variance=((one["interval"][1] - one["interval"][0]) / 3.92) ** 2) for one in measured]
    here = ", ".join(f"{runs[name]['title']} {tau.value:.2f}" for name, tau in zip(names, taus, strict=True))
    printed = ", ".join(f"{STUDY[name]:.2f}" for name in names)
    here += " (one training each: the intervals are over texts)"
    return [Claim("No feature loss, then fused features, each raise tau (heads trained alike)", printed, here,
                  judge(difference(*pair) for pair in itertools.pairwise(taus)))]  # fmt: skip


def _by_position(evidence: Evidence) -> list[Claim]:
    found = []
    cells = one_row(cell for cell in recorded(evidence, 0.0) if cell.draft["kind"] == "static")
    for label in distinct(cell.label for cell in cells):
        own = [cell for cell in cells if cell.label == label]
        reached, accepted = (
            [
                compare.by_key(own, lambda cell, rank=rank, column=column: [
                    row[rank] for row in cell.by_question[f"siblings_{column}"]
                ])
                for rank in range(len(own[0].by_question["siblings_reached"][0]))
            ]
            for column in ("reached", "accepted")
        )  # fmt: skip
        if len(reached) < 2 or min(sum(column.values()) for column in reached) < FEW:
            continue
        rates = [rate(*pair) for pair in zip(accepted, reached, strict=True)]
        here = ", ".join(f"{rate.value:.2f}" for rate in rates) + f" ({title(label)})"
        found.append(Claim("Acceptance at depth 1 falls over the siblings, first to last", "EAGLE-2, figure 5", here,
                           trend(list(map(negative, rates)))))  # fmt: skip
    return found


def _calibrated(evidence: Evidence) -> list[Claim]:
    found = []
    for label in distinct(cell.label for cell in evidence.cells if "@" not in cell.label and cell.calibration):
        own = [cell for cell in evidence.cells if cell.label == label and cell.temperature == 0]
        known = [cell.calibration for cell in own if cell.calibration]
        if not own or len(known) < len(own) or len({len(one["count"]) for one in known}) > 1:
            continue
        count, accepted = (
            [
                compare.by_key(own, lambda cell, place=place, column=column: [
                    row[place] for row in cell.by_question[f"bins_{column}"]
                ])
                for place in range(len(known[0]["count"]))
            ]
            for column in ("count", "accepted")
        )  # fmt: skip
        rates = [rate(hits, tries) for hits, tries in zip(accepted, count, strict=True) if sum(tries.values()) >= FEW]
        if len(rates) < 2:
            continue
        here = f"{title(label)}: " + ", ".join(f"{rate.value:.2f}" for rate in rates)
        claim = "Acceptance rises with the draft's confidence, lowest bin to highest"
        found.append(Claim(claim, "EAGLE-2, figure 6", here, trend(rates)))
    return found


def _flat(evidence: Evidence) -> list[Claim]:
    """EAGLE-3's figure 7: EAGLE's rate falls with n, EAGLE-3's hardly does."""
    own: dict[str, Chain] = {}
    for (name, heat), chains in pooled_chains(evidence).items():
        if heat == 0 and name in map(title, ("eagle1", "eagle2", "eagle3")):
            own[name] = max(chains, key=lambda chain: chain.length)
    if title("eagle1") in own:  # the paper's curve; EAGLE-2's head is the same
        own.pop(title("eagle2"), None)
    shared = [n for n in range(min((chain.length for chain in own.values()), default=0))
              if all(chain.tested[n] >= FEW for chain in own.values())]  # fmt: skip
    if len(own) < 2 or title("eagle3") not in own or len(shared) < 2:
        return []
    words, falls, last = {}, {}, shared[-1]
    for name, chain in own.items():
        first, end = (rate(chain.of("accepted", n), chain.of("tested", n)) for n in (0, last))
        words[name] = f"{name} {first.value:.2f} to {end.value:.2f} (n = {last})"
        falls[name] = less(first, end)
    three = title("eagle3")
    other = next(name for name in own if name != three)
    here = ", ".join(words.values())
    return [Claim(f"n-alpha falls with n for {other}, hardly for EAGLE-3", "EAGLE-3, figure 7", here,
                  judge(difference(low, falls[other]) for low in (Estimate(0.0), falls[three])))]  # fmt: skip


def _batches(evidence: Evidence) -> list[Claim]:
    found = []
    cells = one_row(cell for cell in evidence.bench if cell.temperature == 0 and cell.label not in BASELINES)
    for label in distinct(cell.label for cell in cells):
        own = [cell for cell in cells if cell.label == label]
        sizes = sorted({cell.batch for cell in own})
        by_size = [[cell for cell in own if cell.batch == size] for size in sizes]
        speeds = [speed for of in by_size if (speed := compare.speedup(of, compare.shared(*by_size)))]
        if len(sizes) > 1 and len(speeds) == len(sizes):
            here = ", ".join(f"batch {size} {speed.value:.2f}x" for size, speed in zip(sizes, speeds, strict=True))
            found.append(Claim(f"The larger the batch, the smaller the speedup ({title(label)})",
                               "1.81x at batch 2, 1.38x at 64 (SGLang)" if own[0].method == "eagle3" else "-", here,
                               trend(list(map(negative, speeds)))))  # fmt: skip
    return found


def _formula(evidence: Evidence) -> list[Claim]:
    worst: dict[str, tuple[Estimate, int]] = {}
    for (name, heat), chains in pooled_chains(evidence).items():
        longest = max(chains, key=lambda chain: chain.length)
        if heat or longest.acceptance is None:
            continue
        found = [(_off(longest, chain), chain.length) for chain in chains if chain.cycles]
        worst[name] = max(found, key=lambda one: abs(one[0].value))
    if not worst:
        return []
    here = ", ".join(f"{name} {off.value:+.0%} at K = {length}" for name, (off, length) in worst.items())
    # Within 10% on the side where it is off.
    sides = (off if off.value < 0 else negative(off) for off, _ in worst.values())
    steps = [difference(Estimate(-0.1), side) for side in sides]
    return [Claim("(1 - a^(K+1)) / (1 - a) is the number of tokens per pass, within 10%", "Leviathan et al., eq. 1",
                  f"farthest off: {here}", judge(steps))]  # fmt: skip


def _off(longest: Chain, chain: Chain) -> Estimate:
    """How far the formula is off, relatively; it takes its a from the longest chain of the same questions."""
    a = rate(longest.of("accepted"), longest.of("tested"))
    measured = rate(chain.of("tokens"), chain.of("cycles"))
    formula = expected_tokens(a.value, chain.length)
    steep = sum(k * a.value ** (k - 1) for k in range(1, chain.length + 1))
    ratio = formula / measured.value
    parts = {
        key: steep / measured.value * a.parts[key] - ratio / measured.value * measured.parts[key] for key in a.parts
    }
    return Estimate(ratio - 1, parts, (steep / measured.value) ** 2 * a.variance)


def _rules(evidence: Evidence) -> list[Claim]:
    """By recorded tau where a rule was recorded, by that of timed runs elsewhere."""
    found = []
    every: list[Any] = [*evidence.cells, *evidence.bench]
    for base in distinct(unruled(cell.label)[0] for cell in every if unruled(cell.label)[1]):
        own: dict[str, list[Any]] = {}
        kinds: tuple[Sequence[Any], ...] = (evidence.cells, smallest_of(evidence.bench))
        for cells in kinds:
            hot = [cell for cell in cells if unruled(cell.label)[0] == base and cell.temperature > 0]
            heat = min((cell.temperature for cell in hot), default=0.0)
            ruled = by_rule([cell for cell in hot if cell.temperature == heat])
            if len(ruled) > 1 and "rejection" in ruled:
                own = ruled
                break
        for rule, paper in (("block", "proven (arXiv:2403.10444)"), ("traversal", "reported (arXiv:2505.12398)")):
            here, verdict = paired(own.get("rejection", []), own.get(rule, []), "token by token", rule)
            if here:
                found.append(Claim(f"{rule.capitalize()} verification accepts more than token by token", paper,
                                   f"{title(base)}, temperature {heat:g}: {here}", verdict))  # fmt: skip
    return found


CHECKS: tuple[Callable[[Evidence], list[Claim]], ...] = (
    _same_text, _order, _faster, _heat, _taught, _eagle_3, _eagle_3s_ablation, _dynamic, _eagle_2s_ablation,
    _by_position, _calibrated, _flat, _formula, _batches, _rules,
)  # fmt: skip


def _sampled(cell: Cell) -> bool:
    """Whether drafts were drawn, so that the text follows the law with other draws."""
    return cell.temperature > 0 and cell.draft["rule"] != "deterministic"


def _table_1(evidence: Evidence, temperature: float) -> dict[str, list[Cell]]:
    """The cells of what was timed on every task of a temperature, by label."""
    cells, _ = smallest(evidence.bench, temperature)
    cells = one_row(cell for cell in cells if not unablated(cell.label)[1] and not unruled(cell.label)[1])
    by_label = {label: [cell for cell in cells if cell.label == label] for label in distinct(c.label for c in cells)}
    return {
        label: own for label, own in by_label.items() if label not in BASELINES and tasks_of(own) == tasks_of(cells)
    }
