"""Checks counted operations, the peak of a device, and the report of `train.bench_step`."""

from __future__ import annotations

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.training import PEAK, compiler_options, peak_flops, product_flops
from tests.training.common import report_of
from train import bench_step

A, B, SQUARE = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 3, 5), (2, 5, 7), (4, 4)))
GROUPS = jax.ShapeDtypeStruct((2, 4, 5), jnp.float32)
LOOP = jax.jit(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=6)[0])


@pytest.mark.parametrize(
    ("fn", "args", "products"),
    [
        (jnp.matmul, (A, B), 2 * 3 * 5 * 7),
        (lambda a: a + 1, (A,), 0),
        (LOOP, (SQUARE,), 6 * 4**3),
        (jax.grad(lambda x: jnp.sum(LOOP(x))), (SQUARE,), 3 * 6 * 4**3),
        (jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(x @ x)))), (SQUARE,), 4 * 4**3),
        (lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y, x), (SQUARE,), 4**3),
        (lambda x: jax.lax.platform_dependent(x, cpu=lambda y: y @ y @ y, default=lambda y: y @ y), (SQUARE,), 4**3),
        (lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([1, 3])), (SQUARE, GROUPS), 4 * 4 * 5),
    ],
    ids=["product", "sum", "loop", "gradient", "recomputed", "branch", "platform", "grouped"],
)
def test_product_flops_counts_loops_and_the_longer_branch(fn, args, products):
    assert product_flops(fn, *args) == 2 * products


def test_peak_flops_measures_unknown_devices(monkeypatch):
    assert peak_flops("float32") > 1e8
    peak_flops.cache_clear()
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind="TPU v5 lite")])
    monkeypatch.setattr(jax, "device_count", lambda: 16)
    assert peak_flops() == 16 * PEAK["TPU v5 lite"]
    peak_flops.cache_clear()


@pytest.mark.slow
def test_bench_step_prints_its_report(capsys):
    args = bench_step.Args(size="tiny", rows=2, length=24, unroll=2, repeats=2)
    report = bench_step.main(args)
    assert report_of(capsys) == json.loads(json.dumps(report))
    assert 0 < report["fastest"] <= report["seconds"] <= report["slowest"]
    assert report["tokens_per_second"] == pytest.approx(2 * 24 / report["seconds"], rel=0.01)
    assert 0 <= report["mfu"] < 1
    assert report["loss"][0] != report["loss"][1], "the update is not part of what is timed"
    assert report["settings"] == dataclasses.asdict(args) and "jax" in report["machine"]


def test_compiler_options_are_for_cpus(monkeypatch):
    assert "cse_barrier_expander" in compiler_options().values()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert compiler_options() == {}
