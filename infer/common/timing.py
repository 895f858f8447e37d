"""Fair timing: calls in turns, so that a slow minute of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)


def time_repetitions(calls: Mapping[K, Callable[[], Any]], repetitions: int) -> dict[K, list[float]]:
    """Seconds of every call in every repetition, made in turns so that a slow minute of the machine hits all alike.

    A call must return only when its work is done, and must have been made once before, so that nothing compiles here.
    Every other repetition goes backwards.
    """
    seconds: dict[K, list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions):
        for name in list(calls)[:: 1 if repetition % 2 == 0 else -1]:
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def time_interleaved(calls: Mapping[K, Callable[[], Any]], repetitions: int) -> dict[K, float]:
    """Median seconds of every call; see `time_repetitions`."""
    return {name: statistics.median(values) for name, values in time_repetitions(calls, repetitions).items()}
