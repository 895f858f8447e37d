"""Compiles generation or training for TPUs that this machine lacks, and reports memory and costs.

    python -m infer.aot --model llama-3.1-8b --topology v6e:1x1
    python -m infer.aot --model llama-3.3-70b --topology v5p:2x2x1 --batch 4
    python -m infer.aot --model qwen3-8b --topology v5e:2x2 --layers 2   # a quick look at two layers
    python -m infer.aot --model llama-3.1-8b --topology v5e:2x2 --method sps@chain5 --draft-model llama-3.2-1b
    python -m infer.aot --model llama-3.1-8b --topology v5e:1x1 --weights int8   # fits a chip of 16 GB
    python -m infer.aot --model llama-3.1-8b --topology v6e:1x1 --batch 32 --by-cost   # and trees by their cost
    python -m infer.aot --program train --model llama-3.1-8b --topology v5e:4x4 --rows 16

Needs libtpu (`pip install libtpu`) and no TPU. The whole program is compiled, with abstract weights: prefill and loop,
or one update of an EAGLE-3 head on its frozen target. That takes minutes. The last line is one JSON object; its
`cycle_cost` is what `generate` takes, as `core.CycleCost(**cycle_cost)`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

# Read when JAX and libtpu start: this program never touches a real chip.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # two of these may run side by side

import jax
from jax.experimental import topologies

from eagle_jax.config import ConfigError
from eagle_jax.core import CycleCost, make_sampling
from eagle_jax.models.presets import eagle3_head, model
from eagle_jax.models.quantised import Scheme
from eagle_jax.parallel import make_mesh, row_groups
from eagle_jax.training import PEAK, Objective
from infer.aot.costs import Program
from infer.aot.programs import Workload, generation, training
from infer.common.labels import PLAIN
from infer.common.memory import local_bytes
from infer.common.programs import at_least_one, run


class Chip(NamedTuple):
    """Holds the numbers of one TPU chip, from the vendor's data sheet.

    Attributes:
      hbm: bytes.
      bandwidth: of the HBM, bytes per second.
      flops: bfloat16 operations per second.
    """

    hbm: float
    bandwidth: float
    flops: float


CHIPS = {
    "v4": Chip(32e9, 1228e9, PEAK["TPU v4"]),
    "v5e": Chip(16e9, 819e9, PEAK["TPU v5e"]),
    "v5p": Chip(95e9, 2765e9, PEAK["TPU v5p"]),
    "v6e": Chip(32e9, 1640e9, PEAK["TPU v6e"]),
}


HELD = (
    "compiles",
    "fits",
    "memory_gb",
    "temporaries_gb",
    "host_transfers",
    "cache_copies",
    "attention_kernels",
    "compile_s",
)
"""What counts of a program that chooses among passes: its traffic would be that of all of them."""


KEPT = 2.0
"""Share of the floor in a plain step's traffic above which it says nothing: the model stays on the chip."""


@dataclasses.dataclass(frozen=True)
class Args:
    """Holds the arguments."""

    program: Literal["generate", "train"] = "generate"  # train is one update of a draft head
    model: str = "llama-3.1-8b"  # name of a published model
    # method of generation, a label as in infer.bench (eagle3@8x10x59, sps@chain5/block): eagle3, medusa (5 heads),
    # hydra (Hydra++, 4 heads), sps, pld, lookahead or vanilla; a rule for sampled drafts is compiled at temperature > 0
    method: str = "eagle3"
    draft_model: str = "llama-3.2-1b"  # small model of sps, a published model with the target's vocabulary
    draft_vocab: int = 32000  # size of the draft vocabulary of eagle3
    weights: Scheme | None = None  # quantised weights of target and drafter; None is bfloat16
    drafter_weights: Scheme | None = None  # of the drafter, if other than --weights
    topology: str = "v6e:1x1"  # chip and shape of the slice, such as v6e:1x1, v5e:2x2, v5p:2x2x1, v5p:2x2x4
    batch: int | None = None  # rows over all devices; None is one per slice of the "data" axis
    prompt: int = 1024  # tokens of every prompt
    max_new_tokens: int = 1024  # longest reply
    # committed tokens per row, of which traffic is; the program is the same. None is as many as the cache has slots
    context: int | None = None
    temperature: float = 0.0  # 0 is greedy; above it sampling is compiled
    top_p: float = 1.0  # of the sampled distribution; below 1 a search for its limit is compiled
    plain: bool = True  # also compile plain decoding, to compare with
    by_cost: bool = False  # also compile generation with this program's `cycle_cost`: does it fit, and copy no cache?
    # training: rows per update over all devices; None is one per device along "data" and "fsdp"
    rows: int | None = None
    micro_batches: int = 1  # training: parts of an update that are computed one after the other
    length: int = 2048  # training: tokens per row
    unroll: int = 7  # training: steps of the head on its own outputs
    fsdp: int | None = None  # training: size of the "fsdp" axis; None is all devices that "tensor" leaves
    # size of the "tensor" axis; None is, for generation, the widest that gives every device whole key-value heads, and
    # for training 4 on more than 16 devices, else 1
    tensor: int | None = None
    layers: int | None = None  # number of layers to compile, instead of all


def main(args: Args) -> int:
    """Compiles and reports; the exit status is 0 if everything compiles and fits."""
    at_least_one(args, "batch", "prompt", "context", "max_new_tokens", "layers", "tensor", "fsdp", "draft_vocab")
    at_least_one(args, "rows", "micro_batches", "length", "unroll")
    if args.by_cost and (args.program == "train" or not args.plain or args.method == PLAIN):
        raise ValueError(
            "--by-cost must come with --program generate, --plain and a method that drafts, got --program "
            f"{args.program}, --{'' if args.plain else 'no-'}plain and --method {args.method}. Leave it out."
        )
    config = model(args.model, args.layers)
    chip, devices = chip_and_devices(args.topology)
    count = len(devices)
    if args.program == "train":
        # Without "tensor" an update has a row for each device: too many on a large slice.
        tensor = args.tensor or (4 if count > 16 and count % 4 == 0 else 1)
        fsdp = args.fsdp or max(1, count // tensor)
    else:
        tensor, fsdp = args.tensor or math.gcd(count, config.num_kv_heads), 1
    mesh = make_mesh(count // (tensor * fsdp), tensor, fsdp, devices=devices)
    if args.program == "train":
        rows = args.rows or row_groups(mesh) * args.micro_batches
        sizes: dict[str, Any] = {"rows": rows, "micro_batches": args.micro_batches, "length": args.length}
        works = {
            "update": training(
                config, eagle3_head(config, args.draft_vocab), mesh, Objective(steps=args.unroll), **sizes
            )
        }
    else:
        sizes = {"batch": args.batch or row_groups(mesh), "prompt": args.prompt, "max_tokens": args.max_new_tokens}
        law, small = make_sampling(args.temperature, top_p=args.top_p), model(args.draft_model)
        common: dict[str, Any] = {"sampling": law, "draft_vocab": args.draft_vocab, "context": args.context, **sizes}
        common |= {"weights": args.weights, "drafter_weights": args.drafter_weights or args.weights}
        methods = {"cycle": args.method} | ({"step": PLAIN} if args.plain else {})
        works = {name: generation(config, method, small, mesh, **common) for name, method in methods.items()}
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(f"{args.program}: {args.model}, {config.num_layers} layers, on {args.topology}: {axes}", flush=True)
    result = dataclasses.asdict(args) | sizes | {"layers": config.num_layers, "mesh": dict(mesh.shape)}
    result |= {"jax": jax.__version__, "libtpu": version("libtpu")}
    result |= {name: measure(work, chip, name, args.context) for name, work in works.items()}
    if "step" in works and result["cycle"]["compiles"] and result["step"]["compiles"]:
        ratio = result["cycle_over_step"] = round(result["cycle"]["ms"] / result["step"]["ms"], 3)
        print(ratio_words(ratio, result["step"]["floor_share"]))
        result["cycle_cost"] = cost_of_parts(works["cycle"], works["step"], chip)
        if args.by_cost:
            cost = CycleCost(**result["cycle_cost"])
            works["by_cost"] = generation(config, args.method, small, mesh, cost=cost, **common)
            result["by_cost"] = measure(works["by_cost"], chip, "by_cost", args.context, HELD)
    print(json.dumps(result))
    return 0 if all(result[name]["fits"] for name in works) else 1


def ratio_words(ratio: float, floor_share: float) -> str:
    """Returns the sentence about a cycle's cost in plain steps; `floor_share` is that of the plain step."""
    words = f"A cycle costs {ratio:.2f} plain steps by these bounds, and yields tau tokens."
    if floor_share > KEPT:
        words += (
            " That says nothing about this model: its weights stay on the chip, so a plain step moves far less than "
            "their size. Take all --layers, or a larger --model."
        )
    return words


def cost_of_parts(cycle: Workload, plain: Workload, chip: Chip) -> dict[str, Any]:
    """Returns what `eagle_jax.core.CycleCost` holds, in plain steps, from what a cycle and a plain step must read.

    A pass reads at least what a plain step reads, and takes at least the time of its own arithmetic. A level reads the
    drafter's weights. Nothing counts as kept on the chip from one to the next, in the parts as in the whole: a small
    model's traffic may be far less.
    """
    devices = cycle.mesh.size
    cost: dict[str, Any] = {}
    for context in sorted(cycle.floors, reverse=True):
        memory = plain.floors[context] / chip.bandwidth
        step = max(memory, plain.flops / devices / chip.flops)
        passes = [max(memory, flops / devices / chip.flops) / step for flops in (cycle.by_rows or {}).values()]
        drafted = (cycle.floors[context] - plain.floors[context]) / chip.bandwidth
        level = max(0.0, drafted / step) / max(1, cycle.levels)
        own = {"rows": list(cycle.by_rows or {}), "passes": [round(one, 3) for one in passes], "level": round(level, 4)}
        cost = own | {"slots": float(context)} | ({"longer": cost} if cost else {})
    return cost


def chip_and_devices(topology: str) -> tuple[Chip, list[Any]]:
    """Returns the chip and compile-only devices of "v6e:1x1", "v5e:2x2", "v5p:2x2x1", ...

    Raises:
      ConfigError: libtpu is not installed, or it does not know the topology.
    """
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise ConfigError(f"--topology must begin with one of {', '.join(CHIPS)}, got {topology!r}. Write v6e:1x1.")
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ConfigError("libtpu must be installed, got none. Run `pip install libtpu` (x86_64 Linux).")
    try:
        return CHIPS[name], list(topologies.get_topology_desc(topology, platform="tpu").devices)
    except Exception as error:  # the plugin raises several kinds
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--topology must be a slice that libtpu knows, got {topology!r} ({reason}). Write two dimensions, as "
            "v5e:2x2, or three for v4 and v5p, as v5p:2x2x1."
        ) from error


def measure(
    work: Workload, chip: Chip, name: str, context: int | None = None, keep: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """Compiles a program, prints and returns its costs on one device.

    Args:
      name: of the unit of work, a "cycle", plain "step" or "update", of which traffic and flops are.
      context: committed tokens of every row; None is a full cache.
      keep: the results that count; None is all of them.

    The compiler itself writes the HLO out: what jaxlib reads back from libtpu fails for v5p, where the SparseCores
    gather the embedding asynchronously ("async-update instruction should have 1 operands").
    """
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache has no text
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as dump:
        try:
            options: dict[str, str | bool] = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
            compiled = work.lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            print(f"{name}: does not compile: {reason}")
            return {"compiles": False, "fits": False, "reason": reason}
        (written,) = Path(dump).glob("module_*.jit_*after_optimizations.txt")  # the whole program is one module
        program = Program(written.read_text(encoding="utf-8"), context)
    seconds = time.perf_counter() - started
    unit = program.entry if work.loop is None else program.loop_body(work.loop)
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    held -= memory.alias_size_in_bytes  # arguments that become results
    devices, traffic = work.mesh.size, program.traffic(unit)
    model_flops, flops = work.model_flops / devices, work.flops / devices
    least = max(traffic / chip.bandwidth, flops / chip.flops)
    result: dict[str, Any] = {
        "compiles": True,
        "fits": held <= chip.hbm,
        "memory_gb": round(held / 1e9, 6),
        "hbm_gb": chip.hbm / 1e9,
        "arguments_gb": round(memory.argument_size_in_bytes / 1e9, 6),
        "temporaries_gb": round(memory.temp_size_in_bytes / 1e9, 6),
        **{f"{what}_gb": round(local_bytes(arrays) / 1e9, 6) for what, arrays in work.resident.items()},
        "traffic_gb": round(traffic / 1e9, 6),
        "gflops": round(flops / 1e9, 3),
        "asked_gflops": round(model_flops / 1e9, 3),  # without recomputation
        "ms": round(least * 1e3, 4),  # a lower bound: of arithmetic or memory alone
        "mfu": round(model_flops / chip.flops / least, 4),  # an upper bound
        "collectives_mb": program.collectives(unit),
        "host_transfers": len(program.host_transfers()),
        "cache_copies": program.copies(unit, work.cache) if work.cache else [],
        "attention_kernels": program.kernels(),  # of the whole program
        "compile_s": round(seconds, 1),
    }
    if work.floors:  # of the bytes that must be read
        floor = work.floors[max(work.floors)]
        result |= {"floor_gb": round(floor / 1e9, 6), "floor_share": round(floor / traffic, 4)}
    result = result if keep is None else {key: result[key] for key in keep}
    print(f"{name}, on one device:")
    for key, value in result.items():
        print(f"  {key:<18}{value if value not in ([], {}) else 'none'}", flush=True)
    return result


if __name__ == "__main__":
    run(main, Args, __doc__)
