"""Pictures of a result of `infer.bench`: speedup and tau by task, accepted drafts, throughput against batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.staging import write_whole
from infer.common.results import Result
from infer.papers import figures
from infer.papers.evidence import distinct, title
from infer.tuning.speeds import by_batch


def draw(result: Result, folder: Path) -> list[Path]:
    """Writes `speedup_t0.png` and the like, `accepted.png` and, of several batch sizes, `throughput_t0.png`."""
    pictures: dict[str, Any] = {}
    accepted: dict[str, dict[str, list[int]]] = {}
    for temperature, batch in distinct((group.temperature, group.batch) for group in result.groups):
        cells = [cell for cell in result.cells if (cell.temperature, cell.batch) == (temperature, batch)]
        tasks, labels = distinct(cell.task for cell in cells), distinct(cell.label for cell in cells)
        drawn = [label for label in labels if label != "vanilla"] or labels
        name = f"t{temperature:g}" + (f"_b{batch}" if batch > 1 else "")
        pictures[f"speedup_{name}.png"] = figures.bars(cells, drawn, tasks, title)
        found = {label: [cell.accepted for cell in cells if cell.label == label and cell.accepted] for label in drawn}
        totals = {title(label): [sum(column) for column in zip(*rows, strict=True)] for label, rows in found.items()}
        if counted := {label: counts for label, counts in totals.items() if any(counts)}:
            accepted[f"temperature {temperature:g}" + (f", batch {batch}" if batch > 1 else "")] = counted
    if accepted:
        pictures["accepted.png"] = figures.accepted(accepted)
    for temperature in distinct(group.temperature for group in result.groups):
        if curves := by_batch([cell for cell in result.cells if cell.temperature == temperature]).curves:
            pictures[f"throughput_t{temperature:g}.png"] = figures.throughput(curves)
    for name, figure in pictures.items():
        write_whole(folder / name, figures.png(figure))
    return [folder / name for name in pictures]
