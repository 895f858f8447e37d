"""The sections of `infer.report` that are made of results of infer.bench: speed and tau."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from infer import figures
from infer.evidence import Evidence, Section, distinct, missing, table, title, unablated
from infer.results import Cell, Group, SpecBench

Published = dict[str, dict[str, tuple[float, float]]]

PUBLISHED: dict[str, Published] = {
    "Llama-3.1-8B": {
        "eagle2": {"mt_bench": (3.16, 4.05), "humaneval": (3.66, 4.71), "gsm8k": (3.39, 4.24)},
        "eagle3": {
            "mt_bench": (4.40, 6.13),
            "humaneval": (4.85, 6.74),
            "gsm8k": (4.48, 6.23),
            "alpaca": (4.82, 6.70),
            "cnn_dm": (3.65, 5.34),
        },
    },
    "Vicuna-13B": {
        "sps": {"mt_bench": (1.93, 2.27)},
        "pld": {"mt_bench": (1.58, 1.63)},
        "lookahead": {"mt_bench": (1.65, 1.69)},
        "medusa": {"mt_bench": (2.07, 2.59)},
        "hydra": {"mt_bench": (2.88, 3.65)},
        "eagle1": {"mt_bench": (3.07, 3.98)},
        "eagle2": {"mt_bench": (4.26, 4.83)},
        "eagle3": {"mt_bench": (5.58, 6.65)},
    },
}
"""Speedup and tau as printed in the EAGLE-3 paper (arXiv:2503.01840, table 1): temperature 0, batch 1, GPUs."""
PUBLISHED_ABLATION = {
    frozenset[str](): 4.98,
    frozenset({"norerank"}): 4.86,
    frozenset({"confidence"}): 4.39,
    frozenset({"confidence", "norerank"}): 3.92,
}
"""Tau as printed in the EAGLE-2 paper (arXiv:2406.16858): Vicuna-7B, MT-bench, temperature 0."""
ABLATION = {
    frozenset[str](): "value and rerank (EAGLE-2)",
    frozenset({"norerank"}): "no rerank",
    frozenset({"confidence"}): "no value: expanded by confidence",
    frozenset({"confidence", "norerank"}): "neither",
}


def speedups(evidence: Evidence) -> list[Section]:
    """Table 1 of the papers, one section per temperature 0 and 1: speedup and tau, spread, identical texts."""
    return [_speedups(evidence, temperature) for temperature in (0.0, 1.0)]


def _speedups(evidence: Evidence, temperature: float) -> Section:
    heading = f"Speedup and tau at temperature {temperature:g}"
    cells, batch = _smallest(evidence.bench, temperature)
    cells = [cell for cell in cells if not unablated(cell.label)[1]]
    if not cells:
        command = f"python -m infer.bench --methods vanilla,eagle2,eagle3 --temperatures {temperature:g}"
        return missing(heading, f"no method was timed at temperature {temperature:g}", command)
    tasks, labels = _tasks(cells), distinct(cell.label for cell in cells)
    rows, spreads = [], []
    for label in labels:
        own = [_find(cells, label, task) for task in tasks]
        rows.append([title(label), *map(_both, own), _pair(*_means(own))])
        spreads.append([title(label), *(_spread(cell) for cell in own)])
    name = f"speedup_t{temperature:g}.png"
    repetitions = max(len(cell.seconds) for cell in cells)
    other = " (drafts that are sampled, and `transformers`, follow the same law with other draws)"
    sampled = other if temperature else ""
    parts = [
        f"Speedup over this engine's own plain decoding, and tau; batch {batch}. A dash: not measured, or a method "
        "that counts no passes.",
        table(["method", *tasks, "mean"], rows),
        f"Least and most of the speedup over {repetitions} repetition{'s' * (repetitions > 1)}, and how many replies "
        f"are plain decoding's, token for token{sampled}.",
        table(["method", *tasks], spreads),
        f"![speedup and tau by method and task]({name})",
    ]
    if temperature == 0:
        parts += _published(distinct(cell.method for cell in cells))
    drawn = [label for label in labels if label != "vanilla"] or labels
    return Section(heading, "\n\n".join(parts), {name: figures.bars(cells, drawn, tasks, title)})


def _published(methods: Sequence[str]) -> list[str]:
    """What the paper prints for the methods that were measured."""
    tasks = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
    rows = [
        [title(method), model, *(_pair(*printed[method][task]) if task in printed[method] else "-" for task in tasks)]
        for model, printed in PUBLISHED.items()
        for method in printed
        if method in methods
    ]
    if not rows:
        return []
    return [
        "Published for comparison (EAGLE-3 paper, arXiv:2503.01840, table 1; other models, on GPUs; not measured "
        "here):",
        table(["method", "model", *tasks], rows, left=2),
    ]


def ablation(evidence: Evidence) -> Section:
    """EAGLE-2's ablation: the frontier by confidence and not by value, no rerank, both."""
    heading = "EAGLE-2's ablation"
    bases = distinct(unablated(cell.label)[0] for cell in evidence.bench if unablated(cell.label)[1])
    base = bases[0] if bases else "eagle2@4x2x7"
    command = "python -m infer.bench --methods " + ",".join(
        [base, f"{base}/confidence", f"{base}/norerank", f"{base}/confidence/norerank"]
    )
    if not bases:
        return missing(heading, "no label with confidence or norerank", command)
    parts = ["Speedup and tau of one head and one size of tree; what is left out is named."]
    for base in bases:
        own = [cell for cell in evidence.bench if unablated(cell.label)[0] == base]
        for temperature in sorted({cell.temperature for cell in own}):
            cells, batch = _smallest(own, temperature)
            tasks = _tasks(cells)
            rows = []
            for without, words in ABLATION.items():
                found = [
                    next((c for c in cells if unablated(c.label)[1] == without and c.task == task), None)
                    for task in tasks
                ]
                printed = [f"{PUBLISHED_ABLATION[without]:.2f}"] if temperature == 0 else []
                rows.append([words, *map(_both, found), _pair(*_means(found)), *printed])
            head = [f"{title(base)}, temperature {temperature:g}, batch {batch}", *tasks, "mean"]
            head += ["published tau (EAGLE-2 paper, Vicuna-7B, MT-bench)"] * (temperature == 0)
            parts.append(table(head, rows))
    return Section(heading, "\n\n".join(parts))


def batches(evidence: Evidence) -> Section:
    """Throughput against batch size (the papers' tables 3 and 5, which draft chains)."""
    heading = "Throughput against batch size"
    command = "python -m infer.bench --methods vanilla,eagle2@chain3,eagle3@chain3 --batches 1,2,4,8"
    sections, pictures = [], {}
    for temperature in sorted({cell.temperature for cell in evidence.bench}):
        own = [cell for cell in evidence.bench if cell.temperature == temperature and not unablated(cell.label)[1]]
        sizes: dict[tuple[str, str], set[int]] = {}
        for cell in own:
            sizes.setdefault((cell.label, cell.task), set()).add(cell.batch)
        several = {key: batch for key, batch in sizes.items() if len(batch) > 1}
        if not several:
            continue
        labels, tasks = distinct(label for label, _ in several), sorted({task for _, task in several})
        every = sorted(set().union(*several.values()))
        rows, curves = [], {}
        for label in labels:
            at: dict[int, tuple[float | None, float | None]] = {}
            for batch in every:
                found = [_find([c for c in own if c.batch == batch], label, task) for task in tasks]
                at[batch] = _mean([None if cell is None else cell.tok_s for cell in found]), _means(found)[0]
            rows.append([title(label), *(_rate(*at[batch]) for batch in every)])
            curves[title(label)] = {batch: (a, b) for batch, (a, b) in at.items() if a is not None and b is not None}
        name = f"batch_t{temperature:g}.png"
        pictures[name] = figures.throughput(curves)
        sections += [
            f"Temperature {temperature:g}, means over {', '.join(tasks)}: tokens per second of all rows together, and "
            "the speedup over plain decoding of the same batch size.",
            table(["method", *(f"batch {batch}" for batch in every)], rows),
            f"![throughput and speedup over batch size]({name})",
        ]
    if not sections:
        return missing(heading, "no method was timed at two batch sizes", command)
    sections.append(
        "Published for comparison (EAGLE-3 paper, in SGLang on an H100, chains of 3, Llama-3.1-8B): EAGLE-3 1.81x "
        "at batch 2, 1.38x at batch 64."
    )
    return Section(heading, "\n\n".join(sections), pictures)


def hot(evidence: Evidence) -> Section:
    """The failure mode: the higher the temperature, the less can be known of the next token."""
    heading = "Where it fails: high temperature"
    command = "python -m infer.bench --methods vanilla,eagle2,eagle3 --temperatures 0,1,1.5"
    temperatures = sorted({cell.temperature for cell in evidence.bench})
    if not any(temperature > 1 for temperature in temperatures):
        return missing(heading, "nothing was timed above temperature 1", command)
    by_heat = {heat: _smallest(evidence.bench, heat)[0] for heat in temperatures}
    labels = distinct(
        cell.label for cell in by_heat[temperatures[-1]] if not unablated(cell.label)[1] and cell.label != "vanilla"
    )
    rows, curves = [], {}
    for label in labels:
        there = [heat for heat in temperatures if any(cell.label == label for cell in by_heat[heat])]
        of = {heat: {cell.task: cell for cell in by_heat[heat] if cell.label == label} for heat in there}
        tasks = [task for task in of[there[-1]] if all(task in found for found in of.values())]
        curve = {heat: _means([of[heat][task] for task in tasks]) for heat in there}
        curves[title(label)] = curve
        rows.append([title(label), *(_pair(*curve.get(heat, (None, None))) for heat in temperatures), ", ".join(tasks)])
    text = [
        "Speedup and tau, means over the tasks that were measured at all of the temperatures.",
        table(["method", *(f"T={heat:g}" for heat in temperatures), "tasks"], rows),
        "![speedup and tau over temperature](temperature.png)",
    ]
    return Section(heading, "\n\n".join(text), {"temperature.png": figures.heat(curves)})


def spec_bench(evidence: Evidence) -> Section:
    """Spec-Bench's definitions beside ours, and its categories."""
    heading = "By the definitions of Spec-Bench"
    cells = [cell for cell in evidence.bench if not unablated(cell.label)[1] and cell.label != "vanilla"]
    if not cells:
        return missing(heading, "no method was timed", "python -m infer.bench --methods vanilla,eagle2,eagle3")
    parts = [
        "Tau pools: tokens after each reply's first over cycles. Spec-Bench's mean accepted tokens "
        "(arXiv:2401.07851) are the mean over cycles of the accepted drafts and one more, also where the reply "
        "ended sooner. Our speedup is of all tokens over all seconds; theirs of the mean over questions of tokens "
        "over seconds. Means over tasks."
    ]
    for temperature in sorted({cell.temperature for cell in cells}):
        own, batch = _smallest(cells, temperature)
        tasks, rows = _tasks(own), []
        for label in distinct(cell.label for cell in own):
            found = [_find(own, label, task) for task in tasks]
            speedup, tau = _means(found)
            theirs = [(None, None) if cell is None else _theirs(cell.spec_bench) for cell in found]
            ratio, mat = _mean([pair[0] for pair in theirs]), _mean([pair[1] for pair in theirs])
            rows.append([title(label), _number(tau), _number(mat), _times(speedup), _times(ratio)])
        here = f"T={temperature:g}, batch {batch}: {', '.join(tasks)}"
        parts.append(table([here, "tau", "mean accepted tokens", "speedup", "Spec-Bench's"], rows))
    for group in distinct(cell.group for cell in cells if cell.categories):
        own = [cell for cell in cells if cell.group == group and cell.categories]
        names = distinct(name for cell in own for name in cell.categories)
        lines = []
        for cell in own:
            parts_of = [cell.categories.get(name) for name in names]
            pairs = ["-" if part is None else _pair(*_theirs(part.spec_bench)) for part in parts_of]
            lines.append([title(cell.label), *pairs])
        parts += [
            f"Spec-Bench's speedup and mean accepted tokens, by category of {_words(group)}:",
            table(["method", *names], lines),
        ]
    return Section(heading, "\n\n".join(parts))


def chain_costs(evidence: Evidence) -> dict[str, float]:
    """What a drafted token of a chain costs all in, over a plain step, by label: (pass / plain step - 1) / K.

    A pass is a whole cycle, so this is draft, wider target pass and update together; batch as small as there is.
    """
    cells, _ = _smallest(evidence.bench, 0.0)
    found = {}
    for label in distinct(cell.label for cell in cells):
        length = re.search(r"@(?:.*/)?chain(\d+)", label)
        ratios = []
        for cell in (cell for cell in cells if cell.label == label):
            plain = _find(cells, "vanilla", cell.task)
            if plain and plain.ms_per_pass and cell.ms_per_pass:
                ratios.append(cell.ms_per_pass / plain.ms_per_pass)
        if length and ratios:
            found[label] = max(0.0, (statistics.mean(ratios) - 1) / int(length.group(1)))
    return found


def _smallest(cells: Sequence[Cell], temperature: float) -> tuple[list[Cell], int]:
    """Cells of a temperature at the smallest batch size that it was measured at."""
    own = [cell for cell in cells if cell.temperature == temperature]
    batch = min((cell.batch for cell in own), default=1)
    return [cell for cell in own if cell.batch == batch], batch


def _tasks(cells: Sequence[Cell]) -> list[str]:
    return sorted({cell.task for cell in cells})


def _find(cells: Sequence[Cell], label: str, task: str) -> Cell | None:
    return next((cell for cell in cells if cell.label == label and cell.task == task), None)


def _mean(values: Sequence[float | None]) -> float | None:
    """None where one is missing: a mean over fewer tasks would be another number."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


def _means(cells: Sequence[Cell | None]) -> tuple[float | None, float | None]:
    """Mean speedup and mean tau."""
    pairs = [(None, None) if cell is None else (cell.speedup, cell.tau) for cell in cells]
    return _mean([pair[0] for pair in pairs]), _mean([pair[1] for pair in pairs])


def _both(cell: Cell | None) -> str:
    return "-" if cell is None else _pair(cell.speedup, cell.tau)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _pair(speedup: float | None, tau: float | None) -> str:
    return "-" if speedup is None and tau is None else f"{_times(speedup)}, {_number(tau)}"


def _rate(tok_s: float | None, speedup: float | None) -> str:
    return "-" if tok_s is None else f"{tok_s:.0f}, {_times(speedup)}"


def _spread(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    low, high = cell.speedup_range
    return f"{low:.2f}x-{high:.2f}x, {cell.identical}/{cell.compared}"


def _theirs(found: SpecBench) -> tuple[float | None, float | None]:
    return found.speedup, found.mean_accepted_tokens


def _words(group: Group) -> str:
    return f"{group.task}, T={group.temperature:g}" + (f", batch {group.batch}" if group.batch > 1 else "")
