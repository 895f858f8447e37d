"""Compilation for TPUs that are not there: the whole generate program over abstract weights, its memory and its costs.

`libtpu` compiles for a topology ("v6e:1x1") on any x86 Linux machine. Set `JAX_PLATFORMS=cpu`, `TPU_SKIP_MDS_QUERY=1`
and `TPU_WORKER_HOSTNAMES=localhost` before JAX is imported, or it looks for the chips, and for several at once
`ALLOW_MULTIPLE_LIBTPU_LOAD=1`. Weights are `ShapeDtypeStruct`s with shardings: a 70B model takes no memory here.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import math
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eagle_jax import costs
from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig, TreeConfig
from eagle_jax.drafters.eagle import eagle
from eagle_jax.drafters.vanilla import vanilla
from eagle_jax.generate import generate, prefill, required_slots, step
from eagle_jax.models.decoder import init_params, target_fn
from eagle_jax.models.heads import init_head_params
from eagle_jax.sharding import DATA, ROWS, TENSOR, make_mesh, param_shardings, shard_drafter, shard_target
from eagle_jax.types import Drafter, Params, Sampling, TargetFn

PAPER_TREE = TreeConfig(depth=8, top_k=10, num_nodes=59)
"""60 nodes with the root, 8 levels: EAGLE-3's own setting for 8B models (arXiv:2503.01840)."""
FUNCTIONS, SHAPES = ("target", "drafter", "verify"), ("slots", "max_tokens", "chunk")
GREEDY = Sampling()
LOOP = "jit(generate)/while"
"""Name of the loop over cycles in the HLO."""


class Chip(NamedTuple):
    """One TPU chip, from the vendor's data sheet.

    Attributes:
      hbm: bytes. bandwidth: of the HBM, bytes per second. flops: bfloat16 operations per second.
    """

    hbm: float
    bandwidth: float
    flops: float


CHIPS = {
    "v4": Chip(32e9, 1228e9, 275e12),
    "v5e": Chip(16e9, 819e9, 197e12),
    "v5p": Chip(95e9, 2765e9, 459e12),
    "v6e": Chip(32e9, 1640e9, 918e12),
}


def chip_of(topology: str) -> Chip:
    """The chip of "v5e:2x2".

    Raises:
      ConfigError: no such chip; the message names the nearest.
    """
    name = topology.partition(":")[0]
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"topology {topology!r}: unknown chip {name!r}; the nearest of {', '.join(CHIPS)} is {near!r}"
        )
    return CHIPS[name]


def topology_devices(topology: str) -> list[Any]:
    """Compile-only devices of "v6e:1x1", "v5e:2x2", "v5p:2x2x1", ...

    Raises:
      ConfigError: libtpu is not installed, or it does not know the topology.
    """
    chip_of(topology)
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ConfigError("compiling for TPU needs libtpu: `pip install libtpu` (Linux, x86_64); no TPU is needed")
    try:
        return list(topologies.get_topology_desc(topology, platform="tpu").devices)
    except Exception as error:  # the plugin raises several kinds
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"libtpu gives no topology {topology!r} ({reason}); write v6e:1x1, v5e:2x2 or v5p:2x2x1 "
            "(v4 and v5p have three dimensions)"
        ) from error


def mesh_for(devices: list[Any], kv_heads: int, tensor: int | None = None) -> Mesh:
    """All devices as a ("data", "tensor") mesh, with the widest "tensor" axis that gives every device whole heads.

    Raises:
      ConfigError: `tensor` does not divide the number of devices.
    """
    tensor = math.gcd(len(devices), kv_heads) if tensor is None else tensor
    if tensor < 1 or len(devices) % tensor:
        raise ConfigError(f"tensor={tensor} does not divide the {len(devices)} devices of the topology")
    return make_mesh(len(devices) // tensor, tensor, devices=devices)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is compiled.

    Attributes:
      config, head: sizes of target and EAGLE head. mesh: where they live. tree: of the drafts; None is plain decoding.
      batch: rows over all devices. prompt, max_tokens: widths of the buffers. chunk: prompt tokens per prefill pass.
      sampling: the sampled law; which of its settings are on decides the program, their values do not.
    """

    config: DecoderConfig
    head: HeadConfig
    mesh: Mesh
    tree: TreeConfig | None = PAPER_TREE
    batch: int = 1
    prompt: int = 1024
    max_tokens: int = 1024
    chunk: int = 256
    dtype: str = "bfloat16"
    sampling: Sampling = GREEDY

    def plain(self) -> Workload:
        """The same without a drafter."""
        return dataclasses.replace(self, tree=None)

    @property
    def target(self) -> TargetFn:
        """The target, held to the mesh."""
        return shard_target(target_fn(self.config, self.dtype), self.mesh)

    @property
    def drafter(self) -> Drafter:
        """The drafter, held to the mesh."""
        if self.tree is None:
            return vanilla()
        return shard_drafter(eagle(self.head, self.tree, self.target, self.dtype), self.mesh)

    @property
    def slots(self) -> int:
        """Cache slots, a multiple of 128."""
        depth = 0 if self.tree is None else self.tree.depth
        return -(-required_slots(self.prompt, self.max_tokens, depth, self.chunk) // 128) * 128

    @property
    def cache_dims(self) -> tuple[int, int, int, int]:
        """Sizes of one layer's values on one device; those of its keys in another order."""
        config, mesh = self.config, self.mesh.shape
        return self.batch // mesh[DATA], config.num_kv_heads // mesh[TENSOR], self.slots, config.head_dim

    def params(self) -> Params:
        """Abstract parameters with the shardings of `eagle_jax.sharding`; none without a drafter for the head."""
        key = jax.random.key(0)
        target = jax.eval_shape(functools.partial(init_params, self.config), key)
        head = {} if self.tree is None else jax.eval_shape(functools.partial(init_head_params, self.head), key)
        params = {"target": target, "drafter": head}
        return jax.tree.map(self._abstract, params, param_shardings(params, self.mesh))

    def arguments(self) -> tuple[Any, ...]:
        """Abstract arguments of `generate`."""
        batch = self.batch
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
        shapes = ((batch, self.prompt), (batch,), (batch,), (batch, 4))
        arrays = (*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes), keys)
        return (self.params(), *jax.tree.map(self._by_rows, arrays))

    def options(self) -> dict[str, Any]:
        """Arguments of `step` besides parameters and state."""
        everywhere = NamedSharding(self.mesh, P())
        sampling = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), self.sampling)
        return {"target": self.target, "drafter": self.drafter, "sampling": sampling}

    def buffers(self) -> dict[str, Any]:
        """Static sizes of `generate`."""
        return {"slots": self.slots, "max_tokens": self.max_tokens, "chunk": self.chunk}

    def state(self) -> Any:
        """Abstract state between two cycles, sharded as the program keeps it."""
        options = self.options()
        sampling = options.pop("sampling")  # abstract, hence no constant of the function
        run = functools.partial(prefill, **options, **self.buffers())
        return jax.tree.map(self._by_rows, jax.eval_shape(run, *self.arguments(), sampling=sampling))

    def _abstract(self, leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        dtype = self.dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    def _by_rows(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = P(ROWS, TENSOR) if leaf.ndim == 4 else P(ROWS)  # caches are the only arrays of four axes
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))


def lower_generate(work: Workload) -> jax.stages.Lowered:
    """The whole program, prefill and loop, ready for `.compile()`."""
    program = jax.jit(generate, static_argnames=(*FUNCTIONS, *SHAPES))
    return program.lower(*work.arguments(), **work.options(), **work.buffers())


def lower_step(work: Workload) -> jax.stages.Lowered:
    """One cycle with its state donated, as `stream` runs it."""
    program = jax.jit(step, static_argnames=FUNCTIONS, donate_argnums=(1,))
    return program.lower(work.params(), work.state(), **work.options())


def trace_step(work: Workload) -> Any:
    """The jaxpr of one cycle."""
    program = jax.jit(step, static_argnames=FUNCTIONS)
    return program.trace(work.params(), work.state(), **work.options()).jaxpr


class Report(NamedTuple):
    """What a compiled generate program needs and does. Bytes and flops are those of one device.

    Attributes:
      programs: HLO modules that the one `jit` became.
      memory: arguments, results and temporaries at the peak. weights: of target and head. cache: of the target.
      flops, traffic: of one cycle; traffic is what HBM reads and writes.
      all_reduce, all_gather, other_collectives: bytes per cycle. largest_gather: of one all-gather.
      host: instructions that meet the host. copies: what writes a whole cache array within a cycle. spilled: bytes per
        cycle of whole cache arrays that the compiler kept in VMEM for a while and writes back.
    """

    programs: int
    memory: float
    weights: float
    cache: float
    flops: float
    traffic: float
    all_reduce: float
    all_gather: float
    other_collectives: float
    largest_gather: float
    host: list[str]
    copies: list[str]
    spilled: float

    def fits(self, chip: Chip) -> bool:
        """Whether it fits into the chip's HBM."""
        return self.memory <= chip.hbm

    def seconds(self, chip: Chip) -> float:
        """Least time of one cycle, whichever of memory and arithmetic takes longer; no communication."""
        return max(self.traffic / chip.bandwidth, self.flops / chip.flops)


def compile_program(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, list[str]]:
    """Compiles, and returns with the program the optimised HLO of every module that it became.

    The compiler itself writes the HLO out: what jaxlib reads back from libtpu fails for v5p, where the SparseCores
    gather the embedding asynchronously ("async-update instruction should have 1 operands").
    """
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        written = sorted(Path(folder).glob("module_*.jit_*after_optimizations.txt"))
        if not written:
            names = sorted(path.name for path in Path(folder).iterdir())
            raise RuntimeError(
                f"the compiler wrote no optimised HLO, only {names or 'nothing'}; report it with libtpu's version"
            )
        return compiled, [path.read_text(encoding="utf-8") for path in written]


def analyse(work: Workload, compiled: jax.stages.Compiled, texts: list[str]) -> Report:
    """Reads the report off a compiled generate program: `compile_program(lower_generate(work))`."""
    jaxpr = trace_step(work)
    lengths = costs.loop_lengths(jaxpr)
    program = costs.Program(texts[0])
    cycle = program.loop_body(LOOP)
    moved = dict.fromkeys(("all-reduce", "all-gather", "other"), 0.0)
    largest = 0.0
    for move in program.collectives(cycle, lengths):
        name = move.instruction.opcode.removesuffix("-start")
        moved[name if name in moved else "other"] += move.bytes * move.times
        largest = max(largest, move.bytes) if name == "all-gather" else largest
    writes = program.copies(cycle, work.cache_dims, lengths)
    spills = [
        move for move in writes if move.instruction.opcode == "copy-start" and not move.instruction.buffers[1].hbm
    ]
    return Report(
        programs=len(texts),
        memory=device_memory(compiled),
        weights=_local_bytes(work.params()),
        cache=2.0 * math.prod(work.cache_dims) * jnp.dtype(work.dtype).itemsize * work.config.num_layers,
        flops=costs.flops(jaxpr) / work.mesh.size,
        traffic=program.traffic(cycle, lengths),
        all_reduce=moved["all-reduce"],
        all_gather=moved["all-gather"],
        other_collectives=moved["other"],
        largest_gather=largest,
        host=program.host_transfers(),
        copies=[f"{move.instruction.name} x{move.times}" for move in writes if move not in spills],
        spilled=float(sum(move.written * move.times for move in spills)),
    )


def device_memory(compiled: jax.stages.Compiled) -> float:
    """Bytes of one device that the program holds at once: arguments, results and temporaries, aliased ones once."""
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return float(held - memory.alias_size_in_bytes)


def _local_bytes(params: Params) -> float:
    sizes = (math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    return float(sum(sizes))
