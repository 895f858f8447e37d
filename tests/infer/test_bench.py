"""The benchmark, on a pair small enough to run it in seconds."""

from __future__ import annotations

import json

import jax
import pytest

from eagle_jax.checkpoints import save_medusa_checkpoint, save_target_checkpoint
from eagle_jax.config import MedusaConfig
from eagle_jax.models.medusa import init_medusa_params
from infer import bench


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [{"question_id": 1, "turns": ["abc", "again"]}, {"question_id": 2, "turns": ["de"]}]
    (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (folder / "long.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["x" * 3000]}), encoding="utf-8")
    return folder


QUICK = {"max_new_tokens": 6, "repeats": 1, "transformers": False, "golden": False}


def test_report(pair, tasks, capsys):
    report = bench.main(bench.Args(tasks="talk,long", data=tasks, **QUICK))
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == report
    assert set(report) == {"results", "mean_speedup", "machine", "settings"}
    assert set(report["results"]) == {"vanilla", "eagle2", "eagle3"}
    for method, results in report["results"].items():
        assert set(results) == {"talk"}  # no turn of the other task fits the model
        assert set(results["talk"]) == {"tok_s", "speedup", "tau", "cycle_ms", "identical"}
        assert results["talk"]["identical"] == "3/3"
        assert f"| talk | {method} |" in printed
    assert report["results"]["vanilla"]["talk"]["tau"] == 1
    assert report["results"]["vanilla"]["talk"]["speedup"] == 1
    assert "long: 1 turns left out" in printed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batches_and_temperature(pair, tasks, temperature):
    args = bench.Args(
        methods="eagle3", tasks=str(tasks / "talk.jsonl"), batch=2, temperature=temperature, tree="1,2,2", **QUICK
    )
    results = bench.main(args)["results"]
    assert set(results) == {"vanilla", "eagle3"}  # what eagle3 is compared with is always measured
    assert results["eagle3"]["talk"]["identical"] == "3/3"


def test_every_method_is_measured_by_its_name(pair, tasks, tmp_path):
    target = bench.load_pair(bench.Sources())[0]
    save_target_checkpoint(target.config, target.params, tmp_path / "small", "float32")
    names, given = ("sps", "pld", "lookahead", "medusa", "hydra"), {"draft_model": str(tmp_path / "small")}
    for kind in ("medusa", "hydra"):
        config, given[kind] = MedusaConfig(kind, 32, 258, num_heads=2), str(tmp_path / kind)
        save_medusa_checkpoint(config, init_medusa_params(config, jax.random.key(1)), tmp_path / kind, "float32")
    args = bench.Args(methods=",".join(names), tasks="talk", data=tasks, **given, **QUICK)
    results = bench.main(args)["results"]
    assert list(results) == ["vanilla", *names]
    assert all(results[name]["talk"]["identical"] == "3/3" for name in names)
    assert results["sps"]["talk"]["tau"] > 2  # it is the target itself


def test_tally():
    plain, drafted = bench.Tally(), bench.Tally()
    plain.add(bench.Answer([[1, 2, 3]], 2), bench.Answer([[1, 2, 3]], 2), seconds=2.0)
    drafted.add(bench.Answer([[1, 2, 4]], 1), bench.Answer([[1, 2, 3]], 2), seconds=1.0)
    assert drafted.summary(plain) == {"tok_s": 3.0, "speedup": 2.0, "tau": 2.0, "cycle_ms": 1000.0, "identical": "0/1"}
    drafted.add(bench.Answer([[1]], None), bench.Answer([[1]], None), seconds=1.0)
    assert "tau" not in drafted.summary(plain)  # a method that does not count its passes


def test_what_is_refused(pair, tasks):
    with pytest.raises(ValueError, match="--limit 0 must be at least 1"):
        bench.main(bench.Args(tasks="talk", data=tasks, limit=0, **QUICK))
    with pytest.raises(ValueError, match="--tasks names no task"):
        bench.main(bench.Args(tasks=" , ", data=tasks, **QUICK))
    with pytest.raises(ValueError, match="--methods names no method"):
        bench.main(bench.Args(methods="", tasks="talk", data=tasks))
    with pytest.raises(ValueError, match="unknown method 'typical': there are vanilla, sps, pld, lookahead, medusa, "):
        bench.main(bench.Args(methods="vanilla,typical", tasks="talk", data=tasks, **QUICK))
    with pytest.raises(ValueError, match="--methods hydra needs --hydra PATH, heads trained for the target"):
        bench.main(bench.Args(methods="hydra", tasks="talk", data=tasks, **QUICK))
    with pytest.raises(ValueError, match="--methods sps needs --draft-model PATH"):
        bench.main(bench.Args(methods="sps", tasks="talk", data=tasks, **QUICK))
    with pytest.raises(ValueError, match="--methods eagle3 with --target needs --eagle3 PATH"):
        bench.main(bench.Args(methods="eagle3", target="some/model", tasks="talk", data=tasks, **QUICK))
    with pytest.raises(ValueError, match="neither a file nor a name"):
        bench.main(bench.Args(tasks="chat", data=tasks, **QUICK))
    with pytest.raises(ValueError, match="the small pair is float32, not bfloat16"):
        bench.main(bench.Args(tasks="talk", data=tasks, dtype="bfloat16", **QUICK))
