"""Writes Markdown tables, and those of a result of `infer.bench`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infer.common.estimates import Estimate, speedup, tau
from infer.common.results import Cell, Result


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Returns a Markdown table. The first `left` columns are text, the others are numbers."""
    lines = [f"| {' | '.join(line)} |" for line in [head, *rows]]
    rule = "|" + "---|" * left + "---:|" * (len(head) - left)
    return "\n".join([lines[0], rule, *lines[1:]])


def number(value: float | None, unit: str = "") -> str:
    """Formats with two digits; an unknown value is a dash."""
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
