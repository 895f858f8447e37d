"""Times methods in turns, and computes the cells of a result of `infer.bench`."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

import eagle_jax
from eagle_jax.core import CycleCost, Payoff
from eagle_jax.core.types import Params
from eagle_jax.devices import DeviceError
from eagle_jax.runtime.generation import request_of, run_request
from infer.common.results import Cell, Draft, Group, TimedQuestions

K = TypeVar("K", bound=Hashable)

FEW = 2
"""Turns of the shorter call of a part."""
QUARTILE = 0.25
"""Of a part's times that which counts: more are delays by other programs, the least ones luck where clocks vary."""


def time_repetitions(
    calls: Mapping[K, Callable[[], Any]], repetitions: int, pause: float = 0.0, enough: float = 0.0
) -> dict[K, list[float]]:
    """Returns the seconds of every call in every repetition; the calls take turns, `pause` seconds apart.

    There are more than `repetitions` until all took `enough` seconds.

    A call must wait for its result. It must have run once before, so that the times include no compilation.
    Every other repetition runs the calls in reverse order.
    """
    seconds: dict[K, list[float]] = {name: [] for name in calls}
    repetition, end = 0, time.perf_counter() + enough if enough else 0.0
    while repetition < repetitions or (enough and time.perf_counter() < end):
        for name in list(calls)[:: 1 if repetition % 2 == 0 else -1]:
            time.sleep(pause)
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
        repetition += 1
    return seconds


def time_interleaved(calls: Mapping[K, Callable[[], Any]], repetitions: int) -> dict[K, float]:
    """Returns the median seconds of every call; see `time_repetitions`."""
    return {name: statistics.median(values) for name, values in time_repetitions(calls, repetitions).items()}


class Part(NamedTuple):
    """Holds `body(params, carry) -> carry`. XLA moves work that ignores the carry out of the loop."""

    body: Callable[[Params, Any], Any]
    params: Params
    carry: Any

    def program(self, *others: Any) -> Callable[[int], Any]:
        """Returns a call that runs the body so many times in one compiled loop and waits for the result.

        Args:
          others: carries of the same shapes, from each of which a loop begins as well; the last result is returned.
        """

        def loop(params: Params, carry: Any, turns: jax.Array) -> Any:
            return jax.lax.fori_loop(0, turns, lambda _, carry: self.body(params, carry), carry)

        compiled = jax.jit(loop)

        def call(turns: int) -> Any:
            for carry in (self.carry, *others):
                result = jax.block_until_ready(compiled(self.params, carry, turns))
            return result

        return call


def time_turns(
    programs: Mapping[K, Callable[[int], Any]], turns: int, base: K, repetitions: int, enough: float = 0.0
) -> dict[K, float]:
    """Returns the seconds of one turn of every program, from calls with `FEW` turns and `turns` more.

    The lower quartile of either counts. Their difference leaves out what a call does once, which is no small part: the
    first turn copies the caches. 0 is less than the times vary. See `time_repetitions`.

    Raises:
      DeviceError: that of `base`, which others are compared with, is 0.
    """
    calls = {(name, n): functools.partial(call, n) for name, call in programs.items() for n in (FEW, FEW + turns)}
    found = time_repetitions(calls, repetitions, enough=enough)
    usual = {key: float(np.quantile(seconds, QUARTILE)) for key, seconds in found.items()}
    seconds = {name: max(usual[name, FEW + turns] - usual[name, FEW], 0.0) / turns for name in programs}
    if not seconds[base]:
        raise DeviceError(
            f"a plain step must take time, got calls of {FEW} steps that were no faster than those of {FEW + turns}. "
            "End other programs on this machine."
        )
    return seconds


class Answer(NamedTuple):
    """Holds new tokens per row and, for methods that count passes, counts per row."""

    tokens: list[list[int]]  # [rows] new tokens
    cycles: list[int] | None = None  # [rows] target passes after the prefill
    accepted: list[list[int]] | None = None  # [rows][D+1] histograms


class Method(NamedTuple):
    """Holds functions `(prompts, keys) -> Answer` that wait for the result; `keys` has one per prompt."""

    answer: Callable[[list[list[int]], jax.Array], Answer]  # whole replies
    # only the first token of every reply, by the same program if the method has one; after `answer` for these prompts
    prefill: Callable[[list[list[int]], jax.Array], Answer]


@dataclasses.dataclass
class Seen:
    """Holds the prompts that are measured, and the payoff of drafts before and after them.

    All repetitions begin with what was known before: the drafts of these prompts do not count.
    """

    prompts: list[list[int]] | None = None
    before: Payoff | None = None
    after: Payoff | None = None
    first: list[int] = dataclasses.field(default_factory=list)  # tokens of the replies


def engine(
    target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter | None, max_new_tokens: int, temperature: float,
    cost: CycleCost | None = None,
) -> Method:  # fmt: skip
    """Wraps this library's `generate`; `cost` is its `cycle_cost`, and drafts of earlier prompts pay off for later."""
    seen = Seen()
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "cycle_cost": cost}

    def answer(prompts: list[list[int]], keys: jax.Array) -> Answer:
        if prompts is not seen.prompts:
            seen.prompts, seen.before = prompts, seen.after
        out = eagle_jax.generate(target, drafter, prompts, key=keys, payoff=seen.before, **options)
        seen.after, seen.first = out.payoff, [row[0] for row in out.tokens]
        return Answer(out.tokens, out.cycles.tolist(), out.accepted.tolist())

    def prefill(prompts: list[list[int]], keys: jax.Array) -> Answer:
        request = request_of(target, drafter, prompts, key=keys, **options)
        # The first token ends its row: the prefill alone. With a budget of 1 the drafter would not read the prompt.
        ends = jax.numpy.broadcast_to(jax.numpy.asarray(seen.first)[:, None], request.batch.eos_ids.shape)
        return Answer(run_request(request._replace(batch=request.batch._replace(eos_ids=ends)), seen.before).tokens)

    return Method(answer, prefill)


class Call(NamedTuple):
    """Holds a turn of a batch by one method."""

    number: int  # of the batch
    questions: Sequence[str]  # [rows] names
    answer: Answer
    plain: Answer  # plain decoding's
    seconds: Sequence[float]  # of the whole call, per repetition
    prefill_seconds: Sequence[float]  # of the prefill alone


def cell(label: str, group: Group, own: Sequence[Call], plain: Sequence[Call], draft: Draft) -> Cell:
    """Returns the cell of a method on a group from the calls of the method and of plain decoding."""
    columns = _by_question(own, plain)
    replies, tokens = sum(columns.replies), sum(columns.tokens)
    seconds, decoding = _seconds(own)
    plain_seconds, plain_decoding = _seconds(plain)
    plain_tokens = sum(columns.plain_tokens)
    speedups = tokens / seconds * plain_seconds / plain_tokens
    decoded, plain_decoded = tokens - replies, plain_tokens - replies
    decodes = min(decoded, plain_decoded) > 0 and min(decoding.min(), plain_decoding.min()) > 0
    counted = columns.cycles is not None
    cycles = sum(columns.cycles or ())
    passes = sum(max(call.answer.cycles or ()) for call in own) if counted else 0
    histograms = [row for call in own for row in call.answer.accepted or ()]
    texts = [pair for call in own for pair in zip(call.answer.tokens, call.plain.tokens, strict=True)]
    return Cell(
        label=label,
        task=group.task,
        temperature=group.temperature,
        batch=group.batch,
        questions=len(columns.question),
        replies=replies,
        tokens=tokens,
        passes=passes if counted else None,
        cycles=cycles if counted else None,
        tok_s=_median(tokens / seconds),
        speedup=_median(speedups),
        speedup_range=[_round(speedups.min()), _round(speedups.max())],
        decode_speedup=_median(decoded / decoding * plain_decoding / plain_decoded) if decodes else None,
        tau=_round(decoded / cycles) if cycles else None,
        accepted=np.sum(histograms, axis=0).tolist() if counted else None,
        ms_per_pass=_median(1000 * decoding / passes) if passes and decodes else None,
        identical=sum(mine == base for mine, base in texts),
        draft=draft,
        by_question=columns,
    )


def _seconds(calls: Sequence[Call]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds of all calls together, and without the prefills, per repetition."""
    whole = np.sum([call.seconds for call in calls], axis=0)
    return whole, whole - np.sum([call.prefill_seconds for call in calls], axis=0)


def _by_question(own: Sequence[Call], plain: Sequence[Call]) -> TimedQuestions:
    """Sums over the replies of every question; rows of a batch share its seconds alike."""
    names = list(dict.fromkeys(name for call in own for name in call.questions))
    rows = [(names.index(name), row, call) for call in own for row, name in enumerate(call.questions)]

    def sums(values: Sequence[float]) -> list[int]:
        return np.bincount([at for at, _, _ in rows], values, len(names)).astype(int).tolist()

    def seconds(calls: Sequence[Call]) -> list[list[float]]:
        total = np.zeros((len(calls[0].seconds), len(names)))
        for call in calls:
            for name in call.questions:
                total[:, names.index(name)] += np.asarray(call.seconds) / len(call.questions)
        return [[_round(value) for value in repetition] for repetition in total]

    counted = own[0].answer.cycles is not None
    return TimedQuestions(
        question=names,
        call=[next(call.number for call in own if name in call.questions) for name in names],
        replies=sums([1] * len(rows)),
        tokens=sums([len(call.answer.tokens[row]) for _, row, call in rows]),
        cycles=sums([call.answer.cycles[row] for _, row, call in rows if call.answer.cycles]) if counted else None,
        seconds=seconds(own),
        plain_tokens=sums([len(call.plain.tokens[row]) for _, row, call in rows]),
        plain_seconds=seconds(plain),
    )


def _median(values: np.ndarray) -> float:
    return _round(np.median(values))


def _round(value: float) -> float:
    """Rounds to six digits: more are noise."""
    return float(f"{value:.6g}")
