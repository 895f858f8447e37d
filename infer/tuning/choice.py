"""Which of several methods is chosen by what was measured of them, and which of the predicted are measured at all."""

from __future__ import annotations

import itertools

import numpy as np
from scipy.special import stdtrit  # type: ignore[import-untyped]

from infer.tuning.replay import TOLERATED, Score, choose

LEAST = 5
"""Repetitions that a choice takes: of three two may agree by chance, and the spread of fewer says nothing."""
SLOWER = 0.05
"""What "auto" may lose to plain decoding on a task, and to the best method."""


def safe(score: Score) -> bool:
    """`Score.safe` by more than a spread that is known."""
    return score.safe and all(len(values) >= LEAST for values in score.ratios.values())


def may_be_safe(score: Score) -> bool:
    """Whether it would be safe if there were no noise."""
    return score.mean > 1 and score.worst > 1 - TOLERATED


def spread(own: Score, other: Score) -> float:
    """Half the 95% interval of one mean over another, by Student's t over repetitions that were measured in turns.

    It knows the noise of the clock and not that of the prompts, which are the same for both.
    """
    over = np.divide(*(np.mean(list(score.ratios.values()), axis=0) for score in (own, other)))
    return float(stdtrit(len(over) - 1, 0.975) * np.std(over, ddof=1) / len(over) ** 0.5)


def choose_of(scores: dict[str, Score]) -> str | None:
    """The best of those that are safe; None, plain decoding, where none is."""
    return choose({label: score for label, score in scores.items() if safe(score)})


def shortlist(predicted: dict[str, Score], count: int) -> list[str]:
    """What is measured: the best predicted one of every method that may win, then by worst task and mean in turns.

    What is best in the mean may lose too much on some task to be chosen.
    """
    order = sorted(predicted, key=lambda label: -predicted[label].mean)
    close = [label for label in order if predicted[label].mean > 0.9 * predicted[order[0]].mean]
    steady = sorted(close, key=lambda label: -predicted[label].worst)
    first: dict[str, str] = {}
    for label in order:
        first.setdefault(label.partition("@")[0], label)
    near = [label for label in first.values() if label in close]
    rest = [label for both in itertools.zip_longest(steady, order) for label in both if label]
    return list(dict.fromkeys([*near, *rest]))[: max(count, 1)]
