"""Reads draft trees: ancestor mask, depths, children, the best nodes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from eagle_jax.core.types import DraftTree

SMALL = 8
"""Rows of a tree up to which no product of matrices finds its ancestors."""


def ancestor_mask(parents: Int[Array, "B T"], depth: int) -> Bool[Array, "B T T"]:
    """Returns what every row of the tree sees: itself and its ancestors. A padded row sees itself only.

    Args:
      parents: rows of the parents, `ROOT` or `PADDING`.
      depth: D, no path is longer. The closure takes ceil(log2 D) squarings of a [T, T] matrix: no gather, so
        it runs on the matrix unit. A CPU takes longer to start a product of a small tree than to compute it.
    """
    size = parents.shape[-1]
    rows = jnp.arange(size)
    reach = (parents[:, :, None] == rows[None, None, :]) | (rows[:, None] == rows[None, :])[None]
    span = 1
    while span < depth:
        reach = jnp.any(reach[:, :, :, None] & reach[:, None], axis=2) if size <= SMALL else _product(reach)
        span *= 2
    return reach


def _product(reach: Bool[Array, "B T T"]) -> Bool[Array, "B T T"]:
    numbers = reach.astype(jnp.float32)
    return numbers @ numbers > 0


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
    size = tree.parents.shape[1]
    above = jnp.where(ancestor_mask(tree.parents, depth), tree.scores[:, None, :], jnp.inf)
    worst = jnp.min(above, axis=2).at[:, 0].set(jnp.inf)  # the root comes first, and NaN last
    # Ranks by comparison: a sort and gathers of so few numbers are slow on a TPU, and many operations on a CPU.
    mine, other = worst[:, :, None], worst[:, None, :]
    better = (other > mine) | (jnp.isnan(mine) & ~jnp.isnan(other))
    worse = (other < mine) | (jnp.isnan(other) & ~jnp.isnan(mine))
    earlier = np.tri(size, k=-1, dtype=bool)[None]
    place = jnp.sum(better | (earlier & ~worse), axis=2, dtype=jnp.int32)
    at = place[:, None, :] == np.arange(size)[None, :, None]
    moved = lambda column: jnp.sum(jnp.where(at, column[:, None, :], 0), axis=2, dtype=column.dtype)  # noqa: E731
    parents, laws = moved(tree.parents), tree.draft_log_probs
    is_parent = parents[:, :, None] == np.arange(size)[None, None]
    of_parent = jnp.sum(jnp.where(is_parent, place[:, None, :], 0), axis=2, dtype=parents.dtype)
    order = moved(jnp.broadcast_to(jnp.arange(size)[None], parents.shape))
    return DraftTree(
        tokens=moved(tree.tokens),
        parents=jnp.where(parents >= 0, of_parent, parents),
        scores=moved(tree.scores),
        draft_log_probs=None if laws is None else jnp.take_along_axis(laws, order[:, :, None], axis=1),
    )
