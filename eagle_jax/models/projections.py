"""Joins the projections of a layer that read the same input, so that one product computes them, and splits them again.

`qkv_proj` holds the rows of `q_proj`, `k_proj` and `v_proj`, `gate_up_proj` those of `gate_proj` and `up_proj`. Modules
accept both layouts. Files, training and meshes have the projections one by one: "tensor" splits the rows of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle_jax.config import DecoderConfig
from eagle_jax.core import Params
from eagle_jax.models.quantised import is_quantised

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Projections by the name of their joined form."""


def project(
    module: nn.Module, x: Float[Array, "*b I"], name: str, sizes: Sequence[int], linear: Any
) -> list[Float[Array, "*b O"]]:
    """Returns the products of `x` with the projections of `JOINED[name]`, from whichever layout the module has.

    Args:
      sizes: outputs of every projection. linear: `(size, name) -> nn.Module`, a projection of so many outputs.
    """
    if module.has_variable("params", name):
        ends = [sum(sizes[: place + 1]) for place in range(len(sizes) - 1)]
        return jnp.split(linear(sum(sizes), name=name)(x), ends, axis=-1)
    return [linear(size, name=part)(x) for size, part in zip(sizes, JOINED[name], strict=True)]


def join_projections(params: Params) -> Params:
    """Returns the parameters of a decoder or of one of its layers with projections of one input joined.

    Projections that are quantised unlike one another stay separate, and so do those of experts.
    """

    def joined(node: Any) -> Any:
        if not isinstance(node, dict) or is_quantised(node):
            return node
        # Stacks of experts look like matrices with groups.
        out = {name: part if name == "experts" else joined(part) for name, part in node.items()}
        for name, parts in JOINED.items():
            if all(part in out for part in parts) and _alike([out[part] for part in parts]):
                out[name] = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[out.pop(part) for part in parts])
        return out

    return joined(params)


def _alike(parts: Sequence[Any]) -> bool:
    """Returns whether the parts are those of linear layers and differ in the number of rows alone."""

    def form(part: Any) -> Any:
        leaves, structure = jax.tree.flatten(part)
        return structure, [(leaf.shape[1:], leaf.dtype) for leaf in leaves]

    linear = isinstance(parts[0], Mapping) and "weight" in parts[0]
    is_matrix = linear and (is_quantised(parts[0]["weight"]) or parts[0]["weight"].ndim == 2)
    return is_matrix and all(form(part) == form(parts[0]) for part in parts)


def split_projections(params: Params, config: DecoderConfig) -> Params:
    """Returns the parameters of a decoder or of one of its layers with every projection by itself."""
    keys = config.num_kv_heads * config.head_dim
    outputs = {"qkv_proj": (config.num_heads * config.head_dim, keys), "gate_up_proj": (config.intermediate_size,)}

    def split(node: Any) -> Any:
        if not isinstance(node, dict) or is_quantised(node):
            return node
        out = {name: split(part) for name, part in node.items()}
        for name, parts in JOINED.items():
            if name not in out:
                continue
            whole, start = out.pop(name), 0
            for part, size in zip(parts, (*outputs[name], None), strict=True):
                end = None if size is None else start + size
                out[part] = jax.tree.map(lambda leaf, rows=slice(start, end): leaf[rows], whole)
                start = end or 0
        return out

    return split(params)
