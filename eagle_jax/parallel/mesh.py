"""Where parameters and caches live on a mesh of devices: one table of rules, and wrappers that hold the engine to it.

The mesh has three axes. "data" and "fsdp" split the rows of the batch. "tensor" splits every matrix as in Megatron-LM
(arXiv:1909.08053): the projections into heads and into the MLP by columns, those out of them by rows, so that a layer
needs two all-reduces and no weight ever moves. "fsdp" splits the other axis of every matrix, which is gathered where it
is used (ZeRO-3, arXiv:1910.02054): for training, where states and gradients outweigh the traffic. The embedding is
split by vocabulary rows, the lm_heads by vocabulary columns, caches by key-value heads.
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
from jaxtyping import Array

from eagle_jax.config import ConfigError
from eagle_jax.core.types import (
    Drafter,
    KVCache,
    NewKV,
    Params,
    RowRandomness,
    Sampling,
    TargetFn,
    TargetOutput,
    Verified,
)

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")
ROWS = (DATA, FSDP)
"""Axes that split the rows of a batch."""

RULES: tuple[tuple[str, P], ...] = (
    (r"embed_(tokens|positions)/embedding", P(TENSOR, FSDP)),
    (r"\w*lm_head/kernel", P(FSDP, TENSOR)),
    (r"\w*lm_head/bias", P(TENSOR)),
    (r"(q|k|v|gate|up)_proj/kernel", P(FSDP, TENSOR)),
    (r"(q|k|v|gate|up)_proj/bias", P(TENSOR)),
    (r"(o|down)_proj/kernel", P(TENSOR, FSDP)),
    # The features come whole out of the target, so a split by rows costs one all-reduce, like o_proj and down_proj.
    (r"(fc|linear|res_connection)/kernel", P(TENSOR, FSDP)),
    (r"(o_proj|down_proj|fc|linear|res_connection)/bias", P(None)),
    (r"(\w*norm\w*)/(scale|bias)", P(None)),
    (r"d2t", P(None)),
)
"""(pattern for the end of the parameter's path, how its axes are split); the first match counts."""


def param_spec(path: str, shape: tuple[int, ...]) -> P:
    """How the parameter at `path` ("layers_0/self_attn/q_proj/kernel") is split.

    Raises:
      ConfigError: no rule matches, or the rule would replicate a matrix.
    """
    if not shape:  # counts and keys of an optimiser's state
        return P()
    for pattern, spec in RULES:
        if re.search(rf"(^|/){pattern}$", path):
            if len(spec) != len(shape):
                raise ConfigError(
                    f"parameter {path!r} of shape {list(shape)} meets a rule for {len(spec)} axes: {spec}"
                )
            return spec
    kind = "matrix" if len(shape) > 1 else "parameter"
    raise ConfigError(
        f"{kind} {path!r} of shape {list(shape)} matches no sharding rule; add one to eagle_jax.parallel.mesh.RULES"
    )


def param_sharding(path: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """`param_spec` on a mesh.

    Raises:
      ConfigError: as there, or an axis that the mesh does not divide.
    """
    check_mesh(mesh)
    spec = param_spec(path, shape)
    for size, axis in zip(shape, spec, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise ConfigError(
                f"parameter {path!r} of shape {list(shape)}: {size} is not a multiple of {axis}={mesh.shape[axis]}; "
                f"choose a {axis!r} axis that divides it"
            )
    return NamedSharding(mesh, spec)


def param_shardings(params: Params, mesh: Mesh) -> Any:
    """The shardings of a tree of arrays or `ShapeDtypeStruct`s.

    It may be a target, a head, `{"target": ..., "drafter": ...}`, or the state of a training run, whose moments lie as
    their parameters do.

    Raises:
      ConfigError: as `param_sharding`.
    """

    def place(path: tuple, leaf: Any) -> NamedSharding:
        return param_sharding(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, mesh)

    return jax.tree_util.tree_map_with_path(place, params)


def gathered(params: Params, mesh: Mesh | None, *, embedding: bool = False) -> Params:
    """Inside jit: frozen matrices as products want them, whole over "fsdp".

    Without this the compiler may take the split of a matrix's rows for that of the states it is multiplied with, and
    then every device computes with every row of the batch.

    Args:
      mesh: None changes nothing.
      embedding: gather that, too: where it serves as lm_head. A look-up moves rows, which are fewer.

    Raises:
      ConfigError: as `param_sharding`.
    """
    if mesh is None:
        return params

    def gather(path: tuple, leaf: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        home = param_sharding(name, leaf.shape, mesh).spec
        if FSDP not in home or (name.endswith("embedding") and not embedding):
            return leaf
        return _split(leaf, mesh, *_without_fsdp(home))

    return jax.tree_util.tree_map_with_path(gather, params)


def copies(params: Params, mesh: Mesh) -> Params:
    """Inside jit: a copy of trained parameters for each of the `row_groups`, [groups, ...], whole over "fsdp".

    What is computed from a copy has its gradient in the copy: sums over steps, chunks and layers stay on their devices,
    and gradients are added up between devices once, in float32. Were the parameters shared by all rows, the compiler
    would add up every term between devices, even inside loops.

    Raises:
      ConfigError: as `param_sharding`.
    """

    def copy(path: tuple, leaf: Array) -> Array:
        return _copied(
            leaf, mesh, param_sharding(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, mesh)
        )

    return jax.tree_util.tree_map_with_path(copy, params)


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
    """How many groups of devices have rows of their own."""
    return 1 if mesh is None else mesh.shape[DATA] * mesh.shape[FSDP]


def embeds_by_rows(mesh: Mesh | None) -> Callable[..., Any]:
    """Linen interceptor: what is looked up in an embedding lies with the rows of the batch, whatever its own split."""

    def call(run: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        found = run(*args, **kwargs)
        if mesh is None or not isinstance(context.module, nn.Embed) or context.method_name != "__call__":
            return found
        return by_rows(found, mesh)

    return call


def by_rows(x: Array, mesh: Mesh | None) -> Array:
    """Inside jit: `x` [B, ...] with its rows over "data" and "fsdp", the other axes whole."""
    return x if mesh is None else _split(x, mesh, ROWS, *[None] * (x.ndim - 1))


def placer(mesh: Mesh) -> Callable[[str, np.ndarray], Array]:
    """`place(path, host array)` for the loaders: tensors go straight to their devices and never lie whole on one.

    Where the mesh spans several processes, all of them hold the same host array and each places its own part.
    """

    def place(path: str, host: np.ndarray) -> Array:
        sharding = param_sharding(path, host.shape, mesh)
        if sharding.is_fully_addressable:
            return jax.device_put(host, sharding)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return place


def check_mesh(mesh: Any) -> None:
    """Refuses a mesh without the three axes, or one whose axes are part of the types of arrays (`AxisType.Explicit`).

    Raises:
      ConfigError: naming its axes; or it is no mesh.
    """
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh is a {type(mesh).__name__}: pass a jax.sharding.Mesh with the axes {', '.join(AXES)}")
    if mesh.axis_names != AXES or any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ConfigError(
            f"the mesh has the axes {mesh.axis_names} of types {mesh.axis_types}, expected {AXES}, all Auto; "
            "make it with eagle_jax.parallel.mesh.make_mesh(data, tensor); an axis may have size 1"
        )


def make_mesh(data: int = 1, tensor: int = 1, fsdp: int = 1, *, devices: Any = None) -> Mesh:
    """A ("data", "fsdp", "tensor") mesh over the first `data * fsdp * tensor` devices, process by process.

    Args:
      devices: None takes all of all processes.

    Raises:
      ConfigError: there are fewer devices, or some that share a "tensor" group belong to different running processes.
    """
    chosen = jax.devices() if devices is None else list(devices)
    count = data * fsdp * tensor
    if min(data, fsdp, tensor) < 1 or count > len(chosen):
        raise ConfigError(
            f"data={data} times fsdp={fsdp} times tensor={tensor} must be at least 1 and at most "
            f"the {len(chosen)} devices"
        )
    if len({device.process_index for device in chosen}) > 1:  # TPUs are numbered by place, not by host
        chosen = sorted(chosen, key=lambda device: (device.process_index, device.id))
    grid = np.array(chosen[:count]).reshape(data, fsdp, tensor)
    spans = any(len({device.process_index for device in group}) > 1 for group in grid.reshape(-1, tensor))
    if spans and devices is None:  # given devices may be a slice that a program is only compiled for
        raise ConfigError(
            f"tensor={tensor} would split a matrix over devices of different processes, of which each has "
            f"{jax.local_device_count()}: choose a 'tensor' axis that divides that"
        )
    return Mesh(grid, AXES)


def place_cache(cache: KVCache, mesh: Mesh) -> KVCache:
    """The cache with rows over "data" and "fsdp", and key-value heads over "tensor".

    Raises:
      ConfigError: the mesh divides neither evenly.
    """
    batch, heads = cache.keys[0].shape[:2]
    data, tensor = mesh.shape[DATA] * mesh.shape[FSDP], mesh.shape[TENSOR]
    if heads % tensor:
        raise ConfigError(
            f"num_kv_heads={heads} is not a multiple of tensor={tensor}: every device needs whole heads; choose "
            f"a 'tensor' axis that divides {heads} and put the other devices on the 'data' axis"
        )
    if batch % data:
        raise ConfigError(
            f"a batch of {batch} is not a multiple of data={data}: every device needs as many rows; add "
            f"{data - batch % data} prompts or choose a 'data' axis that divides {batch}"
        )
    return KVCache(_heads(cache.keys, mesh), _heads(cache.values, mesh), _split(cache.length, mesh, ROWS))


def _heads(arrays: tuple[Array, ...], mesh: Mesh) -> tuple[Array, ...]:
    return tuple(_split(array, mesh, ROWS, TENSOR, None, None) for array in arrays)


def _split(x: Array, mesh: Mesh, *axes: str | tuple[str, ...] | None) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


@functools.lru_cache(maxsize=64)
def shard_target(fn: TargetFn, mesh: Mesh) -> TargetFn:
    """`fn` with tokens, states, logits and cache held to the mesh. Equal arguments give the same object (jit caches).

    Raises:
      ConfigError: the mesh has other axes, or does not divide the key-value heads.
    """
    check_mesh(mesh)
    jax.eval_shape(
        lambda: place_cache(fn.init_cache(mesh.size // mesh.shape[TENSOR], 1), mesh)
    )  # refuses heads before anything runs

    def forward(
        params: Params,
        tokens: Array,
        positions: Array,
        mask: Array,
        cache: KVCache | None,
        taps: tuple[int, ...] = (),
        *earlier: NewKV | None,
    ) -> TargetOutput:
        tokens, positions = _split(tokens, mesh, ROWS, None), _split(positions, mesh, ROWS, None)
        out = fn.forward(params, tokens, positions, mask, cache, taps, *earlier)
        return TargetOutput(
            _split(out.hidden, mesh, ROWS, None, None),
            _split(out.features, mesh, ROWS, None, None),
            NewKV(_heads(out.new.keys, mesh), _heads(out.new.values, mesh)),
        )

    def logits(params: Params, hidden: Array) -> Array:
        return _split(fn.logits(params, hidden), mesh, ROWS, *[None] * (hidden.ndim - 2), TENSOR)

    def init_cache(batch: int, slots: int) -> KVCache:
        return place_cache(fn.init_cache(batch, slots), mesh)

    return TargetFn(forward, logits, fn.embed, init_cache)


@functools.lru_cache(maxsize=256)
def shard_drafter(drafter: Drafter, mesh: Mesh) -> Drafter:
    """`drafter` with every cache in its state held to the mesh; other leaves follow. Equal arguments, same object.

    Raises:
      ConfigError: the mesh has other axes; at the first use, if it does not divide the head's key-value heads or the
        batch.
    """
    check_mesh(mesh)

    def held(state: Any) -> Any:
        is_cache = lambda node: isinstance(node, KVCache)  # noqa: E731
        return jax.tree.map(lambda node: place_cache(node, mesh) if is_cache(node) else node, state, is_leaf=is_cache)

    def init(params: Params, batch: int, slots: int) -> Any:
        return held(drafter.init(params, batch, slots))

    def draft(params: Params, state: Any, root: Array, chance: RowRandomness, sampling: Sampling) -> tuple[Any, Any]:
        tree, state = drafter.draft(params, state, root, chance, sampling)
        return tree, held(state)

    def update(params: Params, state: Any, verified: Verified) -> Any:
        return held(drafter.update(params, state, verified))

    return drafter._replace(init=init, draft=draft, update=update)
