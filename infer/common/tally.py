"""Computes the cells of a result of `infer.bench` from timed replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from infer.common.calls import Answer
from infer.common.results import Cell, Draft, Group, TimedQuestions


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
