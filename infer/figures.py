"""The figures of `infer.report`: black on white, a method in the same colour and mark wherever it stands."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
"""Told apart by the colour-blind (Okabe and Ito)."""
MARKS = "osD^vP*X"
LINES = ("-", "--", "-.", ":")


WANTED = "figures need matplotlib: pip install matplotlib"


class Lengths(NamedTuple):
    """Tokens per target pass by length of the chain, measured and by the formula."""

    lengths: list[int]
    measured: list[float]
    formula: list[float]


def png(figure: Any) -> bytes:
    """The bytes of a figure: for the same figure the same, no date or version in them."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, metadata={"Software": None})
    return picture.getvalue()


def bars(cells: Sequence[Any], labels: Sequence[str], tasks: Sequence[str], title: Callable[[str], str]) -> Any:
    """Speedup, with its range, and tau: a group of bars per task, a bar per method."""
    crowded = len(labels) * len(tasks) > 18
    figure, (left, right) = _panels(2, width=9.2 if crowded else 4.6, columns=1 if crowded else 2)
    width = 0.8 / len(labels)
    for place, label in enumerate(labels):
        own = {cell.task: cell for cell in cells if cell.label == label}
        at = [task + width * (place - (len(labels) - 1) / 2) for task, name in enumerate(tasks) if name in own]
        found = [own[name] for name in tasks if name in own]
        speed = [cell.speedup for cell in found]
        spread = [
            [max(0.0, cell.speedup - cell.speedup_range[0]) for cell in found],
            [max(0.0, cell.speedup_range[1] - cell.speedup) for cell in found],
        ]
        style = {"width": width * 0.9, "color": COLOURS[place % len(COLOURS)], "label": title(label)}
        style |= {"hatch": ("", "//", "..", "xx")[place // len(COLOURS) % 4], "edgecolor": "white"}
        left.bar(at, speed, yerr=spread, ecolor="black", capsize=2, **style)
        known = [(x, cell.tau) for x, cell in zip(at, found, strict=True) if cell.tau is not None]
        right.bar([x for x, _ in known], [tau for _, tau in known], **style)
    for axes, what in ((left, "speedup over plain decoding"), (right, "tau, tokens per target pass")):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(tasks)), list(tasks))
        axes.set_ylabel(what)
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    return _legend_below(figure, left)


def accepted(panels: Mapping[str, Mapping[str, Sequence[int]]]) -> Any:
    """How many drafted tokens a cycle accepts: `panels[title][method]` is the histogram."""
    figure, every = _panels(len(panels), share=True)
    names = list(dict.fromkeys(name for counts in panels.values() for name in counts))
    for axes, (heading, histograms) in zip(every, panels.items(), strict=True):
        for name, counts in histograms.items():
            shares = [count / sum(counts) for count in counts]
            axes.plot(range(len(counts)), shares, **_style(names.index(name)), label=name)
        axes.set_title(heading, fontsize="medium")
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _name(axes, "drafted tokens accepted in a cycle", "share of cycles")
    return _legend_below(figure, *every)


def throughput(curves: Mapping[str, Mapping[int, tuple[float, float]]]) -> Any:
    """Tokens per second and speedup over batch size: `curves[method][batch]`."""
    figure, (left, right) = _panels(2)
    for place, (name, curve) in enumerate(curves.items()):
        sizes = sorted(curve)
        for side, axes in enumerate((left, right)):
            axes.plot(sizes, [curve[size][side] for size in sizes], **_style(place), label=name)
    every = sorted({size for curve in curves.values() for size in curve})
    for axes, what in ((left, "tokens per second, all rows"), (right, "speedup over plain decoding")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(every, [str(size) for size in every])
        axes.set_ylim(bottom=0)
        _name(axes, "batch size, rows", what)
    return _legend_below(figure, left)


def heat(curves: Mapping[str, Mapping[float, tuple[float | None, float | None]]]) -> Any:
    """Speedup and tau over temperature."""
    figure, (left, right) = _panels(2)
    for place, (name, curve) in enumerate(curves.items()):
        for side, axes in enumerate((left, right)):
            points = [
                (temperature, pair[side]) for temperature, pair in sorted(curve.items()) if pair[side] is not None
            ]
            axes.plot([x for x, _ in points], [y for _, y in points], **_style(place), label=name)
    every = sorted({temperature for curve in curves.values() for temperature in curve})
    for axes, what in ((left, "speedup over plain decoding"), (right, "tau, tokens per target pass")):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(every)
        axes.set_ylim(bottom=0)
        _name(axes, "temperature", what)
    return _legend_below(figure, left)


def positions(panels: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Any:
    """Acceptance over depth, a line for each of four siblings; a panel per method: `(reached, accepted)`, [D, K]."""
    figure, every = _panels(len(panels), share=True)
    for axes, (name, (reached, accepted)) in zip(every, panels.items(), strict=True):
        for rank in range(min(4, reached.shape[1])):
            depth = np.flatnonzero(reached[:, rank])
            rate = accepted[depth, rank] / reached[depth, rank]
            axes.plot(depth + 1, rate, **_style(rank), label=f"sibling {rank + 1}")
        axes.set_title(name, fontsize="medium")
        axes.set_xticks(range(1, len(reached) + 1))
        axes.set_ylim(-0.02, 1.02)
        _name(axes, "depth of the node", "accepted of those looked at")
    return _legend_below(figure, *every)


def nodes(panels: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Any:
    """Acceptance by node of static trees, coloured by depth: `(parents, reached, accepted)`, each [N]."""
    figure, every = _panels(len(panels), width=6.0, share=True)
    for axes, (name, (parents, reached, accepted)) in zip(every, panels.items(), strict=True):
        depths: list[int] = []
        for parent in parents.tolist():
            depths.append(1 if parent < 0 else depths[parent] + 1)
        for depth in sorted(set(depths)):
            own = np.array([node for node, level in enumerate(depths) if level == depth and reached[node]], int)
            colour = COLOURS[(depth - 1) % len(COLOURS)]
            axes.bar(own + 1, accepted[own] / reached[own], color=colour, label=f"depth {depth}")
        axes.set_title(name, fontsize="medium")
        axes.set_ylim(0, 1)
        _name(axes, "node of the tree", "accepted of those looked at")
    return _legend_below(figure, *every)


def calibration(panels: Mapping[float, Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]]) -> Any:
    """Acceptance over mean confidence of each bin; the larger the mark, the more nodes. A panel per temperature."""
    figure, every = _panels(len(panels), share=True)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for axes, (temperature, curves) in zip(every, panels.items(), strict=True):
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":", label="as confident as right")
        for name, (confidence, rate, count) in curves.items():
            style = _style(names.index(name))
            sizes = 12 + 90 * count / max(1, int(count.max(initial=1)))
            axes.plot(confidence, rate, color=style["color"], linestyle=style["linestyle"], linewidth=1.2)
            axes.scatter(confidence, rate, s=sizes, color=style["color"], marker=style["marker"], alpha=0.8, label=name)
        axes.set_title(f"temperature {temperature:g}", fontsize="medium")
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        _name(axes, "confidence of the draft", "accepted of those looked at")
    return _legend_below(figure, *every)


def n_alpha(panels: Mapping[float, Mapping[str, Sequence[float | None]]]) -> Any:
    """n-alpha over n, a line per method, a panel per temperature."""
    figure, every = _panels(len(panels), share=True)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for axes, (temperature, curves) in zip(every, panels.items(), strict=True):
        for name, alpha in curves.items():
            points = [(n, rate) for n, rate in enumerate(alpha) if rate is not None]
            axes.plot([n for n, _ in points], [rate for _, rate in points], **_style(names.index(name)), label=name)
        axes.set_title(f"temperature {temperature:g}", fontsize="medium")
        axes.set_xticks(range(max(map(len, curves.values()))))
        axes.set_ylim(-0.02, 1.02)
        _name(axes, "n, accepted drafts before", "n-alpha")
    return _legend_below(figure, *every)


def expected(panels: Mapping[float, Mapping[str, Lengths]]) -> Any:
    """Tokens per pass over the length of the chain: measured (marks), by the formula (broken lines)."""
    figure, every = _panels(len(panels), share=True)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for axes, (temperature, curves) in zip(every, panels.items(), strict=True):
        for name, (lengths, seen, formula) in curves.items():
            style = _style(names.index(name))
            axes.plot(
                lengths, seen, color=style["color"], marker=style["marker"], markersize=5, label=f"{name}, measured"
            )
            axes.plot(lengths, formula, color=style["color"], linestyle="--", linewidth=1.2, label=f"{name}, formula")
        axes.set_title(f"temperature {temperature:g}", fontsize="medium")
        axes.set_xticks(sorted({length for curve in curves.values() for length in curve.lengths}))
        axes.set_ylim(bottom=1)
        _name(axes, "K, drafts in the chain", "tokens per target pass")
    return _legend_below(figure, *every)


def _panels(count: int, width: float = 4.6, share: bool = False, columns: int = 4) -> tuple[Any, list[Any]]:
    """A figure of panels side by side, `columns` in a row at most."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(WANTED) from error

    count = max(1, count)
    rows = -(-count // columns)
    columns = -(-count // rows)
    figure = Figure(figsize=(width * columns, 3.6 * rows), layout="constrained", facecolor="white")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share).ravel().tolist()
    for empty in grid[count:]:
        empty.remove()
    return figure, grid[:count]


def _style(place: int) -> dict[str, Any]:
    style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKS[place % len(MARKS)], "markersize": 5}
    return style | {"linestyle": LINES[place // len(COLOURS) % len(LINES)]}


def _name(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def _legend_below(figure: Any, *of: Any) -> Any:
    """One legend under all panels, each name once: it can cover nothing."""
    found = {label: handle for axes in of for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if found:
        columns = min(len(found), max(2, int(figure.get_figwidth() // 2.3)))
        figure.legend(
            found.values(), found.keys(), loc="outside lower center", ncols=columns, fontsize="small", frameon=False
        )
    return figure
