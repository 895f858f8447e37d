"""The papers' claims, held against result files of a few cells: each is seen to hold and seen not to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infer.papers import claims
from infer.papers.evidence import gather
from tests.infer.result_files import bench_cell, bench_file, draft_of, record_cell, record_file, static_draft

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
    assert judged("The text", *pair, other) == [("5 of 5 replies identical, 1 setting of 1 method", "yes")]
    more = bench_cell("eagle2@4x2x7", "gsm8k", 2.0, 4.0, temperature=1.0)
    assert judged("The text", *pair, more) == [("10 of 10 replies identical, 2 settings of 1 method", "yes")]
    wrong = bench_cell("eagle3@4x2x7/deterministic", "gsm8k", 2.0, 4.0, temperature=1.0, identical=4)
    assert judged("The text", *pair, wrong) == [("9 of 10 replies identical, 2 settings of 2 methods", "no")]


def test_a_small_model_with_a_tree_draws_nothing(judged):
    """What was drawn is said by the cell, not by the method: `sps@4x2x7` keeps plain decoding's text."""
    ranked = draft_of("sps@4x2x7", rule="deterministic", ranking="draw")
    broken = bench_cell("sps@4x2x7", "gsm8k", 2.0, 4.0, temperature=1.0, identical=4, draft=ranked)
    assert judged("The text", broken) == [("4 of 5 replies identical, 1 setting of 1 method", "no")]


def test_order_of_tau(judged):
    """By the trees of the papers, as recorded; only methods that the paper printed are compared."""
    cells = [record_cell(label, "mt_bench", tau=tau) for label, tau in
             [("pld", 1.5), ("medusa@static", 2.5), ("eagle1", 3.5), ("eagle2", 9.0), ("own", 9.0)]]  # fmt: skip
    words = "PLD 1.50 < Medusa 2.50 < EAGLE 3.50; of 3 pairs 3 in order, 0 reversed"
    assert judged("Order", *cells) == [(words, "yes")]
    cells[1] = record_cell("medusa@static", "mt_bench", tau=1.25)
    words = "Medusa 1.25 < PLD 1.50 < EAGLE 3.50; of 3 pairs 2 in order, 1 reversed"
    assert judged("Order", *cells) == [(words, "no")]
    cells[1] = record_cell("medusa@static", "mt_bench", tau=1.5)
    assert judged("Order", *cells)[0][1] == "cannot tell"
    assert judged("Order", *cells[:2]) == []
    assert judged("Order", *(bench_cell(cell.label, "mt_bench", 2.0, cell.tau) for cell in cells)) == []


def test_speeds(judged):
    cells = [bench_cell("pld", "gsm8k", 0.75, 1.5), bench_cell("eagle2", "gsm8k", 2.0, 4.0)]
    assert judged("Every method", *cells) == [("PLD 0.75x, EAGLE-2 2.00x", "no")]
    cells[0] = bench_cell("pld", "gsm8k", 1.125, 1.5, noise=(-0.5, 0.5, 0, 0, 0))
    assert judged("Every method", *cells)[0][1] == "cannot tell"
    cells[0] = bench_cell("pld", "gsm8k", 1.125, 1.5)
    assert judged("Every method", *cells)[0][1] == "yes"
    hot = bench_cell("eagle2", "gsm8k", 1.5, 3.0, temperature=1.0)
    assert judged("Speedup falls", *cells, hot) == [("EAGLE-2 2.00x to 1.50x (5 questions)", "yes")]
    sizes = [bench_cell("eagle2@chain3", "gsm8k", speed, 3.0, batch=batch) for batch, speed in ((1, 2.0), (2, 1.5))]
    assert judged("The larger", *sizes) == [("batch 1 2.00x, batch 2 1.50x", "yes")]
    sizes.append(bench_cell("eagle2@chain3", "gsm8k", 1.75, 3.0, batch=4))
    assert judged("The larger", *sizes) == [("batch 1 2.00x, batch 2 1.50x, batch 4 1.75x", "no")]
    sizes[2] = bench_cell("eagle2@chain3", "gsm8k", 1.0, 3.0, batch=8)  # all five in one call: no error is known
    assert judged("The larger", *sizes) == [("batch 1 2.00x, batch 2 1.50x, batch 8 1.00x", "cannot tell")]


def test_heat_compares_the_same_questions(judged):
    """Those of one temperature alone are left out, whatever they would have added."""
    cold = bench_cell("eagle2", "gsm8k", 2.0, 4.0, noise=(0, 0, 0, 1.0, 1.0))
    hot = bench_cell("eagle2", "gsm8k", 2.0, 4.0, temperature=1.0, questions=3)
    assert judged("Speedup falls", cold, hot) == [("EAGLE-2 2.00x to 2.00x (3 questions)", "cannot tell")]
    elsewhere = bench_cell("eagle2", "nq", 1.0, 4.0, temperature=1.0)
    assert judged("Speedup falls", cold, elsewhere) == []
    other = [bench_cell("eagle3", "gsm8k", 2.0, 4.0), bench_cell("eagle3", "gsm8k", 1.0, 2.0, temperature=1.0)]
    words = "EAGLE-3 2.00x to 1.00x (5 questions); no question in common: EAGLE-2"
    assert judged("Speedup falls", cold, elsewhere, *other) == [(words, "yes")]


def test_heat_compares_one_batch_size(judged):
    cold = bench_cell("eagle2", "gsm8k", 3.0, 4.0)
    hot = bench_cell("eagle2", "gsm8k", 1.0, 4.0, temperature=1.0, batch=4)
    assert judged("Speedup falls", cold, hot) == []
    both = [bench_cell("eagle2", "gsm8k", 2.0, 4.0, batch=4), cold, hot]
    assert judged("Speedup falls", *both)[0][0] == "EAGLE-2 2.00x to 1.00x (5 questions)"


def test_drafts_that_the_law_ranks_alone_are_judged_apart(judged):
    """The papers' ranking is that; with the draw in view heat need not cost anything."""
    cells = []
    for label, ranking, speeds in (("eagle2", "draw", (1.5, 1.75)), ("eagle2@untempered", "untempered", (1.25, 0.75))):
        for heat, speed in zip((1.0, 1.5), speeds, strict=True):
            draft = draft_of("eagle2", ranking=ranking)
            cells.append(bench_cell(label, "gsm8k", speed, 3.0, temperature=heat, draft=draft))
    found = judged("Speedup falls from temperature 1 to 1.5", *cells)
    assert found == [
        ("EAGLE-2 1.50x to 1.75x (5 questions)", "no"), ("EAGLE-2, untempered 1.25x to 0.75x (5 questions)", "yes")
    ]  # fmt: skip
    assert len(judged("Speedup falls from temperature 1 to 1.5, ranked by the head's law alone", *cells)) == 1


def test_eagle_3(judged):
    cells = [record_cell("eagle2@6x10x59", "gsm8k", tau=4.0), record_cell("eagle3@8x10x59", "gsm8k", tau=4.5)]
    words = "EAGLE-2 (`eagle2@6x10x59`) 4.00, EAGLE-3 (`eagle3@8x10x59`) 4.50 (difference +0.50 ± 0.00, 5 questions)"
    assert judged("EAGLE-3 accepts more", *cells) == [(words, "yes")]
    cells[1] = record_cell("eagle3@8x10x59", "gsm8k", tau=4.5, noise=(3.0, -3.0, 0.0, 0.0, 0.0))
    # Of 5 questions that are off by 3, -3 and 0: sqrt((9 + 9) / 5 / 4) = 0.95 is the standard error of their mean, and
    # 2.78 the 97.5% quantile of Student's t with 4 degrees of freedom.
    words = words.replace("0.00, 5", "2.63, 5")
    assert judged("EAGLE-3 accepts more", *cells) == [(words, "cannot tell")]
    assert judged("EAGLE-3 accepts more", record_cell("eagle2", "gsm8k"), record_cell("eagle3", "gsm8k")) == []


@pytest.mark.parametrize(
    ("taus", "half", "verdict"),
    [((3.0, 3.5, 4.0), 0.2, "yes"), ((3.0, 3.5, 4.0), 0.6, "cannot tell"), ((3.0, 3.5, 2.5), 0.2, "no")],
)
def test_the_study(judged, tmp_path, taus, half, verdict):
    study = json.loads(STUDY.read_text(encoding="utf-8"))
    wanted = dict(zip(("eagle2", "top", "eagle3"), taus, strict=True))
    for run in study["runs"].values():
        if run["run"] in wanted:
            tau = wanted[run["run"]]
            run["measured"] |= {"tau": tau, "interval": [tau - half, tau + half]}
    (path := tmp_path / "study.json").write_text(json.dumps(study), encoding="utf-8")
    ((here, holds),) = judged("No feature loss", study=path)
    assert holds == verdict
    assert all(f"{tau:.2f}" in here for tau in taus)


def test_ablation_and_rules(judged):
    base = "eagle2@4x2x7"
    taus = {"": 4.0, "/confidence": 3.5, "/norerank": 3.75, "/confidence/norerank": 3.0}
    cells = [bench_cell(base + without, "gsm8k", 2.0, tau) for without, tau in taus.items()]
    ((here, holds),) = judged("Value and rerank", *cells)
    assert here.endswith("(EAGLE-2) 4.00, no rerank 3.75, no value: expanded by confidence 3.50, neither 3.00")
    assert holds == "yes"
    assert judged("Value and rerank", *cells[:3]) == []
    cells[1] = bench_cell(f"{base}/confidence", "gsm8k", 2.0, 4.0)
    assert judged("Value and rerank", *cells)[0][1] == "cannot tell"
    cells[1] = bench_cell(f"{base}/confidence", "gsm8k", 2.0, 4.25)
    assert judged("Value and rerank", *cells)[0][1] == "no"
    wide = [record_cell(f"eagle2@6x10x59{without}", "gsm8k", tau=tau) for without, tau in taus.items()]
    assert judged("Value and rerank each raise tau (EAGLE-2, 6x10x59, recorded)", *wide)[0][1] == "yes"
    rules = [bench_cell(f"sps@chain4/{rule}", "gsm8k", 1.5, tau, temperature=1.0)
             for rule, tau in (("rejection", 3.0), ("block", 3.25))]  # fmt: skip
    words = "SpS, chain4, temperature 1: token by token 3.00, block 3.25 (difference +0.25 ± 0.00, 5 questions)"
    assert judged("Block", *rules) == [(words, "yes")]
    # A label without a rule is that of its method's own; another batch size is another measurement.
    unnamed = bench_cell("sps@chain4", "gsm8k", 1.5, 3.0, temperature=1.0, draft=rules[0].draft)
    assert judged("Block", unnamed, rules[1]) == [(words, "yes")]
    wide = [bench_cell(cell.label, "gsm8k", 1.5, 9.0, temperature=1.0, batch=4) for cell in rules]
    assert judged("Block", *wide, *rules) == [(words, "yes")]
    worse = [rules[0], bench_cell("sps@chain4/block", "gsm8k", 1.5, 2.0, temperature=1.0)]
    assert judged("Block", *worse)[0][1] == "no"


def test_trees_of_one_size(judged):
    """With the same weights; `eagle1` and `eagle2@static` of one head are one tree."""
    many = {"drafted": [[60, 60]], "reached": [[60, 60]], "accepted": [[36, 12]]}
    tree = static_draft("eagle2", -1, -1, 0)
    static = record_cell("eagle2@static", "gsm8k", draft=tree, positions=many, tau=2.5)
    trees = [draft_of("eagle2", nodes=nodes, depth=2) for nodes in (3, 4)]
    cells = [static, record_cell("eagle2@2x2x3", "gsm8k", draft=trees[0], tau=3.0),
             record_cell("eagle2@2x2x4", "gsm8k", draft=trees[1], tau=5.0)]  # fmt: skip
    words = "EAGLE-2, static 2.50, EAGLE-2, 2x2x3 3.00 (difference +0.50 ± 0.00, 5 questions)"
    assert judged("A dynamic tree", *cells) == [(words, "yes")]
    assert judged("A dynamic tree", static, cells[2]) == []
    assert judged("Acceptance at depth 1", *cells) == [("0.60, 0.20 (EAGLE-2, static)", "yes")]


def test_heads_that_were_taught_otherwise(judged):
    """In the same tree, whichever of the two methods that have EAGLE's head it stands under."""
    one = draft_of("eagle2", weights="bundled eagle1")
    other = one | {"weights": "bundled hass"}
    high = record_cell("hass@6x10x59", "gsm8k", draft=other, tau=3.0)
    words = "taught as EAGLE ({}, 6x10x59) 2.50, as HASS (HASS, 6x10x59) 3.00 (difference +0.50 ± 0.00, 5 questions)"
    start = "A head taught on its own outputs"
    for label, name in (("eagle1@6x10x59", "EAGLE"), ("eagle2@6x10x59", "EAGLE-2")):
        low = record_cell(label, "gsm8k", draft=one, tau=2.5)
        assert judged(start, low, high) == [(words.format(name), "yes")]
    worse = record_cell("hass@6x10x59", "gsm8k", draft=other, tau=2.0)
    assert judged(start, low, worse)[0][1] == "no"
    assert judged(start, low, record_cell("hass", "gsm8k", draft=one)) == []  # the same head
    assert judged(start, low, record_cell("hass", "gsm8k", draft=other | {"nodes": 8})) == []
    assert judged(start, low, record_cell("eagle2", "gsm8k", draft=other)) == []


def test_calibration_and_chains(judged):
    honest = {"count": [40, 60, 3], "confidence": [0.2, 0.7, 0.9], "accepted": [10, 45, 0], "error": 0.0}
    chains = [{"length": 2, "tokens": 150, "cycles": 100, "tested": [100, 60], "accepted": [60, 30]}]
    two = record_cell("eagle2", "gsm8k", calibration=honest, chains=chains)
    three = record_cell("eagle3", "gsm8k", chains=[chains[0] | {"accepted": [60, 33]}])
    assert judged("Acceptance rises", two) == [("EAGLE-2: 0.25, 0.75", "yes")]  # three nodes say nothing
    noisy, worse = ({"count": [40, 60, 60], "confidence": [0.2, 0.7, 0.9], "accepted": [10, 45, last], "error": 0.0}
                    for last in (43, 20))  # fmt: skip
    assert judged("Acceptance rises", record_cell("eagle2", "gsm8k", calibration=noisy))[0][1] == "yes"  # within chance
    assert judged("Acceptance rises", record_cell("eagle2", "gsm8k", calibration=worse))[0][1] == "no"
    words = "EAGLE-2 0.60 to 0.50 (n = 1), EAGLE-3 0.60 to 0.55 (n = 1)"
    assert judged("n-alpha falls", two, three) == [(words, "cannot tell")]
    assert judged("n-alpha falls", two) == []
    # Of one head under several names: its chains are the latest method's.
    shared = [record_cell(label, "gsm8k", chains=chains, draft=draft_of(label, weights="bundled eagle1"))
              for label in ("eagle1", "hass", "eagle2")]  # fmt: skip
    assert judged("n-alpha falls", *shared, three) == [(words, "cannot tell")]
    # Compared at the last n that both have.
    short = record_cell("eagle2", "gsm8k", chains=[
        {"length": 3, "tokens": 150, "cycles": 100, "tested": [100, 60, 29], "accepted": [60, 30, 1]}
    ])  # fmt: skip
    assert judged("n-alpha falls", short, three)[0][0] == words
    steep, flat = (
        record_cell(label, "gsm8k", chains=[
            {"length": 2, "tokens": 1500, "cycles": 1000, "tested": [1000, 600], "accepted": [600, last]}
        ]) for label, last in (("eagle2", 100), ("eagle3", 350))
    )  # fmt: skip
    assert judged("n-alpha falls", steep, flat)[0][1] == "yes"
    # The paper's curve is of EAGLE's head, which is taken where it was recorded.
    own = record_cell("eagle1@4x2x7", "gsm8k", chains=[
        {"length": 2, "tokens": 1500, "cycles": 1000, "tested": [1000, 600], "accepted": [600, 590]}
    ])  # fmt: skip
    ((found, verdict),) = judged("n-alpha falls", own, steep, flat)
    assert found.startswith("EAGLE 0.60 to 0.98") and verdict == "no"
    # a = 90 / 160: 1 + a + a^2 = 1.879, measured 150 tokens in 100 cycles.
    assert judged("(1 - a", two) == [("farthest off: EAGLE-2 +25% at K = 2", "no")]
    noisy = record_cell("eagle2", "gsm8k", chains=chains).chains
    noisy[0]["by_question"]["tokens"] = [60, 50, 30, 6, 4]
    assert judged("(1 - a", record_cell("eagle2", "gsm8k", chains=noisy))[0][1] == "cannot tell"
