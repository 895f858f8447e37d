"""The whole generate program over abstract weights: prefill and loop, its memory and what a cycle costs."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig, MedusaConfig, TreeConfig
from eagle_jax.core.loop import generate, prefill, required_slots, step
from eagle_jax.core.types import Batch, Drafter, Engine, Params, Sampling, Sizes, TargetFn
from eagle_jax.drafters.eagle import eagle
from eagle_jax.drafters.lookahead import lookahead
from eagle_jax.drafters.medusa import medusa
from eagle_jax.drafters.prompt_lookup import prompt_lookup
from eagle_jax.drafters.small_model import small_model
from eagle_jax.drafters.vanilla import vanilla
from eagle_jax.models.decoder import init_params, target_fn
from eagle_jax.models.heads import init_head_params
from eagle_jax.models.medusa import init_medusa_params
from eagle_jax.parallel.mesh import DATA, ROWS, TENSOR, param_shardings, shard_drafter, shard_target
from infer.aot import costs
from infer.aot.chips import Chip, device_memory, local_bytes

PAPER_TREE = TreeConfig(depth=8, top_k=10, num_nodes=59)
"""60 nodes with the root, 8 levels: EAGLE-3's own setting for 8B models (arXiv:2503.01840)."""
GREEDY = Sampling()
LOOP = "jit(generate)/while"
"""Name of the loop over cycles in the HLO."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is compiled.

    Attributes:
      config: sizes of the target. head: of what drafts: an EAGLE head, Medusa's or Hydra's heads, a small model, or
        the name of a method without weights ("pld", "lookahead"). mesh: where they live.
      tree: of the drafts; None is plain decoding. Methods without weights take no notice of its shape.
      batch: rows over all devices. prompt, max_tokens: widths of the buffers. chunk: prompt tokens per prefill pass.
      sampling: the sampled law; which of its settings are on decides the program, their values do not.

    Raises:
      ConfigError: the buffers are longer than the model's positions.
    """

    config: DecoderConfig
    head: HeadConfig | MedusaConfig | DecoderConfig | Literal["pld", "lookahead"]
    mesh: Mesh
    tree: TreeConfig | None = PAPER_TREE
    batch: int = 1
    prompt: int = 1024
    max_tokens: int = 1024
    chunk: int = 256
    dtype: str = "bfloat16"
    sampling: Sampling = GREEDY

    def __post_init__(self) -> None:
        if self.prompt + self.max_tokens > self.config.max_position:
            raise ConfigError(
                f"a prompt of {self.prompt} tokens and an answer of {self.max_tokens} go beyond the model's "
                f"{self.config.max_position} positions: lower --prompt or --max-new-tokens"
            )

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
        plain, head, tree = vanilla(), self.head, self.tree
        if tree is None:
            return plain
        if isinstance(head, HeadConfig):
            plain = eagle(head, tree, self.target, self.dtype)
        elif isinstance(head, MedusaConfig):
            plain = medusa(head, tree, self.target, self.config.num_layers, self.dtype)
        elif isinstance(head, DecoderConfig):
            model = shard_target(target_fn(head, self.dtype), self.mesh)
            plain = small_model(model, tree, self.config.vocab_size, head.vocab_size)
        else:
            plain = prompt_lookup(3, 10) if head == "pld" else lookahead(5, 7, 7)
        return shard_drafter(plain, self.mesh)

    @property
    def slots(self) -> int:
        """Cache slots, a multiple of 128."""
        return -(-required_slots(self.prompt, self.max_tokens, self.drafter.depth, self.chunk) // 128) * 128

    @property
    def cache_dims(self) -> tuple[int, int, int, int]:
        """Sizes of one layer's values on one device; those of its keys in another order."""
        config, mesh = self.config, self.mesh.shape
        return self.batch // mesh[DATA], config.num_kv_heads // mesh[TENSOR], self.slots, config.head_dim

    def params(self) -> Params:
        """Returns abstract parameters, sharded by `eagle_jax.parallel.mesh`; the drafter of plain decoding has none."""
        target = jax.eval_shape(functools.partial(init_params, self.config), jax.random.key(0))
        params = {"target": target, "drafter": jax.eval_shape(self._drafter_params)}
        return jax.tree.map(self._abstract, params, param_shardings(params, self.mesh))

    def arguments(self) -> tuple[Any, ...]:
        """Abstract arguments of `generate`."""
        batch = self.batch
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
        shapes = ((batch, self.prompt), (batch,), (batch,), (batch, 4))
        arrays: Any = (*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes), keys)
        return self.params(), jax.tree.map(self._by_rows, Batch(*arrays)), self.law()

    def law(self) -> Sampling:
        """Abstract settings of the sampled law."""
        everywhere = NamedSharding(self.mesh, P())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), self.sampling)

    @property
    def engine(self) -> Engine:
        """Static functions of a cycle."""
        return Engine(self.target, self.drafter)

    @property
    def sizes(self) -> Sizes:
        """Static sizes of `generate`."""
        return Sizes(self.max_tokens, self.chunk, self.slots)

    def state(self) -> Any:
        """Abstract state between two cycles, sharded as the program keeps it."""
        run = functools.partial(prefill, engine=self.engine, sizes=self.sizes)
        return jax.tree.map(self._by_rows, jax.eval_shape(run, *self.arguments()))

    def _drafter_params(self) -> Params:
        head, key = self.head, jax.random.key(0)
        if self.tree is None or isinstance(head, str):
            return {}
        if isinstance(head, HeadConfig):
            return init_head_params(head, key)
        return init_medusa_params(head, key) if isinstance(head, MedusaConfig) else {"model": init_params(head, key)}

    def _abstract(self, leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        dtype = self.dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    def _by_rows(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = P(ROWS, TENSOR) if leaf.ndim == 4 else P(ROWS)  # caches are the only arrays of four axes
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))


def lower_generate(work: Workload) -> jax.stages.Lowered:
    """The whole program, prefill and loop, ready for `.compile()`."""
    program = jax.jit(generate, static_argnames=("engine", "sizes"))
    return program.lower(*work.arguments(), engine=work.engine, sizes=work.sizes)


def lower_step(work: Workload) -> jax.stages.Lowered:
    """One cycle with its state donated, as `stream` runs it."""
    program = jax.jit(step, static_argnames="engine", donate_argnums=(1,))
    return program.lower(work.params(), work.state(), work.law(), engine=work.engine)


def trace_step(work: Workload) -> Any:
    """The jaxpr of one cycle."""
    program = jax.jit(step, static_argnames="engine")
    return program.trace(work.params(), work.state(), work.law(), engine=work.engine).jaxpr


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


def analyse(work: Workload, compiled: jax.stages.Compiled, texts: list[str]) -> Report:
    """Reads the report off a compiled generate program: `compile_program(lower_generate(work))`."""
    jaxpr = trace_step(work)
    lengths = costs.loop_lengths(jaxpr)
    program = costs.Program(texts[0])
    cycle = program.loop_body(LOOP)
    moved = dict.fromkeys(("all-reduce", "all-gather", "other"), 0.0)
    largest = 0.0
    for move in program.collectives(cycle, lengths):
        moved[move.kind if move.kind in moved else "other"] += move.bytes * move.times
        largest = max(largest, move.bytes) if move.kind == "all-gather" else largest
    writes = program.copies(cycle, work.cache_dims, lengths)
    spills = [
        move for move in writes if move.instruction.opcode == "copy-start" and not move.instruction.buffers[1].hbm
    ]
    return Report(
        programs=len(texts),
        memory=device_memory(compiled),
        weights=local_bytes(work.params()),
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
