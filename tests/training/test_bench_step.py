"""`train.bench_step` at a tiny size: its report and its refusals."""

from __future__ import annotations

import dataclasses
import json

import pytest

from eagle_jax.training import host
from train import bench_step
from train.bench_step import Args


def test_the_last_line_is_the_report(capsys):
    args = Args(size="tiny", rows=2, length=24, unroll=2, repeats=2)
    report = bench_step.main(args)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(json.dumps(report))
    assert 0 < report["fastest"] <= report["seconds"] <= report["slowest"]
    assert report["tokens_per_second"] == pytest.approx(2 * 24 / report["seconds"], rel=0.01)
    assert 0 <= report["mfu"] < 1
    assert report["loss"][0] != report["loss"][1], "the update is not part of what is timed"
    assert report["settings"] == dataclasses.asdict(args) and "jax" in report["machine"]


def test_compiler_options_are_for_cpus(monkeypatch):
    assert "cse_barrier_expander" in host.compiler_options().values()
    monkeypatch.setattr(host.jax, "default_backend", lambda: "tpu")
    assert host.compiler_options() == {}
