"""Makes the report's tables and figures of speed and tau."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.files.staging import write_whole
from infer.common import figures
from infer.common.estimates import Estimate, asked, difference, speedup, tau
from infer.common.results import Cell, Result
from infer.common.tables import number, table, times
from infer.papers.sources import Section, Sources, at_temperatures, by_label, foremost, in_order, tasks_of, title

ABLATION: dict[tuple[str, ...], str] = {
    (): "value and rerank (EAGLE-2)",
    ("norerank",): "no rerank",
    ("confidence",): "no value: expanded by confidence",
    ("confidence", "norerank"): "neither",
}
"""EAGLE-2's ablation: the settings of a label, and what they leave out."""


def speeds(sources: Sources) -> list[Section]:
    """Returns table 1 of the papers, a section per temperature: speedup and tau by task at the smallest batch size."""
    sections = []
    for temperature, every in at_temperatures(sources.timed).items():
        cells = _smallest(every)
        labels = dict.fromkeys(cell.label for cell in cells)
        drawn = foremost([label for label in labels if label != "vanilla"] or labels)
        tasks, rows, accepted = tasks_of(cells), [], dict[str, dict[int, float | None]]()
        for label, own in by_label(cells).items():
            found = {cell.task: f"{times(cell.speedup)}, {number(cell.tau)}" for cell in own}
            means = _estimates(speedup(own), tau(own)) if len(own) == len(tasks) else ["-"] * 4
            costs = [cell.tau / cell.decode_speedup for cell in own if cell.tau and cell.decode_speedup]
            cost = f"{number(statistics.mean(costs) if costs else None)} ({own[0].draft['rows']})"
            texts = f"{sum(cell.identical for cell in own)}/{sum(cell.compared for cell in own)}"
            row = [title(label), *(found.get(task, "-") for task in tasks), *means]
            rows.append([*row, str(len(asked(own))), cost, texts])
            if label in drawn and all(cell.accepted for cell in own):
                counts = [sum(column) for column in zip(*(cell.accepted or [] for cell in own), strict=True)]
                accepted[title(label)] = {at: count / sum(counts) for at, count in enumerate(counts)}
        text = (
            f"Batch {cells[0].batch}. By task: speedup over plain decoding, tau. Then the means over tasks with 95% "
            "intervals, the number of questions, the time of a cycle over a plain step (rows of its target pass), and "
            "the replies that equal plain decoding's."
        )
        head = ["method", *tasks, "speedup", "95%", "tau", "95%", "questions", "cycle (rows)", "identical"]
        shown = [cell for cell in cells if cell.label in drawn]
        pictures = {f"speedup_t{temperature:g}.png": figures.bars(shown, title)}
        if accepted:
            curves = {f"temperature {temperature:g}": accepted}
            picture = figures.lines(curves, "drafted tokens accepted", "share of the cycles")
            pictures[f"accepted_t{temperature:g}.png"] = picture
        sections.append(_section(f"Speedup and tau at temperature {temperature:g}", pictures, text, table(head, rows)))
    return sections


def taus(sources: Sources) -> list[Section]:
    """Returns tau of every recorded tree, a section per temperature."""
    sections = []
    for temperature, cells in at_temperatures(sources.recorded).items():
        tasks, rows = tasks_of(cells), []
        for label, own in by_label(cells).items():
            found = {cell.task: number(cell.tau) for cell in own}
            means = _estimates(tau(own)) if len(found) == len(tasks) else ["-"] * 2
            nodes = str(own[0].draft["rows"] - 1)
            rows.append([title(label), nodes, *(found.get(task, "-") for task in tasks), *means, str(len(asked(own)))])
        text = "Tokens per target pass, recorded without a clock: the cost of a wider pass does not count."
        written = table(["method", "nodes", *tasks, "mean", "95%", "questions"], rows)
        sections.append(_section(f"Tau of recorded trees at temperature {temperature:g}", {}, text, written))
    return sections


def ablation(sources: Sources) -> Section | None:
    """Returns EAGLE-2's ablation: tau without value, without rerank, without both, and the paired differences."""
    parts = []
    kinds: list[tuple[str, Sequence[Any]]] = [("recorded", sources.recorded), ("timed", sources.timed)]
    for kind, every in kinds:
        for temperature, cells in at_temperatures(every).items():
            found = by_label(_smallest(cells))
            for base in found:
                own = {left_out: found.get("/".join([base, *left_out]), []) for left_out in ABLATION}
                if sum(map(bool, own.values())) < 2:
                    continue
                shared = set.intersection(*(asked(cells) for cells in own.values() if cells))
                values = {left_out: tau(cells, shared) for left_out, cells in own.items()}
                rows = []
                for left_out, words in ABLATION.items():
                    one, full = values[left_out], values[()]
                    step = difference(one, full) if left_out and one and full else None
                    rows.append([words, *_estimates(one, step), str(len(shared))])
                what = f"{title(base)}, temperature {temperature:g}, {kind}"
                parts.append(table([what, "tau", "95%", "difference", "95%", "questions"], rows))
    text = "Mean over tasks of tau, on the questions that all rows answered. Differences are paired by question."
    return _section("EAGLE-2's ablation", {}, text, *parts) if parts else None


def batches(sources: Sources) -> Section | None:
    """Returns throughput against batch size (the papers' tables 3 and 5)."""
    parts, pictures = [], {}
    for temperature, every in at_temperatures(sources.timed).items():
        several = {(c.label, c.task) for c in every if any(_alike(c, o) and c.batch != o.batch for o in every)}
        cells = [cell for cell in every if (cell.label, cell.task) in several]
        sizes = sorted({cell.batch for cell in cells})
        if not sizes:
            continue
        rows, rates, ratios = [], dict[str, dict[int, float | None]](), dict[str, dict[int, float | None]]()
        for label, own in by_label(cells).items():
            by_size = {size: [cell for cell in own if cell.batch == size] for size in sizes}
            found = {size: speedup(some) if some else None for size, some in by_size.items()}
            mean = {size: statistics.fmean(c.tok_s for c in some) if some else None for size, some in by_size.items()}
            rates[title(label)], ratios[title(label)] = mean, {size: one and one.value for size, one in found.items()}
            words = [
                f"{mean[size]:.0f}, {one.value:.2f}x ({one.interval()})" if one else "-" for size, one in found.items()
            ]
            rows.append([title(label), *words, str(len(asked(own)))])
        axes = ["tokens per second, all rows", "speedup over plain decoding"]
        picture = figures.lines({"": rates, " ": ratios}, "batch size, rows", axes, log=True)
        pictures[f"throughput_t{temperature:g}.png"] = picture
        parts.append(table([f"temperature {temperature:g}", *(f"batch {size}" for size in sizes), "questions"], rows))
    text = (
        "Tokens per second of all rows, and speedup over plain decoding of the same batch size with its 95% interval."
    )
    return _section("Throughput against batch size", pictures, text, *parts) if parts else None


def temperatures(sources: Sources) -> Section | None:
    """Returns speedup and tau over temperature, of the questions that were answered at all temperatures."""
    rows, speed, passes = [], dict[str, dict[float, float | None]](), dict[str, dict[float, float | None]]()
    heats = {heat: by_label(_smallest(cells)) for heat, cells in at_temperatures(sources.timed).items()}
    for label in dict.fromkeys(label for found in heats.values() for label in found if label != "vanilla"):
        there = {heat: found[label] for heat, found in heats.items() if label in found}
        shared = set.intersection(*map(asked, there.values()))
        if len(there) < 2 or not shared or len({cell.batch for own in there.values() for cell in own}) > 1:
            continue
        cells = {heat: [cell for cell in own if asked([cell]) & shared] for heat, own in there.items()}
        found = {heat: (speedup(own, shared), tau(own, shared)) for heat, own in cells.items()}
        speed[title(label)] = {heat: one and one.value for heat, (one, _) in found.items()}
        passes[title(label)] = {heat: one and one.value for heat, (_, one) in found.items()}
        words = [word for heat in heats for word in _estimates(*found.get(heat, (None, None)))]
        rows.append([title(label), *words, str(len(shared))])
    if not rows:
        return None
    head = [word for heat in heats for word in (f"speedup, T={heat:g}", "95%", f"tau, T={heat:g}", "95%")]
    text = "Speedup and tau of the questions that were answered at all temperatures of a row."
    axes = ["speedup over plain decoding", "tau, tokens per target pass"]
    picture = figures.lines({"": speed, " ": passes}, "temperature", axes)
    return _section("Temperature", {"temperature.png": picture}, text, table(["method", *head, "questions"], rows))


def draw(result: Result, folder: Path) -> list[Path]:
    """Writes the figures of one result of `infer.bench`: speedup and tau, accepted drafts, throughput."""
    sources = Sources([], in_order(result.cells), [])
    sections = [*speeds(sources), batches(sources)]
    pictures = {name: picture for section in sections if section for name, picture in section.figures.items()}
    for name, picture in pictures.items():
        write_whole(folder / name, figures.png(picture))
    return [folder / name for name in pictures]


def _section(heading: str, pictures: dict[str, Any], *parts: str) -> Section:
    shown = [f"![{name.removesuffix('.png')}]({name})" for name in pictures]
    return Section(heading, "\n\n".join([*parts, *shown]), pictures)


def _smallest(cells: Sequence[Any]) -> list[Any]:
    """Returns the cells of the smallest batch size; recordings have none and are all returned."""
    sizes = [getattr(cell, "batch", 1) for cell in cells]
    return [cell for cell, size in zip(cells, sizes, strict=True) if size == min(sizes)]


def _alike(one: Cell, other: Cell) -> bool:
    return (one.label, one.task) == (other.label, other.task)


def _estimates(*found: Estimate | None) -> list[str]:
    return [word for one in found for word in (["-", "-"] if one is None else [number(one.value), one.interval()])]
