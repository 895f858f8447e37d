"""Compiled for TPUs that are not there: memory, transfers and costs of generation and training."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys

import jax
import pytest

from eagle_jax.models import presets
from eagle_jax.models.decoder import init_params
from infer.aot import __main__ as aot
from infer.aot import chips
from infer.aot.costs import Collective, Program

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPU needs libtpu (pip install libtpu)"
)

LOOP = """HloModule toy

%update (p0: bf16[8,64,128], p1: bf16[8,1,128]) -> bf16[8,64,128] {
  %p0 = bf16[8,64,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[8,1,128]{2,1,0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %updated = bf16[8,64,128]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%p0, %p1, %zero, %zero, %zero)
}

%products (rows: bf16[8,4,16], keys: bf16[8,4,32]) -> f32[8,16,32] {
  %rows = bf16[8,4,16]{2,1,0} parameter(0)
  %keys = bf16[8,4,32]{2,1,0} parameter(1)
  ROOT %all = f32[8,16,32] convolution(%rows, %keys), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0fb_0io->0bf
}

%cut (whole: bf16[8,4,16], at: s32[]) -> bf16[1,4,16] {
  %whole = bf16[8,4,16]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  ROOT %part = bf16[1,4,16]{2,1,0:S(1)} dynamic-slice(%whole, %at, %at, %at), dynamic_slice_sizes={1,4,16}
}

%scatter (input: f32[64,32]) -> f32[16,32] {
  %input = f32[64,32]{1,0} parameter(0)
  %sum = f32[64,32]{1,0} all-reduce(%input), replica_groups={{0,1,2,3}}, to_apply=%add
  %index = u32[] partition-id()
  ROOT %own = f32[16,32]{1,0} dynamic-slice(%sum, %index, %index), dynamic_slice_sizes={16,32}
}

%below (state: (s32[], bf16[8,64,128])) -> pred[] {
  %state.c = (s32[], bf16[8,64,128]{2,1,0}, bf16[8,1,128]{2,1,0}, bf16[8,4,16]{2,1,0}) parameter(0)
  %turn = s32[] get-tuple-element(%state.c), index=0
  %bound = s32[]{:T(128)} constant(3)
  ROOT %less = pred[] compare(%turn, %bound), direction=LT
}

%body (state: (s32[], bf16[8,64,128])) -> (s32[], bf16[8,64,128]) {
  %state = (s32[], bf16[8,64,128]{2,1,0}, bf16[8,1,128]{2,1,0}, bf16[8,4,16]{2,1,0}) parameter(0)
  %turn.b = s32[]{:S(2)} get-tuple-element(%state), index=0
  %cache = bf16[8,64,128]{2,1,0} get-tuple-element(%state), index=1
  %new = bf16[8,1,128]{2,1,0} get-tuple-element(%state), index=2
  %rows.b = bf16[8,4,16]{2,1,0} get-tuple-element(%state), index=3
  %in.place = bf16[8,64,128]{2,1,0} fusion(%cache, %new), kind=kLoop, calls=%update
  %sum.b = bf16[8,1,128]{2,1,0:S(1)} all-reduce(%new), replica_groups={{0,1}}, to_apply=%add
  %copied = bf16[8,64,128]{1,2,0} copy(%in.place)
  %keys.b = bf16[8,4,32]{2,1,0:S(1)} copy-done(%turn.b)
  %scores = f32[8,16,32]{2,1,0:S(1)} fusion(%rows.b, %keys.b), kind=kOutput, calls=%products
  %fetch = ((bf16[8,4,16], s32[]), bf16[1,4,16]{2,1,0:S(1)}, s32[]{:S(2)}) async-start(%rows.b, %turn.b), calls=%cut
  ROOT %next = (s32[], bf16[8,64,128], bf16[8,1,128], bf16[8,4,16]) tuple(%turn.b, %copied, %new, %rows.b)
}

ENTRY %main (grads: f32[64,32], state: (s32[], bf16[8,64,128])) -> f32[16,32] {
  %grads = f32[64,32]{1,0} parameter(0)
  %state.m = (s32[], bf16[8,64,128]{2,1,0}, bf16[8,1,128]{2,1,0}, bf16[8,4,16]{2,1,0}) parameter(1)
  %loop = (s32[], bf16[8,64,128]) while(%state.m), condition=%below, body=%body, metadata={op_name="jit(f)/walk/while"}
  ROOT %reduced = f32[16,32]{1,0} fusion(%grads), kind=kCustom, calls=%scatter
}
"""


def test_costs_of_a_loop():
    """An update in place costs the update, a slice the slice, VMEM nothing, a loop its turns."""
    program = Program(LOOP)
    cache, new, rows, part = 8 * 64 * 128 * 2, 8 * 128 * 2, 2 * 8 * 4 * 16, 2 * 4 * 16
    body = 2 * new + new + 2 * cache + rows + part
    assert program.traffic(program.loop_body("walk/while")) == body
    assert program.traffic("main") == 3 * body + 4 * (64 * 32 + 16 * 32)
    assert program.flops("main") == 3 * 2 * 8 * 4 * 16 * 32  # a batched product is a dilated convolution
    assert program.collectives("main") == {
        "all-reduce": Collective(3, 3 * new, 3 * new, new),
        "reduce-scatter": Collective(1, 4 * 64 * 32, 0, 4 * 64 * 32),
    }
    assert program.copies("main", (1, 8, 64, 128)) == ["copied"]
    assert program.largest("main", "f32") == 4 * 8 * 16 * 32
    assert program.host_transfers() == []
    called = LOOP.replace("copy(%in.place)", 'custom-call(%in.place), custom_call_target="xla_python_cpu_callback"')
    assert Program(called).host_transfers() == ["copied"]
    endless = LOOP.replace("direction=LT", "direction=NE")
    assert Program(endless).traffic("body") * 2 == Program(LOOP).traffic("main") - Program(endless).traffic("main")
    with pytest.raises(ValueError, match="got 0"):
        program.loop_body("absent/while")


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
  %product = bf16[8,4]{1,0} dot(%rows, %own), lhs_contracting_dims={1}, rhs_contracting_dims={0}
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
    program = Program(CHAIN)
    gathered, product = 2 * (16 * 32 + 64 * 32), 2 * (8 * 16 + 16 * 4 + 8 * 4)
    assert program.traffic("main") == gathered + product
    assert program.flops("main") == 2 * 8 * 16 * 4
    assert program.collectives("main") == {"all-gather": Collective(1, 4096, 0, 4096)}


def test_products_on_padding_do_not_count():
    text = """HloModule products

ENTRY %main (c: f32[1,5,3], d: f32[3,3,7]) -> f32[1,5,7] {
  %c = f32[1,5,3]{2,1,0} parameter(0)
  %d = f32[3,3,7]{2,1,0} parameter(1)
  ROOT %window = f32[1,5,7]{2,1,0} convolution(%c, %d), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f
}
"""
    assert Program(text).flops("main") == 2 * (5 * 3 - 2) * 3 * 7


def test_parameter_counts():
    """The presets have the sizes their names promise."""
    sizes = {"llama-3.1-8b": 8.03, "llama-3.3-70b": 70.55, "qwen3-8b": 8.19, "vicuna-13b": 13.02, "gpt2": 0.1244}
    for name, billions in sizes.items():
        shapes = jax.eval_shape(lambda key, name=name: init_params(presets.model(name, 1), key), jax.random.key(0))
        whole, layer = (sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(part))
                        for part in (shapes, shapes["layers_0"]))  # fmt: skip
        count = whole + (presets.model(name).num_layers - 1) * layer
        assert count / 1e9 == pytest.approx(billions, rel=2e-3), name


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((None, 1, 4), (1, 1, 4)), ((None, 1, 2), (2, 1, 2)), ((1, None, 1), (1, 4, 1)), ((2, None, 2), (2, 1, 2)),
        ((1, 1, 2), (1, 1, 2)),  # devices may be left idle
    ],
)  # fmt: skip
def test_meshes(given, sizes):
    assert tuple(chips.slice_mesh(jax.devices()[:4], *given).shape.values()) == sizes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "llama3.1-8b"}, "model must be one of .*, got 'llama3.1-8b'"),
        ({"topology": "v6:1x1"}, "must begin with one of .*, got 'v6:1x1'. The nearest is 'v6e'"),
        ({"batch": 0}, "--batch must be at least 1, got 0"),
        ({"method": "eagle1"}, "--method must be one of eagle3, .* got eagle1"),
        ({"method": "eagle3@9"}, "setting of 'eagle3@9' must be"),
        ({"tensor": 3}, "--data x --fsdp x --tensor must divide the 4 devices of the topology, got 3"),
        (
            {"model": "gpt2-medium", "prompt": 512, "max_new_tokens": 513},
            "at most the model's 1024 positions, got 1025",
        ),
        ({"program": "train", "rows": 6}, "--rows must be a multiple of --micro-batches 1 x data x fsdp 4, got 6"),
        ({"program": "train", "fsdp": 4, "tensor": 2}, "fsdp=4 times tensor=2 must be"),
        ({"program": "train", "unroll": 0}, "--unroll must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_compiled_is_refused(monkeypatch, given, message):
    monkeypatch.setattr(aot, "topology_devices", lambda topology: jax.devices()[:4])
    with pytest.raises(ValueError, match=message):
        aot.main(aot.Args(**{"layers": 1} | given))


def test_a_topology_that_libtpu_does_not_know(monkeypatch):
    def unknown(*args, **kwargs):
        raise RuntimeError("no such slice\nand more")

    monkeypatch.setenv("TPU_LIBRARY_PATH", "somewhere")
    monkeypatch.setattr(chips.topologies, "get_topology_desc", unknown)
    with pytest.raises(ValueError, match=r"got 'v5p:3x3' \(no such slice\)\. Write v6e:1x1"):
        chips.topology_devices("v5p:3x3")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH")
    with pytest.raises(ValueError, match="pip install libtpu"):
        chips.topology_devices("v6e:1x1")


def on_tpu(repository, *words: str) -> list[dict]:
    """The JSON objects that a Python process prints; libtpu reads its settings when it is loaded, so it has its own."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=repository, env=environment, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


METHODS = """
import json
from infer.aot.__main__ import measure  # sets the environment of libtpu
from infer.aot.chips import CHIPS, slice_mesh, topology_devices
from infer.aot.programs import generation
from eagle_jax.config import DecoderConfig, MedusaConfig, TreeConfig
from eagle_jax.core.sampling import make_sampling
from eagle_jax.drafters.lookahead import lookahead
from eagle_jax.drafters.prompt_lookup import prompt_lookup
from eagle_jax.models.presets import eagle3_head

target = DecoderConfig(1024, 256, 512, 2, num_heads=4, num_kv_heads=2, head_dim=64)
small = DecoderConfig(1024, 128, 256, 1, num_heads=2, num_kv_heads=1, head_dim=64)
static, warm = (-1, -1, -1, 0, 0, 1, 3, 3), make_sampling(0.8)
mesh = slice_mesh(topology_devices("v5e:1x1"), None, 1, 1)
for method, tree, sampling in (
    (prompt_lookup(3, 10), None, make_sampling(0.0)),
    (lookahead(5, 7, 7), None, make_sampling(0.0)),
    (MedusaConfig("medusa", 256, 1024, 4, 1, None), TreeConfig.static(static), make_sampling(0.0)),
    (MedusaConfig("hydra", 256, 1024, 4, 1, target.one_layer()), TreeConfig(3, 4, 16), warm),
    (small, TreeConfig.chain(4, "rejection"), warm),
    (small, TreeConfig.static(static, "traversal"), warm),
    (small, TreeConfig.chain(4, "block"), warm),
    (eagle3_head(target, 512), TreeConfig(3, 4, 16, top_p=0.9), warm),
):
    work = generation(target, method, mesh, tree, batch=2, prompt=128, max_tokens=128, sampling=sampling)
    print(json.dumps(measure(work, CHIPS["v5e"], "cycle")), flush=True)
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_method_is_one_program_without_the_host_or_a_copied_cache(repository):
    found = on_tpu(repository, "-c", METHODS)
    assert [(one["programs"], one["host_transfers"], one["cache_copies"]) for one in found] == [(1, 0, [])] * 8


UPDATE = """
import json
from infer.aot.__main__ import measure
from infer.aot.chips import CHIPS, slice_mesh, topology_devices
from infer.aot.programs import training
from eagle_jax.config import DecoderConfig
from eagle_jax.models.presets import eagle3_head
from eagle_jax.training.objective import Objective

target = DecoderConfig(16384, 256, 512, 3, num_heads=4, num_kv_heads=2, head_dim=64)
mesh = slice_mesh(topology_devices("v5e:2x2"), 1, None, 1)
work = training(target, eagle3_head(target, 4096), mesh, Objective(steps=2, chunk=64), rows=4, length=512)
print(json.dumps(measure(work, CHIPS["v5e"], "update")))
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_update_of_a_tiny_head(repository):
    """Four devices, each with a quarter of every matrix and one of the four rows."""
    (found,) = on_tpu(repository, "-c", UPDATE)
    hidden, middle, vocabulary, kept, attention = 256, 512, 16384, 4096, 4 * 64 + 2 * 2 * 64
    layer = 3 * hidden * middle + hidden * (attention + 4 * 64)
    target = 3 * layer + 2 * hidden * vocabulary
    head = 3 * hidden * middle + hidden * (2 * attention + 4 * 64) + 3 * hidden**2 + hidden * kept
    assert (found["programs"], found["host_transfers"], found["fits"]) == (1, 0, True)
    # bfloat16 and, with two moments, float32; norms come on top, whole on every device.
    assert found["target_gb"] * 1e9 == pytest.approx(2 * target / 4, rel=0.01)
    assert found["state_gb"] * 1e9 == pytest.approx(3 * 4 * head / 4, rel=0.01)
    assert found["memory_gb"] == pytest.approx(found["arguments_gb"] + found["temporaries_gb"], rel=0.01)  # donated
    # No [B, T, Vd] array is ever written in float32, let alone one of all steps or of all of V.
    assert 0 < found["widest_float32_mb"] * 1e6 < 4 * 512 * kept
    # A device computes its own row and nothing of another's: twice what is counted once, at most.
    least = 2 * 512 * (3 * layer + hidden * vocabulary + 2 * 3 * head)
    assert found["asked_gflops"] * 1e9 == pytest.approx(least, rel=0.2)
    assert found["asked_gflops"] < found["gflops"] < 1.6 * found["asked_gflops"]
    # Every matrix is gathered once, every gradient added up once; states never travel, nothing does in a loop.
    sent = {kind: one["bytes"] * 1e6 for kind, one in found["collectives_mb"].items()}
    assert not any(one["looped"] for one in found["collectives_mb"].values())
    assert sent["all-gather"] == pytest.approx(2 * (target - hidden * vocabulary + head), rel=0.05)
    # The compiler may add gradients that were bfloat16 up in bfloat16, and leave out the scatter.
    reduced = sum(sent.get(kind, 0.0) for kind in ("reduce-scatter", "all-reduce"))
    assert 2 * head < reduced < 1.1 * 4 * head
    assert sum(sent.values()) - sent["all-gather"] - reduced < 2 * 2 * 512 * 4 * hidden


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(10800)
@pytest.mark.parametrize(
    ("model", "topology", "batch", "layers", "weights"),
    [
        ("llama-3.1-8b", "v5e:2x2", 1, 2, 3.8233 / 4),
        ("llama-3.1-8b", "v6e:1x1", 1, 32, 16.91),
        ("llama-3.1-8b", "v5e:2x2", 1, 32, 16.91 / 4),
        ("llama-3.1-8b", "v5p:2x2x1", 8, 32, 16.91 / 4),
        ("llama-3.3-70b", "v5p:2x2x1", 1, 80, 143.9 / 4),
        ("llama-3.3-70b", "v5p:2x2x4", 2, 80, 143.9 / 8),
    ],
)
def test_generation_on_slices(repository, model, topology, batch, layers, weights):
    """EAGLE-3, 59 nodes in 8 levels, prompt and reply of 1,024 tokens each; half an hour for a whole model."""
    options = f"--model {model} --topology {topology} --batch {batch} --layers {layers}"
    (found,) = on_tpu(repository, "-m", "infer.aot", *options.split())
    cycle, plain = found["cycle"], found["step"]
    assert cycle["fits"] and plain["fits"]
    assert (cycle["programs"], cycle["host_transfers"], cycle["cache_copies"]) == (1, 0, [])
    assert cycle["weights_gb"] == pytest.approx(weights, rel=0.01)
    # A plain step reads the layers and the lm_head once, a cycle reads these and the head for every level.
    target = presets.model(model)
    read = plain["weights_gb"] - 2e-9 * target.vocab_size * target.hidden_size / found["mesh"]["tensor"]
    assert read < plain["traffic_gb"] < 1.1 * read + plain["cache_gb"]
    assert 1 < found["cycle_over_step"] < 6
    # No weight travels: the smallest matrix of these models has 8 MB, the draft logits of one row 1.3 MB.
    gathered = cycle["collectives_mb"].get("all-gather", {"largest": 0})
    assert gathered["largest"] < 2 * batch


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(10800)
@pytest.mark.parametrize(
    ("topology", "model", "rows", "target"),
    [
        ("v5e:4x4", "llama-3.1-8b", 16, 16.06 / 16),
        ("v6e:2x4", "llama-3.1-8b", 16, 16.06 / 8),
        ("v5p:4x4x4", "llama-3.3-70b", 64, 141.1 / 64),
    ],
)
def test_training_on_slices(repository, topology, model, rows, target):
    """EAGLE-3 on whole models; half an hour each."""
    options = f"--program train --model {model} --topology {topology} --rows {rows}"
    (found,) = on_tpu(repository, "-m", "infer.aot", *options.split())
    update, mesh = found["update"], found["mesh"]
    assert (update["fits"], update["programs"], update["host_transfers"]) == (True, 1, 0)
    assert update["target_gb"] == pytest.approx(target, rel=0.01)
    # Float32 logits exist for one chunk at a time: less than those of one step over a device's rows.
    local = rows // (mesh["data"] * mesh["fsdp"])
    assert update["widest_float32_mb"] < 4e-6 * local * 2048 * 128256 / mesh["tensor"]
    # Work is shared out: what a device does is what it is asked for and what is computed again.
    assert 1 < update["gflops"] / update["asked_gflops"] < 1.5
    assert 0.2 < update["mfu"] < 1
    # Whatever part of a matrix a device has for "tensor" is gathered once: all weights but the embedding, no states.
    gathered = update["collectives_mb"]["all-gather"]
    assert gathered["looped"] < 10
    assert gathered["bytes"] < 1100 * (update["target_gb"] + update["state_gb"] / 6) * mesh["fsdp"]
    if mesh["tensor"] == 1:
        assert not any(one["looped"] for one in update["collectives_mb"].values())
