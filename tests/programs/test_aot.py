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
    # The cache is only ever updated in place. What the compiler keeps in VMEM for a while is written back: all of the
    # cache where there are two layers, next to nothing of a whole model's.
    assert result["cache_copies"] == []
    if result["layers"] > 2:
        assert result["cache_spilled_mb"] <= 0.1 * 1000 * result["cache_gb"]
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


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@needs_libtpu
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("model", "topology", "batch", "weights"),
    [
        slow("llama-3.1-8b", "v6e:1x1", 1, 16.91),
        slow("llama-3.1-8b", "v5e:2x2", 1, 16.91 / 4),
        slow("llama-3.1-8b", "v5p:2x2x1", 8, 16.91 / 4),
        slow("llama-3.3-70b", "v5p:2x2x1", 1, 143.9 / 4),
        slow("llama-3.3-70b", "v5p:2x2x4", 2, 143.9 / 8),
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


def test_kept_reports_cover_the_slices_of_the_readme(repository):
    """The compilations that take minutes each are kept as reports; what `check` asserts holds for all of them."""
    kept = json.loads((repository / "docs" / "measured" / "aot.json").read_text(encoding="utf-8"))
    for result in kept:
        check(result)
    whole = {(result["model"], result["topology"]) for result in kept}
    assert whole >= {("llama-3.1-8b", slice_) for slice_ in ("v6e:1x1", "v5e:2x2", "v5p:2x2x1")}
    assert whole >= {("llama-3.3-70b", slice_) for slice_ in ("v5p:2x2x1", "v5p:2x2x4")}
    assert any(result["temperature"] > 0 for result in kept)


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


def test_flops_count_every_turn_of_a_loop():
    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x @ x, None

    jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(body, x, None, length=5)[0])(jnp.zeros((4, 4)))
    assert costs.flops(jaxpr) == 5 * 2 * 4**3
    assert list(costs.loop_lengths(jaxpr).values()) == [5]


def test_flops_of_a_cycle():
    """60 rows meet every matrix of the target; the head runs on 1 + 7 levels. Attention comes on top."""
    config = presets.model("llama-3.1-8b", 1)
    work = Workload(config, presets.eagle3_head(config), make_mesh(1, 1), PAPER_TREE, 1, 32, 32, 32)
    counted = costs.flops(analysis.trace_step(work))
    target = 60 * (218_103_808 + 4096 * 128256)
    head = (9 + 70) * 243_269_632 + 71 * 4096 * 32000 + 9 * 3 * 4096**2
    assert counted == pytest.approx(2 * (target + head), rel=0.05)
    assert costs.loop_lengths(analysis.trace_step(work))["draft/while"] == 7


HLO = """HloModule toy

%fused (p0: bf16[8,64,128], p1: bf16[8,1,128]) -> bf16[8,64,128] {
  %p0 = bf16[8,64,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[8,1,128]{2,1,0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %update = bf16[8,64,128]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%p0, %p1, %zero, %zero, %zero)
}

%turn (state: (bf16[8,64,128], bf16[8,1,128])) -> (bf16[8,64,128], bf16[8,1,128]) {
  %state = (bf16[8,64,128]{2,1,0}, bf16[8,1,128]{2,1,0}) parameter(0)
  %cache = bf16[8,64,128]{2,1,0} get-tuple-element(%state), index=0
  %new = bf16[8,1,128]{2,1,0} get-tuple-element(%state), index=1
  %in.place = bf16[8,64,128]{2,1,0} fusion(%cache, %new), kind=kLoop, calls=%fused
  %sum = bf16[8,1,128]{2,1,0:S(1)} all-reduce(%new), replica_groups={{0,1}}, to_apply=%add
  %copied = bf16[8,64,128]{1,2,0} copy(%in.place)
  ROOT %next = (bf16[8,64,128]{2,1,0}, bf16[8,1,128]{2,1,0}) tuple(%copied, %new)
}

ENTRY %main (state: (bf16[8,64,128], bf16[8,1,128])) -> (bf16[8,64,128], bf16[8,1,128]) {
  %state.1 = (bf16[8,64,128]{2,1,0}, bf16[8,1,128]{2,1,0}) parameter(0)
  ROOT %loop = (bf16[8,64,128], bf16[8,1,128]) while(%state.1), body=%turn, metadata={op_name="jit(f)/walk/while"}
}
"""


def test_traffic_of_a_program():
    """An update in place costs the update, VMEM nothing, a loop its turns; cache copies and callbacks are found."""
    program = costs.Program(HLO)
    cache, new = 8 * 64 * 128 * 2, 8 * 128 * 2
    update, reduce, copy = 2 * new, new, 2 * cache
    assert program.traffic("main", {"walk/while": 3}) == 3 * (update + reduce + copy)
    assert program.traffic("main", {"while": 8, "walk/while": 3}) == 3 * (update + reduce + copy)  # the longest name
    assert program.traffic(program.loop_body("walk/while"), {}) == update + reduce + copy
    assert [
        (move.instruction.name, move.bytes, move.times) for move in program.collectives("main", {"walk/while": 3})
    ] == [("sum", new, 3)]
    assert [move.instruction.name for move in program.copies("main", (1, 8, 64, 128), {})] == ["copied"]
    assert program.host_transfers() == []
    called = HLO.replace("copy(%in.place)", 'custom-call(%in.place), custom_call_target="xla_python_cpu_callback"')
    assert costs.Program(called).host_transfers() == ["copied"]
    with pytest.raises(ValueError, match="0 loops"):
        program.loop_body("absent/while")


SLICE = """HloModule slices

%cut (p: s8[64]) -> s8[16] {
  %p = s8[64]{0} parameter(0)
  ROOT %part = s8[16]{0:S(1)} slice(%p), slice={[0:16]}
}

ENTRY %main (weights: s8[64]) -> s8[16] {
  %weights = s8[64]{0} parameter(0)
  %start = ((s8[64]{0}), s8[16]{0:S(1)}, s32[]{:S(2)}) START
  ROOT %done = s8[16]{0:S(1)} async-done(%start)
}
"""


TRAINING = """HloModule update

%scatter (input: f32[64,32]) -> f32[16,32] {
  %input = f32[64,32]{1,0} parameter(0)
  %sum = f32[64,32]{1,0} all-reduce(%input), replica_groups={{0,1,2,3}}, to_apply=%add
  %index = u32[] partition-id()
  %zero = u32[] constant(0)
  ROOT %own = f32[16,32]{1,0} dynamic-slice(%sum, %index, %zero), dynamic_slice_sizes={16,32}
}

%products (rows: bf16[8,4,16], keys: bf16[8,4,32]) -> f32[8,16,32] {
  %rows = bf16[8,4,16]{2,1,0} parameter(0)
  %keys = bf16[8,4,32]{2,1,0} parameter(1)
  ROOT %all = f32[8,16,32] convolution(%rows, %keys), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0fb_0io->0bf
}

%below (state: (s32[], bf16[8,4,16])) -> pred[] {
  %state.c = (s32[], bf16[8,4,16]{2,1,0}) parameter(0)
  %turn = s32[] get-tuple-element(%state.c), index=0
  %bound = s32[]{:T(128)} constant(5)
  ROOT %less = pred[] compare(%turn, %bound), direction=LT
}

%cut (whole: bf16[8,4,16], at: s32[]) -> bf16[1,4,16] {
  %whole = bf16[8,4,16]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  ROOT %part = bf16[1,4,16]{2,1,0:S(1)} dynamic-slice(%whole, %at, %at, %at), dynamic_slice_sizes={1,4,16}
}

%body (state: (s32[], bf16[8,4,16])) -> (s32[], bf16[8,4,16]) {
  %state.b = (s32[], bf16[8,4,16]{2,1,0}) parameter(0)
  %turn.b = s32[]{:S(2)} get-tuple-element(%state.b), index=0
  %rows.b = bf16[8,4,16]{2,1,0} get-tuple-element(%state.b), index=1
  %keys.b = bf16[8,4,32]{2,1,0:S(1)} copy-done(%turn.b)
  %scores = f32[8,16,32]{2,1,0:S(1)} fusion(%rows.b, %keys.b), kind=kOutput, calls=%products
  %fetch = ((bf16[8,4,16], s32[]), bf16[1,4,16]{2,1,0:S(1)}, s32[]{:S(2)}) async-start(%rows.b, %turn.b), calls=%cut
  ROOT %next.b = (s32[], bf16[8,4,16]{2,1,0}) tuple(%turn.b, %rows.b)
}

ENTRY %main (grads: f32[64,32], rows.m: bf16[8,4,16]) -> f32[16,32] {
  %grads = f32[64,32]{1,0} parameter(0)
  %rows.m = bf16[8,4,16]{2,1,0} parameter(1)
  %zero.m = s32[] constant(0)
  %first = (s32[], bf16[8,4,16]{2,1,0}) tuple(%zero.m, %rows.m)
  %loop = (s32[], bf16[8,4,16]{2,1,0}) while(%first), condition=%below, body=%body
  %both = (f32[8]{0}, f32[4]{0}) all-reduce(%rows.m, %rows.m), to_apply=%add
  ROOT %reduced = f32[16,32]{1,0} fusion(%grads), kind=kCustom, calls=%scatter
}
"""


def test_costs_of_an_update():
    """A loop says how often it turns; a batched product is a dilated convolution; a reduce-scatter is a fusion."""
    program = costs.Program(TRAINING)
    assert program.flops("main", {}) == 5 * 2 * 8 * 4 * 16 * 32
    sent = [(one.kind, one.bytes, one.times) for one in program.collectives("main", {})]
    assert sent == [("all-reduce", 4 * (8 + 4), 1), ("reduce-scatter", 4 * 64 * 32, 1)]
    rows, fetched = 2 * 8 * 4 * 16, 2 * 4 * 16
    assert program.traffic("body", {}) == rows + fetched


CHAIN = """HloModule chain

%begin (part: bf16[16,32]) -> (bf16[16,32], bf16[64,32], u32[]) {
  %part = bf16[16,32]{1,0} parameter(0)
  %all.1 = bf16[64,32]{1,0} all-gather(%part), channel_id=7, frontend_attributes={chain_id="3"}
  ROOT %started = (bf16[16,32], bf16[64,32], u32[]) custom-call(%all.1), custom_call_target="AsyncCollectiveStart"
}

%beside (part: bf16[16,32], whole: bf16[64,32], rows: bf16[8,16], own: bf16[16,4]) -> (bf16[8,4], bf16[64,32]) {
  %part.2 = bf16[16,32]{1,0} parameter(0)
  %whole.2 = bf16[64,32]{1,0} parameter(1)
  %rows = bf16[8,16]{1,0} parameter(2)
  %own = bf16[16,4]{1,0} parameter(3)
  %all.2 = bf16[64,32]{1,0} all-gather(%part.2), channel_id=7, frontend_attributes={chain_id="3"}
  %product = bf16[8,4]{1,0} convolution(%rows, %own), dim_labels=bf_io->bf
  ROOT %out = (bf16[8,4]{1,0}, bf16[64,32]{1,0}, bf16[64,32]{1,0}) tuple(%product, %whole.2, %all.2)
}

%end (part: bf16[16,32], whole: bf16[64,32]) -> bf16[64,32] {
  %part.3 = bf16[16,32]{1,0} parameter(0)
  %whole.3 = bf16[64,32]{1,0} parameter(1)
  %all.3 = bf16[64,32]{1,0} all-gather(%part.3), channel_id=7, frontend_attributes={chain_id="3"}
  ROOT %ended = bf16[64,32]{1,0} custom-call(%whole.3, %all.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (part: bf16[16,32], rows: bf16[8,16], own: bf16[16,4]) -> bf16[64,32] {
  %part.m = bf16[16,32]{1,0} parameter(0)
  %rows.m = bf16[8,16]{1,0} parameter(1)
  %own.m = bf16[16,4]{1,0} parameter(2)
  %start = (bf16[16,32]{1,0}, bf16[64,32]{1,0}, u32[]) fusion(%part.m), kind=kCustom, calls=%begin
  %source = bf16[16,32]{1,0} get-tuple-element(%start), index=0
  %target = bf16[64,32]{1,0} get-tuple-element(%start), index=1
  %both = (bf16[8,4]{1,0}, bf16[64,32]{1,0}, bf16[64,32]{1,0}) fusion(%source, %target, %rows.m, %own.m), calls=%beside
  %filled = bf16[64,32]{1,0} get-tuple-element(%both), index=1
  ROOT %done = bf16[64,32]{1,0} fusion(%source, %filled), kind=kCustom, calls=%end
}
"""


def test_a_gather_beside_products_counts_once():
    """The compiler splits it over the fusions that it runs beside; each of them passes the buffers on."""
    program = costs.Program(CHAIN)
    gathered, product = 2 * (16 * 32 + 64 * 32), 2 * (8 * 16 + 16 * 4 + 8 * 4)
    assert program.traffic("main", {}) == gathered + product
    assert [(one.kind, one.bytes, one.times) for one in program.collectives("main", {})] == [("all-gather", 4096, 1)]


def test_flops_of_products():
    """A `dot`, and a convolution whose window hangs over the edge: positions in the padding are not computed."""
    text = """HloModule products

ENTRY %main (a: f32[4,6], b: f32[6,8], c: f32[1,5,3], d: f32[3,3,7]) -> f32[1,5,7] {
  %a = f32[4,6]{1,0} parameter(0)
  %b = f32[6,8]{1,0} parameter(1)
  %c = f32[1,5,3]{2,1,0} parameter(2)
  %d = f32[3,3,7]{2,1,0} parameter(3)
  %plain = f32[4,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %window = f32[1,5,7]{2,1,0} convolution(%c, %d), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f
}
"""
    assert costs.Program(text).flops("main", {}) == 2 * 4 * 6 * 8 + 2 * (5 * 3 - 2) * 3 * 7


@pytest.mark.parametrize("start", ["async-start(%weights), calls=%cut", "slice-start(%weights), slice={[0:16]}"])
def test_a_fetched_slice_costs_the_slice(start):
    """Weights that are brought into VMEM piece by piece, under either of the compiler's names for it."""
    assert costs.Program(SLICE.replace("START", start)).traffic("main", {}) == 16
