"""Pictures of a result of `infer.bench`: speedup and tau by task, accepted drafts, throughput against batch size."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.staging import write_whole
from infer.results import Cell, Result


def draw(result: Result, folder: Path) -> list[Path]:
    """Writes `speedup.png`, `tau.png`, `accepted.png` and, of several batch sizes, `throughput.png`."""
    from matplotlib import colormaps

    palette = colormaps["tab10" if len(result.labels) <= 10 else "tab20"]
    colours = {label: palette(number % palette.N) for number, label in enumerate(result.labels)}
    drawn = [
        _panels(result, colours, folder / "speedup.png", "speedup over plain decoding", _bars(_speedup, 1.0, "{:.2f}")),
        _panels(result, colours, folder / "tau.png", "tau, tokens per target pass", _bars(_tau, 1.0, "{:.2f}")),
        _panels(result, colours, folder / "accepted.png", "share of cycles", _histograms),
    ]
    if len({group.batch for group in result.groups}) > 1:
        drawn.append(_throughput(result, colours, folder / "throughput.png"))
    return drawn


def _speedup(cell: Cell) -> float | None:
    return None if cell.label == "vanilla" else cell.speedup


def _tau(cell: Cell) -> float | None:
    return None if cell.label == "vanilla" else cell.tau


def _panels(result: Result, colours: dict[str, Any], path: Path, quantity: str, paint: Callable[..., None]) -> Path:
    """One panel per temperature and batch size, side by side where they are narrow."""
    from matplotlib.figure import Figure

    shown = list(dict.fromkeys((group.temperature, group.batch) for group in result.groups))
    batches = len({batch for _, batch in shown})
    bars = len({group.task for group in result.groups}) * len(result.labels)
    wide = paint is not _histograms and bars > 24
    columns = 1 if wide else min(batches, 3)
    width = min(12.0, max(4.6, 0.22 * bars)) if paint is not _histograms else 4.6
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(width * columns + 2.2, 3.1 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for place, (axes, (temperature, batch)) in enumerate(zip(grid.flat, shown, strict=False)):
        cells = [cell for cell in result.cells if (cell.temperature, cell.batch) == (temperature, batch)]
        paint(axes, cells, colours)
        axes.set_title(f"temperature {temperature:g}, batch {batch}", fontsize="medium")
        axes.set_ylabel(quantity if place % columns == 0 else "")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    grid.flat[0].set_ylim(bottom=0)  # last: shared axes no longer follow what is drawn after it
    return _save(figure, grid.flat, path)


def _bars(value: Callable[[Cell], float | None], plain: float, form: str) -> Callable[..., None]:
    """Bars by task, a colour per method; `plain` is where plain decoding stands."""

    def paint(axes: Any, cells: list[Cell], colours: dict[str, Any]) -> None:
        tasks = list(dict.fromkeys(cell.task for cell in cells))
        labels = [label for label in colours if any(cell.label == label and value(cell) is not None for cell in cells)]
        thick = 0.8 / max(len(labels), 1)
        for number, label in enumerate(labels):
            found = [(tasks.index(cell.task), value(cell)) for cell in cells if cell.label == label]
            at = [place + (number - (len(labels) - 1) / 2) * thick for place, height in found if height is not None]
            heights = [height for _, height in found if height is not None]
            bars = axes.bar(at, heights, thick * 0.92, color=colours[label], label=label)
            axes.bar_label(
                bars, [form.format(height) for height in heights], fontsize="xx-small", rotation=90, padding=2
            )
        axes.axhline(plain, color="black", linewidth=1, linestyle="--")
        axes.set_xticks(range(len(tasks)), tasks)
        axes.margins(y=0.16)

    return paint


def _histograms(axes: Any, cells: list[Cell], colours: dict[str, Any]) -> None:
    """How many drafted tokens a cycle accepts, over all tasks."""
    for label, colour in colours.items():
        found = [cell.accepted for cell in cells if cell.label == label and label != "vanilla" and cell.accepted]
        if not found:
            continue
        counts = [sum(column) for column in zip(*found, strict=True)]
        total = max(sum(counts), 1)
        axes.plot(
            range(len(counts)), [count / total for count in counts], "o-", color=colour, label=label, markersize=4
        )
    axes.set_xlabel("drafted tokens accepted in a cycle, all tasks")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _throughput(result: Result, colours: dict[str, Any], path: Path) -> Path:
    """Tokens per second against batch size, a panel per temperature."""
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(group.temperature for group in result.groups))
    batches = sorted({group.batch for group in result.groups})
    figure = Figure(figsize=(5 * len(temperatures) + 2.2, 3.6), layout="constrained")
    grid = figure.subplots(1, len(temperatures), squeeze=False, sharey=True)
    for axes, temperature in zip(grid[0], temperatures, strict=True):
        for label, colour in colours.items():
            rates = {
                batch: [
                    cell.tok_s
                    for cell in result.cells
                    if (cell.label, cell.temperature, cell.batch) == (label, temperature, batch)
                ]
                for batch in batches
            }
            points = [(batch, statistics.fmean(values)) for batch, values in rates.items() if values]
            if points:
                style = "k--" if label == "vanilla" else "o-"
                axes.plot(
                    *zip(*points, strict=True), style, **({} if label == "vanilla" else {"color": colour}), label=label
                )
        axes.set(title=f"temperature {temperature:g}", xlabel="batch, conversations at a time", xscale="log")
        axes.set_xticks(batches, map(str, batches))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    grid[0][0].set_ylim(bottom=0)
    grid[0][0].set_ylabel("tokens per second, mean over tasks")
    return _save(figure, grid.flat, path)


def _save(figure: Any, panels: Any, path: Path) -> Path:
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small", frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_whole(path, picture.getvalue())
    return path
