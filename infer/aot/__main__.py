"""Compiles generation or training for TPUs that are not there, and says whether it fits and what it costs.

    python -m infer.aot --model llama-3.1-8b --topology v6e:1x1
    python -m infer.aot --model llama-3.3-70b --topology v5p:2x2x1 --batch 4
    python -m infer.aot --model qwen3-8b --topology v5e:2x2 --layers 2   # a quick look at two layers
    python -m infer.aot --model llama-3.1-8b --topology v5e:2x2 --method sps --draft-model llama-3.2-1b
    python -m infer.aot --program train --model llama-3.1-8b --topology v5e:4x4 --rows 16

Needs libtpu (`pip install libtpu`) and no TPU. The whole program is compiled, with abstract weights: prefill and loop,
or one update of an EAGLE-3 head on its frozen target. That takes minutes. The last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

# Read when JAX and libtpu start: this program never touches a real chip.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # two of these may run side by side

import jax
from jax.sharding import Mesh

from eagle_jax.config import DecoderConfig, MedusaConfig, TreeConfig
from eagle_jax.core.sampling import make_sampling
from eagle_jax.models.presets import eagle3_head, model
from eagle_jax.parallel.mesh import AXES, row_groups
from eagle_jax.training.objective import Objective
from infer.aot import (
    Chip,
    Report,
    TrainReport,
    TrainWorkload,
    Workload,
    analyse,
    analyse_training,
    chip_of,
    compile_program,
    lower_generate,
    lower_training,
    mesh_for,
    topology_devices,
    training_mesh,
)
from infer.common.programs import at_least_one, run

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments.

    Attributes:
      program: generate, or train: one update of a draft head.
      model: name of a published model; a wrong one names the nearest.
      method: of generation: eagle3, medusa (5 heads), hydra++ (4), sps (a small model), pld, lookahead.
      draft_model: of sps, name of a published model with the target's vocabulary.
      topology: chip and shape of the slice, such as v6e:1x1, v5e:2x2, v5p:2x2x1, v5p:2x2x4.
      batch: rows over all devices; None is one per slice of the "data" axis.
      prompt: width of the prompt buffer.
      max_new_tokens: width of the output buffer.
      depth: levels of the draft tree; None is 8, as many as there are heads (medusa, hydra++), 5 (sps).
      top_k: children per node of the draft tree; None is 10, of sps 1.
      nodes: of the draft tree, the root not counted; None is 59, of sps 5.
      verification: the acceptance rule (TreeConfig), compiled at temperature > 0; "traversal" is for static trees.
      temperature: 0 is greedy; above it sampling is compiled, and drafting with the noise in view.
      top_p: of the sampled law; below 1 the program looks for its edge in every distribution.
      tensor: size of the "tensor" axis; None is for generation the widest that gives every device whole key-value
        heads, for training 4 on more than 16 devices and else 1.
      layers: compile so many layers instead of all.
      plain: also compile plain decoding, to compare with.
      hlo: folder for the optimised HLO texts.
      rows: of training, per update, over all devices; None is one per device along "data" and "fsdp".
      micro_batches: of training, parts of an update that are computed one after the other.
      length: of training, tokens per row.
      unroll: of training, steps of the head on its own outputs.
      draft_vocab: of training, size of the draft vocabulary.
      data: of training, size of the "data" axis.
      fsdp: of training, size of the "fsdp" axis; None is what the other two leave.
    """

    program: Literal["generate", "train"] = "generate"
    model: str = "llama-3.1-8b"
    method: Literal["eagle3", "medusa", "hydra++", "sps", "pld", "lookahead"] = "eagle3"
    draft_model: str = "llama-3.2-1b"
    topology: str = "v6e:1x1"
    batch: int | None = None
    prompt: int = 1024
    max_new_tokens: int = 1024
    depth: int | None = None
    top_k: int | None = None
    nodes: int | None = None
    verification: Literal["deterministic", "rejection", "block"] = "deterministic"
    temperature: float = 0.0
    top_p: float = 1.0
    tensor: int | None = None
    layers: int | None = None
    plain: bool = True
    hlo: Path | None = None
    rows: int | None = None
    micro_batches: int = 1
    length: int = 2048
    unroll: int = 7
    draft_vocab: int = 32000
    data: int = 1
    fsdp: int | None = None


def main(args: Args) -> int:
    """Runs it; the exit status is 0 if everything compiles and fits."""
    at_least_one(args, "batch", "prompt", "max_new_tokens", "layers", "tensor", "depth", "top_k", "nodes")
    at_least_one(args, "rows", "micro_batches", "length", "unroll", "draft_vocab", "data", "fsdp")
    return generation(args) if args.program == "generate" else training(args)


def training(args: Args) -> int:
    """Compiles one update of an EAGLE-3 head."""
    chip, config = chip_of(args.topology), model(args.model, args.layers)
    mesh = training_mesh(topology_devices(args.topology), args.data, args.fsdp, args.tensor)
    head = eagle3_head(config, args.draft_vocab)
    rows = row_groups(mesh) * args.micro_batches if args.rows is None else args.rows
    objective = Objective(steps=args.unroll)
    work = TrainWorkload(config, head, mesh, objective, rows, args.micro_batches, args.length)
    result = begin(args, config.num_layers, mesh)
    result |= {
        "command": shlex.join(["python", "-m", "infer.aot", *sys.argv[1:]]),
        "rows": rows,
        "micro_batches": args.micro_batches,
        "length": args.length,
        "unroll": args.unroll,
        "draft_vocab": head.draft_vocab_size,
    }
    started = time.perf_counter()
    try:
        compiled, texts = compile_program(lower_training(work))
    except jax.errors.JaxRuntimeError as error:
        result |= refused("train", error)
    else:
        seconds = time.perf_counter() - started
        keep(args.hlo, "train", texts)
        report = analyse_training(work, compiled, texts)
        result |= update_costs(work, report, chip) | {"compile_s": round(seconds, 1)}
        show_update(result)
    print(json.dumps(result))
    return 0 if result["fits"] else 1


def update_costs(work: TrainWorkload, report: TrainReport, chip: Chip) -> dict[str, Any]:
    """The report of an update as JSON: everything per device but tokens per second."""
    seconds = report.seconds(chip)
    return {
        "compiles": True,
        "fits": report.fits(chip),
        "memory_gb": round(report.memory / GB, 3),
        "hbm_gb": chip.hbm / GB,
        "arguments_gb": round(report.arguments / GB, 3),
        "temporaries_gb": round(report.temporaries / GB, 3),
        "donated_gb": round(report.donated / GB, 3),
        "target_gb": round(report.target / GB, 3),
        "state_gb": round(report.state / GB, 3),
        "widest_float32_gb": round(report.widest / GB, 3),
        "tflops_per_step": round(report.flops / 1e12, 3),
        "model_tflops_per_step": round(report.model_flops / 1e12, 3),
        "gb_per_step": round(report.traffic / GB, 2),
        "collectives": {
            kind: {"times": one.times, "gb": round(one.bytes / GB, 4), "gb_in_loops": round(one.looped / GB, 4)}
            for kind, one in report.collectives.items()
        },
        "compute_ms": round(report.flops / chip.flops * 1e3, 2),
        "hbm_ms": round(report.traffic / chip.bandwidth * 1e3, 2),
        "ms_per_step": round(seconds * 1e3, 2),
        "tokens_per_s": round(work.tokens / seconds),
        "mfu": round(report.utilisation(chip), 4),
        "programs": report.programs,
        "host_transfers": len(report.host),
    }


def show_update(result: dict[str, Any]) -> None:
    """Prints the report of an update."""
    verdict = "fits" if result["fits"] else "DOES NOT FIT"
    print(f"train: compiled in {result['compile_s']:.0f} s; per device:")
    print(f"  memory       {result['memory_gb']:8.2f} GB of {result['hbm_gb']:.0f} GB: {verdict}")
    print(f"    arguments  {result['arguments_gb']:8.2f} GB        temporaries {result['temporaries_gb']:.2f} GB")
    print(f"    target     {result['target_gb']:8.2f} GB        head and optimiser {result['state_gb']:.2f} GB")
    print(f"  per update   {result['gb_per_step']:8.2f} GB through HBM, {result['tflops_per_step']:.2f} TFLOP")
    for kind, one in result["collectives"].items():
        print(f"    {kind:<18} {one['times']:5d} x, {one['gb']:.2f} GB, of which in loops {one['gb_in_loops']:.2f} GB")
    print(f"    at least   {result['ms_per_step']:8.2f} ms: all devices at most {result['tokens_per_s']:,} tokens/s")
    print(
        f"    at most    {result['mfu']:8.1%} of the peak in model flops ({result['model_tflops_per_step']:.2f} TFLOP)"
    )
    print(f"  host         {result['host_transfers']} transfers", flush=True)


def begin(args: Args, layers: int, mesh: Mesh) -> dict[str, Any]:
    """What is compiled for what: printed, and the first fields of the result."""
    sizes = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in AXES)
    print(f"{args.program}: {args.model}, {layers} layers, on {args.topology}: {sizes}", flush=True)
    return {
        "program": args.program,
        "model": args.model,
        "layers": layers,
        "topology": args.topology,
        "mesh": dict(mesh.shape),
        "jax": jax.__version__,
        "libtpu": version("libtpu"),
    }


def refused(name: str, error: Exception) -> dict[str, Any]:
    """What the compiler says when it gives up."""
    reason = str(error).strip().splitlines()[0]
    print(f"{name}: does not compile: {reason}")
    return {"compiles": False, "fits": False, "reason": reason}


def keep(folder: Path | None, name: str, texts: list[str]) -> None:
    """Writes the optimised HLO."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.hlo").write_text(texts[0], encoding="utf-8")


def generation(args: Args) -> int:
    """Compiles prefill and the loop over cycles."""
    chip = chip_of(args.topology)
    config = model(args.model, args.layers)
    mesh = mesh_for(topology_devices(args.topology), config.num_kv_heads, args.tensor)
    batch = mesh.shape[AXES[0]] if args.batch is None else args.batch
    head, tree = drafts(args, config)
    sampling = make_sampling(args.temperature, top_p=args.top_p)
    work = Workload(config, head, mesh, tree, batch, args.prompt, args.max_new_tokens, sampling=sampling)
    result = begin(args, config.num_layers, mesh)
    result |= {"method": args.method, "batch": batch, "context": work.slots, "temperature": args.temperature}
    result |= compile_one("tree", work, chip, args.hlo)
    if args.plain and result["compiles"]:
        plain = compile_one("plain", work.plain(), chip, args.hlo)
        if plain["compiles"]:
            result |= {
                f"plain_{key}": plain[key] for key in ("gb_per_cycle", "gflops_per_cycle", "ms_per_cycle", "compile_s")
            }
            ratio = result["ms_per_cycle"] / result["plain_ms_per_cycle"]
            result["cycle_over_plain_step"] = round(ratio, 3)
            print(f"A cycle costs {ratio:.2f} plain steps by these bounds, and yields tau tokens.")
        else:
            result["plain_reason"] = plain["reason"]
    print(json.dumps(result))
    return 0 if result["compiles"] and result["fits"] and "plain_reason" not in result else 1


def drafts(args: Args, config: DecoderConfig) -> tuple[Any, TreeConfig]:
    """What drafts, as `Workload.head` takes it, and its tree."""
    chain = args.method == "sps"
    deepest = {"medusa": 5, "hydra++": 4, "sps": 5}.get(args.method, 8)
    given = (args.depth or deepest, args.top_k or (1 if chain else 10), args.nodes or (5 if chain else 59))
    ranked = args.verification == "deterministic"
    tree = TreeConfig(*given) if ranked else TreeConfig.chain(given[0], args.verification)
    if args.method == "eagle3":
        return eagle3_head(config), tree
    if chain:
        return model(args.draft_model), tree
    if args.method in ("pld", "lookahead"):
        return args.method, tree
    prefix = config.one_layer(tie_word_embeddings=False) if args.method == "hydra++" else None
    kind: Literal["medusa", "hydra"] = "medusa" if args.method == "medusa" else "hydra"
    return MedusaConfig(kind, config.hidden_size, config.vocab_size, deepest, 1, prefix), tree


def compile_one(name: str, work: Workload, chip: Chip, folder: Path | None) -> dict[str, Any]:
    """Compiles one program, prints its costs, and returns them."""
    started = time.perf_counter()
    lowered = lower_generate(work)
    lowering = time.perf_counter() - started
    try:
        compiled, texts = compile_program(lowered)
    except jax.errors.JaxRuntimeError as error:
        return refused(name, error)
    seconds = time.perf_counter() - started
    report = analyse(work, compiled, texts)
    keep(folder, name, texts)
    show(name, report, chip, seconds, lowering)
    return {
        "compiles": True,
        "fits": report.fits(chip),
        "memory_gb": round(report.memory / GB, 3),
        "hbm_gb": chip.hbm / GB,
        "weights_gb": round(report.weights / GB, 3),
        "cache_gb": round(report.cache / GB, 3),
        "gb_per_cycle": round(report.traffic / GB, 3),
        "gflops_per_cycle": round(report.flops / 1e9, 1),
        "ms_per_cycle": round(report.seconds(chip) * 1e3, 3),
        "collective_mb_per_cycle": round((report.all_reduce + report.all_gather + report.other_collectives) / 1e6, 2),
        "largest_all_gather_mb": round(report.largest_gather / 1e6, 2),
        "programs": report.programs,
        "host_transfers": len(report.host),
        "cache_copies": report.copies,
        "cache_spilled_mb": round(report.spilled / 1e6, 2),
        "compile_s": round(seconds, 1),
    }


def show(name: str, report: Report, chip: Chip, seconds: float, lowering: float) -> None:
    """Prints the report of one program, per device."""
    verdict = "fits" if report.fits(chip) else "DOES NOT FIT"
    print(f"{name}: compiled in {seconds:.0f} s (tracing and lowering {lowering:.0f} s); per device:")
    print(f"  memory       {report.memory / GB:8.2f} GB of {chip.hbm / GB:.0f} GB: {verdict}")
    print(f"    weights    {report.weights / GB:8.2f} GB        cache {report.cache / GB:.2f} GB")
    print(f"  per cycle    {report.traffic / GB:8.2f} GB through HBM, {report.flops / 1e9:.0f} GFLOP")
    print(f"    at least   {report.seconds(chip) * 1e3:8.2f} ms")
    print(
        f"    all-reduce {report.all_reduce / 1e6:8.2f} MB        all-gather {report.all_gather / 1e6:.2f} MB "
        f"(largest {report.largest_gather / 1e6:.2f} MB)        others {report.other_collectives / 1e6:.2f} MB"
    )
    print(f"  host         {len(report.host)} transfers")
    print(
        f"  cache        copied: {report.copies or 'never'}; written back from VMEM: {report.spilled / 1e6:.2f} MB",
        flush=True,
    )


if __name__ == "__main__":
    run(main, Args, __doc__)
