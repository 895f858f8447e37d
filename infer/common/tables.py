"""Writes Markdown tables, and those of a result of `infer.bench`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from infer.common import estimates
from infer.common.results import Cell, Result, SpecBench


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Returns a Markdown table. The first `left` columns are text, the others are numbers."""
    lines = [f"| {' | '.join(line)} |" for line in [head, *rows]]
    rule = "|" + "---|" * left + "---:|" * (len(head) - left)
    return "\n".join([lines[0], rule, *lines[1:]])


def number(value: float | None) -> str:
    """Formats with two digits; an unknown value is a dash."""
    return "-" if value is None else f"{value:.2f}"


def times(value: float | None) -> str:
    """Formats a ratio; an unknown value is a dash."""
    return "-" if value is None else f"{value:.2f}x"


def markdown(result: Result) -> str:
    """Returns tables of every method and group, the means over tasks, Spec-Bench's definitions, and categories."""
    cells = result.cells
    group = ["T", "batch", "task"]
    parts = [
        table(
            [*group, "method", "tokens/s", "speedup", "of decoding alone", "tau", "ms per pass", "identical"],
            map(_row, cells),
            left=4,
        ),
        table(["T", "batch", "method", "mean speedup over tasks", "95%", "mean tau", "95%"], _means(result), left=3),
        "By the definitions of Spec-Bench (mean over cycles; mean over questions of tokens per second):",
        table(
            [*group, "method", "mean accepted tokens", "tokens/s", "speedup"],
            ([*_group(cell), cell.label, *_spec_bench(cell.spec_bench)] for cell in cells),
            left=4,
        ),
    ]
    categories = [
        [*_group(cell), name, cell.label, times(kind.speedup), number(kind.tau), *_spec_bench(kind.spec_bench)]
        for cell in cells
        for name, kind in cell.categories.items()
    ]
    if categories:
        head = ["category", "method", "speedup", "tau", "accepted", "their tokens/s", "their speedup"]
        parts += ["By category:", table([*group, *head], categories, left=5)]
    where = f"Machine: {result.machine}" + (f"; code: {result.revision}" if result.revision else "")
    return "\n\n".join([*parts, where]) + "\n"


def _row(cell: Cell) -> list[str]:
    least, most = cell.speedup_range
    spread = f" ({least:.2f} to {most:.2f})" if len(cell.seconds) > 1 else ""
    numbers = [times(cell.decode_speedup), number(cell.tau), number(cell.ms_per_pass)]
    speed = [f"{cell.tok_s:.0f}", times(cell.speedup) + spread]
    return [*_group(cell), cell.label, *speed, *numbers, f"{cell.identical}/{cell.compared}"]


def _spec_bench(found: SpecBench) -> list[str]:
    return [number(found.mean_accepted_tokens), f"{found.tok_s:.0f}", times(found.speedup)]


def _means(result: Result) -> Iterable[list[str]]:
    found: dict[tuple[float, int, str], list[Cell]] = {}
    for cell in result.cells:
        found.setdefault((cell.temperature, cell.batch, cell.label), []).append(cell)
    for (temperature, batch, label), cells in found.items():
        taus = [cell.tau for cell in cells if cell.tau is not None]
        speedup = statistics.fmean(cell.speedup for cell in cells)
        intervals = [found.interval() if found else "-" for found in (estimates.speedup(cells), estimates.tau(cells))]
        tau = number(statistics.fmean(taus) if taus else None)
        yield [f"{temperature:g}", str(batch), label, times(speedup), intervals[0], tau, intervals[1]]


def _group(cell: Cell) -> list[str]:
    return [f"{cell.temperature:g}", str(cell.batch), cell.task]
