"""`train.bench_step` at a tiny size: what it prints and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest

from eagle_jax.training import host
from train import bench_step
from train.bench_step import Args


@pytest.fixture
def tiny():
    pytest.importorskip("torch", reason="needs torch: pip install eagle-jax[test]")
    return Args(size="tiny", rows=2, unroll=2, warmup=1, repeats=2, compile=False)


def test_the_last_line_compares_the_two_sides(tiny, capsys):
    report = bench_step.main(tiny)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(json.dumps(report))
    ours, *theirs = (report["seconds"][name]["median"] for name in report["seconds"])
    assert report["ratio"] == pytest.approx(min(theirs) / ours, rel=0.01)
    for name, (first, last) in report["loss"].items():
        assert (first, last) == pytest.approx(report["loss"]["jax"], rel=1e-5), name
        assert first != last, f"{name} learns nothing: the update is not part of what is timed"
        timing = report["seconds"][name]
        assert 0 < timing["min"] <= timing["median"] <= timing["max"]
        assert report["cpu_seconds"][name] > 0
        assert report["tokens_per_second"][name] == pytest.approx(2 * 24 / timing["median"], rel=0.01)
    assert report["settings"] == dataclasses.asdict(tiny)
    assert report["config"]["hidden_size"] == 32
    assert "jax" in report["machine"]
    assert "eager" in report["torch"]


def test_bfloat16_agrees_as_well(tiny):
    report = bench_step.main(dataclasses.replace(tiny, dtype="bfloat16", repeats=1))
    assert report["loss"]["jax"][0] == pytest.approx(report["loss"]["torch, 1 threads"][0], rel=1e-3)
    assert report["loss"]["jax"][0] != report["loss"]["torch, 1 threads"][0], "neither computed in bfloat16"


def test_no_ratio_where_the_losses_differ():
    times = {"jax": np.ones((1, 2)), "torch": np.full((1, 2), 2.0)}
    assert bench_step.summary(48, times, {"jax": [3.0, 2.0], "torch": [3.0, 2.001]})["ratio"] == 2.0
    for other in (2.01, float("nan")):
        with pytest.raises(ValueError, match=r"at update 1 the loss is 2.000000 here .* with torch"):
            bench_step.summary(48, times, {"jax": [3.0, 2.0], "torch": [3.0, other]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "--repeats 0 must be at least 1"),
        ({"warmup": 0}, "--warmup 0 must be at least 1"),
        ({"unroll": 0}, "--unroll 0 must be at least 1"),
        ({"length": 0}, "--length 0 must be at least 1"),
        ({"length": 2}, "--length must be at least 9 for --unroll 7, got 2"),
    ],
)
def test_bad_numbers_are_refused_before_anything_runs(changes, message, monkeypatch):
    monkeypatch.setattr(bench_step, "jax_step", lambda *_: pytest.fail("something was compiled"))
    with pytest.raises(ValueError, match=message):
        bench_step.main(Args(**changes))


def test_without_torch_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(bench_step, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"needs PyTorch. Install it: pip install -e '\.\[test\]'"):
        bench_step.main(Args())


def test_compiler_options_are_for_cpus(monkeypatch):
    assert "cse_barrier_expander" in host.compiler_options().values()
    monkeypatch.setattr(host.jax, "default_backend", lambda: "tpu")
    assert host.compiler_options() == {}
