"""Builds small result files, for the tests of what reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infer.common import drafts, results

QUESTIONS = [f"q{number}" for number in range(5)]
EVEN = (0.0,) * 5


def draft_of(label: str) -> dict[str, Any]:
    """A dynamic tree of 7 nodes; nothing for the baselines."""
    if label in ("vanilla", "transformers"):
        return drafts.PLAIN
    tree = {"kind": "dynamic", "depth": 4, "top_k": 2, "nodes": 7, "rows": 8, "rank_by": "value"}
    return drafts.PLAIN | tree | {"rerank": "norerank" not in label, "weights": f"bundled {label.partition('@')[0]}"}


def bench_cell(label: str, task: str, speedup: float, tau: float | None, noise=EVEN, **own) -> results.Cell:
    """A cell of five questions, alike but for `noise`, which is added to the tau and the speedup of each."""
    taus = [(tau or 1.0) + extra for extra in noise]
    by_question = {
        "question": QUESTIONS, "call": list(range(5)), "replies": [1] * 5,
        "tokens": [round(1600 * one) + 1 for one in taus], "cycles": None if tau is None else [1600] * 5,
        "seconds": [[1.0] * 5], "plain_tokens": [round(1600 * one) + 1 for one in taus],
        "plain_seconds": [[speedup + extra for extra in noise]],
    }  # fmt: skip
    values = dict(
        method=label.partition("@")[0], label=label, task=task, temperature=0.0, batch=1, questions=5, replies=5,
        tokens=sum(by_question["tokens"]), passes=None if tau is None else 8000, cycles=None if tau is None else 8000,
        seconds=[5.0], prefill_seconds=[0.1], tok_s=100 * speedup, tok_s_range=[90 * speedup, 110 * speedup],
        decode_tok_s=None, speedup=speedup, speedup_range=[speedup - 0.1, speedup + 0.1], decode_speedup=speedup,
        tau=tau, accepted=None if tau is None else [10, 20, 30], ms_per_pass=None, identical=5, compared=5,
        spec_bench=results.SpecBench(tau, 100.0, speedup), categories={}, draft=draft_of(label),
        by_question=by_question,
    )  # fmt: skip
    return results.Cell(**(values | own))


def recording(label: str, task: str, tau: float = 2.5, noise=EVEN, **own) -> results.Recording:
    """A recording of five questions, alike but for `noise` in tau."""
    tokens = [round(1600 * (tau + extra)) for extra in noise]
    values = dict(
        method=label.partition("@")[0], label=label, task=task, temperature=0.0, questions=5, replies=5,
        tokens=sum(tokens), cycles=8000, tau=tau,
        positions={"drafted": [[12, 12], [12, 0]], "reached": [[10, 10], [5, 0]], "accepted": [[6, 1], [2, 0]]},
        calibration={"count": [4, 0, 6], "confidence": [0.25, None, 0.75], "accepted": [2, 0, 6], "error": 0.25},
        uncalibrated=None,
        chains=[
            {"length": 1, "tokens": 16, "cycles": 10, "tested": [10], "accepted": [6]},
            {"length": 2, "tokens": 20, "cycles": 10, "tested": [10, 6], "accepted": [6, 3]},
        ],
        draft=draft_of(label), by_question={"question": QUESTIONS, "tokens": tokens, "cycles": [1600] * 5},
    )  # fmt: skip
    return results.Recording(**(values | own))


def bench_file(path: Path, *cells: results.Cell, machine: str = "a laptop", **settings) -> Path:
    results.write(results.Result(machine, "abc1234", {"target": None} | settings, list(cells)), path)
    return path


def recorded_file(path: Path, *cells: results.Recording, **settings) -> Path:
    results.write(results.Recorded("a server", None, {"target": None} | settings, list(cells)), path)
    return path
