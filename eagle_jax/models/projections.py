"""Joins the projections of a layer that read the same input, so that one product computes them, and splits them again.

`qkv_proj` holds the rows of `q_proj`, `k_proj` and `v_proj`, `gate_up_proj` those of `gate_proj` and `up_proj`. Modules
accept both layouts. Files, training and meshes have the projections one by one: "tensor" splits the rows of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
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
        whole = linear(sum(sizes), name=name)(x)
        return jnp.split(whole, list(itertools.accumulate(sizes))[:-1], axis=-1)
    return [linear(size, name=part)(x) for size, part in zip(sizes, JOINED[name], strict=True)]


def join_projections(params: Params) -> Params:
    """Returns the parameters of a decoder or of one of its layers with projections of one input joined.

    Projections that are quantised unlike one another stay separate, and so do those of experts.
    """

    def joined(node: dict[str, Any]) -> None:
        for name, parts in JOINED.items():
            if all(part in node for part in parts) and _alike([node[part] for part in parts]):
                node[name] = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[node.pop(part) for part in parts])

    return _rewritten(params, joined)


def split_projections(params: Params, config: DecoderConfig) -> Params:
    """Returns the parameters of a decoder or of one of its layers with every projection by itself."""
    query, keys = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    ends = {"qkv_proj": (0, query, query + keys, None), "gate_up_proj": (0, config.intermediate_size, None)}

    def separate(node: dict[str, Any]) -> None:
        for name in JOINED.keys() & node.keys():
            whole = node.pop(name)
            for part, rows in zip(JOINED[name], itertools.starmap(slice, itertools.pairwise(ends[name])), strict=True):
                node[part] = jax.tree.map(lambda leaf, rows=rows: leaf[rows], whole)

    return _rewritten(params, separate)


def _rewritten(node: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """Returns a copy of nested dicts, each of which `change` edited, inner ones first.

    Experts stay as they are: their stacks look like matrices with groups.
    """
    if not isinstance(node, dict) or is_quantised(node):
        return node
    out = {name: part if name == "experts" else _rewritten(part, change) for name, part in node.items()}
    change(out)
    return out


def _alike(parts: Sequence[Params]) -> bool:
    """Returns whether linear layers differ in the number of outputs alone."""

    def form(part: Params) -> Any:
        leaves, structure = jax.tree.flatten(part)
        return structure, [(leaf.shape[1:], leaf.dtype) for leaf in leaves]

    return all(form(part) == form(parts[0]) for part in parts)
