"""Draft trees: candidates, rerank, ancestor mask. Pure, written for one row and `vmap`ped by the callers.

Two facts carry the dynamic tree of EAGLE-2 (arXiv:2406.16858, section 4). Scores are cumulative log-probabilities
in float32, so a child never scores above its parent; and `jax.lax.top_k` breaks ties towards the lower index, and
parents are recorded before their children. Hence the best N candidates are closed under "parent of", ties included.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.core.types import PADDING, ROOT, DraftTree


class Pool(NamedTuple):
    """Candidates in the order of their creation, the root not among them.

    Attributes:
      tokens: [..., P] int32, target ids.
      parents: [..., P] int32, index of the parent in the pool, `ROOT` for children of the root; always below the
        own index.
      scores: [..., P] float32, cumulative draft log-probability.
    """

    tokens: Int[Array, "*b P"]
    parents: Int[Array, "*b P"]
    scores: Float[Array, "*b P"]


def select_best(pool: Pool, num_nodes: int) -> Int[Array, "*b N"]:
    """The rerank of EAGLE-2: pool indices of the `num_nodes` best scores, in order of creation."""
    _, best = jax.lax.top_k(pool.scores, num_nodes)
    return jnp.sort(best, axis=-1)


def gather_tree(root: Int[Array, " B"], pool: Pool, kept: Int[Array, "B N"]) -> DraftTree:
    """Builds the tree of the candidates `kept` (ascending, closed under "parent of").

    Raises: nothing; a parent missing from `kept` would be linked wrongly, which `select_best` cannot produce.
    """
    return jax.vmap(_gather_row)(root, pool, kept)


def _gather_row(root: Int[Array, ""], pool: Pool, kept: Int[Array, " N"]) -> DraftTree:
    parents = pool.parents[kept]
    # `kept` ascends, so the row of a kept parent is one (for the root) plus the number of kept candidates before it.
    rows = 1 + jnp.sum(kept[None, :] < parents[:, None], axis=1, dtype=jnp.int32)
    rows = jnp.where(parents == ROOT, 0, rows)
    return DraftTree(
        tokens=jnp.concatenate([root[None], pool.tokens[kept]]),
        parents=jnp.concatenate([jnp.array([ROOT], jnp.int32), rows]),
        scores=jnp.concatenate([jnp.zeros((1,), jnp.float32), pool.scores[kept]]),
    )


def ancestor_mask(parents: Int[Array, "B T"], depth: int) -> Bool[Array, "B T T"]:
    """What every row of the tree sees: itself and its ancestors. A padded row sees itself only.

    Args:
      parents: rows of the parents, `ROOT` or `PADDING`.
      depth: D, no path is longer. The closure takes ceil(log2(D + 1)) squarings of a [T, T] matrix: no gather, so
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
    """Depth of every row, 0 at the root (and in padded rows), from its ancestor mask."""
    return jnp.sum(mask, axis=-1, dtype=jnp.int32) - 1


def children_with(
    tokens: Int[Array, " T"], parents: Int[Array, " T"], nodes: Bool[Array, " T"], token: Int[Array, ""]
) -> Bool[Array, " T"]:
    """Which rows are children of one of `nodes` and carry `token`. Padding is nobody's child."""
    return (parents >= 0) & nodes[jnp.maximum(parents, 0)] & (tokens == token)


def pad_tree(tree: DraftTree, num_nodes: int) -> DraftTree:
    """Appends padded rows until the tree has `num_nodes` drafted rows."""
    extra = num_nodes + 1 - tree.tokens.shape[1]
    widen = ((0, 0), (0, extra))
    return DraftTree(
        tokens=jnp.pad(tree.tokens, widen),
        parents=jnp.pad(tree.parents, widen, constant_values=PADDING),
        scores=jnp.pad(tree.scores, widen, constant_values=-jnp.inf),
    )
