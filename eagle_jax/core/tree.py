"""Reads draft trees: ancestor mask, depths, children, the best nodes."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from eagle_jax.core.types import DraftTree


def ancestor_mask(parents: Int[Array, "B T"], depth: int) -> Bool[Array, "B T T"]:
    """Returns what every row of the tree sees: itself and its ancestors. A padded row sees itself only.

    Args:
      parents: rows of the parents, `ROOT` or `PADDING`.
      depth: D, no path is longer. The closure takes ceil(log2 D) squarings of a [T, T] matrix: no gather, so
        it runs on the matrix unit.
    """
    size = parents.shape[-1]
    rows = jnp.arange(size)
    reach = ((parents[:, :, None] == rows[None, None, :]) | (rows[:, None] == rows[None, :])[None]).astype(jnp.float32)
    span = 1
    while span < depth:
        reach = jnp.minimum(reach @ reach, 1.0)
        span *= 2
    return reach > 0


def node_depths(mask: Bool[Array, "B T T"]) -> Int[Array, "B T"]:
    """Returns the depth of every row, 0 at the root and in padded rows, from its ancestor mask."""
    return jnp.sum(mask, axis=-1, dtype=jnp.int32) - 1


def children_with(
    tokens: Int[Array, " T"], parents: Int[Array, " T"], nodes: Bool[Array, " T"], token: Int[Array, ""]
) -> Bool[Array, " T"]:
    """Returns which rows are children of one of `nodes` and carry `token`. A padded row is never a child."""
    return (parents >= 0) & nodes[jnp.maximum(parents, 0)] & (tokens == token)


def by_score(tree: DraftTree, depth: int) -> DraftTree:
    """Returns the tree with its nodes in the order of their scores, the best first.

    A node counts at most what its ancestors count, and equal ones keep their order: parents precede children, so the
    first rows are a tree of the best nodes.
    """
    above = jnp.where(ancestor_mask(tree.parents, depth), tree.scores[:, None, :], jnp.inf)
    order = 1 + jnp.argsort(-jnp.min(above, axis=2)[:, 1:], axis=1, stable=True)
    order = jnp.pad(order, ((0, 0), (1, 0)))
    place = jnp.argsort(order, axis=1)
    parents = jnp.take_along_axis(tree.parents, order, axis=1)
    laws = tree.draft_log_probs
    return DraftTree(
        tokens=jnp.take_along_axis(tree.tokens, order, axis=1),
        parents=jnp.where(
            parents >= 0, jnp.take_along_axis(place, jnp.maximum(parents, 0), axis=1).astype(parents.dtype), parents
        ),
        scores=jnp.take_along_axis(tree.scores, order, axis=1),
        draft_log_probs=None if laws is None else jnp.take_along_axis(laws, order[:, :, None], axis=1),
    )
