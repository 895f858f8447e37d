"""The papers' claims, held against result files of a few cells: each is seen to hold and seen not to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infer import claims
from infer.evidence import gather
from tests.infer.result_files import bench_cell, bench_file, record_cell, record_file

STUDY = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "study.json"


@pytest.fixture
def judged(tmp_path):
    """The claims about some cells, by their first words: what is said of here, and whether it holds."""

    def judge(start: str, *cells, study: Path | None = None):
        timed = [cell for cell in cells if hasattr(cell, "speedup")]
        recordings = [cell for cell in cells if not hasattr(cell, "speedup")]
        files = [bench_file(tmp_path / "b.json", timed)] if timed else []
        files += [record_file(tmp_path / "a.json", recordings)] if recordings else []
        files += [study] if study else []
        found = [claim for check in claims.CHECKS for claim in check(gather(files))]
        return [(claim.here, claim.holds) for claim in found if claim.claim.startswith(start)]

    return judge


def test_the_same_text_counts_where_drafts_are_not_sampled(judged):
    pair = [bench_cell("eagle2", "gsm8k", 2.0, 4.0), bench_cell("sps", "gsm8k", 1.5, 3.0, temperature=1.0, identical=0)]
    other = bench_cell("eagle3@rejection", "gsm8k", 2.0, 4.0, temperature=1.0, identical=0)
    assert judged("The text", *pair, other) == [("5 of 5 replies identical, 1 methods", True)]
    wrong = bench_cell("eagle3@4x2x7/deterministic", "gsm8k", 2.0, 4.0, temperature=1.0, identical=4)
    assert judged("The text", *pair, wrong) == [("9 of 10 replies identical, 2 methods", False)]


def test_order_of_tau(judged):
    """EAGLE is an EAGLE-2 head with the static tree; only methods that the paper printed are compared."""
    cells = [bench_cell(label, "mt_bench", 2.0, tau) for label, tau in
             [("pld", 1.5), ("medusa", 2.5), ("eagle2@static", 3.5), ("own", 9.0)]]  # fmt: skip
    assert judged("Order", *cells) == [("PLD 1.50 < Medusa 2.50 < EAGLE 3.50; 3 of 3 pairs in order", True)]
    cells[1] = bench_cell("medusa", "mt_bench", 2.0, 1.25)
    assert judged("Order", *cells) == [("Medusa 1.25 < PLD 1.50 < EAGLE 3.50; 2 of 3 pairs in order", False)]
    assert judged("Order", *cells[:2]) == []


def test_speeds(judged):
    cells = [bench_cell("pld", "gsm8k", 0.75, 1.5), bench_cell("eagle2", "gsm8k", 2.0, 4.0)]
    assert judged("Every method", *cells) == [("PLD 0.75x, EAGLE-2 2.00x", False)]
    hot = bench_cell("eagle2", "gsm8k", 1.5, 3.0, temperature=1.0)
    assert judged("Speedup falls", *cells, hot) == [("EAGLE-2 2.00x to 1.50x", True)]
    sizes = [bench_cell("eagle2@chain3", "gsm8k", speed, 3.0, batch=batch) for batch, speed in ((1, 2.0), (4, 1.5))]
    assert judged("The larger", *sizes) == [("batch 1 2.00x, batch 4 1.50x", True)]
    sizes.append(bench_cell("eagle2@chain3", "gsm8k", 1.75, 3.0, batch=8))
    assert judged("The larger", *sizes) == [("batch 1 2.00x, batch 4 1.50x, batch 8 1.75x", False)]


def test_eagle_3(judged):
    cells = [bench_cell("eagle2", "gsm8k", 2.0, 4.0), bench_cell("eagle3", "gsm8k", 2.0, 4.5)]
    assert judged("EAGLE-3 accepts more", *cells) == [("4.00 and 4.50", True)]
    taus = {
        run["run"]: run["measured"]["tau"] for run in json.loads(STUDY.read_text(encoding="utf-8"))["runs"].values()
    }
    ((_, holds),) = judged("No feature loss", study=STUDY)
    assert holds == (taus["eagle2"] < taus["top"] < taus["eagle3"])


def test_ablation_and_rules(judged):
    base = "eagle2@4x2x7"
    taus = {"": 4.0, "/confidence": 3.5, "/norerank": 3.75, "/confidence/norerank": 3.0}
    cells = [bench_cell(base + without, "gsm8k", 2.0, tau) for without, tau in taus.items()]
    ((here, holds),) = judged("Value and rerank", *cells)
    assert here.endswith("(EAGLE-2) 4.00, no rerank 3.75, no value: expanded by confidence 3.50, neither 3.00")
    assert holds
    assert judged("Value and rerank", *cells[:3]) == []
    cells[1] = bench_cell(f"{base}/confidence", "gsm8k", 2.0, 4.25)
    assert not judged("Value and rerank", *cells)[0][1]
    rules = [bench_cell(f"sps@chain4/{rule}", "gsm8k", 1.5, tau, temperature=1.0)
             for rule, tau in (("rejection", 3.0), ("block", 3.25))]  # fmt: skip
    assert judged("Block", *rules) == [("SpS, chain4: 3.00 and 3.25, temperature 1", True)]


def test_trees_of_one_size(judged):
    nodes = {"parents": [-1, -1, 0], "drafted": [9, 9, 9], "reached": [9, 9, 9], "accepted": [5, 2, 3]}
    many = {"drafted": [[60, 60]], "reached": [[60, 60]], "accepted": [[36, 12]]}
    static = record_cell("eagle2@static", "gsm8k", nodes=nodes, positions=many)
    cells = [static, record_cell("eagle2@2x2x3", "gsm8k", tokens=36), record_cell("eagle2@2x2x4", "gsm8k", tokens=60)]
    assert judged("A dynamic tree", *cells) == [("EAGLE-2, static 2.50, EAGLE-2, 2x2x3 3.00", True)]
    assert judged("Acceptance at depth 1", *cells) == [("0.60, 0.20 (EAGLE-2, static)", True)]


def test_calibration_and_chains(judged):
    honest = {"count": [40, 60, 3], "confidence": [0.2, 0.7, 0.9], "accepted": [10, 45, 0], "error": 0.0}
    chains = [{"length": 2, "tokens": 150, "cycles": 100, "tested": [100, 60], "accepted": [60, 30]}]
    two = record_cell("eagle2", "gsm8k", calibration=honest, chains=chains)
    three = record_cell("eagle3", "gsm8k", chains=[chains[0] | {"accepted": [60, 33]}])
    assert judged("Acceptance rises", two) == [("EAGLE-2: 0.25, 0.75", True)]  # three nodes say nothing
    noisy, worse = ({"count": [40, 60, 60], "confidence": [0.2, 0.7, 0.9], "accepted": [10, 45, last], "error": 0.0}
                    for last in (43, 20))  # fmt: skip
    assert judged("Acceptance rises", record_cell("eagle2", "gsm8k", calibration=noisy))[0][1]  # 0.75 to 0.72 is chance
    assert not judged("Acceptance rises", record_cell("eagle2", "gsm8k", calibration=worse))[0][1]
    assert judged("n-alpha falls", two, three) == [("EAGLE-2 0.60 to 0.50 (n = 1), EAGLE-3 0.60 to 0.55 (n = 1)", True)]
    assert judged("n-alpha falls", two) == []
    # a = 90 / 160: 1 + a + a^2 = 1.879, measured 150 tokens in 100 cycles.
    assert judged("(1 - a", two) == [("farthest off: EAGLE-2 +25% at K = 2", False)]
