"""Times whole calls of methods in turns with plain decoding."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax.core import CycleCost, Payoff
from eagle_jax.runtime.compilation import forget_programs
from eagle_jax.runtime.generation import chosen, expected_payoff, request_of, run_request
from eagle_jax.runtime.profile import Chosen, Profile
from eagle_jax.runtime.request import Request
from infer.common.labels import PLAIN
from infer.common.timing import time_repetitions

T = TypeVar("T")
START = time.monotonic()
TOLERATED = 0.03
"""Largest loss of a choice to plain decoding on a tuned task; a limit that we set, below `SLOWER`."""
SLOWER = 0.05
"""Largest loss of "auto" to plain decoding on a task of a check; a limit that we set."""
LEAST = 5
"""Least repetitions of a choice, a number that we set: the spread of fewer is unknown."""


class Prompt(NamedTuple):
    """Holds token ids, and a key of their own: the reply does not depend on the batch."""

    tokens: list[int]
    key: jax.Array


Samples = Mapping[str, Sequence[Prompt]]
"""Prompts by task."""


class Setting(NamedTuple):
    """Holds the setting to tune for. `prompt` is the longest prompt in tokens; None is any."""

    batch: int
    temperature: float
    max_new_tokens: int
    prompt: int | None = None


def batches(prompts: Sequence[T], size: int) -> list[Sequence[T]]:
    """Splits prompts, or values of prompts, in order; the last batch may be smaller."""
    return [prompts[at : at + size] for at in range(0, len(prompts), size)]


def arguments(prompts: Sequence[Prompt], setting: Setting) -> dict[str, Any]:
    """Returns the arguments of `eagle_jax.generate` for one batch, but for target and drafter."""
    return {
        "prompts": [prompt.tokens for prompt in prompts],
        "max_new_tokens": setting.max_new_tokens,
        "temperature": setting.temperature,
        "key": jnp.stack([prompt.key for prompt in prompts]),
    }


def request_at_width(
    target: eagle_jax.Target, drafter: Any, prompts: Sequence[Prompt], every: Sequence[Prompt], setting: Setting,
    cost: CycleCost | None = None,
) -> Request:  # fmt: skip
    """Returns the request of some prompts, padded like the longest of `every`: one program serves all batches."""
    longest = max(every, key=lambda prompt: len(prompt.tokens))
    request = request_of(target, drafter, cycle_cost=cost, **arguments([*prompts, longest], setting))
    return request._replace(batch=jax.tree.map(lambda rows: rows[: len(prompts)], request.batch))


class Score(NamedTuple):
    """Holds the speed of a method: per task and repetition, plain decoding's seconds over the method's."""

    ratios: Mapping[str, Sequence[float]]

    @property
    def speedups(self) -> dict[str, float]:
        """Returns the median ratio per task."""
        return {task: float(np.median(values)) for task, values in self.ratios.items()}

    @property
    def mean(self) -> float:
        """Returns the mean over tasks of the median ratio."""
        return float(np.mean(list(self.speedups.values())))

    @property
    def worst(self) -> float:
        """Returns the least median ratio of a task."""
        return min(self.speedups.values())

    @property
    def safe(self) -> bool:
        """Returns whether it beats plain decoding in the mean and loses at most `TOLERATED` on any task.

        Both by more than the spread: two standard errors of the median ratio.
        """
        least = [_median_less_spread(values) for values in self.ratios.values()]
        return float(np.mean(least)) > 1 and min(least) > 1 - TOLERATED


def _median_less_spread(values: Sequence[float]) -> float:
    middle = float(np.median(values))
    deviation = float(np.median(np.abs(np.subtract(values, middle))))
    # Of normal noise: 1.4826 makes a deviation of it, 1.2533 is the median's error over the mean's.
    return middle - 2 * 1.2533 * 1.4826 * deviation / len(values) ** 0.5


def time_against_plain(
    target: eagle_jax.Target,
    methods: Mapping[str, Any],
    samples: Samples,
    setting: Setting,
    repeats: int,
    profile: Profile | None = None,
    costs: Mapping[str, CycleCost] = MappingProxyType({}),
    expected: Mapping[str, float] = MappingProxyType({}),
) -> tuple[dict[str, Score], str]:
    """Times whole calls of every method in turns with plain decoding, batch by batch.

    Args:
      methods: drafters by label, or "auto".
      profile: for "auto", which chooses by the length of a batch; without it all batches have one width.
      costs: `cycle_cost` of some labels. expected: their predicted speedup, which their calls begin with.

    Returns:
      the scores by label, and how many replies equal plain decoding's, such as "8/8".
    """
    ratios: dict[str, dict[str, list[float]]] = {label: {} for label in methods}
    every = list(itertools.chain(*samples.values()))
    replies: dict[str, list[list[int]]] = {}
    identical = compared = 0

    def run(label: str, request: Request, payoff: Payoff | None) -> None:
        replies[label] = run_request(request, payoff).tokens

    for task, prompts in samples.items():
        seconds = {label: np.zeros(repeats) for label in (PLAIN, *methods)}
        parts = batches(prompts, setting.batch)
        for number, part in enumerate(parts, 1):
            place = f"measuring {task}, batch {number} of {len(parts)}"
            forget_programs()
            calls: dict[str, Callable[[], None]] = {}
            for label, drafter in {PLAIN: None, **methods}.items():
                if profile is None:
                    request = request_at_width(target, drafter, part, every, setting, costs.get(label))
                    method = Chosen(drafter, costs.get(label), expected.get(label))
                else:
                    followed, options = drafter and profile, arguments(part, setting)
                    request = request_of(target, drafter, profile=followed, **options)
                    method = chosen(target, drafter, followed, options["prompts"], setting.temperature)
                payoff = expected_payoff(method)
                if number == 1 and (profile is not None or not any(ratios.values())):
                    show_progress(f"{place}: compiling {label}")
                one = jnp.ones_like(request.batch.budget)  # one token per row: the same program ends after the prefill
                run(label, request._replace(batch=request.batch._replace(budget=one)), payoff)
                calls[label] = partial(run, label, request, payoff)
            show_progress(f"{place}: {len(calls)} methods in turns, {repeats} repetitions")
            for label, times in time_repetitions(calls, repeats).items():
                seconds[label] += times
            for label in methods:
                identical += sum(a == b for a, b in zip(replies[label], replies[PLAIN], strict=True))
                compared += len(part)
        for label in methods:
            ratios[label][task] = (seconds[PLAIN] / seconds[label]).tolist()
        speeds = ", ".join(f"{label} {Score(found).speedups[task]:.2f}x" for label, found in ratios.items())
        show_progress(f"measured {task}: {speeds}")
    return {label: Score(by_task) for label, by_task in ratios.items()}, f"{identical}/{compared}"


def show_progress(text: str) -> None:
    """Prints a line to stderr, after the minutes and seconds since the start."""
    minutes, seconds = divmod(int(time.monotonic() - START), 60)
    print(f"{minutes:3d}:{seconds:02d}  {text}", file=sys.stderr, flush=True)
