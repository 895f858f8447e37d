"""Cells of `infer.bench` as the report's tables show them: which belong together, their means, their words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from infer.common.results import Cell


def smallest(cells: Sequence[Cell], temperature: float) -> tuple[list[Cell], int]:
    """Cells of a temperature at the smallest batch size that it was measured at."""
    own = [cell for cell in cells if cell.temperature == temperature]
    batch = min((cell.batch for cell in own), default=1)
    return [cell for cell in own if cell.batch == batch], batch


def one_batch(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of one label at the smallest batch size that it was measured at at every temperature; none without one."""
    sizes = [{cell.batch for cell in cells if cell.temperature == heat} for heat in {c.temperature for c in cells}]
    shared = set.intersection(*sizes) if sizes else set()
    return [cell for cell in cells if cell.batch == min(shared)] if shared else []


def smallest_of(cells: Sequence[Cell]) -> list[Cell]:
    """Cells at the smallest batch size of their temperature."""
    return [cell for heat in sorted({cell.temperature for cell in cells}) for cell in smallest(cells, heat)[0]]


def tasks_of(cells: Sequence[Cell]) -> list[str]:
    """Their tasks, by name."""
    return sorted({cell.task for cell in cells})


def find(cells: Sequence[Cell], label: str, task: str) -> Cell | None:
    """The cell of a method on a task, of cells of one temperature and batch size."""
    return next((cell for cell in cells if cell.label == label and cell.task == task), None)


def mean(values: Sequence[float | None]) -> float | None:
    """None where one is missing: a mean over fewer tasks would be another number."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


def means(cells: Sequence[Cell | None]) -> tuple[float | None, float | None]:
    """Mean speedup and mean tau."""
    pairs = [(None, None) if cell is None else (cell.speedup, cell.tau) for cell in cells]
    return mean([speedup for speedup, _ in pairs]), mean([tau for _, tau in pairs])


def cycle_cost(cell: Cell | None) -> float | None:
    """Time of a cycle (draft, wider target pass, update) over that of a plain step: tau over the speedup of decoding.

    None at batch sizes above 1, where rows end at different times, and where either is not known.
    """
    if cell is None or cell.batch > 1 or not cell.tau or not cell.decode_speedup:
        return None
    return cell.tau / cell.decode_speedup


def uneven(cells: Sequence[Any]) -> list[str]:
    """A sentence that says which methods answered other questions of a task than most; none where all are the same."""
    words = []
    for task in dict.fromkeys(cell.task for cell in cells):
        own = [cell for cell in cells if cell.task == task]
        asked = {cell.label: tuple(sorted({q for one in own if one.label == cell.label
                                           for q in one.by_question["question"]})) for cell in own}  # fmt: skip
        usual = statistics.mode(asked.values())
        words += [f"`{label}` {len(questions)} on {task} (the others {len(usual)})"
                  for label, questions in asked.items() if questions != usual]  # fmt: skip
    return [f"Not all answered the same questions: {'; '.join(words)}."] if words else []


def both(cell: Cell | None) -> str:
    """Speedup and tau of a cell; a dash where it was not measured."""
    return "-" if cell is None else pair(cell.speedup, cell.tau)


def number(value: float | None) -> str:
    """Two digits; a dash for what is not known."""
    return "-" if value is None else f"{value:.2f}"


def times(value: float | None) -> str:
    """A ratio; a dash for what is not known."""
    return "-" if value is None else f"{value:.2f}x"


def pair(speedup: float | None, tau: float | None) -> str:
    """Speedup and tau; one dash where neither is known."""
    return "-" if speedup is None and tau is None else f"{times(speedup)}, {number(tau)}"
