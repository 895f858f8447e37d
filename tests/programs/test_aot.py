"""Tests programs compiled for TPUs that this machine lacks: memory, transfers and costs."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys

import jax
import pytest

from eagle_jax.config import DecoderConfig
from eagle_jax.core import CycleCost, make_sampling, required_slots
from eagle_jax.models import init_params, presets
from eagle_jax.parallel import make_mesh
from infer.aot import __main__ as aot
from infer.aot.programs import generation

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPU needs libtpu (pip install libtpu)"
)


def test_parameter_counts():
    """The presets have the sizes their names promise."""
    sizes = {"llama-3.1-8b": 8.03, "llama-3.3-70b": 70.55, "qwen3-8b": 8.19, "vicuna-13b": 13.02, "gpt2": 0.1244,
             "smollm2-135m": 0.1345, "smollm3-3b": 3.075, "phi-4": 14.66, "qwen3-30b-a3b": 30.53,
             "qwen3-235b-a22b": 235.1, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83,
             "mistral-7b-v0.1": 7.242, "qwen2.5-7b": 7.616}  # fmt: skip
    for name, billions in sizes.items():
        shapes = jax.eval_shape(lambda key, name=name: init_params(presets.model(name, 1), key), jax.random.key(0))
        whole, layer = (sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(part))
                        for part in (shapes, shapes["layers_0"]))  # fmt: skip
        count = whole + (presets.model(name).num_layers - 1) * layer
        assert count / 1e9 == pytest.approx(billions, rel=2e-3), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "llama3.1-8b"}, "model must be one of .*, got 'llama3.1-8b'"),
        ({"batch": 0}, "--batch must be at least 1, got 0"),
        ({"method": "eagle1"}, "--method must be one of eagle3, .* got eagle1"),
        ({"tensor": 8}, "tensor=8 must be 1 to 4"),
        ({"model": "gpt2", "tensor": 1, "prompt": 512, "max_new_tokens": 513}, "at most 512 after .* got 513"),
        ({"program": "train", "rows": 6}, "--rows must be a multiple of --micro-batches 1 x data x fsdp 4, got 6"),
        ({"program": "train", "tensor": 3}, "--tensor must divide the 8 key-value heads, got 3"),
        ({"program": "train", "unroll": 0}, "--unroll must be at least 1, got 0"),
        ({"by_cost": True, "plain": False}, "--by-cost must come with .*, got --program generate, --no-plain and"),
        ({"by_cost": True, "method": "vanilla"}, "--by-cost must .* a method that drafts, got .* vanilla"),
    ],
)
def test_what_cannot_be_compiled_is_refused(monkeypatch, given, message):
    monkeypatch.setattr(aot, "chip_and_devices", lambda topology: (aot.CHIPS["v6e"], jax.devices()[:4]))
    with pytest.raises(ValueError, match=message):
        aot.main(aot.Args(**{"layers": 1} | given))


def test_costs_leave_the_cache_as_it_is():
    """What the drafter reads at once after plain steps lies in its own cache."""
    target = DecoderConfig(64, 32, 48, 1, num_heads=4, num_kv_heads=2, head_dim=8)
    mesh, law = make_mesh(devices=jax.devices()[:1]), make_sampling(0.0)
    sizes = {"batch": 1, "prompt": 32, "max_tokens": 32, "draft_vocab": 64}
    slots = [
        generation(target, "pld@7", target, mesh, sampling=law, cost=cost, **sizes).cache[-1]
        for cost in (None, CycleCost((1, 8), (1.0, 1.5)))
    ]
    assert slots[1] == slots[0] >= required_slots(32, 32, 7, 32)


def test_a_topology_that_libtpu_does_not_know(monkeypatch):
    def unknown(*args, **kwargs):
        raise RuntimeError("no such slice\nand more")

    monkeypatch.setenv("TPU_LIBRARY_PATH", "somewhere")
    monkeypatch.setattr(aot.topologies, "get_topology_desc", unknown)
    with pytest.raises(ValueError, match=r"got 'v5p:3x3' \(no such slice\)\. Write two dimensions"):
        aot.chip_and_devices("v5p:3x3")
    with pytest.raises(ValueError, match=r"must begin with one of .*, got 'v6:1x1'"):
        aot.chip_and_devices("v6:1x1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH")
    with pytest.raises(ValueError, match="pip install libtpu"):
        aot.chip_and_devices("v6e:1x1")


def on_tpu(repository, *words: str) -> list[dict]:
    """The JSON objects of a process of its own: libtpu reads its settings when it is loaded."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=repository, env=environment, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


IMPORTS = """
import json
from infer.aot.__main__ import chip_and_devices, measure  # sets the environment of libtpu
import jax
from infer.aot.programs import generation, training
from eagle_jax.config import DecoderConfig
from eagle_jax.core.sampling import make_sampling
from eagle_jax.models import eagle3_head
from eagle_jax.parallel import make_mesh
from eagle_jax.training import Objective
"""
METHODS = """
target = DecoderConfig(1024, 256, 512, 2, num_heads=4, num_kv_heads=2, head_dim=64)
small = DecoderConfig(1024, 128, 256, 1, num_heads=2, num_kv_heads=1, head_dim=64)
chip, devices = chip_and_devices("v5e:1x1")
mesh = make_mesh(devices=devices)
for temperature, methods in (
    (0.0, ("pld", "lookahead", "medusa@static")),
    (0.8, ("hydra@3x4x16", "sps@chain4", "sps@static/traversal", "sps@chain4/block", "eagle3@3x4x16/top_p0.9")),
):
    for method in methods:
        law = make_sampling(temperature)
        sizes = {"batch": 2, "prompt": 128, "max_tokens": 128, "draft_vocab": 1024}
        work = generation(target, method, small, mesh, sampling=law, **sizes)
        print(json.dumps(measure(work, chip, "cycle")), flush=True)
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_method_is_one_program_without_the_host_or_a_copied_cache(repository):
    found = on_tpu(repository, "-c", IMPORTS + METHODS)
    assert [(one["host_transfers"], one["cache_copies"]) for one in found] == [(0, [])] * 8


KERNELS = """
import itertools
from jax.sharding import SingleDeviceSharding
from eagle_jax.models import attention

shapes = {  # rows, tokens, columns, query heads, key heads, head size, slots, with a window, with sinks, dtype
    "Llama-3.1-8B, verification": (8, 60, 60, 32, 8, 128, 2176, False, False, "bfloat16"),
    "Llama-3.1-8B, plain step": (1, 1, 1, 32, 8, 128, 2176, False, False, "bfloat16"),
    "Llama-3.1-8B, prefill": (4, 256, 256, 32, 8, 128, 2176, False, False, "bfloat16"),
    "a level of a head": (8, 10, 80, 32, 8, 128, 2176, False, False, "bfloat16"),
    "SmolLM2": (1, 8, 8, 9, 3, 64, 400, False, False, "bfloat16"),
    "gpt-oss, ring": (2, 60, 60, 64, 8, 64, 192, True, True, "bfloat16"),
    "Gemma 3, ring": (2, 60, 60, 8, 4, 256, 1088, True, False, "bfloat16"),
    "float32": (2, 60, 60, 32, 8, 128, 700, False, False, "float32"),
}
for topology, (name, sizes) in itertools.product(("v5e:1x1", "v5p:1x1x1", "v6e:1x1"), shapes.items()):
    batch, new, columns, heads, groups, width, slots, window, sinks, dtype = sizes
    home = SingleDeviceSharding(chip_and_devices(topology)[1][0])
    abstract = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=home)
    keys, first = abstract(dtype, batch, groups, columns, width), abstract("int32", batch, new) if window else None
    text = jax.jit(attention.attend).lower(
        abstract(dtype, batch, new, heads, width), keys, keys, abstract("bool", batch, new, columns),
        abstract(dtype, batch, groups, width, slots), abstract(dtype, batch, groups, slots, width),
        abstract("int32", batch), first, None, abstract(dtype, heads) if sinks else None,
    ).compile().as_text()
    print(json.dumps({"name": name, "topology": topology, "kernels": text.count('"tpu_custom_call"')}), flush=True)
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_attention_to_a_cache_is_one_kernel(repository):
    found = on_tpu(repository, "-c", IMPORTS + KERNELS)
    assert [one["kernels"] for one in found] == [1] * 24


LADDER = """
from eagle_jax.core import CycleCost

target = DecoderConfig(1024, 256, 512, 2, num_heads=4, num_kv_heads=2, head_dim=64)
for topology, tensor in (("v5e:1x1", 1), ("v6e:2x2", 2)):
    chip, devices = chip_and_devices(topology)
    mesh = make_mesh(len(devices) // tensor, tensor, devices=devices)
    for method in ("pld@7", "eagle3@3x4x16"):
        cost = CycleCost((1, 4, 8, 17), (1.0, 1.1, 1.2, 1.5), 0.05)
        sizes = {"batch": 4, "prompt": 1024, "max_tokens": 1024, "draft_vocab": 1024}
        for given in (None, cost):
            work = generation(target, method, target, mesh, sampling=make_sampling(0.0), cost=given, **sizes)
            print(json.dumps(measure(work, chip, "cycle")), flush=True)
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_trees_by_their_cost_copy_no_cache(repository):
    """Branches with passes of all sizes and loops of plain steps write no cache anew, on one device and on a mesh.

    Two layers and a head attend by the kernel everywhere: in the chunks of the prefill and in cycles, and with costs
    in the passes of every size and in plain steps.
    """
    found = on_tpu(repository, "-c", IMPORTS + LADDER)
    assert [(one["host_transfers"], one["cache_copies"]) for one in found] == [(0, [])] * 8
    assert [one["attention_kernels"] for one in found] == [4, 10, 7, 16] * 2


QUANTISED = """
from eagle_jax.models import layers
from eagle_jax.models.quantised import dequantise

target = DecoderConfig(32768, 4096, 14336, 2, num_heads=32, num_kv_heads=8, head_dim=128)  # a layer of Llama-3.1-8B
sizes = {"batch": 1, "prompt": 128, "max_tokens": 128, "draft_vocab": 1024}
product = layers.product


def dequantised_first(x, weight, dtype=None):
    return product(x, jax.lax.optimization_barrier(dequantise(weight)), dtype)


def compile_for(topology, weights, *methods):
    chip, devices = chip_and_devices(topology)
    for method in methods:
        mesh, law = make_mesh(devices=devices), make_sampling(0.0)
        work = generation(target, method, target, mesh, sampling=law, weights=weights, **sizes)
        print(json.dumps(measure(work, chip, "cycle")), flush=True)


compile_for("v5e:1x1", WEIGHTS, "vanilla", "pld@59")  # passes of 1 and of 60 rows
layers.product = dequantised_first
compile_for("v5e:1x1", WEIGHTS, "vanilla")
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("weights", "bits", "temporaries"), [
    ("int8", 8, 0.03), ("fp8", 8, 0.03), ("int4", 4, 0.12)  # int4: down_proj and o_proj once more, in another layout
])  # fmt: skip
def test_a_pass_reads_the_small_type_and_writes_no_dequantised_copy(repository, weights, bits, temporaries):
    *passes, dequantised_first = on_tpu(repository, "-c", IMPORTS + QUANTISED.replace("WEIGHTS", repr(weights)))
    hidden, middle, vocabulary = 4096, 14336, 32768
    layer = 3 * hidden * middle + 2 * hidden * (32 + 8) * 128
    read = (2 * layer * bits / 8 + hidden * vocabulary) / 1e9  # lm_head is int8; scales and the cache come on top
    for found in passes:
        # The compiler keeps up to 128 MB of weights in VMEM over all cycles.
        assert read - 0.13 < found["traffic_gb"] < 1.2 * read
        assert found["temporaries_gb"] < temporaries  # the largest matrix has 0.117 GB in bfloat16
    assert dequantised_first["traffic_gb"] > 2 * read  # what the bounds would see


EXPERTS = """
from dataclasses import replace
from eagle_jax.models.presets import model

target = replace(model("qwen3-30b-a3b", 1), vocab_size=32768)
chip, devices = chip_and_devices("v5e:1x1")
sizes = {"batch": 1, "prompt": 128, "max_tokens": 128, "draft_vocab": 1024}
for method in ("vanilla", "pld@59"):
    mesh, law = make_mesh(devices=devices), make_sampling(0.0)
    work = generation(target, method, target, mesh, sampling=law, weights=WEIGHTS, **sizes)
    print(json.dumps(measure(work, chip, "cycle")), flush=True)
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_experts_are_read_in_the_small_type(repository, weights):
    hidden, inner, count, vocabulary = 2048, 768, 128, 32768
    experts, attention = 3 * count * inner * hidden, 2 * hidden * (32 + 4) * 128
    read = (experts + attention + hidden * vocabulary + 2 * hidden * count) / 1e9  # the router is bfloat16
    for found in on_tpu(repository, "-c", IMPORTS + EXPERTS.replace("WEIGHTS", repr(weights))):
        assert read - 0.13 < found["traffic_gb"] < 1.1 * read
        assert found["temporaries_gb"] * 1e9 < experts / 3  # no stack of experts in any type


UPDATE = """
target = DecoderConfig(16384, 256, 512, 3, num_heads=4, num_kv_heads=2, head_dim=64)
chip, devices = chip_and_devices("v5e:2x2")
head, objective = eagle3_head(target, 4096), Objective(steps=2, chunk=64)
for mesh in (make_mesh(fsdp=4, devices=devices), make_mesh(fsdp=2, tensor=2, devices=devices)):
    work = training(target, head, mesh, objective, rows=4, micro_batches=1, length=512)
    print(json.dumps(measure(work, chip, "update")))
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_update_of_a_tiny_head(repository):
    """Compiles it for four devices, each with a quarter of every matrix and one of the four rows."""
    found, split = on_tpu(repository, "-c", IMPORTS + UPDATE)
    hidden, middle, vocabulary, kept, attention = 256, 512, 16384, 4096, 4 * 64 + 2 * 2 * 64
    layer = 3 * hidden * middle + hidden * (attention + 4 * 64)
    target = 3 * layer + 2 * hidden * vocabulary
    head = 3 * hidden * middle + hidden * (2 * attention + 4 * 64) + 3 * hidden**2 + hidden * kept
    assert (found["host_transfers"], found["fits"]) == (0, True)
    # bfloat16 and, with two moments, float32; norms come on top, whole on every device.
    assert found["target_gb"] * 1e9 == pytest.approx(2 * target / 4, rel=0.01)
    assert found["state_gb"] * 1e9 == pytest.approx(3 * 4 * head / 4, rel=0.01)
    assert found["memory_gb"] == pytest.approx(found["arguments_gb"] + found["temporaries_gb"], rel=0.01)  # donated
    # A device computes its own row, and parts of it twice.
    least = 2 * 512 * (3 * layer + hidden * vocabulary + 2 * 3 * head)
    assert found["asked_gflops"] * 1e9 == pytest.approx(least, rel=0.2)
    assert found["asked_gflops"] < found["gflops"] < 1.6 * found["asked_gflops"]
    # Every matrix is gathered once, every gradient added up once; states never travel.
    sent = {kind: one["mb"] * 1e6 for kind, one in found["collectives_mb"].items()}
    assert sent["all-gather"] == pytest.approx(2 * (target - hidden * vocabulary + head), rel=0.05)
    # The compiler may add gradients that were bfloat16 up in bfloat16, and leave out the scatter.
    reduced = sum(sent.get(kind, 0.0) for kind in ("reduce-scatter", "all-reduce"))
    assert 2 * head < reduced < 1.1 * 4 * head
    assert sum(sent.values()) - sent["all-gather"] - reduced < 2 * 2 * 512 * 4 * hidden
    # A device gathers only its part for "tensor", half of every matrix.
    assert split["fits"] and split["collectives_mb"]["all-gather"]["mb"] * 1e6 < 0.6 * sent["all-gather"]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(10800)
@pytest.mark.parametrize(
    ("options", "weights", "most"),
    [
        ("--model llama-3.1-8b --topology v5e:2x2 --layers 2", 3.8233 / 4, 6.0),
        ("--model llama-3.3-70b --topology v5p:2x2x4 --layers 2 --batch 2", 10.4314 / 8, 6.0),
        ("--model llama-3.1-8b --topology v6e:1x1", 16.91, 1.37),  # the goal is 1.36, and 1.364 is measured; minutes
        ("--model llama-3.1-8b --topology v6e:1x1 --batch 8", 16.91, 1.45),
        ("--model llama-3.1-8b --topology v6e:1x1 --drafter-weights int8", 16.49, 1.20),
        ("--model llama-3.1-8b --topology v6e:1x1 --drafter-weights int8 --batch 8", 16.49, 1.30),
        ("--model llama-3.1-8b --topology v6e:1x1 --method pld@59", 16.06, 1.05),  # the target's pass alone
        ("--model llama-3.1-8b --topology v6e:1x1 --method pld@59 --batch 8", 16.06, 1.10),
    ],
)
def test_generation_on_slices(repository, options, weights, most):
    """Compiles EAGLE-3, 59 nodes in 8 levels, prompt and reply of 1,024 tokens."""
    (found,) = on_tpu(repository, "-m", "infer.aot", *options.split())
    cycle, plain = found["cycle"], found["step"]
    assert cycle["fits"] and plain["fits"]
    assert (cycle["host_transfers"], cycle["cache_copies"]) == (0, [])
    assert cycle["weights_gb"] == pytest.approx(weights, rel=0.01)
    assert 0.7 < cycle["floor_share"] < 1.1 and 0.9 < plain["floor_share"] < 1.001
    # A plain step reads the layers and the lm_head once, a cycle reads these and the head for every level.
    target = presets.model(found["model"])
    read = plain["weights_gb"] - 2e-9 * target.vocab_size * target.hidden_size / found["mesh"]["tensor"]
    assert read < plain["traffic_gb"] < 1.1 * read + plain["cache_gb"]
    assert 1 < found["cycle_over_step"] < most
    # No weight travels: the smallest matrix of these models has 8 MB, the draft logits of one row 1.3 MB.
    gathered = cycle["collectives_mb"].get("all-gather", {"largest": 0})
    assert gathered["largest"] < 2 * found["batch"]
