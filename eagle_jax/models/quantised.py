"""Defines quantised weights: small integers or floats `q`, and a `scale` for every row or group of inputs.

A quantised weight [O, I] is a dict in the place of the array:

    q      [O, I] or, in groups along the input, [O, I / g, g]; int8, int4 or float8_e4m3fn
    scale  q's shape without its last axis, in the dtype of the activations
    zero   int8, like `scale`; only in files that have zero points

The weight is `(q - zero) * scale`. The weights of experts are stacks: q [E, O, I], scale [E, O]. Groups are an axis
of `q`, because XLA for TPU then converts and scales inside the product. With groups of a flat [O, I] it writes the
whole weight to memory (`python -m infer.aot --weights int4`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eagle_jax.config import ConfigError
from eagle_jax.core import Params

Scheme = Literal["int8", "int4", "fp8"]
"""int8: per output channel. int4: groups of at most 128 inputs. fp8: e4m3, per output channel."""

Weight = Float[Array, "O I"] | Mapping[str, Array]
"""A weight, or a quantised one."""

QUANTISED = "q", "scale", "zero"
"""Keys of a quantised weight."""
GROUP = 128
"""Most inputs of a group of int4; one row of a TPU's registers."""
_TYPES = {"int8": (jnp.int8, 127.5), "int4": (jnp.int4, 7.5), "fp8": (jnp.float8_e4m3fn, 448.0)}


def is_quantised(leaf: Any) -> bool:
    """Returns whether a node of a parameter tree is a quantised weight."""
    return isinstance(leaf, Mapping) and "q" in leaf


def quantise(weight: Any, scheme: Scheme, dtype: Any) -> dict[str, Any]:
    """Rounds a weight [O, I], or [E, O, I] of experts, to the nearest values of a scheme (NumPy in, NumPy out; traced).

    The largest magnitude of a channel or group is the end of the range, as in `compressed-tensors`. Groups are the
    largest divisor of I up to 128.

    Args:
      dtype: of the scale. The values are rounded to multiples of the scale in this dtype.
    """
    xp: Any = np if isinstance(weight, np.ndarray) else jnp
    kind, end = _TYPES[scheme]
    wide = weight.astype(np.float32)
    if scheme == "int4":
        inputs = weight.shape[1]
        group = next(size for size in range(min(GROUP, inputs), 0, -1) if inputs % size == 0)
        wide = wide.reshape(len(weight), -1, group)
    scale = (xp.max(xp.abs(wide), axis=-1) / end).astype(dtype)
    wide = wide / xp.where(scale == 0, 1, scale).astype(np.float32)[..., None]
    if scheme == "fp8":
        return {"q": xp.clip(wide, -end, end).astype(kind), "scale": scale}
    return {"q": xp.clip(xp.round(wide), -end - 0.5, end - 0.5).astype(kind), "scale": scale}


def scheme_of(path: str, scheme: Scheme | None) -> Scheme | None:
    """Returns how a scheme stores the parameter at `path`; None leaves it as it is.

    Matrices are quantised; norms, biases, learned positions and routers of experts are not. An embedding or lm_head
    of an int4 model has int8: its rows are words, whose scores are compared with one another.

    Raises:
      ConfigError: int4 for the weights of experts.
    """
    *parents, leaf = path.split("/")
    owner = parents[-1] if parents else ""
    if scheme == "int4" and "experts" in parents:
        raise ConfigError("weights must be int8 or fp8 for a model with experts, got 'int4'. Choose one.")
    if scheme is None or leaf not in ("weight", "embedding") or owner == "embed_positions" or "router" in owner:
        return None
    is_table = leaf == "embedding" or owner.endswith("lm_head")
    return "int8" if scheme == "int4" and is_table else scheme


def quantise_params(params: Params, scheme: Scheme | None, dtype: Any, prefix: str = "") -> dict[str, Any]:
    """Quantises the matrices of a tree that are still floats; see `scheme_of`."""

    def convert(name: str, node: Any) -> Any:
        path = f"{prefix}{name}"
        if isinstance(node, Mapping):
            return node if is_quantised(node) else quantise_params(node, scheme, dtype, f"{path}/")
        how = scheme_of(path, scheme)
        return node if how is None else quantise(node, how, dtype)

    return {name: convert(name, node) for name, node in params.items()}


def scaled(weight: Mapping[str, Any], dtype: Any = None) -> Any:
    """Returns the values of a quantised weight in `dtype` (None: that of its scale), in the shape of `q`."""
    kind = weight["scale"].dtype if dtype is None else dtype
    values = weight["q"].astype(kind)
    if "zero" in weight:
        values = values - weight["zero"].astype(kind)[..., None]
    return values * weight["scale"].astype(kind)[..., None]


def dequantise(weight: Any) -> Any:
    """Returns a weight [O, I] as one array, in the dtype of its scale."""
    return scaled(weight).reshape(len(weight["q"]), -1) if is_quantised(weight) else weight


def dequantise_params(params: Params) -> dict[str, Any]:
    """Returns a tree of parameters with floats in the place of quantised weights."""

    def convert(path: tuple[Any, ...], node: Any) -> Any:
        is_stack = any(part.key == "experts" for part in path)  # looks like a matrix with groups
        return scaled(node) if is_stack and is_quantised(node) else dequantise(node)

    return jax.tree_util.tree_map_with_path(convert, params, is_leaf=is_quantised)


def look_up(weight: Mapping[str, Array], rows: Int[Array, "*b"]) -> Float[Array, "*b I"]:
    """Returns rows of a quantised weight, in the dtype of its scale."""
    # XLA makes a slice of a look-up of one row, and on TPU copies the whole table of small values for it.
    flat = jnp.pad(rows.reshape(-1), (0, max(0, 2 - rows.size)))
    found = scaled({name: part[flat] for name, part in weight.items()}).reshape(len(flat), -1)
    return found[: rows.size].reshape(*rows.shape, -1)


def activation_dtype(params: Params) -> str:
    """Returns the dtype of the activations of a tree: that of its floats without the quantised values."""

    def first(node: Any) -> Any:
        if not isinstance(node, Mapping):
            return node.dtype if jnp.issubdtype(node.dtype, jnp.floating) else None
        parts = [node["scale"]] if is_quantised(node) else node.values()
        return next((found for part in parts if (found := first(part)) is not None), None)

    return str(first(params))
