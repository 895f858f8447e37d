"""Estimates tau and speedup with 95% intervals from SciPy, and writes Markdown tables.

A method's number is the mean over tasks of a ratio of sums over questions. The interval uses the delta method, with
Welch's degrees of freedom because the variances of tasks differ. Questions of one call (a batch) count as one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from infer.common.results import Cell, Result

LEVEL = 0.95


class Estimate(NamedTuple):
    """Holds a measured number."""

    value: float
    # by (task, question or call) what it adds to the error of `value`; the parts of a task add up to 0
    parts: Mapping[tuple[str, Any], float]

    def half_width(self) -> float | None:
        """Returns half the width of the interval; None where a task has a single question or call."""
        tasks: dict[str, list[float]] = {}
        for (task, _), part in self.parts.items():
            tasks.setdefault(task, []).append(part)
        counts = np.array(list(map(len, tasks.values())))
        if counts.min(initial=2) < 2:
            return None
        variances = np.array([np.square(own).sum() for own in tasks.values()]) * counts / (counts - 1)
        if not (variance := variances.sum()):
            return 0.0
        freedom = variance**2 / (variances**2 / (counts - 1)).sum()
        return float(stats.t.ppf((1 + LEVEL) / 2, freedom) * math.sqrt(variance))

    def interval(self) -> str:
        """Returns the interval as text, "1.05 to 1.21"; '-' if there is none."""
        half = self.half_width()
        return "-" if half is None else f"{self.value - half:.2f} to {self.value + half:.2f}"


def ratio(keys: Sequence[Any], over: Sequence[Sequence[float]], under: Sequence[Sequence[float]]) -> Estimate:
    """Estimates product(sums of `over`) / product(sums of `under`); `keys` has (task, question) by entry."""
    above, below = np.asarray(over, float).T, np.asarray(under, float).T  # [questions, factors]
    value = float(np.prod(above.sum(axis=0)) / np.prod(below.sum(axis=0)))
    each = (above / above.sum(axis=0)).sum(axis=1) - (below / below.sum(axis=0)).sum(axis=1)
    parts = dict.fromkeys(keys, 0.0)
    for key, part in zip(keys, each, strict=True):
        parts[key] += value * float(part)
    return Estimate(value, parts)


def mean(found: Sequence[Estimate]) -> Estimate:
    """Returns the mean of estimates."""
    return _combined(found, [1 / len(found)] * len(found))


def difference(one: Estimate, other: Estimate) -> Estimate:
    """Returns `one` - `other`, paired by question."""
    return _combined([one, other], [1, -1])


def _combined(found: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    parts: dict[Any, float] = {}
    for one, weight in zip(found, weights, strict=True):
        for key, part in one.parts.items():
            parts[key] = parts.get(key, 0.0) + weight * part
    return Estimate(sum(weight * one.value for one, weight in zip(found, weights, strict=True)), parts)


def questions_of(cells: Sequence[Any]) -> set[tuple[str, str]]:
    """Returns the task and name of every question of some cells."""
    return {(cell.task, question) for cell in cells for question in cell.by_question.question}


def tau(cells: Sequence[Any], questions: Collection[tuple[str, str]] | None = None) -> Estimate | None:
    """Estimates the mean over tasks of tokens per cycle.

    Args:
      cells: of one label, each of another task.
      questions: the questions to use; None means all.

    Returns:
      None where a method does not count cycles, or a task has none.
    """
    found = []
    for cell in cells:
        columns, rows = cell.by_question, _rows(cell, questions)
        if columns.cycles is None or not sum(columns.cycles[row] for row in rows):
            return None
        first = getattr(columns, "replies", [0] * len(columns.question))  # the prefill gives each reply its first token
        keys = [(cell.task, columns.question[row]) for row in rows]
        tokens = [columns.tokens[row] - first[row] for row in rows]
        found.append(ratio(keys, [tokens], [[columns.cycles[row] for row in rows]]))
    return mean(found) if found else None


def speedup(cells: Sequence[Any], questions: Collection[tuple[str, str]] | None = None) -> Estimate | None:
    """Estimates the mean speedup over tasks; each is the median over repetitions.

    Arguments as of `tau`; all cells are of one batch size.
    """
    found = []
    for cell in cells:
        columns, rows = cell.by_question, _rows(cell, questions)
        if not rows:
            return None
        names = columns.question if len({*columns.call}) == len(columns.call) else columns.call
        keys, repetitions = [(cell.task, names[row]) for row in rows], []
        for seconds, plain in zip(columns.seconds, columns.plain_seconds, strict=True):
            four = columns.tokens, plain, seconds, columns.plain_tokens
            values = [[column[row] for row in rows] for column in four]
            repetitions.append(ratio(keys, values[:2], values[2:]))
        found.append(mean(repetitions)._replace(value=statistics.median(one.value for one in repetitions)))
    return mean(found) if found else None


def share(accepted: int, tried: int) -> str:
    """Returns a share, its 95% Wilson interval and count; '-' if `tried` is 0.

    For example "0.44 (0.41 to 0.47) of 1016".
    """
    if not tried:
        return "-"
    found = stats.binomtest(accepted, tried).proportion_ci(LEVEL, method="wilson")
    return f"{accepted / tried:.2f} ({found.low:.2f} to {found.high:.2f}) of {tried}"


def _rows(cell: Any, questions: Collection[tuple[str, str]] | None) -> list[int]:
    names = cell.by_question.question
    return [row for row, name in enumerate(names) if questions is None or (cell.task, name) in questions]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Returns a Markdown table. The first `left` columns are text, the others are numbers."""
    lines = [f"| {' | '.join(line)} |" for line in [head, *rows]]
    rule = "|" + "---|" * left + "---:|" * (len(head) - left)
    return "\n".join([lines[0], rule, *lines[1:]])


def number(value: float | None, unit: str = "") -> str:
    """Formats with two decimals; an unknown value is '-'."""
    return "-" if value is None else f"{value:.2f}{unit}"


def with_interval(*found: Estimate | None) -> list[str]:
    """Returns two columns per estimate: the value and its interval."""
    return [word for one in found for word in (["-", "-"] if one is None else [number(one.value), one.interval()])]


def markdown(result: Result) -> str:
    """Returns tables of every method and group, and of the means over tasks."""
    group = ["T", "batch", "task", "method"]
    head = [*group, "tokens/s", "speedup", "of decoding alone", "tau", "ms per pass", "identical"]
    means: dict[tuple[str, ...], list[Cell]] = {}
    for cell in result.cells:
        means.setdefault((f"{cell.temperature:g}", str(cell.batch), cell.label), []).append(cell)
    rows = [[*key, *with_interval(speedup(cells), tau(cells))] for key, cells in means.items()]
    over_tasks = table(["T", "batch", "method", "mean speedup over tasks", "95%", "mean tau", "95%"], rows, left=3)
    where = f"Machine: {result.machine}" + (f"; code: {result.revision}" if result.revision else "")
    return "\n\n".join([table(head, map(_row, result.cells), left=4), over_tasks, where]) + "\n"


def _row(cell: Cell) -> list[str]:
    least, most = cell.speedup_range
    spread = f" ({least:.2f} to {most:.2f})" if least < most else ""
    numbers = [number(cell.decode_speedup, "x"), number(cell.tau), number(cell.ms_per_pass)]
    speeds = [f"{cell.tok_s:.0f}", number(cell.speedup, "x") + spread]
    group = [f"{cell.temperature:g}", str(cell.batch), cell.task, cell.label]
    return [*group, *speeds, *numbers, f"{cell.identical}/{cell.replies}"]
