"""The report of small result files whose rows were computed by hand."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from infer.common import results
from infer.papers import figures, report
from infer.papers.evidence import gather, title, unablated, unruled
from tests.infer.result_files import (
    PLAIN,
    RECORDS,
    STUDY,
    TABLE_1,
    bench_cell,
    bench_file,
    draft_of,
    made,
    part,
    record_cell,
    record_file,
)


def size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def test_table_1(tmp_path):
    text = part(made(tmp_path, bench_file(tmp_path / "b.json", TABLE_1)), "Speedup and tau at temperature 0")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[:4] == [
        "| method | gsm8k | mt_bench | mean | cycle over plain step |",
        "|---|---:|---:|---:|---:|",
        "| plain decoding | 1.00x, 1.00 | 1.00x, 1.00 | 1.00x, 1.00 | - |",
        "| EAGLE-3 | 3.00x, 5.00 | 2.00x, 4.00 | 2.50x, 4.50 | 1.75 (8 rows) |",
    ]
    some = text.split("On some of the tasks only:")[1].strip().splitlines()
    assert some[:4] == [
        "| method | gsm8k | mean | cycle over plain step |",
        "|---|---:|---:|---:|",
        "| PLD, 10 | 1.25x, 1.50 | 1.25x, 1.50 | - |",
        "| transformers | 0.50x, - | 0.50x, - | - |",
    ]
    assert "| EAGLE-3 | 2.88x-3.25x, 5/5 | 1.88x-2.25x, 4/5 |" in lines
    assert "over 2 repetitions" in text
    assert "| EAGLE-3 | Llama-3.1-8B | 4.40x, 6.13 | 4.85x, 6.74 | 4.48x, 6.23 | 4.82x, 6.70 | 3.65x, 5.34 |" in lines
    assert "| PLD | Vicuna-13B | 1.58x, 1.63 | - | - | - | - |" in lines
    assert not any("Medusa" in line for line in lines)  # printed in the paper, not measured here
    width, height = size(tmp_path / "out" / "speedup_t0.png")
    assert width > height > 200


def test_a_section_without_data_names_its_command(tmp_path):
    text = made(tmp_path, bench_file(tmp_path / "b.json", TABLE_1))
    for heading, command in {
        "Speedup and tau at temperature 1": "python -m infer.bench --methods vanilla,eagle2,eagle3 --temperatures 1",
        "EAGLE-2's ablation": "--methods eagle2@6x10x59,eagle2@6x10x59/confidence,eagle2@6x10x59/norerank,",
        "EAGLE-3's ablation": "python -m train.demo.study",
        "Acceptance by tree position": "python -m infer.acceptance",
        "n-alpha": "python -m infer.acceptance",
        "Throughput against batch size": "--batches 1,2,4,8",
        "Where it fails: high temperature": "--temperatures 0,1,1.5",
    }.items():
        (line,) = part(text, heading).strip().splitlines()
        assert line.startswith("Not in these files: ")
        assert command in line


def test_eagle_2s_ablation(tmp_path):
    base = "eagle2@4x2x7"
    cells = [
        bench_cell(base, "gsm8k", 2.0, 4.0),
        bench_cell(f"{base}/confidence", "gsm8k", 1.5, 3.0),
        bench_cell(f"{base}/confidence/norerank", "gsm8k", 1.25, 2.5),
    ]
    text = made(tmp_path, bench_file(tmp_path / "b.json", [*cells, *PLAIN[:1]]))
    lines = part(text, "EAGLE-2's ablation").splitlines()
    assert "| value and rerank (EAGLE-2) | 2.00x, 4.00 | 2.00x, 4.00 | 4.98 |" in lines
    assert "| no rerank | - | - | 4.86 |" in lines
    assert "| no value: expanded by confidence | 1.50x, 3.00 | 1.50x, 3.00 | 4.39 |" in lines
    assert "| neither | 1.25x, 2.50 | 1.25x, 2.50 | 3.92 |" in lines
    assert "confidence" not in part(text, "Speedup and tau at temperature 0")


def test_acceptance_rules_stand_in_a_section_of_their_own(tmp_path):
    base = "eagle2@static"
    own = [bench_cell(base, "gsm8k", 2.0, 4.0), bench_cell(f"{base}/traversal", "gsm8k", 1.5, 3.0),
           bench_cell("eagle3", "gsm8k", 2.0, 4.0)]  # fmt: skip
    cells = [dataclasses.replace(cell, temperature=1.0) for cell in [*own, PLAIN[0]]]
    text = made(tmp_path, bench_file(tmp_path / "b.json", cells))
    assert part(text, "Acceptance rules").strip().splitlines()[2:] == [
        "| EAGLE-2, static, temperature 1, batch 1: speedup and tau | gsm8k | mean |",
        "|---|---:|---:|",
        "| deterministic | 2.00x, 4.00 | 2.00x, 4.00 |",
        "| traversal | 1.50x, 3.00 | 1.50x, 3.00 |",
    ]
    assert "traversal" not in part(text, "Speedup and tau at temperature 1")
    named = dataclasses.replace(cells[0], label=f"{base}/deterministic", speedup=3.0)
    text = part(made(tmp_path, bench_file(tmp_path / "b.json", [*cells, named])), "Acceptance rules")
    assert text.count("| deterministic |") == 1  # what was measured beside the others
    assert "| deterministic | 3.00x, 4.00 | 3.00x, 4.00 |" in text


def test_recorded_rules_have_their_taus(tmp_path):
    rules = {"rejection": 2.0, "block": 2.25}
    cells = [
        record_cell(f"sps@chain4/{rule}", task, 1.0, tau=tau + extra)
        for task, extra in (("gsm8k", 0.0), ("nq", 0.5))
        for rule, tau in rules.items()
    ]
    text = part(made(tmp_path, record_file(tmp_path / "r.json", cells)), "Acceptance rules")
    assert text.strip().splitlines()[2:] == [
        "| SpS, chain4, temperature 1: recorded tau | gsm8k | nq | mean |",
        "|---|---:|---:|---:|",
        "| rejection | 2.00 | 2.50 | 2.25 |",
        "| block | 2.25 | 2.75 | 2.50 |",
    ]


def test_eagle_3s_ablation_is_that_of_the_study(tmp_path):
    text = part(made(tmp_path, STUDY), "EAGLE-3's ablation")
    runs = json.loads(STUDY.read_text(encoding="utf-8"))["runs"]
    for name, printed in {"eagle2": "4.05", "top": "5.37", "eagle3": "6.13", "top-feature-loss": "-"}.items():
        (run,) = [run for run in runs.values() if run["run"] == name]
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {run['title']} |")]
        assert f"| {run['measured']['tau']:.2f} |" in line
        assert line.endswith(f"| {printed} |")


def test_batches_of_chains(tmp_path):
    cells = []
    for batch, speed in ((1, 2.0), (4, 1.5)):
        cells.append(bench_cell("vanilla", "gsm8k", 1.0, 1.0, batch=batch, tok_s=100.0 * batch))
        cells.append(bench_cell("eagle3@chain3", "gsm8k", speed, 2.5, batch=batch, tok_s=100.0 * batch * speed))
    text = made(tmp_path, bench_file(tmp_path / "b.json", [*cells, bench_cell("eagle3", "gsm8k", 3.0, 5.0)]))
    lines = part(text, "Throughput against batch size").splitlines()
    assert "| EAGLE-3, chain3 | 200, 2.00x | 600, 1.50x |" in lines
    assert not any(line.startswith("| EAGLE-3 |") for line in lines)  # measured at one batch size
    assert "batch 1." in part(text, "Speedup and tau at temperature 0")
    assert (tmp_path / "out" / "batch_t0.png").stat().st_size > 5000


def test_high_temperature_is_compared_on_the_tasks_that_all_have(tmp_path):
    cells = [
        bench_cell("eagle3", task, speedup, tau, temperature=heat)
        for task, heat, speedup, tau in [
            ("gsm8k", 0.0, 3.0, 5.0), ("mt_bench", 0.0, 2.0, 4.0), ("gsm8k", 1.0, 2.0, 3.0),
            ("mt_bench", 1.0, 1.5, 2.5), ("gsm8k", 1.5, 0.75, 1.5),
        ]
    ]  # fmt: skip
    text = part(made(tmp_path, bench_file(tmp_path / "b.json", cells)), "Where it fails: high temperature")
    assert "| method | T=0 | T=1 | T=1.5 | questions |" in text
    assert "| EAGLE-3 | 3.00x, 5.00 | 2.00x, 3.00 | 0.75x, 1.50 | 5 of 10: gsm8k |" in text
    assert (tmp_path / "out" / "temperature.png").exists()


def test_spec_benchs_definitions(tmp_path):
    writing = results.Category(2.5, 1.5, results.SpecBench(2.75, 120.0, 1.75))
    cells = [bench_cell("eagle3", "mt_bench", 2.0, 4.0, categories={"writing": writing}), PLAIN[1]]
    text = part(made(tmp_path, bench_file(tmp_path / "b.json", cells)), "By the definitions of Spec-Bench")
    assert "| T=0, batch 1: mt_bench | tau | mean accepted tokens | speedup | Spec-Bench's |" in text
    assert "| EAGLE-3 | 4.00 | 4.25 | 2.00x | 1.88x |" in text
    assert "| method | writing |" in text
    assert "| EAGLE-3 | 1.75x, 2.75 |" in text


def test_what_each_label_is(tmp_path):
    """Labels of equal drafts are one row, here and in the tables; the order is the papers', whatever that of files."""
    tree = draft_of("eagle2", depth=4)
    cells = [
        bench_cell("eagle3", "gsm8k", 2.0, 4.0),
        *PLAIN[:1],
        bench_cell("eagle2@4x2x7", "gsm8k", 2.0, 4.0, draft=tree),
    ]
    recordings = [
        record_cell("eagle2", "gsm8k", draft=tree),
        record_cell("hass", "gsm8k", draft=tree | {"weights": "bundled hass"}),
    ]
    files = [bench_file(tmp_path / "b.json", cells), record_file(tmp_path / "a.json", recordings)]
    text = made(tmp_path, *files)
    assert text.split("\n## ", 1)[1] == made(tmp_path, *files[::-1]).split("\n## ", 1)[1]
    rows = [line for line in part(text, "What each label is").splitlines() if line.startswith("|")][2:]
    words = "dynamic, depth 4, top 2, 7 nodes | deterministic, ranked by draw | 8 |"
    assert rows == [
        "| `vanilla` | plain decoding | - | nothing | deterministic | 1 |",
        f"| `hass` | HASS | bundled hass | {words}",
        f"| `eagle2`, `eagle2@4x2x7` | EAGLE-2 | {tree['weights']} | {words}",
        rows[-1],
    ]
    assert rows[-1].startswith("| `eagle3` | EAGLE-3 | bundled eagle3 | dynamic, depth ")
    # Timed by its long name alone, it keeps that; measured by both in one table it is one row.
    both = [*cells, bench_cell("eagle2", "gsm8k", 2.0, 4.0, draft=tree)]
    table = part(made(tmp_path, bench_file(tmp_path / "b.json", both)), "Speedup and tau at temperature 0")
    assert table.count("| EAGLE-2 | 2.00x, 4.00 |") == 1
    assert "4x2x7" not in table


def test_tau_at_the_papers_trees(tmp_path):
    cells = [record_cell("eagle2@6x10x59", task, tau=tau) for task, tau in (("gsm8k", 3.0), ("nq", 4.0))]
    cells += [record_cell("medusa@static", "gsm8k", tau=2.0), record_cell("eagle2@6x10x59/norerank", "gsm8k", tau=1.0)]
    text = part(made(tmp_path, record_file(tmp_path / "a.json", cells)), "Tau at the papers' own trees")
    assert "| temperature 0 | nodes | gsm8k | nq | mean |" in text
    assert "| EAGLE-2, 6x10x59 | 7 | 3.00 | 4.00 | 3.50 |" in text
    assert "| Medusa, static | 7 | 2.00 | - | - |" in text
    assert "norerank" not in text


def test_positions_are_pooled_over_tasks(tmp_path):
    wider = {"drafted": [[9, 9, 9]], "reached": [[10, 10, 10]], "accepted": [[4, 2, 1]]}
    cells = [RECORDS[0], record_cell("eagle3", "mt_bench", positions=wider)]
    text = part(made(tmp_path, record_file(tmp_path / "a.json", cells)), "Acceptance by tree position")
    assert "| EAGLE-3 | 1 | 0.50 (10/20) | 0.15 (3/20) | 0.10 (1/10) | - |" in text
    assert "|  | 2 | 0.40 (2/5) | - | - | - |" in text
    assert "nodes_t0.png" not in text
    assert (tmp_path / "out" / "positions_t0.png").exists()


def test_a_static_tree_has_nodes(tmp_path):
    nodes = {"parents": [-1, -1, 0], "drafted": [9, 9, 9], "reached": [9, 9, 5], "accepted": [5, 1, 2]}
    chain = {"parents": [-1, 0, 1], "drafted": [9, 9, 9], "reached": [9, 5, 2], "accepted": [5, 2, 1]}
    cells = [record_cell("eagle2@static", "gsm8k", nodes=nodes), record_cell("eagle2@chain3", "gsm8k", nodes=chain)]
    evidence = gather([record_file(tmp_path / "a.json", cells)])
    pictures = {name for section in report.sections(evidence) for name in section.pictures}
    assert "nodes_t0.png" in pictures
    figure = figures.nodes({"static": (np.array([-1, -1, 0, 2]), np.array([9, 9, 5, 0]), np.array([5, 1, 2, 0]))})
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == pytest.approx([5 / 9, 1 / 9, 2 / 5])
    assert [text.get_text() for text in figure.legends[0].texts] == ["depth 1", "depth 2"]  # no node of depth 3 was met


def test_calibration_is_pooled_by_bin(tmp_path):
    other = {"count": [6, 0], "confidence": [0.5, None], "accepted": [0, 0], "error": 0.5}
    cells = [
        RECORDS[0],
        record_cell("eagle3", "mt_bench", calibration=other),
        record_cell("pld", "gsm8k", calibration=None, uncalibrated="it drafts without probabilities", chains=[]),
    ]
    text = part(made(tmp_path, record_file(tmp_path / "a.json", cells)), "Confidence of the draft against acceptance")
    # Bin 1: 10 nodes, confidences 4 x 0.25 + 6 x 0.5 = 4, 2 accepted; bin 2: 6 nodes, 4.5 expected, 6 accepted.
    assert "| EAGLE-3 | 0 | 0.219 | 0.20 (2/10) | 1.00 (6/6) |" in text
    assert "PLD has none: it drafts without probabilities." in text


def test_n_alpha_and_expected_tokens(tmp_path):
    cells = [*RECORDS, record_cell("eagle3@2x2x4", "gsm8k"), record_cell("eagle3@2x2x4", "mt_bench")]
    other = [{"length": 1, "tokens": 12, "cycles": 10, "tested": [10], "accepted": [2]}]
    cells.append(record_cell("eagle3@2x2x4/untempered", "gsm8k", chains=other))
    text = made(tmp_path, record_file(tmp_path / "a.json", cells))
    own = part(text, "n-alpha")
    assert "| EAGLE-3 | 0 | 0.60 (12/20) | 0.50 (6/12) |" in own
    assert "2x2x4" not in own  # another tree of the same head: its chains are the same
    assert "| EAGLE-3, untempered | 0 | 0.20 (2/10) | - |" in own
    best = part(text, "Expected tokens per pass, and the best chain")
    # a = 18 of 32; formula for K = 1: 1 + a, measured 32 tokens in 20 cycles.
    assert "| EAGLE-3 | 0 | 0.562 | measured | 1.60 | 2.00 |" in best
    assert "|  |  |  | (1 - a^(K+1)) / (1 - a) | 1.56 | 1.88 |" in best
    assert "|  |  |  | 1 + a0 + a0 a1 + ... | 1.60 | 1.90 |" in best
    # By hand, a = 0.5: K = 2 at c = 0.1 (1.75 / 1.2); 0.2 pays one draft (1.5 / 1.2), 0.5 none.
    (row,) = [line for line in best.splitlines() if line.startswith("| 0.5 |")]
    assert row.split(" | ")[3:] == ["2 (1.46x)", "1 (1.25x)", "0 (1.00x) |"]


def test_the_measured_cost_of_a_draft(tmp_path):
    cells = [PLAIN[0], bench_cell("eagle3@chain3", "gsm8k", 1.5, 2.6, decode_speedup=2.0)]
    text = made(tmp_path, bench_file(tmp_path / "b.json", cells))
    best = part(text, "Expected tokens per pass, and the best chain")
    assert "c=0.10, measured: EAGLE-3, chain3 |" in best  # (2.6 / 2 - 1) / 3
    (row,) = [line for line in best.splitlines() if line.startswith("| 0.5 |")]
    assert row.endswith("| 2 (1.46x) |")


def test_labels_in_words():
    assert unruled("sps@chain4/block") == ("sps@chain4", "block")
    assert unruled("eagle3@traversal") == ("eagle3", "traversal")
    assert unruled("eagle3") == ("eagle3", None)
    assert title("eagle3@6x10x59/untempered") == "EAGLE-3, 6x10x59 untempered"
    assert title("own") == "own"
    assert unablated("eagle2@4x2x7/confidence/norerank") == ("eagle2@4x2x7", {"confidence", "norerank"})
    assert unablated("eagle2@norerank") == ("eagle2", {"norerank"})
    assert unablated("eagle3") == ("eagle3", set())
