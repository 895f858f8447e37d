"""Builds small result files, for the tests of what reads them."""

from __future__ import annotations

from pathlib import Path

from infer.common import results
from infer.common.methods import NOTHING

QUESTIONS = [f"q{number}" for number in range(5)]
NOISE = (0.3, -0.1, 0.2, -0.4, 0.0)
EVEN = (0.0,) * 5


def draft_of(label: str) -> results.Draft:
    if label in ("vanilla", "transformers"):
        return NOTHING
    return results.Draft("dynamic, depth 4, top 2, 7 nodes", "deterministic, ranked by draw", 8, f"bundled {label}")


def bench_cell(label: str, task: str, speedup: float, tau: float | None, noise=EVEN, **own) -> results.Cell:
    """A cell of five questions, alike but for `noise`, which is added to the tau and the speedup of each."""
    tokens = [round(1600 * ((tau or 1.0) + extra)) + 1 for extra in noise]
    by_question = results.TimedQuestions(
        question=QUESTIONS, call=list(range(5)), replies=[1] * 5, tokens=tokens,
        cycles=None if tau is None else [1600] * 5, seconds=[[1.0] * 5], plain_tokens=tokens,
        plain_seconds=[[speedup + extra for extra in noise]],
    )  # fmt: skip
    values = dict(
        label=label, task=task, temperature=0.0, batch=1, questions=5, replies=5,
        tokens=sum(tokens), passes=None if tau is None else 8000, cycles=None if tau is None else 8000,
        tok_s=100 * speedup, speedup=speedup, speedup_range=[speedup - 0.1, speedup + 0.1], decode_speedup=speedup,
        tau=tau, accepted=None if tau is None else [10, 20, 30], ms_per_pass=None, identical=5, draft=draft_of(label),
        by_question=by_question,
    )  # fmt: skip
    return results.Cell(**(values | own))


def recording(label: str, task: str, tau: float = 2.5, noise=EVEN, **own) -> results.Recording:
    """A recording of five questions, alike but for `noise` in tau."""
    tokens = [round(1600 * (tau + extra)) for extra in noise]
    values = dict(
        label=label, task=task, temperature=0.0, questions=5, replies=5,
        tokens=sum(tokens), cycles=8000, tau=tau, draft=draft_of(label),
        positions=results.Positions([[12, 12], [12, 0]], [[10, 10], [5, 0]], [[6, 1], [2, 0]]),
        calibration=results.Calibration([4, 0, 6], [0.25, None, 0.75], [2, 0, 6]),
        chains=[results.Chain(1, 16, 10, [10], [6]), results.Chain(2, 20, 10, [10, 6], [6, 3])],
        by_question=results.CountedQuestions(QUESTIONS, tokens, [1600] * 5),
    )  # fmt: skip
    return results.Recording(**(values | own))


def bench_file(path: Path, *cells: results.Cell, machine: str = "a laptop", **settings) -> Path:
    results.write(results.Result(machine, "abc1234", {"target": None} | settings, list(cells)), path)
    return path


def recorded_file(path: Path, *cells: results.Recording, **settings) -> Path:
    results.write(results.Recorded("a server", None, {"target": None} | settings, list(cells)), path)
    return path
