"""How far a measured difference can be trusted: the one standard by which `infer.claims` judges.

A number of a method is a mean over tasks of ratios, each of sums over the questions of a task: tau is tokens over
cycles, a speedup is tokens per second over plain decoding's. What a question adds to the error of such a number is
known (to first order), so that of a difference is too: the same questions are compared, and what makes a question easy
for both falls out. A difference counts where it is more than two standard errors.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

ERRORS = 2
"""Standard errors that a difference has to exceed."""
YES, NO, UNKNOWN = "yes", "no", "cannot tell"

Key = tuple[str, str]
"""Task and question."""


class Estimate(NamedTuple):
    """A measured number.

    Attributes:
      value: the number. parts: what every question adds to its error. variance: of an error that no question tells
        of, such as that of a share of independent trials.
    """

    value: float
    parts: Mapping[Key, float] = {}
    variance: float = 0.0


class Difference(NamedTuple):
    """A difference that a claim takes to be above 0, and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:+.2f} ± {ERRORS * self.error:.2f}" if math.isfinite(self.error) else f"{self.value:+.2f}"


def judge(differences: Iterable[Difference]) -> str:
    """Whether all are above 0: no where one is below it by more than two standard errors, yes where all are above."""
    found = list(differences)
    if any(one.value < -ERRORS * one.error for one in found):
        return NO
    return YES if found and all(one.value > ERRORS * one.error for one in found) else UNKNOWN


def trend(values: Sequence[Estimate]) -> str:
    """Whether a row of numbers rises: no neighbours fall, and the last is above the first, both by `judge`."""
    steps = [difference(*pair) for pair in itertools.pairwise(values)]
    if any(judge([step]) == NO for step in steps):
        return NO
    return judge([difference(values[0], values[-1])])


def difference(low: Estimate, high: Estimate) -> Difference:
    """`high` - `low`; questions that are in both are compared with themselves."""
    keys = dict.fromkeys([*low.parts, *high.parts])
    squares = sum((high.parts.get(key, 0.0) - low.parts.get(key, 0.0)) ** 2 for key in keys)
    return Difference(high.value - low.value, math.sqrt(squares + low.variance + high.variance))


def negative(found: Estimate) -> Estimate:
    """The same below 0: what falls, rises there."""
    return Estimate(-found.value, {key: -part for key, part in found.parts.items()}, found.variance)


def share(accepted: float, tried: float) -> Estimate:
    """A rate of independent trials. Of none or all it is taken to be one short of that, or it would be certain."""
    rate = accepted / tried
    safe = min(max(accepted, 1), tried - 1) / tried if tried > 1 else 0.5
    return Estimate(rate, variance=safe * (1 - safe) / tried)


def asked(cells: Iterable[Any]) -> set[Key]:
    """The questions of some cells, of infer.bench or infer.acceptance."""
    return {(cell.task, question) for cell in cells for question in cell.by_question["question"]}


def shared(*groups: Sequence[Any]) -> set[Key]:
    """Questions that all of the groups of cells have."""
    return set.intersection(*map(asked, groups))


def tau(cells: Sequence[Any], keys: set[Key] | None = None) -> Estimate | None:
    """Mean over tasks of tokens per cycle; cells of one label, each of another task.

    Args:
      keys: questions that count; None is all. None comes back where a task has no cycle.
    """
    found = []
    for cell in cells:
        columns = cell.by_question
        if columns.get("cycles") is None:
            return None
        own = _of(cell, keys)
        if not own:
            continue
        first = columns.get("replies", [0] * len(columns["question"]))  # a reply's first token is the prefill's
        tokens = {key: columns["tokens"][at] - first[at] for key, at in own.items()}
        cycles = {key: columns["cycles"][at] for key, at in own.items()}
        if not (total := sum(cycles.values())):
            return None
        value = sum(tokens.values()) / total
        found.append(_stratum(value, {key: (tokens[key] - value * cycles[key]) / total for key in own}))
    return _mean(found)


def speedup(cells: Sequence[Any], keys: set[Key] | None = None) -> Estimate | None:
    """Mean over tasks of tokens per second over plain decoding's, the median over repetitions; cells as for `tau`."""
    found = []
    for cell in cells:
        columns, own = cell.by_question, _of(cell, keys)
        if not own:
            continue
        ratios, logs = [], []
        for seconds, plain in zip(columns["seconds"], columns["plain_seconds"], strict=True):
            sums = [sum(column[at] for at in own.values()) for column in
                    (columns["tokens"], seconds, columns["plain_tokens"], plain)]  # fmt: skip
            ratios.append(sums[0] / sums[1] / (sums[2] / sums[3]))
            logs.append({
                key: columns["tokens"][at] / sums[0] - seconds[at] / sums[1]
                - columns["plain_tokens"][at] / sums[2] + plain[at] / sums[3] for key, at in own.items()
            })  # fmt: skip
        value = statistics.median(ratios)
        found.append(_stratum(value, {key: value * statistics.fmean(log[key] for log in logs) for key in own}))
    return _mean(found)


def _of(cell: Any, keys: set[Key] | None) -> dict[Key, int]:
    """Places of the questions that count."""
    named = {(cell.task, question): at for at, question in enumerate(cell.by_question["question"])}
    return {key: at for key, at in named.items() if keys is None or key in keys}


def _stratum(value: float, parts: dict[Key, float]) -> Estimate:
    """Of one task; one question alone says nothing of the error, which is then without bound."""
    if len(parts) < 2:
        return Estimate(value, variance=math.inf)
    grown = math.sqrt(len(parts) / (len(parts) - 1))
    return Estimate(value, {key: part * grown for key, part in parts.items()})


def _mean(found: Sequence[Estimate]) -> Estimate | None:
    if not found:
        return None
    parts = {key: part / len(found) for one in found for key, part in one.parts.items()}
    variance = sum(one.variance for one in found) / len(found) ** 2
    return Estimate(statistics.fmean(one.value for one in found), parts, variance)
