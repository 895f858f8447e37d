"""The sections of `infer.papers.report` that are made of results of infer.bench: speed and tau."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from infer.common.results import Cell, Group, SpecBench
from infer.papers import compare, figures
from infer.papers.cells import (
    both,
    cycle_cost,
    find,
    mean,
    means,
    number,
    one_batch,
    pair,
    smallest,
    tasks_of,
    times,
    uneven,
)
from infer.papers.evidence import (
    BASELINES,
    Evidence,
    Section,
    distinct,
    missing,
    one_row,
    published_as,
    table,
    title,
    unablated,
    unruled,
)

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


def speedups(evidence: Evidence) -> list[Section]:
    """Table 1 of the papers, one section per temperature 0 and 1: speedup and tau, spread, identical texts."""
    return [_speedups(evidence, temperature) for temperature in (0.0, 1.0)]


def _speedups(evidence: Evidence, temperature: float) -> Section:
    heading = f"Speedup and tau at temperature {temperature:g}"
    cells, batch = smallest(evidence.bench, temperature)
    cells = one_row(cell for cell in cells if not unablated(cell.label)[1] and not unruled(cell.label)[1])
    if not cells:
        command = f"python -m infer.bench --methods vanilla,eagle2,eagle3 --temperatures {temperature:g}"
        return missing(heading, f"no method was timed at temperature {temperature:g}", command)
    labels = distinct(cell.label for cell in cells)
    tasks = {label: tasks_of([cell for cell in cells if cell.label == label]) for label in labels}
    whole = [label for label in labels if tasks[label] == tasks_of(cells)] or labels
    repetitions = max(len(cell.seconds) for cell in cells)
    other = " (drafts that are sampled, and `transformers`, follow the same law with other draws)"
    name = f"speedup_t{temperature:g}.png"
    parts = [
        f"Speedup over this engine's own plain decoding, and tau; batch {batch}. A dash: not measured, or a method "
        "that counts no passes. Last, mean time of a cycle over that of a plain step, which tau has to exceed to be "
        "of use, and the rows of its target pass. Second table: least and most of the speedup over "
        f"{repetitions} repetition{'s' * (repetitions > 1)}, and how many replies are plain decoding's, token for "
        f"token{other if temperature else ''}.",
        *uneven(cells),
        *_by_task(cells, whole),
        f"![speedup and tau by method and task]({name})",
    ]
    if rest := [label for label in labels if label not in whole]:
        parts += ["On some of the tasks only:", *_by_task([cell for cell in cells if cell.label in rest], rest)]
    if temperature == 0:
        parts += _published(distinct(map(published_as, cells)))
    drawn = [label for label in whole if label != "vanilla"] or whole
    return Section(heading, "\n\n".join(parts), {name: figures.bars(cells, drawn, tasks_of(cells), title)})


def _by_task(cells: Sequence[Cell], labels: Sequence[str]) -> list[str]:
    """Two tables: speedup and tau with their means and what a cycle costs; the spread of the speedup."""
    tasks, rows, spreads = tasks_of(cells), [], []
    for label in labels:
        own = [find(cells, label, task) for task in tasks]
        rows.append([title(label), *map(both, own), pair(*means(own)), _cost(own)])
        spreads.append([title(label), *map(_spread, own)])
    return [table(["method", *tasks, "mean", "cycle over plain step"], rows), table(["method", *tasks], spreads)]


def _cost(own: Sequence[Cell | None]) -> str:
    """What a cycle costs, with the rows of its target pass: the one says little without the other."""
    cost, rows = mean(list(map(cycle_cost, own))), distinct(cell.draft["rows"] for cell in own if cell)
    return number(cost) if cost is None else f"{cost:.2f} ({rows[0]} row{'s' * (rows[0] > 1)})"


def _published(methods: Sequence[str]) -> list[str]:
    """What the paper prints for the methods that were measured."""
    tasks = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
    rows = [
        [title(method), model, *(pair(*printed[method][task]) if task in printed[method] else "-" for task in tasks)]
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


class ByBatch(NamedTuple):
    """What was measured at several batch sizes.

    Attributes:
      tasks, sizes: of all of them together. rates: tokens per second and speedup by label and batch size, means over
        the tasks; None where one is missing. curves: the same, by title, where both are known.
    """

    tasks: list[str]
    sizes: list[int]
    rates: dict[str, dict[int, tuple[float | None, float | None]]]
    curves: dict[str, dict[int, tuple[float, float]]]


def by_batch(cells: Sequence[Cell]) -> ByBatch:
    """Throughput by batch size, of the methods and tasks that were measured at several; cells of one temperature."""
    measured: dict[tuple[str, str], set[int]] = {}
    for cell in cells:
        measured.setdefault((cell.label, cell.task), set()).add(cell.batch)
    several = {key: batch for key, batch in measured.items() if len(batch) > 1}
    tasks, sizes = sorted({task for _, task in several}), sorted(set[int]().union(*several.values()))
    rates: dict[str, dict[int, tuple[float | None, float | None]]] = {}
    for label in distinct(label for label, _ in several):
        for batch in sizes:
            found = [find([cell for cell in cells if cell.batch == batch], label, task) for task in tasks]
            rate = mean([None if cell is None else cell.tok_s for cell in found])
            rates.setdefault(label, {})[batch] = rate, means(found)[0]
    curves = {
        title(label): {batch: (a, b) for batch, (a, b) in of.items() if a is not None and b is not None}
        for label, of in rates.items()
    }
    return ByBatch(tasks, sizes, rates, curves)


def batches(evidence: Evidence) -> Section:
    """Throughput against batch size (the papers' tables 3 and 5, which draft chains)."""
    heading = "Throughput against batch size"
    command = "python -m infer.bench --methods vanilla,eagle2@chain3,eagle3@chain3 --batches 1,2,4,8,16,32"
    sections, pictures = [], {}
    for temperature in sorted({cell.temperature for cell in evidence.bench}):
        own = [cell for cell in evidence.bench if cell.temperature == temperature]
        own = one_row(cell for cell in own if not unablated(cell.label)[1] and not unruled(cell.label)[1])
        tasks, sizes, rates, curves = by_batch(own)
        if not rates:
            continue
        name = f"batch_t{temperature:g}.png"
        pictures[name] = figures.throughput(curves)
        rows = [[title(label), *(_rate(*of[batch]) for batch in sizes)] for label, of in rates.items()]
        sections += [
            f"Temperature {temperature:g}, means over {', '.join(tasks)}: tokens per second of all rows together, and "
            "the speedup over plain decoding of the same batch size.",
            table(["method", *(f"batch {batch}" for batch in sizes)], rows),
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
    cells = one_row(cell for cell in evidence.bench if not unablated(cell.label)[1] and not unruled(cell.label)[1])
    hottest = [cell for cell in cells if cell.temperature == temperatures[-1]]
    labels = distinct(cell.label for cell in hottest if cell.label not in BASELINES)
    rows, curves = [], {}
    for label in labels:
        same = one_batch([cell for cell in cells if cell.label == label])
        there = {heat: own for heat in temperatures if (own := [c for c in same if c.temperature == heat])}
        keys = compare.shared(*there.values()) if there else set()
        all_of = max((len(compare.asked(own)) for own in there.values()), default=0)
        if not keys or len(there) < 2:
            rows.append([title(label), *["-"] * len(temperatures), f"0 of {all_of}"])
            continue
        curve = {}
        for heat, own in there.items():
            speed, tau = compare.speedup(own, keys), compare.tau(own, keys)
            curve[heat] = speed and speed.value, tau and tau.value
        curves[title(label)] = curve
        tasks = ", ".join(sorted({task for task, _ in keys}))
        rows.append([title(label), *(pair(*curve.get(heat, (None, None))) for heat in temperatures),
                     f"{len(keys)} of {all_of}: {tasks}"])  # fmt: skip
    text = [
        "Speedup and tau of the questions that were answered at all of a row's temperatures, means over their tasks; "
        "questions that were answered at some of them only are left out (last column).",
        table(["method", *(f"T={heat:g}" for heat in temperatures), "questions"], rows),
    ]
    if not curves:
        return Section(heading, "\n\n".join(text))
    text.append("![speedup and tau over temperature](temperature.png)")
    return Section(heading, "\n\n".join(text), {"temperature.png": figures.heat(curves)})


def spec_bench(evidence: Evidence) -> Section:
    """Spec-Bench's definitions beside ours, and its categories."""
    heading = "By the definitions of Spec-Bench"
    shown = one_row(cell for cell in evidence.bench if not unablated(cell.label)[1] and not unruled(cell.label)[1])
    cells = [cell for cell in shown if cell.label != "vanilla"]
    if not cells:
        return missing(heading, "no method was timed", "python -m infer.bench --methods vanilla,eagle2,eagle3")
    parts = [
        "Tau pools: tokens after each reply's first over cycles. Spec-Bench's mean accepted tokens "
        "(arXiv:2401.07851) are the mean over cycles of the accepted drafts and one more, also where the reply "
        "ended sooner. Our speedup is of all tokens over all seconds; theirs of the mean over questions of tokens "
        "over seconds. Means over tasks."
    ]
    for temperature in sorted({cell.temperature for cell in cells}):
        own, batch = smallest(cells, temperature)
        tasks, rows = tasks_of(own), []
        for label in distinct(cell.label for cell in own):
            found = [find(own, label, task) for task in tasks]
            speedup, tau = means(found)
            theirs = [(None, None) if cell is None else _theirs(cell.spec_bench) for cell in found]
            ratio, mat = mean([pair[0] for pair in theirs]), mean([pair[1] for pair in theirs])
            rows.append([title(label), number(tau), number(mat), times(speedup), times(ratio)])
        here = f"T={temperature:g}, batch {batch}: {', '.join(tasks)}"
        parts += uneven(own)
        parts.append(table([here, "tau", "mean accepted tokens", "speedup", "Spec-Bench's"], rows))
    for group in distinct(cell.group for cell in cells if cell.categories):
        own = [cell for cell in cells if cell.group == group and cell.categories]
        names = distinct(name for cell in own for name in cell.categories)
        lines = []
        for cell in own:
            parts_of = [cell.categories.get(name) for name in names]
            pairs = ["-" if part is None else pair(*_theirs(part.spec_bench)) for part in parts_of]
            lines.append([title(cell.label), *pairs])
        parts += [
            f"Spec-Bench's speedup and mean accepted tokens, by category of {_words(group)}:",
            table(["method", *names], lines),
        ]
    return Section(heading, "\n\n".join(parts))


def chain_costs(evidence: Evidence) -> dict[str, float]:
    """What a drafted token of a chain costs all in, over a plain step, by label: (cycle / plain step - 1) / K.

    Of one prompt at a time (`cycle_cost`); a cycle is draft, wider target pass and update together.
    """
    cells = [cell for cell in evidence.bench if (cell.temperature, cell.batch) == (0.0, 1)]
    found = {}
    for label in distinct(cell.label for cell in cells):
        length = re.search(r"@(?:.*/)?chain(\d+)", label)
        own = [cell for cell in cells if cell.label == label]
        ratios = [cost for cost in map(cycle_cost, own) if cost is not None]
        if length and ratios:
            found[label] = max(0.0, (statistics.mean(ratios) - 1) / int(length.group(1)))
    return found


def _rate(tok_s: float | None, speedup: float | None) -> str:
    return "-" if tok_s is None else f"{tok_s:.0f}, {times(speedup)}"


def _spread(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    low, high = cell.speedup_range
    return f"{low:.2f}x-{high:.2f}x, {cell.identical}/{cell.compared}"


def _theirs(found: SpecBench) -> tuple[float | None, float | None]:
    return found.speedup, found.mean_accepted_tokens


def _words(group: Group) -> str:
    return f"{group.task}, T={group.temperature:g}" + (f", batch {group.batch}" if group.batch > 1 else "")
