"""Compiled for TPUs that are not there: memory, transfers and costs of the whole generate program."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import infer.aot as analysis
from eagle_jax import ConfigError
from eagle_jax.models import presets
from eagle_jax.models.decoder import init_params
from eagle_jax.parallel.mesh import make_mesh
from infer.aot import PAPER_TREE, Workload, costs

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPU needs libtpu (pip install libtpu)"
)


def compile_for_tpu(repository, *options: str) -> dict:
    """The last line of `python -m infer.aot`, a process of its own: libtpu reads its settings when it is loaded."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "infer.aot", *options]
    run = subprocess.run(command, capture_output=True, text=True, cwd=repository, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def check(result: dict) -> None:
    assert result["compiles"]
    assert result["fits"]
    assert result["memory_gb"] <= result["hbm_gb"]
    assert result["programs"] == 1  # prefill and loop: the loop is found inside it, or no traffic could be counted
    assert result["host_transfers"] == 0
    assert result["cache_copies"] == []  # the cache is only ever updated in place
    # No weight travels: the smallest matrix of these models has 8 MB, the draft logits of one row 1.3 MB.
    assert result["largest_all_gather_mb"] < 2 * result["batch"]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tensor_parallel_two_layers(repository):
    """Llama-3.1-8B with two of its layers over four chips, each of which holds a quarter of every matrix."""
    result = compile_for_tpu(repository, "--layers", "2", "--topology", "v5e:2x2", "--no-plain")
    check(result)
    assert result["mesh"] == {"data": 1, "fsdp": 1, "tensor": 4}
    assert result["weights_gb"] == pytest.approx(3.8233 / 4, rel=1e-3)
    assert result["memory_gb"] < 1.2
    assert result["collective_mb_per_cycle"] < 40


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("model", "topology", "batch", "weights"),
    [
        ("llama-3.1-8b", "v6e:1x1", 1, 16.91),
        ("llama-3.1-8b", "v5e:2x2", 1, 16.91 / 4),
        ("llama-3.1-8b", "v5p:2x2x1", 8, 16.91 / 4),
        ("llama-3.3-70b", "v5p:2x2x1", 1, 143.9 / 4),
        ("llama-3.3-70b", "v5p:2x2x4", 2, 143.9 / 8),
    ],
)
def test_whole_models(repository, model, topology, batch, weights):
    """All layers, EAGLE-3, 59 nodes in 8 levels, prompt and answer of 1,024 tokens each."""
    result = compile_for_tpu(repository, "--model", model, "--topology", topology, "--batch", str(batch), "--no-plain")
    check(result)
    assert result["weights_gb"] == pytest.approx(weights, rel=0.01)
    assert result["gb_per_cycle"] > 0.8 * result["weights_gb"]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_cycle_against_a_plain_step(repository):
    """Two layers: a plain step reads the weights once, a cycle reads them once and the head eight times."""
    result = compile_for_tpu(repository, "--layers", "2", "--topology", "v6e:1x1")
    check(result)
    layer, vocabulary = 2 * 218_112_000, 2 * 4096 * 128256
    assert result["plain_gb_per_cycle"] * 1e9 == pytest.approx(2 * layer + vocabulary, rel=0.05)
    assert 1 < result["cycle_over_plain_step"] < 6


def size(shapes) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def test_parameter_counts():
    """The presets have the sizes their names promise."""
    sizes = {"llama-3.1-8b": 8.03, "llama-3.3-70b": 70.55, "qwen3-8b": 8.19, "vicuna-13b": 13.02}
    for name, billions in (sizes | {"gpt2-medium": 0.355, "gpt2": 0.124}).items():
        shapes = jax.eval_shape(lambda key, name=name: init_params(presets.model(name, 1), key), jax.random.key(0))
        layers = presets.model(name).num_layers
        count = size(shapes) + (layers - 1) * size(shapes["layers_0"])
        assert count / 1e9 == pytest.approx(billions, abs=0.01 if billions > 1 else 1e-3), name


def test_unknown_names_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"unknown model 'llama3.1-8b'; the nearest known one is 'llama-3.1-8b'"):
        presets.model("llama3.1-8b")
    with pytest.raises(ConfigError, match=r"unknown chip 'v6'; the nearest of .* is 'v6e'"):
        analysis.topology_devices("v6:1x1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ConfigError, match="pip install libtpu"):
        analysis.topology_devices("v6e:1x1")


def test_buffers_beyond_the_models_positions_are_refused():
    config = presets.model("gpt2-medium", 1)
    with pytest.raises(ConfigError, match=r"512 tokens and an answer of 513 go beyond the model's 1024 positions"):
        analysis.Workload(config, "pld", analysis.mesh_for(jax.devices()[:1], 16), prompt=512, max_tokens=513)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--topology v5p:3x3", "libtpu gives no topology 'v5p:3x3'"),
        ("--batch 0", "--batch 0 must be at least 1"),
        ("--max-new-tokens -1", "--max-new-tokens -1 must be at least 1"),
    ],
)
def test_what_cannot_be_compiled_is_refused(repository, options, message):
    command = [sys.executable, "-m", "infer.aot", *options.split()]
    run = subprocess.run(command, capture_output=True, text=True, cwd=repository, check=False)
    assert run.returncode != 0
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_mesh_takes_whole_heads():
    devices = jax.devices()
    assert dict(analysis.mesh_for(devices, 8).shape) == {"data": 1, "fsdp": 1, "tensor": 4}
    assert dict(analysis.mesh_for(devices, 6).shape) == {"data": 2, "fsdp": 1, "tensor": 2}
    with pytest.raises(ConfigError, match="tensor=3 does not divide the 4 devices"):
        analysis.mesh_for(devices, 6, tensor=3)


def test_products_count_every_turn_of_a_loop():
    """An input counts as read in every turn, by the share that a device holds; what is computed does not."""

    def program(x, weights):
        return jax.lax.scan(lambda x, _: (x @ weights.T, None), x, None, length=5)[0] @ x

    jaxpr = jax.make_jaxpr(program)(jnp.zeros((4, 4)), jnp.zeros((4, 4)))
    found = costs.product_costs(jaxpr, [0.0, 0.5])
    assert found == (6 * 2 * 4**3, 5 * 0.5 * 4 * 16)
    assert list(costs.loop_lengths(jaxpr).values()) == [5]


def test_costs_of_a_cycle():
    """60 rows meet every matrix of the target; the head runs on 1 + 7 levels. Attention comes on top."""
    config = presets.model("llama-3.1-8b", 1)
    work = Workload(config, presets.eagle3_head(config), make_mesh(1, 1), PAPER_TREE, 1, 32, 32, 32)
    jaxpr = analysis.trace_step(work)
    stored = jax.tree.leaves((work.params(), work.state(), work.law()))
    counted = costs.product_costs(jaxpr, [float(leaf.ndim > 1) for leaf in stored])
    layer, vocabulary, head = 218_103_808, 4096 * 128256, 243_269_632
    rows = 60 * (layer + vocabulary) + (9 + 70) * head + 71 * 4096 * 32000 + 9 * 3 * 4096**2
    assert counted.flops == pytest.approx(2 * rows, rel=0.05)
    read = layer + vocabulary + 8 * (head + 4096 * 32000) + 3 * 4096**2
    assert counted.bytes == pytest.approx(2 * read, rel=0.05)
    assert costs.loop_lengths(jaxpr)["draft/while"] == 7


HLO = """HloModule toy

%begin (part: bf16[16,32]) -> (bf16[16,32], bf16[64,32], u32[]) {
  %all.1 = bf16[64,32]{1,0} all-gather(%part), channel_id=7, metadata={op_name="jit(f)/walk/while/body/dot"}
  ROOT %started = (bf16[16,32], u32[]) custom-call(%all.1), custom_call_target="AsyncCollectiveStart"
}

%turn (state: (bf16[8,64,128], bf16[8,1,128])) -> (bf16[8,64,128], bf16[8,1,128]) {
  %all.2 = bf16[64,32]{1,0} all-gather(%part), channel_id=7, metadata={op_name="jit(f)/walk/while/body/dot"}
  %s = (bf16[8,1,128]{0:S(1)}, f32[4]{0}) all-reduce(%n), metadata={op_name="jit(f)/walk/while/body/draft/while/body"}
  %copied = bf16[8,64,128]{1,2,0} copy(%in.place), metadata={op_name="jit(f)/walk/while/body/commit"}
  %kept = bf16[8,64,128]{1,2,0:S(1)} copy(%in.place), metadata={op_name="jit(f)/walk/while/body/commit"}
}

ENTRY %main (state: (bf16[8,64,128], bf16[8,1,128])) -> (bf16[8,64,128], bf16[8,1,128]) {
  %first = bf16[8,64,128]{1,2,0} copy(%cache), metadata={op_name="jit(f)/prefill"}
  %once = f32[2]{0} reduce-scatter(%grads), metadata={op_name="jit(f)/add"}
  ROOT %loop = (bf16[8,64,128], bf16[8,1,128]) while(%state.1), body=%turn, metadata={op_name="jit(f)/walk/while"}
}
"""


def test_what_the_hlo_says():
    """Collectives with their turns, one for a chain; copies of the cache in HBM within the loop; calls of the host."""
    cycle = "jit(f)/walk/while/body"
    found = costs.collectives(HLO, {"draft/while": 3}, cycle)
    assert [(one.kind, one.bytes, one.times, one.looped) for one in found] == [
        ("all-gather", 2 * 64 * 32, 1, False), ("all-reduce", 2 * 8 * 128 + 16, 3, True)
    ]  # fmt: skip
    assert [one.kind for one in costs.collectives(HLO, {})] == ["all-gather", "all-reduce", "reduce-scatter"]
    assert costs.copies(HLO, (1, 8, 64, 128), cycle) == ["copied"]
    assert costs.copies(HLO, (8, 64, 128)) == ["copied", "first"]
    assert costs.host_transfers(HLO) == []
    called = HLO.replace("copy(%in.place)", 'custom-call(%in.place), custom_call_target="xla_python_cpu_callback"')
    assert costs.host_transfers(called) == ["copied", "kept"]
