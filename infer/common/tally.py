"""Computes the cells of a result of `infer.bench` from timed replies."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from infer.common.calls import Answer
from infer.common.results import Category, Cell, Group, SpecBench, TimedQuestions
from infer.common.tasks import Question

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories of MT-bench, which Spec-Bench counts as one where it stands beside others."""


class Reply(NamedTuple):
    """One turn of one conversation by one method.

    Attributes:
      question: its name (`names_of`). call: of the batch, whose turns are calls of the same questions. category: of the
        question. tokens: new ones.
      cycles, accepted: target passes after the prefill and the histogram of accepted drafts; None where not counted.
      seconds, prefill_seconds: its share of the call's, per repetition: rows of a batch share alike.
      identical: whether it is plain decoding's.
    """

    question: str
    call: int
    category: str
    tokens: int
    cycles: int | None
    accepted: list[int] | None
    seconds: list[float]
    prefill_seconds: list[float]
    identical: bool


@dataclasses.dataclass
class Tally:
    """All replies of one method to the questions of a group.

    Attributes:
      passes: target passes after the prefills, of the longest row of each batch; None where not counted.
    """

    replies: list[Reply] = dataclasses.field(default_factory=list)
    passes: int | None = 0

    def add(
        self,
        call: int,
        questions: Sequence[str],
        categories: Sequence[str],
        answer: Answer,
        plain: Answer,
        seconds: Sequence[float],
        prefill_seconds: Sequence[float],
    ) -> None:
        """Counts one turn of a batch, `call`: `questions` and `categories` per row, seconds of all per repetition."""
        rows = len(answer.tokens)
        for row, (question, category) in enumerate(zip(questions, categories, strict=True)):
            self.replies.append(
                Reply(
                    question,
                    call,
                    category,
                    len(answer.tokens[row]),
                    None if answer.cycles is None else answer.cycles[row],
                    None if answer.accepted is None else answer.accepted[row],
                    [value / rows for value in seconds],
                    [value / rows for value in prefill_seconds],
                    answer.tokens[row] == plain.tokens[row],
                )
            )
        counted = self.passes is not None and answer.cycles is not None
        self.passes = self.passes + max(answer.cycles) if counted else None  # type: ignore[operator, arg-type]


def names_of(questions: Sequence[Question]) -> list[str]:
    """Returns a name for every question, unique whatever file it comes from: its id and a hash of its text."""
    found: list[str] = []
    for question in questions:
        name = f"{question.id}:{hashlib.sha256(json.dumps(question.turns).encode()).hexdigest()[:8]}"
        found.append(f"{name}:{found.count(name)}" if name in found else name)
    return found


def cell(method: str, label: str, group: Group, tally: Tally, plain: Tally, draft: Any) -> Cell:
    """Returns the cell of a method on a group; `draft` as in `infer/common/drafts.py`."""
    own, base = tally.replies, plain.replies
    seconds, prefills = _sums(own, "seconds"), _sums(own, "prefill_seconds")
    rates, decoding = _rates(own), _decode_rates(own)
    faster = [a / b if a and b else None for a, b in zip(decoding, _decode_rates(base), strict=True)]
    tokens, cycles = sum(reply.tokens for reply in own), _cycles(own)
    decode_seconds = statistics.median(whole - part for whole, part in zip(seconds, prefills, strict=True))
    ratios = _ratios(rates, _rates(base))
    return Cell(
        method=method,
        label=label,
        task=group.task,
        temperature=group.temperature,
        batch=group.batch,
        questions=len({reply.question for reply in own}),
        replies=len(own),
        tokens=tokens,
        passes=tally.passes,
        cycles=cycles,
        seconds=[_round(value) for value in seconds],
        prefill_seconds=[_round(value) for value in prefills],
        tok_s=_round(statistics.median(rates)),
        tok_s_range=[_round(min(rates)), _round(max(rates))],
        decode_tok_s=_median(decoding),
        speedup=_round(statistics.median(ratios)),
        speedup_range=[_round(min(ratios)), _round(max(ratios))],
        decode_speedup=_median(faster),
        tau=_tau(own),
        accepted=_histogram(own),
        ms_per_pass=_round(1000 * decode_seconds / tally.passes) if tally.passes and decode_seconds > 0 else None,
        identical=sum(reply.identical for reply in own),
        compared=len(own),
        spec_bench=_spec_bench(own, base),
        categories=_categories(own, base),
        draft=draft,
        by_question=_by_question(own, base),
    )


def _by_question(own: list[Reply], base: list[Reply]) -> TimedQuestions:
    """Sums over the replies of every question, as `Cell.by_question` has them."""
    names = list(dict.fromkeys(reply.question for reply in own))
    mine, plain = ([[reply for reply in of if reply.question == name] for name in names] for of in (own, base))
    times = ([_sums(one, "seconds") for one in of] for of in (mine, plain))
    seconds, plainly = ([list(map(_round, column)) for column in zip(*of, strict=True)] for of in times)
    counted = [_cycles(one) for one in mine]
    return {
        "question": names,
        "call": [one[0].call for one in mine],
        "replies": list(map(len, mine)),
        "tokens": [sum(reply.tokens for reply in one) for one in mine],
        "cycles": None if None in counted else [count for count in counted if count is not None],
        "seconds": seconds,
        "plain_tokens": [sum(reply.tokens for reply in one) for one in plain],
        "plain_seconds": plainly,
    }


def _categories(own: list[Reply], base: list[Reply]) -> dict[str, Category]:
    """By category, where there are several; MT-bench's eight are one where others stand beside them."""
    names = list(dict.fromkeys(reply.category for reply in own))
    beside = any(name not in MT_BENCH for name in names)

    def called(reply: Reply) -> str:
        return "mt_bench" if beside and reply.category in MT_BENCH else reply.category

    grouped = list(dict.fromkeys(map(called, own)))
    if len(grouped) < 2:
        return {}
    found = {}
    for name in grouped:
        mine = [reply for reply in own if called(reply) == name]
        theirs = [reply for reply in base if called(reply) == name]
        speedup = statistics.median(_ratios(_rates(mine), _rates(theirs)))
        found[name] = Category(_tau(mine), _round(speedup), _spec_bench(mine, theirs))
    return found


def _spec_bench(own: list[Reply], base: list[Reply]) -> SpecBench:
    """Medians over the repetitions, each of which is a run of theirs."""
    histogram, ours, plain = _histogram(own), _per_question(own), _per_question(base)
    steps = None if histogram is None else sum(histogram)
    accepted = _round(_weighted(histogram) / steps + 1) if histogram and steps else None
    return SpecBench(accepted, _round(statistics.median(ours)), _round(statistics.median(_ratios(ours, plain))))


def _per_question(replies: list[Reply]) -> list[float]:
    """Per repetition the mean over questions of tokens per second of all its turns."""
    turns: dict[str, list[Reply]] = {}
    for reply in replies:
        turns.setdefault(reply.question, []).append(reply)
    rates = [_rates(group) for group in turns.values()]
    return [statistics.fmean(repetition) for repetition in zip(*rates, strict=True)]


def _sums(replies: list[Reply], field: str) -> list[float]:
    return [sum(values) for values in zip(*(getattr(reply, field) for reply in replies), strict=True)]


def _rates(replies: list[Reply]) -> list[float]:
    """Tokens per second, per repetition."""
    tokens = sum(reply.tokens for reply in replies)
    return [tokens / seconds for seconds in _sums(replies, "seconds")]


def _decode_rates(replies: list[Reply]) -> list[float | None]:
    """Tokens after each reply's first per second after the prefill; None where there is nothing to measure."""
    tokens = sum(reply.tokens - 1 for reply in replies)
    seconds = zip(_sums(replies, "seconds"), _sums(replies, "prefill_seconds"), strict=True)
    return [tokens / (whole - part) if tokens and whole > part else None for whole, part in seconds]


def _cycles(replies: list[Reply]) -> int | None:
    counts = [reply.cycles for reply in replies]
    return None if None in counts else sum(count for count in counts if count is not None)


def _tau(replies: list[Reply]) -> float | None:
    cycles = _cycles(replies)
    return _round(sum(reply.tokens - 1 for reply in replies) / cycles) if cycles else None


def _histogram(replies: list[Reply]) -> list[int] | None:
    rows = [reply.accepted for reply in replies]
    if None in rows:
        return None
    return [sum(column) for column in zip(*(row for row in rows if row is not None), strict=True)]


def _weighted(histogram: Sequence[int]) -> int:
    return sum(place * count for place, count in enumerate(histogram))


def _ratios(ours: Sequence[float], plain: Sequence[float]) -> list[float]:
    return [own / base for own, base in zip(ours, plain, strict=True)]


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return _round(statistics.median(there)) if there else None


def _round(value: float) -> float:
    """Rounds to six digits: more are noise."""
    return float(f"{value:.6g}")
