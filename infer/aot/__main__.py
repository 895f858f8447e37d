"""Compiles generation or training for TPUs that this machine lacks, and reports whether it fits, and its cost.

    python -m infer.aot --model llama-3.1-8b --topology v6e:1x1
    python -m infer.aot --model llama-3.3-70b --topology v5p:2x2x1 --batch 4
    python -m infer.aot --model qwen3-8b --topology v5e:2x2 --layers 2   # a quick look at two layers
    python -m infer.aot --model llama-3.1-8b --topology v5e:2x2 --method sps@chain5 --draft-model llama-3.2-1b
    python -m infer.aot --program train --model llama-3.1-8b --topology v5e:4x4 --rows 16

Needs libtpu (`pip install libtpu`) and no TPU. The whole program is compiled, with abstract weights: prefill and loop,
or one update of an EAGLE-3 head on its frozen target. That takes minutes. The last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

# Read when JAX and libtpu start: this program never touches a real chip.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # two of these may run side by side

import jax

from eagle_jax.config import EAGLE1_PARENTS, DecoderConfig, MedusaConfig, TreeConfig
from eagle_jax.core.sampling import make_sampling
from eagle_jax.drafters.lookahead import lookahead
from eagle_jax.drafters.prompt_lookup import prompt_lookup
from eagle_jax.drafters.vanilla import vanilla
from eagle_jax.models.presets import eagle3_head, model
from eagle_jax.parallel.mesh import row_groups
from eagle_jax.shapes import medusa_parents
from eagle_jax.training.objective import Objective
from infer.aot.chips import Chip, chip_of, slice_mesh, topology_devices
from infer.aot.costs import Program
from infer.aot.programs import Method, Workload, generation, local_bytes, training
from infer.common.labels import Label
from infer.common.programs import at_least_one, run

MANY = 16
"""On more devices than this the default mesh of training has a "tensor" axis: an update would need a row for each."""


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments.

    Attributes:
      program: generate, or train: one update of a draft head.
      model: name of a published model; a wrong one names the nearest.
      method: of generation, a label as in infer.bench (eagle3@8x10x59, sps@chain5/block): eagle3, medusa (5 heads),
        hydra (Hydra++, 4 heads), sps, pld or lookahead. A rule for sampled drafts is compiled at temperature > 0.
      draft_model: of sps, name of a published model with the target's vocabulary.
      topology: chip and shape of the slice, such as v6e:1x1, v5e:2x2, v5p:2x2x1, v5p:2x2x4.
      batch: rows over all devices; None is one per slice of the "data" axis.
      prompt: width of the prompt buffer.
      max_new_tokens: width of the output buffer.
      temperature: 0 is greedy; above it sampling is compiled, and drafting with the noise in view.
      top_p: of the sampled law; below 1 the program looks for its edge in every distribution.
      plain: also compile plain decoding, to compare with.
      rows: of training, per update, over all devices; None is one per device along "data" and "fsdp".
      micro_batches: of training, parts of an update that are computed one after the other.
      length: of training, tokens per row.
      unroll: of training, steps of the head on its own outputs.
      draft_vocab: of training, size of the draft vocabulary.
      data: of training, size of the "data" axis.
      fsdp: of training, size of the "fsdp" axis; None is what the other two leave.
      tensor: size of the "tensor" axis; None is for generation the widest that gives every device whole key-value
        heads, for training 4 on more than 16 devices and else 1.
      layers: number of layers to compile, instead of all.
    """

    program: Literal["generate", "train"] = "generate"
    model: str = "llama-3.1-8b"
    method: str = "eagle3"
    draft_model: str = "llama-3.2-1b"
    topology: str = "v6e:1x1"
    batch: int | None = None
    prompt: int = 1024
    max_new_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    plain: bool = True
    rows: int | None = None
    micro_batches: int = 1
    length: int = 2048
    unroll: int = 7
    draft_vocab: int = 32000
    data: int = 1
    fsdp: int | None = None
    tensor: int | None = None
    layers: int | None = None


def main(args: Args) -> int:
    """Runs it; the exit status is 0 if everything compiles and fits."""
    at_least_one(args, "batch", "prompt", "max_new_tokens", "layers", "tensor", "data", "fsdp")
    at_least_one(args, "rows", "micro_batches", "length", "unroll", "draft_vocab")
    chip, config = chip_of(args.topology), model(args.model, args.layers)
    devices = topology_devices(args.topology)
    if args.program == "train":
        many = len(devices) > MANY and len(devices) % 4 == 0
        mesh = slice_mesh(devices, args.data, args.fsdp, args.tensor or (4 if many else 1))
        head, objective = eagle3_head(config, args.draft_vocab), Objective(steps=args.unroll)
        rows = args.rows or row_groups(mesh) * args.micro_batches
        work = training(config, head, mesh, objective, rows=rows, micro_batches=args.micro_batches, length=args.length)
        works = {"update": work}
    else:
        mesh = slice_mesh(devices, None, 1, args.tensor or math.gcd(len(devices), config.num_kv_heads))
        method, tree = drafts(args, config)
        buffers: dict[str, Any] = {
            "batch": args.batch or row_groups(mesh), "prompt": args.prompt, "max_tokens": args.max_new_tokens,
            "sampling": make_sampling(args.temperature, top_p=args.top_p),
        }  # fmt: skip
        works = {"cycle": generation(config, method, mesh, tree, **buffers)}
        if args.plain:
            works["step"] = generation(config, vanilla(), mesh, **buffers)
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(f"{args.program}: {args.model}, {config.num_layers} layers, on {args.topology}: {sizes}", flush=True)
    result = dataclasses.asdict(args) | next(iter(works.values())).sizes
    result |= {"layers": config.num_layers, "mesh": dict(mesh.shape)}
    result |= {"jax": jax.__version__, "libtpu": version("libtpu")}
    result |= {name: measure(work, chip, name) for name, work in works.items()}
    if "step" in works and result["cycle"]["compiles"] and result["step"]["compiles"]:
        ratio = result["cycle_over_step"] = round(result["cycle"]["ms"] / result["step"]["ms"], 3)
        print(f"A cycle costs {ratio:.2f} plain steps by these bounds, and yields tau tokens.")
    print(json.dumps(result))
    return 0 if all(result[name]["fits"] for name in works) else 1


def drafts(args: Args, config: DecoderConfig) -> tuple[Method, TreeConfig | None]:
    """Returns what `--method` drafts with, and its tree.

    Raises:
      ValueError: a method whose sizes are not known here.
    """
    label, width = Label.parse(args.method), (config.hidden_size, config.vocab_size)
    if label.method == "pld":
        length, ngram = label.numbers
        return prompt_lookup(ngram, length, **dict(label.fields)), None
    if label.method == "lookahead":
        return lookahead(*label.numbers), None
    methods: dict[str, tuple[Method, TreeConfig]] = {
        "eagle3": (eagle3_head(config), TreeConfig(8)),
        "medusa": (MedusaConfig("medusa", *width, 5, 1, None), TreeConfig(5)),
        "hydra": (MedusaConfig("hydra", *width, 4, 1, config.one_layer(tie_word_embeddings=False)), TreeConfig(4)),
        "sps": (model(args.draft_model), TreeConfig.chain(5)),
    }
    if label.method not in methods:
        raise ValueError(f"--method must be one of {', '.join(methods)}, pld and lookahead, got {args.method}.")
    method, tree = methods[label.method]
    static = medusa_parents(method.num_heads) if isinstance(method, MedusaConfig) else EAGLE1_PARENTS
    return method, label.tree(tree, static)


def measure(work: Workload, chip: Chip, name: str) -> dict[str, Any]:
    """Compiles a program, prints and returns its costs on one device.

    Args:
      name: of the unit of work, a "cycle", plain "step" or "update", of which traffic and flops are.

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
        written = sorted(Path(dump).glob("module_*.jit_*after_optimizations.txt"))
        texts = [path.read_text(encoding="utf-8") for path in written]
    seconds = time.perf_counter() - started
    program = Program(texts[0])
    unit = program.entry if work.loop is None else program.loop_body(work.loop)
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    held -= memory.alias_size_in_bytes  # arguments that become results
    asked = work.asked / work.mesh.size
    traffic, flops = program.traffic(unit), max(asked, program.flops(unit))
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
        "asked_gflops": round(asked / 1e9, 3),
        "ms": round(least * 1e3, 4),
        "mfu": round(asked / chip.flops / least, 4),
        "collectives_mb": {
            kind: {"times": one.times} | {key: round(getattr(one, key) / 1e6, 3) for key in one._fields[1:]}
            for kind, one in program.collectives(unit).items()
        },
        "widest_float32_mb": round(program.largest(unit, "f32") / 1e6, 3),
        "programs": len(texts),
        "host_transfers": len(program.host_transfers()),
        "cache_copies": program.copies(unit, work.cache) if work.cache else [],
        "compile_s": round(seconds, 1),
    }
    show(name, work, result)
    return result


def show(name: str, work: Workload, result: dict[str, Any]) -> None:
    """Prints what `measure` returns."""
    resident = ", ".join(f"{what} {result[f'{what}_gb']:.2f} GB" for what in work.resident)
    fits = "fits" if result["fits"] else "DOES NOT FIT"
    print(f"{name}: compiled in {result['compile_s']:.0f} s; per device:")
    print(f"  memory      {result['memory_gb']:8.2f} GB of {result['hbm_gb']:.0f} GB: {fits}")
    print(f"              {resident}, temporaries {result['temporaries_gb']:.2f} GB")
    print(f"  per {name:<8}{result['traffic_gb']:8.2f} GB through HBM, {result['gflops']:.0f} GFLOP")
    print(f"  at least    {result['ms']:8.2f} ms, at most {result['mfu']:.1%} of the peak")
    for kind, one in result["collectives_mb"].items():
        print(f"  {kind:<18}{one['times']:5d} x, {one['bytes']:.2f} MB, of which in loops {one['looped']:.2f} MB")
    copies = result["cache_copies"] or "never"
    print(f"  {result['host_transfers']} transfers to the host; caches copied: {copies}", flush=True)


if __name__ == "__main__":
    run(main, Args, __doc__)
