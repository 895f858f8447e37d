"""Times whole calls of methods in turns with plain decoding."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import eagle_jax
from eagle_jax.runtime.compilation import forget_programs
from infer.common.timing import time_repetitions
from infer.tuning.choice import Score


class Sample(NamedTuple):
    """The prompts of a task. Every prompt has its own key: its text does not depend on the batch.

    Attributes:
      prompts: token ids. keys: [R], one for each.
    """

    prompts: list[list[int]]
    keys: jax.Array

    def batches(self, size: int) -> list[Sample]:
        """Splits the prompts in order; the last batch may be smaller."""
        return [
            Sample(self.prompts[at : at + size], self.keys[at : at + size]) for at in range(0, len(self.prompts), size)
        ]

    def of_length(self, least: int, most: int | None) -> Sample:
        """Selects prompts of more than `least` and at most `most` tokens."""
        kept = [at for at, prompt in enumerate(self.prompts) if least < len(prompt) <= (most or len(prompt))]
        return Sample([self.prompts[at] for at in kept], self.keys[jnp.array(kept, jnp.int32)])


class Setting(NamedTuple):
    """What is tuned for.

    Attributes:
      prompt: tokens of the longest prompt; None is any.
    """

    batch: int
    temperature: float
    max_new_tokens: int
    prompt: int | None = None


class Trial(NamedTuple):
    """Whole calls at one setting.

    Attributes:
      scores: by label. plain: tokens per second of plain decoding.
      identical, compared: texts that are plain decoding's, over all methods.
    """

    scores: dict[str, Score]
    plain: float
    identical: int
    compared: int

    def and_then(self, later: Trial) -> Trial:
        """Adds later repetitions of some of the methods."""
        more = {label: self.scores[label].and_then(score) for label, score in later.scores.items()}
        identical, compared = self.identical + later.identical, self.compared + later.compared
        return Trial(self.scores | more, self.plain, identical, compared)


def timed_call(
    target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter | None, part: Sample, setting: Setting, **options: Any
) -> Callable[..., eagle_jax.GenerateOutput]:
    """Returns `eagle_jax.generate` of one batch as a call."""
    return functools.partial(
        eagle_jax.generate,
        target,
        drafter,
        part.prompts,
        max_new_tokens=setting.max_new_tokens,
        temperature=setting.temperature,
        key=part.keys,
        **options,
    )


def compete(
    target: eagle_jax.Target,
    methods: Mapping[str, eagle_jax.BoundDrafter | None],
    samples: Mapping[str, Sample],
    setting: Setting,
    repeats: int,
    **options: Any,
) -> Trial:
    """Times whole calls of every method in turns with plain decoding, batch by batch.

    Args:
      methods: by label; a drafter, None, or "auto" with `options`.
    """
    ratios: dict[str, dict[str, tuple[float, ...]]] = {label: {} for label in methods}
    tokens, plain_seconds, identical, compared = 0, 0.0, 0, 0
    for task, sample in samples.items():
        sums: dict[str | None, list[float]] = {label: [0.0] * repeats for label in (None, *methods)}
        for number, part in enumerate(sample.batches(setting.batch), 1):
            note(f"{task}, batch {number}: {len(methods)} methods in turns with plain decoding")
            forget_programs()
            calls: dict[str | None, Callable[[], Any]] = {None: timed_call(target, None, part, setting)}
            for label, drafter in methods.items():
                more: dict[str, Any] = options if isinstance(drafter, str) else {}
                calls[label] = timed_call(target, drafter, part, setting, **more)
            answers = {label: call().tokens for label, call in calls.items()}
            for label in methods:
                identical += sum(a == b for a, b in zip(answers[label], answers[None], strict=True))
                compared += len(answers[None])
            for name, seconds in time_repetitions(calls, repeats).items():
                sums[name] = [total + one for total, one in zip(sums[name], seconds, strict=True)]
            tokens += sum(map(len, answers[None]))
        plain_seconds += statistics.median(sums[None])
        for label in methods:
            ratios[label][task] = tuple(a / b for a, b in zip(sums[None], sums[label], strict=True))
    return Trial({label: Score(per_task) for label, per_task in ratios.items()}, tokens / plain_seconds, identical,
                 compared)  # fmt: skip


def note(text: str) -> None:
    """Shows the progress in one row of a terminal."""
    if sys.stderr.isatty():
        print(f"{text:<100}", end="\r", file=sys.stderr, flush=True)
