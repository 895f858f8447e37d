"""Draws what `train.grpo` recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eagle_jax.viz import legend_below, name_axes, panels, style

WINDOW = 4
"""Steps per mean: a round over the questions of the default run."""


def grpo_figure(steps: Sequence[Mapping[str, Any]]) -> Any:
    """Draws reward and length of replies, and tau of every drafter, over the steps; lines are running means.

    Timed steps add a panel with the speedup of rollouts over plain decoding.

    Raises:
      ValueError: matplotlib is not installed.
    """
    timed = [step for step in steps if "seconds" in step]
    figure, (left, middle, right, *more) = panels(4 if timed else 3, width=4.2)
    at = [step["step"] for step in steps]
    for place, name in enumerate(("reward", "ended", "correct")):
        left.plot(at, running_mean([step[name] for step in steps]), color=style(place)["color"], label=name)
    middle.plot(at, running_mean([step["tokens"] for step in steps]), color="0.3")
    for place, name in enumerate(steps[0]["tau"]):
        values, colour = [step["tau"][name] for step in steps], style(place + 3)["color"]
        right.plot(at, values, color=colour, alpha=0.25, linewidth=0.8)
        right.plot(at, running_mean(values), color=colour, linewidth=1.6, label=f"tau, {name}")
        if more and name != "plain":
            speedups = [step["seconds"]["plain"] / step["seconds"][name] for step in timed]
            more[0].plot([step["step"] for step in timed], speedups, color=colour, marker="o", markersize=3)
    if more:
        more[0].axhline(1, color="0.3", linewidth=0.8)
    whats = ("reward, share of replies", "tokens per reply", "tau, tokens per target pass", "speedup over plain")
    for axes, what in zip((left, middle, right, *more), whats[: 3 + len(more)], strict=True):
        axes.set_ylim(bottom=0)
        name_axes(axes, "step of the policy", what)
    return legend_below(figure, left, right)


def running_mean(values: Sequence[float]) -> list[float]:
    """Returns the mean of every value and up to `WINDOW` - 1 before it."""
    return [float(np.mean(values[max(0, end - WINDOW) : end])) for end in range(1, len(values) + 1)]
