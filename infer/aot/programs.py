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

from eagle_jax.config import EAGLE1_PARENTS, ConfigError, DecoderConfig, HeadConfig, MedusaConfig, TreeConfig
from eagle_jax.core.loop import generate, prefill, required_slots, step
from eagle_jax.core.types import Batch, Drafter, Engine, Params, Sampling, Sizes, TargetFn
from eagle_jax.drafters.eagle import eagle_drafter
from eagle_jax.drafters.lookahead_decoding import lookahead_drafter
from eagle_jax.drafters.medusa import medusa_drafter
from eagle_jax.drafters.pld import prompt_lookup_drafter
from eagle_jax.drafters.small_model import small_model_drafter
from eagle_jax.drafters.vanilla import vanilla_drafter
from eagle_jax.models.decoder import init_params, target_fn
from eagle_jax.models.heads import init_head_params
from eagle_jax.models.medusa import init_medusa_params
from eagle_jax.models.presets import eagle3_head
from eagle_jax.packed import PackedTokens
from eagle_jax.parallel.mesh import DATA, ROWS, TENSOR, param_shardings, row_groups, shard_drafter, shard_target
from eagle_jax.shapes import medusa_parents
from eagle_jax.training.flops import product_flops
from eagle_jax.training.objective import Objective
from eagle_jax.training.train_steps import Frozen, HeadTrainState, head_optimiser, head_train_step
from infer.common.labels import PLAIN, Label

CHUNK = 256
"""Prompt tokens per prefill pass."""
DTYPE = "bfloat16"
"""Of weights and products; a trained head's own weights and the optimiser's state are float32."""


class Workload(NamedTuple):
    """Holds a program that is ready to compile, and the subjects of its report.

    Attributes:
      loop: name of the loop in the HLO whose body is one unit of work; None is the whole program.
      resident: abstract arrays that stay in memory, by name. mesh: where they live.
      cache: sizes of the values of one layer on one device, of which no copy should be made.
      model_flops, flops: of the matrix products of one unit, on all devices; `flops` includes recomputation.
    """

    lowered: jax.stages.Lowered
    loop: str | None
    resident: dict[str, Any]
    mesh: Mesh
    cache: tuple[int, ...]
    model_flops: float
    flops: float


def generation(
    config: DecoderConfig,
    method: str,
    small: DecoderConfig,
    mesh: Mesh,
    *,
    batch: int,
    prompt: int,
    max_tokens: int,
    sampling: Sampling,
) -> Workload:
    """Lowers prefill and loop; the unit of work is a cycle.

    Args:
      method: a label as in infer.bench. small: the small model of sps.
      batch: rows over all devices. prompt, max_tokens: widths of the buffers.
      sampling: which of its settings are on decides the program, their values do not.

    Raises:
      ConfigError: the buffers are longer than the model's positions. ValueError: another method.
    """
    if prompt + max_tokens > config.max_position:
        raise ConfigError(
            f"--prompt + --max-new-tokens must be at most the model's {config.max_position} positions, got "
            f"{prompt + max_tokens}. Lower one of them."
        )
    target = shard_target(target_fn(config, DTYPE), mesh)
    drafter, own = make_drafter(method, config, small, target, mesh)
    engine = Engine(target, shard_drafter(drafter, mesh))
    slots = -(-required_slots(prompt, max_tokens, drafter.depth, CHUNK) // 128) * 128
    sizes = Sizes(max_tokens, min(CHUNK, prompt), slots)
    target_params = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    params = _placed({"target": target_params, "drafter": jax.eval_shape(own, jax.random.key(0))}, mesh, DTYPE)

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
    flops = product_flops(functools.partial(step, engine=engine), params, state, law)
    return Workload(
        lowered=program.lower(*arguments, engine=engine, sizes=sizes),
        loop="jit(generate)/while",
        resident={"weights": params, "cache": jax.tree.map(by_rows, (state.cache.keys, state.cache.values))},
        mesh=mesh,
        cache=(batch // mesh.shape[DATA], config.num_kv_heads // mesh.shape[TENSOR], slots, config.head_dim),
        model_flops=flops,
        flops=flops,
    )


def make_drafter(
    text: str, config: DecoderConfig, small: DecoderConfig, target: TargetFn, mesh: Mesh
) -> tuple[Drafter, Callable[[jax.Array], Params]]:
    """Returns the functions of a method by its label, and the function that draws its parameters.

    Raises:
      ValueError: a method whose sizes are not known here.
    """
    label = Label.parse(text)
    without: dict[str, Callable[..., Drafter]] = {
        PLAIN: vanilla_drafter,
        "pld": prompt_lookup_drafter,
        "lookahead": lookahead_drafter,
    }
    if label.method in without:
        return without[label.method](**label.fields), lambda key: {}
    if label.method == "eagle3":
        head = eagle3_head(config)
        tree = label.tree(TreeConfig(8), EAGLE1_PARENTS)
        return eagle_drafter(head, tree, target, DTYPE), functools.partial(init_head_params, head)
    if label.method in ("medusa", "hydra"):
        width = config.hidden_size, config.vocab_size
        if label.method == "medusa":
            heads = MedusaConfig("medusa", *width, 5, 1, None)
        else:
            heads = MedusaConfig("hydra", *width, 4, 1, config.one_layer(tie_word_embeddings=False))
        tree = label.tree(TreeConfig(heads.num_heads), medusa_parents(heads.num_heads))
        return medusa_drafter(heads, tree, target, config.num_layers, DTYPE), functools.partial(
            init_medusa_params, heads
        )
    if label.method == "sps":
        model, tree = shard_target(target_fn(small, DTYPE), mesh), label.tree(TreeConfig.chain(5), EAGLE1_PARENTS)
        chain = small_model_drafter(model, tree, config.vocab_size, small.vocab_size)
        return chain, lambda key: {"model": init_params(small, key)}
    raise ValueError(f"--method must be one of eagle3, medusa, hydra, sps, pld and lookahead, got {text}. Choose one.")


def training(
    config: DecoderConfig,
    head: HeadConfig,
    mesh: Mesh,
    objective: Objective,
    *,
    rows: int,
    micro_batches: int,
    length: int,
) -> Workload:
    """Lowers one update of an EAGLE head on its frozen target, its state donated, as the trainer runs it.

    Args:
      rows: per update, over all devices. micro_batches: parts of an update that are computed one after the other.
      length: tokens per row.

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
        raise ConfigError(f"--tensor must divide the {config.num_kv_heads} key-value heads, got {tensor}. Lower it.")
    optimiser = head_optimiser(1e-4, 100, 1000)  # its numbers do not change the program

    def fresh(key: jax.Array) -> HeadTrainState:
        own = init_head_params(head, key)["head"]
        return HeadTrainState(own, optimiser.init(own), jnp.int32(0), key)

    state = _placed(jax.eval_shape(fresh, jax.random.key(0)), mesh)
    everywhere: Any = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    target = _placed(jax.eval_shape(functools.partial(init_params, config), jax.random.key(0)), mesh, DTYPE)
    width = len(head.taps) * head.target_hidden_size
    frozen = Frozen(target, everywhere((head.draft_vocab_size,), jnp.int32), everywhere((width,), jnp.float32))
    shape, place = (micro_batches, rows // micro_batches, length), NamedSharding(mesh, P(None, ROWS))
    kinds: Any = {name: jnp.bool_ if name == "supervised" else jnp.int32 for name in PackedTokens._fields}
    texts: Any = PackedTokens(**kinds)
    texts = jax.tree.map(lambda kind: jax.ShapeDtypeStruct(shape, kind, sharding=place), texts)
    update = functools.partial(head_train_step, config, head, objective, optimiser, DTYPE)
    kept = functools.partial(
        head_train_step, config, head, dataclasses.replace(objective, remat=False), optimiser, DTYPE
    )
    homes = jax.tree.map(lambda leaf: leaf.sharding, state)
    program = jax.jit(
        functools.partial(update, mesh=mesh), donate_argnums=0, out_shardings=(homes, NamedSharding(mesh, P()))
    )
    bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, frozen, texts))
    return Workload(
        lowered=program.lower(state, frozen, texts),
        loop=None,
        resident={"target": target, "state": (state.head, state.opt_state)},
        mesh=mesh,
        cache=(),
        model_flops=product_flops(kept, *bare),
        flops=product_flops(update, *bare),
    )


def _placed(tree: Any, mesh: Mesh, dtype: str | None = None) -> Any:
    """Returns abstract arrays with their shardings (`eagle_jax.parallel.mesh`); `dtype` is of floats."""

    def place(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        kind = dtype if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, kind, sharding=sharding)

    return jax.tree.map(place, tree, param_shardings(tree, mesh))


def local_bytes(arrays: Any) -> float:
    """Returns the bytes that abstract arrays take on one device, by their shardings."""
    leaves = jax.tree.leaves(arrays)
    return float(sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves))
