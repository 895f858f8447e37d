"""Counts the bytes that a cycle must read, and measures how fast this machine reads as many."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax import BoundDrafter, DraftHead, SmallModel
from eagle_jax.config import DecoderConfig
from eagle_jax.core import Params
from eagle_jax.devices import bits_of
from infer.common.timing import Part

MOST = 10**9
"""Bytes that are read to measure the speed of the memory, at most: they need room beside the weights."""
WIDTH = 4096
"""Length of the vector in the product that reads them."""


def least_bytes(
    config: DecoderConfig, params: Params, cache: Any, drafter: BoundDrafter | None, batch: int, context: int,
    levels: float | None = None,
) -> float:  # fmt: skip
    """Returns the bytes that a cycle must read on one device.

    These are the target's weights and the committed part of its cache once, and the drafter's weights once per level of
    the tree. Of an embedding only rows are read, of experts at most as many as the pass has choices. A program may read
    less: the compiler keeps a matrix in VMEM over the levels if it has room.

    Args:
      params: of the target and the drafter. cache: keys and values by layer.
      drafter: None is plain decoding.
      batch: rows of the program. context: committed tokens of each.
      levels: that are drafted; None is all.
    """
    target = params["target"]
    read = {name: part for name, part in target.items() if name != "embed_tokens" or config.tie_word_embeddings}
    weights = local_bytes(read)
    if config.experts is not None:
        experts = local_bytes(
            [layer["mlp"]["experts"] for layer in target.values() if "experts" in layer.get("mlp", {})]
        )
        nodes = drafter.drafter.num_nodes if drafter is not None else 0
        choices = batch * (nodes + 1) * config.experts.top_k
        weights -= experts * (1 - min(1.0, choices / config.experts.num_experts))
    keys, values = cache
    slots = [layer.shape[2] for layer in values]
    shares = [min(context, most) / most for most in slots]
    committed = math.fsum(share * local_bytes(layer) for share, *layer in zip(shares, keys, values, strict=True))
    drafting = 0.0 if drafter is None else _drafting_bytes(config, target, drafter, levels)
    return weights + committed + drafting


def _drafting_bytes(config: DecoderConfig, target: Params, drafter: BoundDrafter, levels: float | None) -> float:
    """Returns the bytes that a drafter must read in a cycle."""
    own, once = drafter.params, 0.0
    if isinstance(drafter, DraftHead):
        head = {name: part for name, part in own["head"].items() if name != "embed_tokens"}
        if drafter.config.kind == "eagle1":  # has no lm_head
            head["lm_head"] = target["embed_tokens" if config.tie_word_embeddings else "lm_head"]
        else:
            once = local_bytes(head.pop("fc"))  # is read for committed tokens only
        own = own | {"head": head}
    passes = drafter.tree.depth if isinstance(drafter, DraftHead | SmallModel) else 1
    return once + (passes if levels is None else levels) * local_bytes(own)


def local_bytes(arrays: Any) -> float:
    """Returns the bytes that arrays, abstract or not, take on one device, by their shardings."""
    leaves = jax.tree.leaves(arrays)
    return float(sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * bits_of(leaf.dtype) / 8 for leaf in leaves))


def reading(count: float) -> tuple[Part, int]:
    """Returns a part that reads about so many bytes once, at most `MOST`, and how many it reads.

    It is a product with a vector: sums of an array reach a third of that speed on a CPU.
    """
    rows = max(1, round(min(count, MOST) / 4 / WIDTH))
    # The next turn depends on this one, by too little to change a number: nothing is left out.
    body = lambda params, vector: vector + 1e-30 * jnp.sum(params["weight"] @ vector)  # noqa: E731
    return Part(body, {"weight": jnp.ones((rows, WIDTH))}, jnp.ones((WIDTH,))), 4 * WIDTH * rows
