"""Draws the figures of `infer.papers`. A method has one colour and mark in a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eagle_jax.viz import COLOURS, legend_below, name_axes, panels, plot_calibration, style

Curves = Mapping[str, Mapping[Any, float | None]]
"""Points of every line by its name: y by x. None leaves a point out."""


def bars(cells: Sequence[Any], title: Callable[[str], str]) -> Any:
    """Draws speedup, with its range over repetitions, and tau: a group of bars per task, a bar per method."""
    labels, tasks = (list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("label", "task"))
    crowded = len(labels) * len(tasks) > 18
    figure, (left, right) = panels(2, width=9.2 if crowded else 4.6, columns=1 if crowded else 2)
    width = 0.8 / len(labels)
    for place, label in enumerate(labels):
        own = {cell.task: cell for cell in cells if cell.label == label}
        at = [tasks.index(name) + width * (place - (len(labels) - 1) / 2) for name in own]
        speed = [cell.speedup for cell in own.values()]
        ranges = np.array([cell.speedup_range for cell in own.values()]).T
        spread = np.maximum(0, [np.subtract(speed, ranges[0]), np.subtract(ranges[1], speed)])
        look = {"width": width * 0.9, "color": COLOURS[place % len(COLOURS)], "label": title(label)}
        look |= {"hatch": ("", "//", "..", "xx")[place // len(COLOURS) % 4], "edgecolor": "white"}
        left.bar(at, speed, yerr=spread, ecolor="black", capsize=2, **look)
        right.bar(at, [cell.tau or 0 for cell in own.values()], **look)
    for axes, what in ((left, "speedup over plain decoding"), (right, "tau, tokens per target pass")):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(tasks)), tasks)
        axes.set_ylabel(what)
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    return legend_below(figure, left)


def lines(shown: Mapping[str, Curves], x: str, y: str | Sequence[str], *, log: bool = False, broken: str = "") -> Any:
    """Draws lines in one panel per entry of `shown`.

    Args:
      x, y: names of the axes; `y` may be one per panel.
      log: makes the x axis logarithmic, to base 2.
      broken: lines whose name ends so are broken, in the colour of the line before them.
    """
    figure, every = panels(len(shown), share=isinstance(y, str))
    names = list(dict.fromkeys(name for curves in shown.values() for name in curves))
    places = {name: names.index(name) // (2 if broken else 1) for name in names}
    whats = [y] * len(shown) if isinstance(y, str) else y
    for axes, what, (heading, curves) in zip(every, whats, shown.items(), strict=True):
        for name, curve in curves.items():
            points = [(at, value) for at, value in sorted(curve.items()) if value is not None]
            look = style(places[name])
            if broken and name.endswith(broken):
                look = {"color": look["color"], "linestyle": "--"}
            axes.plot([at for at, _ in points], [value for _, value in points], **look, label=name)
        ticks = sorted({at for curve in curves.values() for at in curve})
        if log:
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_title(heading, fontsize="medium")
        name_axes(axes, x, what)
    for axes in every:  # a limit ends the automatic scale, which panels of one y axis share
        axes.set_ylim(bottom=0)
    return legend_below(figure, *every)


def calibration(shown: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]]) -> Any:
    """Draws acceptance over the mean confidence of each bin, a panel per entry; mark by number of nodes."""
    figure, every = panels(len(shown), share=True)
    names = list(dict.fromkeys(name for curves in shown.values() for name in curves))
    for axes, (heading, curves) in zip(every, shown.items(), strict=True):
        for name, curve in curves.items():
            plot_calibration(axes, *curve, name, names.index(name))
        axes.set_title(heading, fontsize="medium")
    return legend_below(figure, *every)
