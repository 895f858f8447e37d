"""Small result files, for the tests of what reads them."""

from __future__ import annotations

from pathlib import Path

from infer import recorded, results


def bench_cell(label: str, task: str, speedup: float, tau: float | None, **own) -> results.Cell:
    """A cell; plain decoding makes 100 tokens per second."""
    theirs = results.SpecBench(None if tau is None else tau + 0.25, 90 * speedup, speedup - 0.125)
    values = dict(
        method=label.partition("@")[0], label=label, task=task, temperature=0.0, batch=1, questions=5, replies=5,
        tokens=205, passes=None if tau is None else 100, cycles=None if tau is None else 100,
        seconds=[2.0, 2.1], prefill_seconds=[0.1, 0.1], tok_s=100 * speedup, tok_s_range=[90 * speedup, 110 * speedup],
        decode_tok_s=None, speedup=speedup, speedup_range=[speedup - 0.125, speedup + 0.25], decode_speedup=None,
        tau=tau, accepted=None, ms_per_pass=10.0, identical=5, compared=5, spec_bench=theirs, categories={},
    )  # fmt: skip
    return results.Cell(**(values | own))


def bench_file(path: Path, cells: list[results.Cell], machine: str = "a laptop", **settings) -> Path:
    results.write(results.Result(machine, "abc1234", {"target": None, "dtype": "float32"} | settings, cells), path)
    return path


def record_cell(label: str, task: str, temperature: float = 0.0, **own) -> recorded.Cell:
    values = dict(
        method=label.partition("@")[0], label=label, task=task, temperature=temperature, questions=5, replies=5,
        tokens=30, cycles=12, tau=2.5,
        positions={"drafted": [[12, 12], [12, 0]], "reached": [[10, 10], [5, 0]], "accepted": [[6, 1], [2, 0]]},
        nodes=None,
        calibration={"count": [4, 6], "confidence": [0.25, 0.75], "accepted": [2, 6], "error": 0.25},
        uncalibrated=None,
        chains=[
            {"length": 1, "tokens": 16, "cycles": 10, "tested": [10], "accepted": [6]},
            {"length": 2, "tokens": 20, "cycles": 10, "tested": [10, 6], "accepted": [6, 3]},
        ],
    )  # fmt: skip
    return recorded.Cell(**(values | own))


def record_file(path: Path, cells: list[recorded.Cell], **settings) -> Path:
    recorded.write(recorded.Recorded("a server", None, {"target": None} | settings, cells), path)
    return path
