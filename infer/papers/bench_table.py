"""A result of `infer.bench` as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from infer.common.results import Cell, Result, SpecBench


def markdown(result: Result) -> str:
    """Tables: every method of every group; the means over tasks; Spec-Bench's definitions; categories."""
    cells = result.cells
    parts = [
        _table(
            "T | batch | task | method | tokens/s | speedup | of decoding alone | tau | ms per pass | identical",
            "rrllrlrrrr",
            map(_row, cells),
        ),
        _table("T | batch | method | mean speedup over tasks | mean tau", "rrlrr", _means(result)),
        "By the definitions of Spec-Bench (mean over cycles; mean over questions of tokens per second):",
        _table(
            "T | batch | task | method | mean accepted tokens | tokens/s | speedup",
            "rrllrrr",
            ([*_group(cell), cell.label, *_spec_bench(cell.spec_bench)] for cell in cells),
        ),
    ]
    if any(cell.categories for cell in cells):
        parts += [
            "By category:",
            _table(
                "T | batch | task | category | method | speedup | tau | accepted | their tokens/s | their speedup",
                "rrlllrrrrr",
                (
                    [
                        *_group(cell),
                        name,
                        cell.label,
                        _times(kind.speedup),
                        _two(kind.tau),
                        *_spec_bench(kind.spec_bench),
                    ]
                    for cell in cells
                    for name, kind in cell.categories.items()
                ),
            ),
        ]
    where = f"Machine: {result.machine}" + (f"; code: {result.revision}" if result.revision else "")
    return "\n\n".join([*parts, where]) + "\n"


def _row(cell: Cell) -> list[str]:
    least, most = cell.speedup_range
    spread = f" ({least:.2f} to {most:.2f})" if len(cell.seconds) > 1 else ""
    numbers = [_times(cell.decode_speedup), _two(cell.tau), _two(cell.ms_per_pass)]
    speed = [f"{cell.tok_s:.0f}", _times(cell.speedup) + spread]
    return [*_group(cell), cell.label, *speed, *numbers, f"{cell.identical}/{cell.compared}"]


def _spec_bench(found: SpecBench) -> list[str]:
    return [_two(found.mean_accepted_tokens), f"{found.tok_s:.0f}", _times(found.speedup)]


def _means(result: Result) -> Iterable[list[str]]:
    for temperature, batch in dict.fromkeys((group.temperature, group.batch) for group in result.groups):
        for label in result.labels:
            cells = [
                cell
                for cell in result.cells
                if (cell.temperature, cell.batch, cell.label) == (temperature, batch, label)
            ]
            if not cells:
                continue
            taus = [cell.tau for cell in cells if cell.tau is not None]
            mean = _times(statistics.fmean(cell.speedup for cell in cells))
            yield [f"{temperature:g}", str(batch), label, mean, _two(statistics.fmean(taus) if taus else None)]


def _group(cell: Cell) -> list[str]:
    return [f"{cell.temperature:g}", str(cell.batch), cell.task]


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _table(head: str, sides: str, rows: Iterable[list[str]]) -> str:
    rule = "|".join("---:" if side == "r" else "---" for side in sides)
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)])
