"""Lowers generation and training over abstract weights: a model of any size takes no memory here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eagle_jax import BoundDrafter, DraftHead, Medusa, SmallModel, Target, TreeConfig, lookahead, prompt_lookup
from eagle_jax.config import EAGLE1_PARENTS, ConfigError, DecoderConfig, HeadConfig, MedusaConfig
from eagle_jax.core import CycleCost, Engine, Params, Sampling, adaptive, prefill, step
from eagle_jax.drafters import vanilla_drafter
from eagle_jax.models import eagle3_head, init_head_params, init_medusa_params, init_params
from eagle_jax.models.quantised import Scheme, quantise_params
from eagle_jax.packed import PackedTokens
from eagle_jax.parallel import ROWS, TENSOR, param_shardings, row_groups, shard_drafter
from eagle_jax.runtime.drafters import DEFAULT_CHAIN
from eagle_jax.runtime.generation import generate_program
from eagle_jax.runtime.request import prepare
from eagle_jax.runtime.target import on_mesh
from eagle_jax.shapes import medusa_parents
from eagle_jax.training import Frozen, HeadTrainState, Objective, head_optimiser, head_train_step, product_flops
from infer.common.labels import PLAIN, Label
from infer.common.memory import least_bytes
from infer.tuning.costs import blank, ladder

DTYPE = "bfloat16"
"""Of weights and products; a trained head's own weights and the optimiser's state are float32."""


class Workload(NamedTuple):
    """Holds a program that is ready to compile, and the values for its report.

    Attributes:
      lowered: the program.
      loop: name of the loop in the HLO whose body is one unit of work; None is the whole program.
      resident: abstract arrays that stay in memory, by name.
      mesh: their mesh.
      cache: shape of one layer's keys or values on one device, a layer without a window if there is one; a copy of this
        size is reported.
      model_flops: of the matrix products of one unit, on all devices, without recomputation.
      flops: `model_flops` and recomputation.
      floors: bytes that one unit must read on one device (`least_bytes`), by committed tokens of every row, ascending;
        empty for training.
      by_rows: flops of a pass of so many rows per sequence, without drafting, on all devices, up to the whole tree;
        empty for plain decoding.
      levels: levels of the tree.
    """

    lowered: jax.stages.Lowered
    loop: str | None
    resident: dict[str, Any]
    mesh: Mesh
    cache: tuple[int, ...]
    model_flops: float
    flops: float
    floors: Mapping[int, float] = MappingProxyType({})
    by_rows: dict[int, float] | None = None
    levels: int = 0


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
    draft_vocab: int,
    weights: Scheme | None = None,
    drafter_weights: Scheme | None = None,
    context: int | None = None,
    cost: CycleCost | None = None,
) -> Workload:
    """Lowers the program that `eagle_jax.generate` would run; the unit of work is a cycle.

    Args:
      config: the target.
      method: a label as in infer.bench.
      small: the small model of sps.
      batch: rows over all devices.
      prompt: tokens of every prompt.
      max_tokens: most tokens of a reply.
      sampling: the program depends on which settings are on, not on their values.
      weights: scheme of quantised weights of the target; None is `DTYPE`.
      drafter_weights: that of the drafter.
      context: committed tokens of every row, for `Workload.floors`; None is those of the prompts, and a full cache.
      cost: the `cycle_cost` of the program; the unit is then drafted cycles, passes of every size, and plain steps.

    Raises:
      ValueError: another method, or more tokens than the model's positions.
    """
    target = _target(config, mesh, weights)
    bound = make_drafter(method, target, small, mesh, draft_vocab, drafter_weights)
    engine = Engine(target.fn, shard_drafter(bound.plain, mesh), cycle_cost=cost)
    rows, sizes = prepare([[0] * prompt] * batch, max_tokens, (), 0, "", config, engine.drafter.depth)
    params = {"target": target.params, "drafter": bound.params}
    arguments = params, _abstract(rows, mesh, P(ROWS)), _abstract(sampling, mesh, P())
    state = jax.eval_shape(functools.partial(prefill, engine=engine, sizes=sizes), *arguments)
    cache = _abstract((state.cache.keys, state.cache.values), mesh, P(ROWS, TENSOR))
    largest = max(cache[0], key=lambda layer: layer.size)  # a layer without a window
    flops = product_flops(functools.partial(step, engine=engine), params, state, arguments[2])
    by_rows: dict[int, float] = {}
    if engine.drafter.num_nodes:
        undrafted = Engine(target.fn, blank(1))
        one = jax.eval_shape(functools.partial(prefill, engine=undrafted, sizes=sizes), *arguments)
        for width in ladder(engine.drafter.num_nodes + 1):
            wide = undrafted._replace(drafter=blank(width))
            by_rows[width] = product_flops(functools.partial(step, engine=wide), params, one, arguments[2])
    begun = None if cost is None else _abstract(adaptive.start(), mesh, P())
    return Workload(
        lowered=generate_program.lower(*arguments, engine, sizes, begun),
        loop="jit(generate)/while",
        resident={"weights": params, "cache": cache},
        mesh=mesh,
        cache=largest.sharding.shard_shape(largest.shape),
        model_flops=flops,
        flops=flops,
        floors={
            tokens: least_bytes(config, params, cache, bound, batch, tokens)
            for tokens in ((prompt, state.cache.slots) if context is None else (context,))
        },
        by_rows=by_rows,
        levels=engine.drafter.depth,
    )


def make_drafter(
    text: str, target: Target, small: DecoderConfig, mesh: Mesh, draft_vocab: int, weights: Scheme | None = None
) -> BoundDrafter:
    """Returns a method with abstract parameters by its label.

    Raises:
      ValueError: a method whose sizes are not known here.
    """
    label, config = Label.parse(text), target.config
    if label.method == PLAIN:
        return BoundDrafter.bind(vanilla_drafter(), target)
    if label.method == "pld":
        return prompt_lookup(target, **label.fields)
    if label.method == "lookahead":
        return lookahead(target, **label.fields)
    if label.method == "eagle3":
        head, tree = eagle3_head(config, draft_vocab), label.tree(TreeConfig(8), EAGLE1_PARENTS)
        return DraftHead.from_params(head, _params(init_head_params, head, mesh, weights), target, tree)
    if label.method in ("medusa", "hydra"):
        layer = config.one_layer(tie_word_embeddings=False) if label.method == "hydra" else None
        kind: Any = label.method
        heads = MedusaConfig(kind, config.hidden_size, config.vocab_size, 4 if layer else 5, 1, layer)
        tree = label.tree(TreeConfig(heads.num_heads), medusa_parents(heads.num_heads))
        return Medusa.from_params(heads, _params(init_medusa_params, heads, mesh, weights), target, tree)
    if label.method == "sps":
        return SmallModel.from_model(target, _target(small, mesh, weights), label.tree(DEFAULT_CHAIN, EAGLE1_PARENTS))
    known = "eagle3, medusa, hydra, sps, pld, lookahead and vanilla"
    raise ValueError(f"--method must be one of {known}, got {text}. Choose one.")


def _target(config: DecoderConfig, mesh: Mesh, weights: Scheme | None = None) -> Target:
    """Returns a target as `load_target` returns it on a TPU, with abstract parameters, which no mesh can place."""
    params = _params(init_params, config, mesh, weights)
    return Target(config, params, on_mesh(config, DTYPE, mesh), "model", DTYPE)


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
      rows: per update, over all devices.
      micro_batches: parts of an update that are computed one after the other.
      length: tokens per row.

    Raises:
      ConfigError: the rows do not divide into micro-batches and over the mesh; the mesh does not divide the heads.
    """
    groups, tensor = row_groups(mesh), mesh.shape[TENSOR]
    if rows % (micro_batches * groups):
        raise ConfigError(
            f"--rows must be a multiple of --micro-batches {micro_batches} x data x fsdp {groups}, got {rows}. "
            "Each device must get the same number of rows."
        )
    if config.num_kv_heads % tensor:
        raise ConfigError(f"--tensor must divide the {config.num_kv_heads} key-value heads, got {tensor}. Lower it.")
    optimiser = head_optimiser(1e-4, 100, 1000)  # its numbers do not change the program

    def fresh(key: jax.Array) -> HeadTrainState:
        own = init_head_params(head, key)["head"]
        return HeadTrainState(own, optimiser.init(own), jnp.int32(0), key)

    state = _abstract(jax.eval_shape(fresh, jax.random.key(0)), mesh)
    target = _params(init_params, config, mesh)
    constants = jnp.zeros(head.draft_vocab_size, jnp.int32), jnp.zeros(len(head.taps) * head.target_hidden_size)
    frozen = Frozen(target, *_abstract(constants, mesh, P()))
    shape = micro_batches, rows // micro_batches, length
    numbers: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
    flags: Any = jax.ShapeDtypeStruct(shape, jnp.bool_)
    texts = _abstract(PackedTokens(numbers, flags, numbers, numbers), mesh, P(None, ROWS))

    def update(objective: Objective, **options: Any) -> Callable[..., Any]:
        return functools.partial(head_train_step, config, head, objective, optimiser, DTYPE, **options)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, P())
    program = jax.jit(update(objective, mesh=mesh), donate_argnums=0, out_shardings=shardings)
    once = update(dataclasses.replace(objective, remat=False))
    return Workload(
        lowered=program.lower(state, frozen, texts),
        loop=None,
        resident={"target": target, "state": (state.head, state.opt_state)},
        mesh=mesh,
        cache=(),
        model_flops=product_flops(once, state, frozen, texts),
        flops=product_flops(update(objective), state, frozen, texts),
    )


def _params(init: Callable[..., Params], config: Any, mesh: Mesh, weights: Scheme | None = None) -> Params:
    """Returns the abstract parameters of a model, quantised by a scheme."""
    make = lambda key: quantise_params(init(config, key), weights, DTYPE)  # noqa: E731
    return _abstract(jax.eval_shape(make, jax.random.key(0)), mesh, dtype=DTYPE)


def _abstract(tree: Any, mesh: Mesh, spec: P | None = None, dtype: str | None = None) -> Any:
    """Returns arrays without values, on a mesh.

    Args:
      spec: of all arrays; None is by the rules of `eagle_jax.parallel.mesh`.
      dtype: of floats; None is their own.
    """
    own = None if spec is None else NamedSharding(mesh, spec)
    shardings = param_shardings(tree, mesh) if own is None else jax.tree.map(lambda _: own, tree)

    def abstract(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1  # fp8 is a quantised value
        kind = dtype if dtype and is_float else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, kind, sharding=sharding)

    return jax.tree.map(abstract, tree, shardings)
