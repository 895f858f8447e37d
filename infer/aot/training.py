"""One update of a draft head over abstract weights: target, head and optimiser in one program, its memory and costs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig
from eagle_jax.models.decoder import init_params
from eagle_jax.models.heads import init_head_params
from eagle_jax.packed import PackedTokens
from eagle_jax.parallel.mesh import DATA, FSDP, ROWS, TENSOR, make_mesh, param_shardings, row_groups
from eagle_jax.training.flops import product_flops
from eagle_jax.training.objective import Objective
from eagle_jax.training.step import Frozen, HeadTrainState, head_optimiser, head_train_step
from infer.aot import costs
from infer.aot.chips import Chip, device_memory, local_bytes

MANY = 16
"""On more devices than this the default mesh splits matrices over "tensor", or an update would need a row for each."""


def training_mesh(devices: list[Any], data: int = 1, fsdp: int | None = None, tensor: int | None = None) -> Mesh:
    """A mesh over the devices: "tensor" is 1, or 4 where there are many; "fsdp" takes what is left.

    Where all three are given, devices may be left idle.

    Raises:
      ConfigError: the axes need more devices than there are, or what is given does not divide them.
    """
    count = len(devices)
    tensor = (4 if count > MANY and count % 4 == 0 else 1) if tensor is None else tensor
    if fsdp is None:
        if data < 1 or tensor < 1 or count % (data * tensor):
            raise ConfigError(f"data={data} times tensor={tensor} does not divide the {count} devices of the topology")
        fsdp = count // (data * tensor)
    return make_mesh(data, tensor, fsdp, devices=devices)


EAGLE3 = Objective()
"""Seven steps, cross-entropy (arXiv:2503.01840)."""


@dataclasses.dataclass(frozen=True)
class TrainWorkload:
    """What is compiled: one call of `head_train_step`, as the trainer jits it.

    Attributes:
      config, head: sizes of target and draft head. mesh: where they live. rows: per update, over all devices.
      micro_batches: parts of an update that are computed one after the other. length: tokens per row.
      dtype: of the target, and of the head's products; its master weights and the optimiser's state are float32.

    Raises:
      ConfigError: the rows do not divide into micro-batches and over the mesh; the mesh does not divide the heads.
    """

    config: DecoderConfig
    head: HeadConfig
    mesh: Mesh
    objective: Objective = EAGLE3
    rows: int = 16
    micro_batches: int = 1
    length: int = 2048
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        groups, tensor = row_groups(self.mesh), self.mesh.shape[TENSOR]
        if self.rows % (self.micro_batches * groups):
            raise ConfigError(
                f"rows={self.rows} is not a multiple of micro_batches={self.micro_batches} times "
                f"data={self.mesh.shape[DATA]} times fsdp={self.mesh.shape[FSDP]}: every device needs as many rows"
            )
        if self.config.num_kv_heads % tensor:
            raise ConfigError(f"num_kv_heads={self.config.num_kv_heads} is not a multiple of tensor={tensor}")

    @property
    def tokens(self) -> int:
        """Per update."""
        return self.rows * self.length

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """As the trainer's; its numbers do not change the program."""
        return head_optimiser(1e-4, 100, 1000)

    def state(self) -> HeadTrainState:
        """Abstract state of the head, float32, with the shardings of `eagle_jax.parallel.mesh`."""

        def fresh(key: jax.Array) -> HeadTrainState:
            head = init_head_params(self.head, key)["head"]
            return HeadTrainState(head, self.optimiser.init(head), jnp.int32(0), key)

        return self._placed(jax.eval_shape(fresh, jax.random.key(0)))

    def frozen(self) -> Any:
        """Abstract target in `dtype`, draft vocabulary and scale of the features."""
        shapes = jax.eval_shape(functools.partial(init_params, self.config), jax.random.key(0))
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self.dtype), shapes)
        if self.head.kind != "eagle3":
            return Frozen(self._placed(target))
        abstract: Any = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(self.mesh, P()))
        width = len(self.head.taps) * self.head.target_hidden_size
        return Frozen(
            self._placed(target), abstract((self.head.draft_vocab_size,), jnp.int32), abstract((width,), jnp.float32)
        )

    def texts(self) -> Any:
        """Abstract micro-batches [M, B, T], rows spread over the mesh."""
        abstract: Any = jax.ShapeDtypeStruct
        shape = (self.micro_batches, self.rows // self.micro_batches, self.length)
        place = NamedSharding(self.mesh, P(None, ROWS))
        kinds: dict[str, Any] = {
            name: jnp.bool_ if name == "supervised" else jnp.int32 for name in PackedTokens._fields
        }
        return PackedTokens(**{name: abstract(shape, kind, sharding=place) for name, kind in kinds.items()})

    def update(self, *, once: bool = False) -> Callable[..., Any]:
        """`head_train_step` of state, frozen and texts; `once`: nothing is computed again for its gradient."""
        objective = dataclasses.replace(self.objective, remat=self.objective.remat and not once)
        mesh = None if once else self.mesh
        return functools.partial(
            head_train_step, self.config, self.head, objective, self.optimiser, self.dtype, mesh=mesh
        )

    def _placed(self, tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            tree,
            param_shardings(tree, self.mesh),
        )


def lower_training(work: TrainWorkload) -> jax.stages.Lowered:
    """One update with its state donated, as the trainer runs it, ready for `.compile()`."""
    state = work.state()
    kept = jax.tree.map(lambda leaf: leaf.sharding, state)
    update = jax.jit(work.update(), donate_argnums=0, out_shardings=(kept, NamedSharding(work.mesh, P())))
    return update.lower(state, work.frozen(), work.texts())


class Traffic(NamedTuple):
    """All communication of one kind in one update.

    Attributes:
      times: executions. bytes: of their results, per device (`costs.Collective`). looped: the part inside loops.
    """

    times: int
    bytes: float
    looped: float


class TrainReport(NamedTuple):
    """What a compiled update needs and does. Bytes and flops are those of one device.

    Attributes:
      programs: HLO modules that the one `jit` became.
      memory: arguments, results and temporaries at the peak; arguments, temporaries: of them. donated: results that
        take the place of arguments. target, state: what of the arguments these are.
      flops: products that the device computes, what is computed again included. model_flops: its share of those that
        the update asks for. traffic: what HBM reads and writes.
      collectives: by kind. host: instructions that meet the host.
      widest: bytes of the largest float32 array that is written to memory anywhere.
    """

    programs: int
    memory: float
    arguments: float
    temporaries: float
    donated: float
    target: float
    state: float
    flops: float
    model_flops: float
    traffic: float
    collectives: dict[str, Traffic]
    host: list[str]
    widest: float

    def fits(self, chip: Chip) -> bool:
        """Whether it fits into the chip's HBM."""
        return self.memory <= chip.hbm

    def seconds(self, chip: Chip) -> float:
        """Least time of one update, whichever of memory and arithmetic takes longer; no communication."""
        return max(self.traffic / chip.bandwidth, self.flops / chip.flops)

    def utilisation(self, chip: Chip) -> float:
        """Model-flops utilisation that the least time allows."""
        return self.model_flops / chip.flops / self.seconds(chip)


def analyse_training(work: TrainWorkload, compiled: jax.stages.Compiled, texts: list[str]) -> TrainReport:
    """Reads the report off a compiled update: `compile_program(lower_training(work))`."""
    program = costs.Program(texts[0])
    memory: Any = compiled.memory_analysis()
    state, frozen = work.state(), work.frozen()
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, frozen, work.texts()))
    moves = program.collectives(program.entry, {})
    kinds = {}
    for kind in sorted({move.kind for move in moves}):
        these = [move for move in moves if move.kind == kind]
        looped = math.fsum(move.bytes * move.times for move in these if move.times > 1)
        total = math.fsum(move.bytes * move.times for move in these)
        kinds[kind] = Traffic(sum(move.times for move in these), total, looped)
    written = (buffer for move in program.moves(program.entry, {}) for buffer in move.instruction.buffers)
    return TrainReport(
        programs=len(texts),
        memory=device_memory(compiled),
        arguments=float(memory.argument_size_in_bytes),
        temporaries=float(memory.temp_size_in_bytes),
        donated=float(memory.alias_size_in_bytes),
        target=local_bytes(frozen.target),
        state=local_bytes((state.head, state.opt_state)),
        flops=program.flops(program.entry, {}),
        model_flops=product_flops(work.update(once=True), *abstract) / work.mesh.size,
        traffic=program.traffic(program.entry, {}),
        collectives=kinds,
        host=program.host_transfers(),
        widest=max((buffer.size for buffer in written if buffer.dtype == "f32"), default=0.0),
    )
