"""Small result files, for the tests of what reads them."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from infer.common import drafts, recorded, results
from infer.papers import report
from infer.papers.evidence import RULES

STUDY = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "study.json"
QUESTIONS = [f"q{number}" for number in range(5)]


def draft_of(label: str, **own) -> dict[str, Any]:
    """A tree that no other label has but for the rule, of weights that all labels of the method share."""
    if label in ("vanilla", "transformers"):
        return drafts.PLAIN | own
    tree: dict[str, Any] = {"kind": "dynamic", "top_k": 2, "nodes": 7, "rows": 8, "rank_by": "value", "rerank": True}
    method, _, setting = label.partition("@")
    ruled = next((word for word in setting.split("/") if word in RULES), None)
    rule = ruled or ("rejection" if method == "sps" else "deterministic")
    tree["depth"] = zlib.crc32(label.removesuffix(f"/{ruled}").encode())
    ranking = "draw" if rule == "deterministic" else None
    return tree | {"weights": f"bundled {method}", "ranking": ranking, "rule": rule} | own


def static_draft(label: str, *parents: int, **own) -> dict[str, Any]:
    own = {"weights": draft_of(label)["weights"], "ranking": "draw"} | own
    return drafts.PLAIN | {"kind": "static", "rows": len(parents) + 1, "parents": drafts.written(parents)} | own


def bench_cell(
    label: str, task: str, speedup: float, tau: float | None, *, noise: tuple[float, ...] = (0, 0, 0, 0, 0), **own
) -> results.Cell:
    """A cell; plain decoding makes 100 tokens per second. Its questions are alike but for `noise`, in tau and speed."""
    names = QUESTIONS[: own.get("questions", 5)]
    noise = noise[: len(names)]
    tokens = [round(((tau or 1) + extra) * 1600) + 1 for extra in noise]
    by_question = {
        "question": names, "call": [at // own.get("batch", 1) for at in range(len(names))],
        "replies": [1] * len(names), "tokens": tokens,
        "cycles": None if tau is None else [1600] * len(names), "seconds": [[1.0] * len(names)],
        "plain_tokens": tokens, "plain_seconds": [[speedup + extra for extra in noise]],
    }  # fmt: skip
    theirs = results.SpecBench(None if tau is None else tau + 0.25, 90 * speedup, speedup - 0.125)
    values = dict(
        method=label.partition("@")[0], label=label, task=task, temperature=0.0, batch=1, questions=5,
        replies=len(names), tokens=sum(tokens), passes=None if tau is None else 100,
        cycles=None if tau is None else 1600 * len(names),
        seconds=[2.0, 2.1], prefill_seconds=[0.1, 0.1], tok_s=100 * speedup, tok_s_range=[90 * speedup, 110 * speedup],
        decode_tok_s=None, speedup=speedup, speedup_range=[speedup - 0.125, speedup + 0.25], decode_speedup=None,
        tau=tau, accepted=None, ms_per_pass=10.0, identical=5, compared=5, spec_bench=theirs, categories={},
        draft=draft_of(label), by_question=by_question,
    )  # fmt: skip
    return results.Cell(**(values | own))


def bench_file(path: Path, cells: list[results.Cell], machine: str = "a laptop", **settings) -> Path:
    results.write(results.Result(machine, "abc1234", {"target": None, "dtype": "float32"} | settings, cells), path)
    return path


def in_fifths(count: int) -> list[int]:
    """Spread over the questions as evenly as it goes."""
    return [count // 5 + (at < count % 5) for at in range(5)]


def table_of(row: list[int]) -> list[list[int]]:
    """A row of counts by question."""
    return [list(column) for column in zip(*map(in_fifths, row), strict=True)]


def record_cell(
    label: str, task: str, temperature: float = 0.0, *, noise: tuple[float, ...] = (0, 0, 0, 0, 0), **own
) -> recorded.Cell:
    """A cell; its questions are alike but for `noise` in tau."""
    tau = own.get("tau", 2.5)
    tokens = [round((tau + extra) * 1600) for extra in noise]
    values = dict(
        method=label.partition("@")[0], label=label, task=task, temperature=temperature, questions=5, replies=5,
        tokens=sum(tokens), cycles=8000, tau=2.5,
        positions={"drafted": [[12, 12], [12, 0]], "reached": [[10, 10], [5, 0]], "accepted": [[6, 1], [2, 0]]},
        nodes=None,
        calibration={"count": [4, 6], "confidence": [0.25, 0.75], "accepted": [2, 6], "error": 0.25},
        uncalibrated=None,
        chains=[
            {"length": 1, "tokens": 16, "cycles": 10, "tested": [10], "accepted": [6]},
            {"length": 2, "tokens": 20, "cycles": 10, "tested": [10, 6], "accepted": [6, 3]},
        ],
        draft=draft_of(label),
    ) | own  # fmt: skip
    bins = values["calibration"]
    values["by_question"] = {
        "question": QUESTIONS, "tokens": tokens, "cycles": [1600] * 5,
        "siblings_reached": table_of(values["positions"]["reached"][0]),
        "siblings_accepted": table_of(values["positions"]["accepted"][0]),
    } | {
        f"bins_{name}": bins and table_of(bins[name]) for name in ("count", "accepted")
    } | own.get("by_question", {})  # fmt: skip
    values["chains"] = [
        {"by_question": {
            "question": QUESTIONS, "tokens": in_fifths(chain["tokens"]), "cycles": in_fifths(chain["cycles"]),
            "tested": table_of(chain["tested"]), "accepted": table_of(chain["accepted"]),
        }} | chain
        for chain in values["chains"]
    ]  # fmt: skip
    return recorded.Cell(**values)


def record_file(path: Path, cells: list[recorded.Cell], **settings) -> Path:
    recorded.write(recorded.Recorded("a server", None, {"target": None} | settings, cells), path)
    return path


def made(tmp_path: Path, *files: Path) -> str:
    report.main(report.Args(files, tmp_path / "out"))
    return (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def part(text: str, heading: str) -> str:
    """A section of the page."""
    return text.split(f"## {heading}\n")[1].split("\n## ", maxsplit=1)[0]


PLAIN = [bench_cell("vanilla", task, 1.0, 1.0) for task in ("gsm8k", "mt_bench")]
TABLE_1 = [
    bench_cell("eagle3", "mt_bench", 2.0, 4.0, identical=4, decode_speedup=2.0),
    bench_cell("transformers", "gsm8k", 0.5, None),
    *PLAIN,
    bench_cell("eagle3", "gsm8k", 3.0, 5.0, decode_speedup=10 / 3),
    bench_cell("pld@10", "gsm8k", 1.25, 1.5),
]
RECORDS = [record_cell("eagle3", "gsm8k"), record_cell("eagle3", "mt_bench")]
