"""The figures of `infer.papers.report`: black on white, a method in the same colour and mark wherever it stands."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.viz import COLOURS, diagonal, legend_below, name_axes, panels, plot_accepted, plot_calibration, style


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
    figure, (left, right) = panels(2, width=9.2 if crowded else 4.6, columns=1 if crowded else 2)
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
        look = {"width": width * 0.9, "color": COLOURS[place % len(COLOURS)], "label": title(label)}
        look |= {"hatch": ("", "//", "..", "xx")[place // len(COLOURS) % 4], "edgecolor": "white"}
        left.bar(at, speed, yerr=spread, ecolor="black", capsize=2, **look)
        known = [(x, cell.tau) for x, cell in zip(at, found, strict=True) if cell.tau is not None]
        right.bar([x for x, _ in known], [tau for _, tau in known], **look)
    for axes, what in ((left, "speedup over plain decoding"), (right, "tau, tokens per target pass")):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(tasks)), list(tasks))
        axes.set_ylabel(what)
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    return legend_below(figure, left)


def accepted(shown: Mapping[str, Mapping[str, Sequence[int]]]) -> Any:
    """How many drafted tokens a cycle accepts: `shown[title][method]` is the histogram."""
    figure, every = panels(len(shown), share=True)
    names = list(dict.fromkeys(name for counts in shown.values() for name in counts))
    for axes, (heading, histograms) in zip(every, shown.items(), strict=True):
        for name, counts in histograms.items():
            plot_accepted(axes, counts, name, names.index(name))
        axes.set_title(heading, fontsize="medium")
    return legend_below(figure, *every)


def throughput(curves: Mapping[str, Mapping[int, tuple[float, float]]]) -> Any:
    """Tokens per second and speedup over batch size: `curves[method][batch]`."""
    figure, (left, right) = panels(2)
    for place, (name, curve) in enumerate(curves.items()):
        sizes = sorted(curve)
        for side, axes in enumerate((left, right)):
            axes.plot(sizes, [curve[size][side] for size in sizes], **style(place), label=name)
    every = sorted({size for curve in curves.values() for size in curve})
    for axes, what in ((left, "tokens per second, all rows"), (right, "speedup over plain decoding")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(every, [str(size) for size in every])
        axes.set_ylim(bottom=0)
        name_axes(axes, "batch size, rows", what)
    return legend_below(figure, left)


def heat(curves: Mapping[str, Mapping[float, tuple[float | None, float | None]]]) -> Any:
    """Speedup and tau over temperature."""
    figure, (left, right) = panels(2)
    for place, (name, curve) in enumerate(curves.items()):
        for side, axes in enumerate((left, right)):
            points = [
                (temperature, pair[side]) for temperature, pair in sorted(curve.items()) if pair[side] is not None
            ]
            axes.plot([x for x, _ in points], [y for _, y in points], **style(place), label=name)
    every = sorted({temperature for curve in curves.values() for temperature in curve})
    for axes, what in ((left, "speedup over plain decoding"), (right, "tau, tokens per target pass")):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(every)
        axes.set_ylim(bottom=0)
        name_axes(axes, "temperature", what)
    return legend_below(figure, left)


def positions(shown: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Any:
    """Acceptance over depth, a line for each of four siblings; a panel per method: `(reached, accepted)`, [D, K]."""
    figure, every = panels(len(shown), share=True)
    for axes, (name, (reached, accepted)) in zip(every, shown.items(), strict=True):
        for rank in range(min(4, reached.shape[1])):
            depth = np.flatnonzero(reached[:, rank])
            rate = accepted[depth, rank] / reached[depth, rank]
            axes.plot(depth + 1, rate, **style(rank), label=f"sibling {rank + 1}")
        axes.set_title(name, fontsize="medium")
        axes.set_xticks(range(1, len(reached) + 1))
        axes.set_ylim(-0.02, 1.02)
        name_axes(axes, "depth of the node", "accepted of those looked at")
    return legend_below(figure, *every)


def nodes(shown: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Any:
    """Acceptance by node of static trees, coloured by depth: `(parents, reached, accepted)`, each [N]."""
    figure, every = panels(len(shown), width=6.0, share=True, columns=2)
    for axes, (name, (parents, reached, accepted)) in zip(every, shown.items(), strict=True):
        depths: list[int] = []
        for parent in parents.tolist():
            depths.append(1 if parent < 0 else depths[parent] + 1)
        for depth in sorted(set(depths)):
            own = np.array([node for node, level in enumerate(depths) if level == depth and reached[node]], int)
            if not own.size:  # a bar of nothing would be in the legend, in a colour of its own
                continue
            colour = COLOURS[(depth - 1) % len(COLOURS)]
            axes.bar(own + 1, accepted[own] / reached[own], color=colour, label=f"depth {depth}")
        axes.set_title(name, fontsize="medium")
        axes.set_ylim(0, 1)
        name_axes(axes, "node of the tree", "accepted of those looked at")
    return legend_below(figure, *every)


def calibration(shown: Mapping[float, Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]]) -> Any:
    """Acceptance over mean confidence of each bin; the larger the mark, the more nodes. A panel per temperature."""
    figure, every = panels(len(shown), share=True)
    names = list(dict.fromkeys(name for curves in shown.values() for name in curves))
    for axes, (temperature, curves) in zip(every, shown.items(), strict=True):
        diagonal(axes)
        for name, curve in curves.items():
            plot_calibration(axes, *curve, name, names.index(name))
        axes.set_title(f"temperature {temperature:g}", fontsize="medium")
    return legend_below(figure, *every)


def n_alpha(shown: Mapping[float, Mapping[str, Sequence[float | None]]]) -> Any:
    """n-alpha over n, a line per method, a panel per temperature."""
    figure, every = panels(len(shown), share=True)
    names = list(dict.fromkeys(name for curves in shown.values() for name in curves))
    for axes, (temperature, curves) in zip(every, shown.items(), strict=True):
        for name, alpha in curves.items():
            points = [(n, rate) for n, rate in enumerate(alpha) if rate is not None]
            axes.plot([n for n, _ in points], [rate for _, rate in points], **style(names.index(name)), label=name)
        axes.set_title(f"temperature {temperature:g}", fontsize="medium")
        axes.set_xticks(range(max(map(len, curves.values()))))
        axes.set_ylim(-0.02, 1.02)
        name_axes(axes, "n, accepted drafts before", "n-alpha")
    return legend_below(figure, *every)


def expected(shown: Mapping[float, Mapping[str, Lengths]]) -> Any:
    """Tokens per pass over the length of the chain: measured (marks), by the formula (broken lines)."""
    figure, every = panels(len(shown), share=True)
    names = list(dict.fromkeys(name for curves in shown.values() for name in curves))
    for axes, (temperature, curves) in zip(every, shown.items(), strict=True):
        for name, (lengths, seen, formula) in curves.items():
            look = style(names.index(name))
            axes.plot(
                lengths, seen, color=look["color"], marker=look["marker"], markersize=5, label=f"{name}, measured"
            )
            axes.plot(lengths, formula, color=look["color"], linestyle="--", linewidth=1.2, label=f"{name}, formula")
        axes.set_title(f"temperature {temperature:g}", fontsize="medium")
        axes.set_xticks(sorted({length for curve in curves.values() for length in curve.lengths}))
        axes.set_ylim(bottom=1)
        name_axes(axes, "K, drafts in the chain", "tokens per target pass")
    return legend_below(figure, *every)
