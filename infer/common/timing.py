"""Times calls in turns, so that a slow minute of the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from eagle_jax.core.types import Params

K = TypeVar("K", bound=Hashable)


def time_repetitions(calls: Mapping[K, Callable[[], Any]], repetitions: int) -> dict[K, list[float]]:
    """Returns the seconds of every call in every repetition; the calls take turns.

    A call must wait for its result. It must have run once before, so that the times include no compilation.
    Every other repetition runs the calls in reverse order.
    """
    seconds: dict[K, list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions):
        for name in list(calls)[:: 1 if repetition % 2 == 0 else -1]:
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def time_interleaved(calls: Mapping[K, Callable[[], Any]], repetitions: int) -> dict[K, float]:
    """Returns the median seconds of every call; see `time_repetitions`."""
    return {name: statistics.median(values) for name, values in time_repetitions(calls, repetitions).items()}


class Part(NamedTuple):
    """Holds `body(params, carry) -> carry`. XLA moves work that ignores the carry out of the loop."""

    body: Callable[[Params, Any], Any]
    params: Params
    carry: Any

    def repeat(self, turns: int) -> Callable[[], Any]:
        """Returns a call that runs the body `turns` times in one compiled loop and waits for the result."""

        def loop(params: Params, carry: Any) -> Any:
            return jax.lax.fori_loop(0, turns, lambda _, carry: self.body(params, carry), carry)

        program = jax.jit(loop)
        return lambda: jax.block_until_ready(program(self.params, self.carry))
