"""How far a measured difference can be trusted: the one standard by which `infer.papers.claims` judges.

A number of a method is a mean over tasks of ratios, each of sums over the questions of a task: tau is tokens over
cycles, a speedup is tokens per second over plain decoding's, a rate is accepted over looked at. What a question adds to
the error of such a number is known (to first order), so that of a difference is too: the same questions are compared,
and what makes a question easy for both falls out. A difference counts where its 95% interval, by Student's t over the
questions with Welch's degrees of freedom over the tasks, leaves out 0. Questions of one call count as one.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scipy.special import ndtri, stdtrit  # type: ignore[import-untyped]

LEVEL = 0.95
"""Of the intervals."""
YES, NO, UNKNOWN = "yes", "no", "cannot tell"

Key = tuple[str, tuple[str, ...]]
"""A task, and questions of it that are not independent: one, or those of a call."""


class Estimate(NamedTuple):
    """A measured number.

    Attributes:
      value: the number. parts: what every question, or call, adds to its error. variance: of an error that no question
        tells of.
    """

    value: float
    parts: Mapping[Key, float] = {}
    variance: float = 0.0


class Difference(NamedTuple):
    """A difference that a claim takes to be above 0, its standard error, and the degrees of freedom of that."""

    value: float
    error: float
    freedom: float = math.inf

    def reach(self, of: int = 1) -> float:
        """Half the width of the interval; of the intervals of `of` differences together (Bonferroni)."""
        if self.freedom < 1 or not math.isfinite(self.error):
            return math.inf
        tail = 1 - (1 - LEVEL) / 2 / of
        return self.error * float(ndtri(tail) if math.isinf(self.freedom) else stdtrit(self.freedom, tail))

    def __str__(self) -> str:
        reach = self.reach()
        return f"{self.value:+.2f} ± {reach:.2f}" if math.isfinite(reach) else f"{self.value:+.2f}, no interval known"


def judge(differences: Iterable[Difference]) -> str:
    """Whether all are above 0: yes where every interval is; no where one, wide enough for all of them, lies below."""
    found = list(differences)
    if any(one.value < -one.reach(len(found)) for one in found):
        return NO
    return YES if found and all(one.value > one.reach() for one in found) else UNKNOWN


def trend(values: Sequence[Estimate]) -> str:
    """Whether a row of numbers rises: no neighbours fall, and the last is above the first, both by `judge`."""
    if judge(difference(*pair) for pair in itertools.pairwise(values)) == NO:
        return NO
    return judge([difference(values[0], values[-1])])


def difference(low: Estimate, high: Estimate) -> Difference:
    """`high` - `low`; questions that are in both are compared with themselves, calls with what they answered."""
    ends = low.parts, high.parts
    squares: dict[str, list[float]] = {}
    for group in _together([*low.parts, *high.parts]):
        one, other = (sum(part for key, part in parts.items() if key in group) for parts in ends)
        squares.setdefault(next(iter(group))[0], []).append((other - one) ** 2)
    variance = sum(map(sum, squares.values())) + low.variance + high.variance
    return Difference(high.value - low.value, math.sqrt(variance), _freedom(list(squares.values()), variance))


def _freedom(squares: Sequence[Sequence[float]], variance: float) -> float:
    """Of a variance of independent parts, one per task, each of so many questions (Welch 1947, Satterthwaite 1946).

    One task that varies much with few questions is then not lent the certainty of the others.
    """
    if not squares:
        return math.inf
    most, least = (combine(len(of) - 1 for of in squares) for combine in (sum, min))
    if least < 1 or not math.isfinite(variance):
        return least
    ratio = sum(sum(of) ** 2 / (len(of) - 1) for of in squares)
    # Rounding alone could take it below that of the least task, where an interval ends to be known.
    return max(variance**2 / ratio, least) if ratio else most


def _together(keys: Sequence[Key]) -> list[set[Key]]:
    """Keys that share a question, in groups."""
    groups: list[tuple[set[tuple[str, str]], set[Key]]] = []
    for task, questions in dict.fromkeys(keys):
        own, members = {(task, question) for question in questions}, {(task, questions)}
        apart = []
        for names, group in groups:
            if own & names:
                own, members = own | names, members | group
            else:
                apart.append((names, group))
        groups = [*apart, (own, members)]
    return [group for _, group in groups]


def negative(found: Estimate) -> Estimate:
    """The same below 0: what falls, rises there."""
    return Estimate(-found.value, {key: -part for key, part in found.parts.items()}, found.variance)


def less(found: Estimate, by: Estimate) -> Estimate:
    """`found` - `by`, with what every question adds to it."""
    keys = dict.fromkeys([*found.parts, *by.parts])
    parts = {key: found.parts.get(key, 0.0) - by.parts.get(key, 0.0) for key in keys}
    return Estimate(found.value - by.value, parts, found.variance + by.variance)


def rate(accepted: Mapping[Key, float], tried: Mapping[Key, float]) -> Estimate:
    """A share of what was tried, pooled over all questions. Of none or all it is as uncertain as if one were not."""
    total = sum(tried.values())
    value = sum(accepted.values()) / total
    parts = {key: (accepted[key] - value * tried[key]) / total for key in tried}
    if not any(parts.values()):
        return Estimate(value, parts, (total - 1) / total**3 if total > 1 else 0.25)
    return _grown(value, parts)


def asked(cells: Iterable[Any]) -> set[tuple[str, str]]:
    """The questions of some cells, of infer.bench or infer.acceptance."""
    return {(cell.task, question) for cell in cells for question in cell.by_question["question"]}


def shared(*groups: Sequence[Any]) -> set[tuple[str, str]]:
    """Questions that all of the groups of cells have."""
    return set.intersection(*map(asked, groups))


def tau(cells: Sequence[Any], keys: set[tuple[str, str]] | None = None) -> Estimate | None:
    """Mean over tasks of tokens per cycle; cells of one label, each of another task.

    Args:
      keys: questions that count; None is all. None comes back where a task has no cycle.
    """
    found = []
    for cell in cells:
        columns = cell.by_question
        if columns["cycles"] is None:
            return None
        own = _of(cell, keys)
        if not own:
            continue
        first = columns.get("replies", [0] * len(columns["question"]))  # a reply's first token is the prefill's
        tokens = {key: float(columns["tokens"][at] - first[at]) for key, at in own.items()}
        cycles = {key: float(columns["cycles"][at]) for key, at in own.items()}
        if not (total := sum(cycles.values())):
            return None
        value = sum(tokens.values()) / total
        found.append(_grown(value, {key: (tokens[key] - value * cycles[key]) / total for key in own}))
    return _mean(found)


def speedup(cells: Sequence[Any], keys: set[tuple[str, str]] | None = None) -> Estimate | None:
    """Mean over tasks of tokens per second over plain decoding's, the median over repetitions; cells as for `tau`.

    The rows of a batch are timed together, and say no more of the error than one.
    """
    found = []
    for cell in cells:
        columns, own = cell.by_question, _of(cell, keys)
        if not own:
            continue
        ratios, parts = [], dict[Key, float]()
        calls: dict[int, list[str]] = {}
        for question, call in zip(columns["question"], columns["call"], strict=True):
            calls.setdefault(call, []).append(question)
        for seconds, plain in zip(columns["seconds"], columns["plain_seconds"], strict=True):
            four = (columns["tokens"], seconds, columns["plain_tokens"], plain)
            sums = [sum(column[at] for at in own.values()) for column in four]
            ratios.append(sums[0] / sums[1] / (sums[2] / sums[3]))
            for (task, _), at in own.items():
                share = [column[at] / whole for column, whole in zip(four, sums, strict=True)]
                key = (task, tuple(calls[columns["call"][at]]))
                log = share[0] - share[1] - share[2] + share[3]
                parts[key] = parts.get(key, 0.0) + log / len(columns["seconds"])
        value = statistics.median(ratios)
        found.append(_grown(value, {key: value * part for key, part in parts.items()}))
    return _mean(found)


def by_key(cells: Sequence[Any], column: Any) -> dict[Key, float]:
    """A column over all questions of some cells, each of another task.

    Args:
      column: `column(cell)` has a number per question.
    """
    found: dict[Key, float] = {}
    for cell in cells:
        names, values = cell.by_question["question"], column(cell)
        found |= {(cell.task, (name,)): float(value) for name, value in zip(names, values, strict=True)}
    return found


def _of(cell: Any, keys: set[tuple[str, str]] | None) -> dict[Key, int]:
    """Places of the questions that count."""
    names = cell.by_question["question"]
    return {(cell.task, (name,)): at for at, name in enumerate(names) if keys is None or (cell.task, name) in keys}


def _grown(value: float, parts: dict[Key, float]) -> Estimate:
    """With the small-sample factor of every task; of a task with one part alone the error is without bound."""
    counts = {task: sum(key[0] == task for key in parts) for task, _ in parts}
    variance = math.inf if 1 in counts.values() else 0.0
    factors = {task: math.sqrt(count / (count - 1)) if count > 1 else 0.0 for task, count in counts.items()}
    return Estimate(value, {key: part * factors[key[0]] for key, part in parts.items()}, variance)


def _mean(found: Sequence[Estimate]) -> Estimate | None:
    if not found:
        return None
    parts = {key: part / len(found) for one in found for key, part in one.parts.items()}
    variance = sum(one.variance for one in found) / len(found) ** 2
    return Estimate(statistics.fmean(one.value for one in found), parts, variance)
