"""Shards parameters, caches and batches over a mesh of devices, by one table of rules.

The mesh has three axes:
- "data" and "fsdp" split the rows of the batch.
- "tensor" splits every matrix as in Megatron-LM (arXiv:1909.08053): input projections of attention and MLP by columns,
  output projections by rows. A layer needs two all-reduces, and no weight moves.
- "fsdp" also splits the other axis of every matrix, which is gathered before use (ZeRO-3, arXiv:1910.02054). It is for
  training, where optimiser states and gradients need more memory than weights.

The embedding is split by vocabulary rows, lm_heads by vocabulary columns, caches by key-value heads, and mixtures of
experts by experts over "tensor".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from eagle_jax.config import ConfigError
from eagle_jax.core import Drafter, DraftTree, KVCache, NewKV, Params, TargetFn, TargetOutput
from eagle_jax.models.experts import Experts
from eagle_jax.models.layers import Attention

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")
ROWS = (DATA, FSDP)
"""Axes that split the rows of a batch."""

RULES: tuple[tuple[str, P], ...] = (
    (r"embed_(tokens|positions)/embedding", P(TENSOR, FSDP)),
    (r"\w*lm_head/weight", P(TENSOR, FSDP)),
    (r"\w*lm_head/bias", P(TENSOR)),
    (r"experts/(gate|up)_proj/weight", P(TENSOR, None, FSDP)),
    (r"experts/down_proj/weight", P(TENSOR, FSDP, None)),
    (r"experts/(gate|up|down)_proj/bias", P(TENSOR, None)),
    (r"router/weight", P(None, None)),
    (r"router/bias", P(None)),
    (r"sinks", P(TENSOR)),
    (r"(q|k|v|gate|up)_proj/weight", P(TENSOR, FSDP)),
    (r"(q|k|v|gate|up)_proj/bias", P(TENSOR)),
    (r"(o|down)_proj/weight", P(FSDP, TENSOR)),
    # Features are whole on every device, so a split of the inputs costs one all-reduce, as for o_proj and down_proj.
    (r"(fc|linear|res_connection)/weight", P(FSDP, TENSOR)),
    (r"(o_proj|down_proj|fc|linear|res_connection)/bias", P(None)),
    (r"(\w*norm\w*)/(scale|bias)", P(None)),
    (r"d2t", P(None)),
    (r"history/(tokens|owner)", P(None)),  # of prompt lookup
    (r"history/prompts", P(None, None)),
    (r"ns_coeffs", P(None)),  # of Muon
)
"""(pattern for the end of a parameter's path, split of its axes); the first match applies. The parts of a quantised
weight are split as the weight."""


def param_sharding(path: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Returns the sharding of the parameter at `path` ("layers_0/self_attn/q_proj/weight").

    Raises:
      ConfigError: no rule matches, or the mesh does not divide an axis.
    """
    if not shape:  # counts and keys of an optimiser's state
        return NamedSharding(mesh, P())
    owner = path.rpartition("/")[0]
    is_part = owner.endswith(("weight", "embedding"))  # of a quantised weight
    # Groups are split as the inputs, and the inputs of a group are not.
    specs = ((pattern, P(*(*spec, None)[: len(shape)]) if is_part else spec) for pattern, spec in RULES)
    name = owner if is_part else path
    found = (spec for pattern, spec in specs if re.search(rf"(^|/){pattern}$", name) and len(spec) == len(shape))
    if (spec := next(found, None)) is None:
        raise ConfigError(
            f"parameter {path!r} of shape {list(shape)} must match a sharding rule. Add one to "
            "eagle_jax.parallel.mesh.RULES."
        )
    for size, axis in zip(shape, spec, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise ConfigError(
                f"parameter {path!r} of shape {list(shape)}: {size} must be a multiple of {axis}={mesh.shape[axis]}. "
                f"Choose a {axis!r} axis that divides it."
            )
    return NamedSharding(mesh, spec)


def param_shardings(params: Params, mesh: Mesh) -> Any:
    """Returns the shardings of a tree of arrays or `ShapeDtypeStruct`s.

    The tree is a target, a head, `{"target": ..., "drafter": ...}`, or the state of a training run, whose moments are
    sharded as their parameters.
    """

    def place(path: tuple, leaf: Any) -> NamedSharding:
        return param_sharding(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, mesh)

    return jax.tree_util.tree_map_with_path(place, params)


def gathered(params: Params, mesh: Mesh | None, *, embedding: bool = False) -> Params:
    """Gathers the matrices of a frozen target over "fsdp", for products; inside jit.

    Otherwise the compiler may propagate the split of a matrix's rows to the states, and every device computes with
    every row of the batch.

    Args:
      mesh: None returns `params`.
      embedding: also gathers the embedding, for use as lm_head. A look-up moves rows, which are fewer.
    """
    if mesh is None:
        return params

    def gather(leaf: Array, home: NamedSharding) -> Array:
        return _split(leaf, mesh, *_without_fsdp(home.spec)) if FSDP in home.spec else leaf

    kept = {} if embedding else {name: part for name, part in params.items() if name.startswith("embed_")}
    return jax.tree.map(gather, params, param_shardings(params, mesh)) | kept


def copies(params: Params, mesh: Mesh) -> Params:
    """Copies trained parameters per row group, [groups, ...], not split over "fsdp"; inside jit.

    Gradients of a copy stay on its devices while steps, chunks and layers add to them. They are summed between devices
    once, in float32. Without copies the compiler would sum every term between devices, even inside loops.
    """
    return jax.tree.map(lambda leaf, home: _copied(leaf, mesh, home), params, param_shardings(params, mesh))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _copied(x: Array, mesh: Mesh, home: NamedSharding) -> Array:
    whole = _without_fsdp(home.spec)
    x = _split(x, mesh, *whole)
    return _split(jnp.broadcast_to(x[None], (row_groups(mesh), *x.shape)), mesh, ROWS, *whole)


def _copied_forward(x: Array, mesh: Mesh, home: NamedSharding) -> tuple[Array, None]:
    return _copied(x, mesh, home), None


def _copied_backward(mesh: Mesh, home: NamedSharding, saved: None, grad: Array) -> tuple[Array]:
    total = jnp.sum(grad.astype(jnp.float32), axis=0)
    return (jax.lax.with_sharding_constraint(total, home).astype(grad.dtype),)


_copied.defvjp(_copied_forward, _copied_backward)


def _without_fsdp(spec: P) -> tuple[str | None, ...]:
    return tuple(None if axis == FSDP else axis for axis in spec)


def row_groups(mesh: Mesh | None) -> int:
    """Returns the number of device groups that hold different rows."""
    return 1 if mesh is None else mesh.shape[DATA] * mesh.shape[FSDP]


def embeds_by_rows(mesh: Mesh | None) -> Callable[..., Any]:
    """Returns a Linen interceptor that shards looked-up embeddings by rows of the batch."""

    def call(run: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        found = run(*args, **kwargs)
        is_lookup = isinstance(context.module, nn.Embed) and context.method_name == "__call__"
        return by_rows(found, mesh) if is_lookup else found

    return call


def by_rows(x: Shaped[Array, "B ..."], mesh: Mesh | None) -> Shaped[Array, "B ..."]:
    """Shards the rows of `x` over "data" and "fsdp"; other axes are not split. Inside jit."""
    return x if mesh is None else _split(x, mesh, ROWS, *[None] * (x.ndim - 1))


def by_device(mesh: Mesh | None) -> Callable[..., Any]:
    """Returns a Linen interceptor by which every device computes with the heads and the experts that it holds.

    Every device of a "tensor" group has the rows of the group, so no row and no weight moves: results of experts need
    one all-reduce a layer, as an MLP does, and those of attention none. The compiler cannot split a kernel by itself.
    """

    def call(run: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        # A small model that drafts is intercepted twice, as a model and inside its drafter.
        if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
            return run(*args, **kwargs)
        if isinstance(context.module, Experts) and context.method_name == "mix":
            return _experts_by_device(run, args, mesh)
        if isinstance(context.module, Attention) and context.method_name == "mix":
            return _attention_by_device(run, args, mesh)
        return run(*args, **kwargs)

    return call


def _experts_by_device(run: Callable, args: tuple, mesh: Mesh) -> Array:
    def mix_held(x: Array, chosen: Array, weights: Array, stacks: Any) -> Array:
        first = jax.lax.axis_index(TENSOR) * stacks["gate"].num_experts
        return jax.lax.psum(run(x, chosen - first, weights, stacks), TENSOR)

    rows = P(ROWS)
    return jax.shard_map(mix_held, mesh=mesh, in_specs=(rows, rows, rows, P(TENSOR)), out_specs=rows, check_vma=False)(
        *args
    )


def _attention_by_device(run: Callable, args: tuple, mesh: Mesh) -> Array:
    rows, heads, query = P(ROWS), P(ROWS, TENSOR), P(ROWS, None, TENSOR)
    mask = rows if args[3].ndim == 3 else P()
    specs = (query, heads, heads, mask, P(TENSOR), heads, heads, rows, rows)[: len(args)]
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=query, check_vma=False)(*args)


def placer(mesh: Mesh) -> Callable[[str, np.ndarray], Array]:
    """Returns `place(path, host array)` for loaders; all processes pass the same array."""

    def place(path: str, host: np.ndarray) -> Array:
        return jax.make_array_from_callback(host.shape, param_sharding(path, host.shape, mesh), host.__getitem__)

    return place


def check_mesh(mesh: Any) -> None:
    """Checks that a mesh has the three axes, all of type `AxisType.Auto`.

    Raises:
      ConfigError: it has other axes, or is not a mesh.
    """
    if isinstance(mesh, Mesh) and mesh.axis_names == AXES and set(mesh.axis_types) == {AxisType.Auto}:
        return
    found = f"axes {mesh.axis_names} ({mesh.axis_types})" if isinstance(mesh, Mesh) else f"a {type(mesh).__name__}"
    raise ConfigError(
        f"mesh must be a jax.sharding.Mesh with the axes {AXES}, all Auto, got {found}. Make it with "
        "eagle_jax.parallel.make_mesh(data, tensor); an axis may have size 1."
    )


def make_mesh(data: int = 1, tensor: int = 1, fsdp: int = 1, *, devices: Any = None) -> Mesh:
    """Makes a ("data", "fsdp", "tensor") mesh of the first devices, ordered by process.

    Args:
      devices: None takes the devices of all processes.

    Raises:
      ConfigError: there are too few devices, or a "tensor" group would span processes.
    """
    chosen = jax.devices() if devices is None else list(devices)
    count = data * fsdp * tensor
    if min(data, fsdp, tensor) < 1 or count > len(chosen):
        raise ConfigError(
            f"data={data} times fsdp={fsdp} times tensor={tensor} must be 1 to {len(chosen)}, the number of devices. "
            "Choose smaller axes."
        )
    if len({device.process_index for device in chosen}) > 1:  # TPUs are numbered by their position, not by host
        chosen = sorted(chosen, key=lambda device: (device.process_index, device.id))
    grid = np.array(chosen[:count]).reshape(data, fsdp, tensor)
    spans = any(len({device.process_index for device in group}) > 1 for group in grid.reshape(-1, tensor))
    if spans and devices is None:  # given devices may be a topology for compilation ahead of time
        raise ConfigError(
            f"tensor={tensor} must divide the {jax.local_device_count()} devices of a process: no matrix may be split "
            "over processes. Choose a 'tensor' axis that divides them."
        )
    return Mesh(grid, AXES)


def place_cache(cache: KVCache, mesh: Mesh) -> KVCache:
    """Shards a cache by rows over "data", "fsdp", and by key-value heads over "tensor"; inside jit.

    Raises:
      ConfigError: the mesh does not divide rows or heads.
    """
    batch, heads = cache.keys[0].shape[:2]
    data, tensor = mesh.shape[DATA] * mesh.shape[FSDP], mesh.shape[TENSOR]
    if heads % tensor:
        raise ConfigError(
            f"num_kv_heads must be a multiple of tensor={tensor}, got {heads}. Choose a 'tensor' axis that divides it, "
            "and put the other devices on the 'data' axis."
        )
    if batch % data:
        raise ConfigError(
            f"the number of prompts must be a multiple of data x fsdp = {data}, got {batch}. Add "
            f"{data - batch % data} prompts, or choose smaller axes."
        )
    return KVCache(_heads(cache.keys, mesh), _heads(cache.values, mesh), _split(cache.length, mesh, ROWS))


def _heads(arrays: tuple[Array, ...], mesh: Mesh) -> tuple[Array, ...]:
    return tuple(_split(array, mesh, ROWS, TENSOR, None, None) for array in arrays)


def _split(x: Array, mesh: Mesh, *axes: str | tuple[str, ...] | None) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


@functools.lru_cache(maxsize=64)
def shard_target(fn: TargetFn, mesh: Mesh) -> TargetFn:
    """Returns `fn` with sharded tokens, states, logits and cache; equal arguments give the same object.

    Raises:
      ConfigError: the mesh has other axes, or does not divide the key-value heads.
    """
    check_mesh(mesh)
    jax.eval_shape(lambda: place_cache(fn.init_cache(row_groups(mesh), 1), mesh))  # raises before anything is compiled

    def forward(params: Params, tokens: Array, positions: Array, *others: Any) -> TargetOutput:
        with nn.intercept_methods(by_device(mesh)):
            out = fn.forward(params, by_rows(tokens, mesh), by_rows(positions, mesh), *others)
        new = NewKV(_heads(out.new.keys, mesh), _heads(out.new.values, mesh))
        return TargetOutput(by_rows(out.hidden, mesh), by_rows(out.features, mesh), new)

    def logits(params: Params, hidden: Array) -> Array:
        return _split(fn.logits(params, hidden), mesh, ROWS, *[None] * (hidden.ndim - 2), TENSOR)

    def init_cache(batch: int, slots: int) -> KVCache:
        return place_cache(fn.init_cache(batch, slots), mesh)

    return TargetFn(forward, logits, fn.embed, init_cache, fn.windows, row_groups(mesh))


@functools.lru_cache(maxsize=256)
def shard_drafter(drafter: Drafter, mesh: Mesh) -> Drafter:
    """Returns `drafter` with every cache in its state sharded; equal arguments give the same object."""
    return _sharded(drafter, mesh)


def _sharded(drafter: Drafter, mesh: Mesh) -> Drafter:
    def shard_caches(state: Any) -> Any:
        is_cache = lambda node: isinstance(node, KVCache) and bool(node.keys)  # noqa: E731
        return jax.tree.map(lambda node: place_cache(node, mesh) if is_cache(node) else node, state, is_leaf=is_cache)

    def init(*arguments: Any) -> Any:
        return shard_caches(drafter.init(*arguments))

    def draft(*arguments: Any) -> tuple[DraftTree, Any]:
        with nn.intercept_methods(by_device(mesh)):
            tree, state = drafter.draft(*arguments)
        return tree, shard_caches(state)

    def update(*arguments: Any) -> Any:
        with nn.intercept_methods(by_device(mesh)):
            return shard_caches(drafter.update(*arguments))

    limited = drafter.with_limit
    with_limit = None if limited is None else lambda *limit: _sharded(limited(*limit), mesh)
    return drafter._replace(init=init, draft=draft, update=update, with_limit=with_limit)
