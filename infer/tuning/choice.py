"""Chooses among methods by what was predicted and measured."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

TOLERATED = 0.03
"""What a choice may lose to plain decoding on a task that it was measured on: other prompts may then cost 5%."""
SLOWER = 0.05
"""What "auto" may lose to plain decoding on a task, before a check fails."""
LEAST = 5
"""Repetitions that a choice needs: the spread of fewer is unknown."""


@dataclasses.dataclass(frozen=True)
class Score:
    """The speed of a method over plain decoding.

    Attributes:
      ratios: per task, plain seconds over its seconds in every repetition.
    """

    ratios: dict[str, tuple[float, ...]]

    @property
    def mean(self) -> float:
        """Mean over tasks of the median ratio."""
        return float(np.mean(list(self.speedups.values())))

    @property
    def worst(self) -> float:
        """The least median ratio of a task."""
        return min(self.speedups.values())

    @property
    def speedups(self) -> dict[str, float]:
        """Median ratio per task."""
        return {task: float(np.median(values)) for task, values in self.ratios.items()}

    @property
    def promising(self) -> bool:
        """Whether it beats plain decoding in the mean and loses at most `TOLERATED` on any task, noise ignored."""
        return self.mean > 1 and self.worst > 1 - TOLERATED

    @property
    def safe(self) -> bool:
        """Whether it is promising by more than the measured spread, two standard errors of a median."""
        least = [_median_less_spread(values) for values in self.ratios.values()]
        enough = all(len(values) >= LEAST for values in self.ratios.values())
        return enough and float(np.mean(least)) > 1 and min(least) > 1 - TOLERATED

    def and_then(self, more: Score) -> Score:
        """Adds the repetitions of a later measurement of the same tasks."""
        return Score({task: (*values, *more.ratios[task]) for task, values in self.ratios.items()})


def _median_less_spread(values: Sequence[float]) -> float:
    middle = float(np.median(values))
    deviation = float(np.median(np.abs(np.subtract(values, middle))))
    # Of normal noise: 1.4826 makes a deviation of it, 1.2533 is the median's error over the mean's.
    return middle - 2 * 1.2533 * 1.4826 * deviation / len(values) ** 0.5


def choose(scores: Mapping[str, Score]) -> str | None:
    """Returns the safe method with the largest mean; None, plain decoding, if none is safe."""
    safe = {label: score.mean for label, score in scores.items() if score.safe}
    return max(safe, key=lambda label: safe[label]) if safe else None


def shortlist(predicted: Mapping[str, Score], count: int) -> list[str]:
    """Returns what is measured: the best of every method within 10%, then by worst task and by mean in turns.

    What is best in the mean may lose too much on some task to be chosen.
    """
    order = sorted(predicted, key=lambda label: -predicted[label].mean)
    close = [label for label in order if predicted[label].mean > 0.9 * predicted[order[0]].mean]
    first = {label.partition("@")[0]: label for label in reversed(close)}
    steady = sorted(close, key=lambda label: -predicted[label].worst)
    rest = [label for both in itertools.zip_longest(steady, order) for label in both if label]
    best = sorted(first.values(), key=order.index)
    return list(dict.fromkeys([*best, *rest]))[: max(count, 1)]
