"""Head training compiled for TPUs that are not there: what an update needs, moves and sends."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from eagle_jax import ConfigError
from eagle_jax.models import presets
from eagle_jax.parallel.mesh import make_mesh
from infer.aot import TrainWorkload, training_mesh
from tests.programs.test_aot import compile_for_tpu

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPU needs libtpu (pip install libtpu)"
)
FIELDS = {
    "program", "command", "model", "layers", "topology", "mesh", "rows", "micro_batches", "length", "unroll",
    "draft_vocab", "compiles", "fits", "memory_gb", "hbm_gb", "arguments_gb", "temporaries_gb", "donated_gb",
    "target_gb", "state_gb", "widest_float32_gb", "tflops_per_step", "model_tflops_per_step", "gb_per_step",
    "collectives", "compute_ms", "hbm_ms", "ms_per_step", "tokens_per_s", "mfu", "programs", "host_transfers",
    "compile_s", "jax", "libtpu",
}  # fmt: skip
SLICES = {
    "v5e:4x4": ("llama-3.1-8b", 16, 16.06 / 16),
    "v6e:2x4": ("llama-3.1-8b", 16, 16.06 / 8),
    "v5p:4x4x4": ("llama-3.3-70b", 64, 141.1 / 64),
}
"""Model, rows, and gigabytes of its bfloat16 weights per device."""

TINY = """
import json
from eagle_jax import DecoderConfig
from infer import aot
from eagle_jax.models.presets import eagle3_head
from eagle_jax.training.objective import Objective

target = DecoderConfig(16384, 256, 512, 3, num_heads=4, num_kv_heads=2, head_dim=64)
mesh = aot.training_mesh(aot.topology_devices("v5e:2x2"))
work = aot.TrainWorkload(target, eagle3_head(target, 4096), mesh, Objective(steps=2, chunk=CHUNK), rows=4, length=512)
report = aot.analyse_training(work, *aot.compile_program(aot.lower_training(work)))
found = report._asdict() | {"fits": report.fits(aot.CHIPS["v5e"]), "mfu": report.utilisation(aot.CHIPS["v5e"])}
print(json.dumps(found))
"""


def compile_tiny(repository, chunk: int = 64) -> dict:
    """A tiny target and head over four devices, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    environment |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    command = [sys.executable, "-c", TINY.replace("CHUNK", str(chunk))]
    run = subprocess.run(command, capture_output=True, text=True, cwd=repository, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_update_of_a_tiny_head(repository):
    """Four devices, each with a quarter of every matrix and one of the four rows."""
    report = compile_tiny(repository)
    hidden, middle, vocabulary, kept, attention = 256, 512, 16384, 4096, 4 * 64 + 2 * 2 * 64
    layer = 3 * hidden * middle + hidden * (attention + 4 * 64)
    target = 3 * layer + 2 * hidden * vocabulary
    head = 3 * hidden * middle + hidden * (2 * attention + 4 * 64) + 3 * hidden**2 + hidden * kept
    assert report["programs"] == 1
    assert report["host"] == []
    assert report["fits"]
    # bfloat16 and, with two moments, float32; norms come on top, whole on every device.
    assert report["target"] == pytest.approx(2 * target / 4, rel=0.01)
    assert report["state"] == pytest.approx(3 * 4 * head / 4, rel=0.01)
    assert report["donated"] == pytest.approx(report["state"], rel=0.01)
    assert report["memory"] == pytest.approx(report["arguments"] + report["temporaries"], rel=0.01)

    # No [B, T, Vd] array is ever written in float32, let alone one of all steps or of all of V.
    assert 0 < report["widest"] < 4 * 512 * kept

    # A device computes its own row and nothing of another's: twice what is counted once, at most.
    tokens = 512
    least = 2 * tokens * (3 * layer + hidden * vocabulary + 2 * 3 * head)
    assert report["model_flops"] == pytest.approx(least, rel=0.2)
    assert report["model_flops"] < report["flops"] < 1.6 * report["model_flops"]
    assert 0 < report["mfu"] < 1

    # Every matrix is gathered once, every gradient added up once; states never travel, nothing does in a loop.
    assert all(looped == 0 for _, _, looped in report["collectives"].values())
    sent = {kind: size for kind, (_, size, _) in report["collectives"].items()}
    looked_up = 2 * tokens * 4 * hidden
    assert sent["all-gather"] == pytest.approx(2 * (target - hidden * vocabulary + head), rel=0.05)
    # The compiler may add gradients that were bfloat16 up in bfloat16, and leave out the scatter.
    reduced = sum(sent.get(kind, 0.0) for kind in ("reduce-scatter", "all-reduce"))
    assert 2 * head < reduced < 1.1 * 4 * head
    assert sum(sent.values()) - sent["all-gather"] - reduced < 2 * looked_up


def check(result: dict) -> None:
    """What holds for whole models on the slices of the README."""
    assert set(result) == FIELDS
    model, rows, target = SLICES[result["topology"]]
    assert (result["program"], result["model"], result["rows"]) == ("train", model, rows)
    assert result["layers"] == presets.model(model).num_layers
    assert (result["length"], result["unroll"], result["draft_vocab"]) == (2048, 7, 32000)
    assert result["compiles"] and result["fits"]
    assert result["memory_gb"] <= result["hbm_gb"]
    assert result["programs"] == 1
    assert result["host_transfers"] == 0
    assert result["target_gb"] == pytest.approx(target, rel=0.01)
    assert result["donated_gb"] == pytest.approx(result["state_gb"], rel=0.01)
    # Float32 logits exist for one chunk at a time: less than those of one step over a device's rows.
    mesh = result["mesh"]
    local = rows // (mesh["data"] * mesh["fsdp"])
    assert result["widest_float32_gb"] < 4e-9 * local * 2048 * 128256 / mesh["tensor"]
    # Work is shared out: what a device does is what it is asked for and what is computed again.
    assert 1 < result["tflops_per_step"] / result["model_tflops_per_step"] < 1.5
    assert result["ms_per_step"] == max(result["compute_ms"], result["hbm_ms"])
    assert 0.2 < result["mfu"] < 1
    # Whatever part of a matrix a device has for "tensor" is gathered once: all weights but the embedding, no states.
    gathered = result["collectives"]["all-gather"]
    assert gathered["gb_in_loops"] < 0.01
    assert gathered["gb"] < 1.1 * (result["target_gb"] + result["state_gb"] / 6) * mesh["fsdp"]
    if mesh["tensor"] == 1:
        assert all(one["gb_in_loops"] == 0 for one in result["collectives"].values())


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(10800)
@pytest.mark.parametrize("topology", SLICES)
def test_whole_models_on_their_slices(repository, topology):
    model, rows, _ = SLICES[topology]
    options = ["--program", "train", "--model", model, "--topology", topology, "--rows", str(rows)]
    check(compile_for_tpu(repository, *options))


def test_kept_reports_cover_the_slices(repository):
    """The compilations that take half an hour each are kept as reports."""
    kept = json.loads((repository / "docs" / "measured" / "aot_train.json").read_text(encoding="utf-8"))
    for result in kept:
        check(result)
    assert {result["topology"] for result in kept} == set(SLICES)


@needs_libtpu
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--topology v5e:4x4 --rows 24", "rows=24 is not a multiple of micro_batches=1 times data=1 times fsdp=16"),
        (
            "--topology v5e:2x2 --fsdp 4 --tensor 2",
            "fsdp=4 times tensor=2 must be at least 1 and at most the 4 devices",
        ),
        ("--topology v5e:2x2 --unroll 0", "--unroll 0 must be at least 1"),
    ],
)
def test_what_cannot_be_compiled_is_refused(repository, options, message):
    command = [sys.executable, "-m", "infer.aot", "--program", "train", *options.split()]
    run = subprocess.run(command, capture_output=True, text=True, cwd=repository, check=False)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_meshes():
    devices = jax.devices()
    assert dict(training_mesh(devices).shape) == {"data": 1, "fsdp": 4, "tensor": 1}
    assert dict(training_mesh(devices, data=2, tensor=2).shape) == {"data": 2, "fsdp": 1, "tensor": 2}
    with pytest.raises(ConfigError, match="data=1 times tensor=3 does not divide the 4 devices"):
        training_mesh(devices, tensor=3)
    with pytest.raises(ConfigError, match="at most the 4 devices"):
        training_mesh(devices, fsdp=8)
    config = presets.model("llama-3.1-8b", 1)
    with pytest.raises(ConfigError, match="rows=6 is not a multiple of micro_batches=2 times data=1 times fsdp=2"):
        TrainWorkload(config, presets.eagle3_head(config), make_mesh(fsdp=2), rows=6, micro_batches=2)
