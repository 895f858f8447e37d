"""Lowers generation and training over abstract weights: a model of any size takes no memory here."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig, MedusaConfig, TreeConfig
from eagle_jax.core.loop import generate, prefill, required_slots, step
from eagle_jax.core.types import Batch, Drafter, Engine, Params, Sampling, Sizes, TargetFn
from eagle_jax.drafters.eagle import eagle
from eagle_jax.drafters.medusa import medusa
from eagle_jax.drafters.small_model import small_model
from eagle_jax.models.decoder import init_params, target_fn
from eagle_jax.models.heads import init_head_params
from eagle_jax.models.medusa import init_medusa_params
from eagle_jax.packed import PackedTokens
from eagle_jax.parallel.mesh import DATA, ROWS, TENSOR, param_shardings, row_groups, shard_drafter, shard_target
from eagle_jax.training.flops import product_flops
from eagle_jax.training.objective import Objective
from eagle_jax.training.step import Frozen, HeadTrainState, head_optimiser, head_train_step

Method = HeadConfig | MedusaConfig | DecoderConfig | Drafter
"""Configuration of a drafter: an EAGLE head, Medusa or Hydra heads, a small model, or a method without weights."""
GREEDY = Sampling()
CHUNK = 256
"""Prompt tokens per prefill pass."""


class Workload(NamedTuple):
    """A program that is ready to compile, and what its report is about.

    Attributes:
      loop: name of the loop in the HLO whose body is one unit of work; None is the whole program.
      resident: abstract arrays that stay in memory, by name. mesh: where they live.
      cache: sizes of the values of one layer on one device, of which no copy should be made.
      asked: flops that one unit needs on all devices together, without recomputation.
      sizes: of the compiled program, for the report.
    """

    lowered: jax.stages.Lowered
    loop: str | None
    resident: dict[str, Any]
    mesh: Mesh
    cache: tuple[int, ...]
    asked: float
    sizes: dict[str, Any]


def generation(
    config: DecoderConfig,
    method: Method,
    mesh: Mesh,
    tree: TreeConfig | None = None,
    *,
    batch: int,
    prompt: int,
    max_tokens: int,
    sampling: Sampling = GREEDY,
    dtype: str = "bfloat16",
) -> Workload:
    """Lowers prefill and loop; the unit of work is a cycle.

    Args:
      tree: of the drafts; methods without weights have none.
      batch: rows over all devices. prompt, max_tokens: widths of the buffers.
      sampling: which of its settings are on decides the program, their values do not.

    Raises:
      ConfigError: the buffers are longer than the model's positions.
    """
    if prompt + max_tokens > config.max_position:
        raise ConfigError(
            f"--prompt + --max-new-tokens must be at most the model's {config.max_position} positions, got "
            f"{prompt + max_tokens}. Lower one of them."
        )
    target = shard_target(target_fn(config, dtype), mesh)
    drafter, own = _drafter(config, method, target, mesh, tree or TreeConfig(), dtype)
    engine = Engine(target, shard_drafter(drafter, mesh))
    slots = -(-required_slots(prompt, max_tokens, drafter.depth, CHUNK) // 128) * 128
    sizes = Sizes(max_tokens, min(CHUNK, prompt), slots)
    params = {"target": _shapes(init_params, config), "drafter": jax.eval_shape(own, jax.random.key(0))}
    params = _placed(params, mesh, dtype)

    def by_rows(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = P(ROWS, TENSOR) if leaf.ndim == 4 else P(ROWS)  # caches are the only arrays of four axes
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    shapes = ((batch, prompt), (batch,), (batch,), (batch, 4))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    numbers: Any = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    rows = Batch(*[*numbers, keys])
    everywhere = NamedSharding(mesh, P())
    law = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), sampling)
    arguments = params, jax.tree.map(by_rows, rows), law
    state = jax.eval_shape(functools.partial(prefill, engine=engine, sizes=sizes), *arguments)
    program = jax.jit(generate, static_argnames=("engine", "sizes"))
    return Workload(
        lowered=program.lower(*arguments, engine=engine, sizes=sizes),
        loop="jit(generate)/while",
        resident={"weights": params, "cache": jax.tree.map(by_rows, (state.cache.keys, state.cache.values))},
        mesh=mesh,
        cache=(batch // mesh.shape[DATA], config.num_kv_heads // mesh.shape[TENSOR], slots, config.head_dim),
        asked=product_flops(functools.partial(step, engine=engine), params, state, law),
        sizes={"batch": batch, "context": slots},
    )


def _drafter(
    config: DecoderConfig, method: Method, target: TargetFn, mesh: Mesh, tree: TreeConfig, dtype: str
) -> tuple[Drafter, Callable[[jax.Array], Params]]:
    """Returns the functions of a method, and what makes its parameters from a key."""
    if isinstance(method, HeadConfig):
        return eagle(method, tree, target, dtype), functools.partial(init_head_params, method)
    if isinstance(method, MedusaConfig):
        heads = medusa(method, tree, target, config.num_layers, dtype)
        return heads, functools.partial(init_medusa_params, method)
    if isinstance(method, DecoderConfig):
        model = shard_target(target_fn(method, dtype), mesh)
        chain = small_model(model, tree, config.vocab_size, method.vocab_size)
        return chain, lambda key: {"model": init_params(method, key)}
    return method, lambda key: {}


def training(
    config: DecoderConfig,
    head: HeadConfig,
    mesh: Mesh,
    objective: Objective,
    *,
    rows: int,
    micro_batches: int = 1,
    length: int = 2048,
    dtype: str = "bfloat16",
) -> Workload:
    """Lowers one update of an EAGLE head on its frozen target, its state donated, as the trainer runs it.

    Args:
      rows: per update, over all devices. micro_batches: parts of an update that are computed one after the other.
      length: tokens per row.
      dtype: of the target, and of the head's products; its master weights and the optimiser's state are float32.

    Raises:
      ConfigError: the rows do not divide into micro-batches and over the mesh; the mesh does not divide the heads.
    """
    groups, tensor = row_groups(mesh), mesh.shape[TENSOR]
    if rows % (micro_batches * groups):
        raise ConfigError(
            f"--rows must be a multiple of --micro-batches {micro_batches} x data x fsdp {groups}, got {rows}. "
            "Every device needs as many rows."
        )
    if config.num_kv_heads % tensor:
        raise ConfigError(f"--tensor must divide the model's {config.num_kv_heads} key-value heads, got {tensor}.")
    optimiser = head_optimiser(1e-4, 100, 1000)  # its numbers do not change the program

    def fresh(key: jax.Array) -> HeadTrainState:
        own = init_head_params(head, key)["head"]
        return HeadTrainState(own, optimiser.init(own), jnp.int32(0), key)

    state = _placed(jax.eval_shape(fresh, jax.random.key(0)), mesh)
    everywhere: Any = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    target = _placed(_shapes(init_params, config), mesh, dtype)
    width = len(head.taps) * head.target_hidden_size
    frozen = Frozen(target, everywhere((head.draft_vocab_size,), jnp.int32), everywhere((width,), jnp.float32))
    shape, place = (micro_batches, rows // micro_batches, length), NamedSharding(mesh, P(None, ROWS))
    kinds: Any = {name: jnp.bool_ if name == "supervised" else jnp.int32 for name in PackedTokens._fields}
    texts: Any = PackedTokens(**kinds)
    texts = jax.tree.map(lambda kind: jax.ShapeDtypeStruct(shape, kind, sharding=place), texts)
    update = functools.partial(head_train_step, config, head, objective, optimiser, dtype, mesh=mesh)
    once = functools.partial(
        head_train_step, config, head, dataclasses.replace(objective, remat=False), optimiser, dtype
    )
    kept = jax.tree.map(lambda leaf: leaf.sharding, state)
    program = jax.jit(update, donate_argnums=0, out_shardings=(kept, NamedSharding(mesh, P())))
    bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, frozen, texts))
    return Workload(
        lowered=program.lower(state, frozen, texts),
        loop=None,
        resident={"target": target, "state": (state.head, state.opt_state)},
        mesh=mesh,
        cache=(),
        asked=product_flops(once, *bare),
        sizes={"rows": rows, "micro_batches": micro_batches, "length": length},
    )


def _shapes(init: Callable[..., Params], config: DecoderConfig) -> Params:
    return jax.eval_shape(functools.partial(init, config), jax.random.key(0))


def _placed(tree: Any, mesh: Mesh, dtype: str | None = None) -> Any:
    """Returns abstract arrays with the shardings of `eagle_jax.parallel.mesh`; with `dtype`, floating ones in it."""

    def place(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        kind = dtype if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, kind, sharding=sharding)

    return jax.tree.map(place, tree, param_shardings(tree, mesh))


def local_bytes(arrays: Any) -> float:
    """Returns the bytes that abstract arrays take on one device, by their shardings."""
    leaves = jax.tree.leaves(arrays)
    return float(sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves))
