"""Makes the report's tables and figures of speed and tau."""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from infer.common.tables import difference, number, questions_of, speedup, table, tau, with_interval
from infer.papers import figures
from infer.papers.sources import Section, Sources, drawn_labels, grouped, title

ABLATION = {
    "": "value and rerank (EAGLE-2)",
    "/norerank": "no rerank",
    "/confidence": "no value: expanded by confidence",
    "/confidence/norerank": "neither",
}
"""EAGLE-2's ablation: the settings of a label, and the parts that they leave out."""


def speeds(sources: Sources) -> list[Section]:
    """Returns table 1 of the papers per temperature: speedup and tau by task at the smallest batch size."""
    sections = []
    for temperature, every in grouped(sources.timed, "temperature").items():
        cells = _smallest(every)
        by_label = grouped(cells, "label")
        drawn = drawn_labels([label for label in by_label if label != "vanilla"] or by_label)
        tasks, rows = sorted(grouped(cells, "task")), []
        for label, own in by_label.items():
            found = {cell.task: f"{number(cell.speedup, 'x')}, {number(cell.tau)}" for cell in own}
            means = with_interval(speedup(own), tau(own)) if len(own) == len(tasks) else ["-"] * 4
            costs = [cell.tau / cell.decode_speedup for cell in own if cell.tau and cell.decode_speedup]
            cost = f"{number(statistics.mean(costs) if costs else None)} ({own[0].draft.rows})"
            texts = f"{sum(cell.identical for cell in own)}/{sum(cell.replies for cell in own)}"
            shown = [title(label), *(found.get(task, "-") for task in tasks), *means]
            rows.append([*shown, str(len(questions_of(own))), cost, texts])
        text = (
            f"Batch {cells[0].batch}. By task: speedup over plain decoding, tau. Then the means over tasks with 95% "
            "intervals, the number of questions, the time of a cycle over a plain step (rows of its target pass), and "
            "the replies that equal plain decoding's."
        )
        head = ["method", *tasks, "speedup", "95%", "tau", "95%", "questions", "cycle (rows)", "identical"]
        draw = functools.partial(figures.bars, [cell for cell in cells if cell.label in drawn], title)
        heading = f"Speedup and tau at temperature {temperature:g}"
        sections.append(Section(heading, text, [table(head, rows)], {f"speedup_t{temperature:g}.png": draw}))
    return sections


def taus(sources: Sources) -> list[Section]:
    """Returns tau of every recorded tree, a section per temperature."""
    sections = []
    for temperature, cells in grouped(sources.recorded, "temperature").items():
        tasks, rows = sorted(grouped(cells, "task")), []
        for label, own in grouped(cells, "label").items():
            found = {cell.task: number(cell.tau) for cell in own}
            means = with_interval(tau(own)) if len(found) == len(tasks) else ["-"] * 2
            columns = [found.get(task, "-") for task in tasks]
            rows.append([title(label), str(own[0].draft.rows - 1), *columns, *means, str(len(questions_of(own)))])
        text = "Tokens per target pass, recorded without a clock: the cost of a wider pass does not count."
        written = table(["method", "nodes", *tasks, "mean", "95%", "questions"], rows)
        sections.append(Section(f"Tau of recorded trees at temperature {temperature:g}", text, [written]))
    return sections


def ablation(sources: Sources) -> Section:
    """Returns EAGLE-2's ablation: tau without value, rerank or both, and the paired differences."""
    tables = []
    text = "Mean over tasks of tau, on the questions that all rows answered. Differences are paired by question."
    kinds: list[tuple[str, Sequence[Any]]] = [("recorded", sources.recorded), ("timed", sources.timed)]
    for kind, every in kinds:
        for temperature, cells in grouped(every, "temperature").items():
            found = grouped(_smallest(cells), "label")
            for base in found:
                own = {words: found[base + suffix] for suffix, words in ABLATION.items() if base + suffix in found}
                if len(own) < 2:
                    continue
                shared = set.intersection(*map(questions_of, own.values()))
                full, rows = tau(found[base], shared), []
                for words, cells_of in own.items():
                    one = tau(cells_of, shared)
                    step = difference(one, full) if one and full and cells_of is not found[base] else None
                    rows.append([words, *with_interval(one, step), str(len(shared))])
                what = f"{title(base)}, temperature {temperature:g}, {kind}"
                tables.append(table([what, "tau", "95%", "difference", "95%", "questions"], rows))
    return Section("EAGLE-2's ablation", text, tables)


def batches(sources: Sources) -> Section:
    """Returns throughput against batch size (the papers' tables 3 and 5)."""
    tables, pictures = [], {}
    for temperature, every in grouped(sources.timed, "temperature").items():
        sizes_of = Counter((cell.label, cell.task) for cell in every)
        cells = [cell for cell in every if sizes_of[cell.label, cell.task] > 1]
        if not cells:
            continue
        sizes = sorted(grouped(cells, "batch"))
        rows, rates, ratios = [], dict[str, dict[int, float | None]](), dict[str, dict[int, float | None]]()
        for label, own in grouped(cells, "label").items():
            words = {}
            for size, sized in grouped(own, "batch").items():
                one, rate = speedup(sized), statistics.fmean(cell.tok_s for cell in sized)
                assert one is not None  # a cell has questions
                words[size] = f"{rate:.0f}, {one.value:.2f}x ({one.interval()})"
                rates.setdefault(title(label), {})[size] = rate
                ratios.setdefault(title(label), {})[size] = one.value
            rows.append([title(label), *(words.get(size, "-") for size in sizes), str(len(questions_of(own)))])
        axes = ["tokens per second, all rows", "speedup over plain decoding"]
        draw = functools.partial(figures.lines, {"": rates, " ": ratios}, "batch size, rows", axes, log=True)
        pictures[f"throughput_t{temperature:g}.png"] = draw
        tables.append(table([f"temperature {temperature:g}", *(f"batch {size}" for size in sizes), "questions"], rows))
    text = (
        "Tokens per second of all rows, and speedup over plain decoding of the same batch size with its 95% interval."
    )
    return Section("Throughput against batch size", text, tables, pictures)


def temperatures(sources: Sources) -> Section:
    """Returns speedup and tau over temperature, of the questions that were answered at all temperatures."""
    rows, speed, passes = [], dict[str, dict[float, float | None]](), dict[str, dict[float, float | None]]()
    heats = {heat: grouped(_smallest(cells), "label") for heat, cells in grouped(sources.timed, "temperature").items()}
    for label in dict.fromkeys(label for found in heats.values() for label in found if label != "vanilla"):
        there = {heat: found[label] for heat, found in heats.items() if label in found}
        shared = set.intersection(*map(questions_of, there.values()))
        if len(there) < 2 or not shared or len({cell.batch for own in there.values() for cell in own}) > 1:
            continue
        cells = {heat: [cell for cell in own if questions_of([cell]) & shared] for heat, own in there.items()}
        found = {heat: (speedup(own, shared), tau(own, shared)) for heat, own in cells.items()}
        speed[title(label)] = {heat: one and one.value for heat, (one, _) in found.items()}
        passes[title(label)] = {heat: one and one.value for heat, (_, one) in found.items()}
        words = [word for heat in heats for word in with_interval(*found.get(heat, (None, None)))]
        rows.append([title(label), *words, str(len(shared))])
    text = "Speedup and tau of the questions that were answered at all temperatures of a row."
    head = [word for heat in heats for word in (f"speedup, T={heat:g}", "95%", f"tau, T={heat:g}", "95%")]
    axes = ["speedup over plain decoding", "tau, tokens per target pass"]
    draw = functools.partial(figures.lines, {"": speed, " ": passes}, "temperature", axes)
    tables = [table(["method", *head, "questions"], rows)] if rows else []
    return Section("Temperature", text, tables, {"temperature.png": draw})


def _smallest(cells: Sequence[Any]) -> list[Any]:
    """Returns the cells of the smallest batch size; recordings have none and are all returned."""
    sizes = [getattr(cell, "batch", 1) for cell in cells]
    return [cell for cell, size in zip(cells, sizes, strict=True) if size == min(sizes)]
