"""Selects and links the best candidates of a dynamic tree (EAGLE-2, arXiv:2406.16858, section 4).

Scores are cumulative log-probabilities in float32, so a child never scores above its parent. `jax.lax.top_k` breaks
ties towards the lower index, and parents are recorded before their children. Hence the best N candidates are closed
under "parent of", ties included.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle_jax.core.types import ROOT, DraftTree


class Pool(NamedTuple):
    """Candidates in the order of their creation, without the root.

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
    """Returns the pool indices of the `num_nodes` best scores, in order of creation."""
    _, best = jax.lax.top_k(pool.scores, num_nodes)
    return jnp.sort(best, axis=-1)


def gather_tree(root: Int[Array, " B"], pool: Pool, kept: Int[Array, "B N"]) -> DraftTree:
    """Builds the tree of the candidates `kept`, in ascending order and with all their parents."""

    def gather(root: Int[Array, ""], pool: Pool, kept: Int[Array, " N"]) -> DraftTree:
        parents = pool.parents[kept]
        # The row of a kept parent is one (for the root) plus the number of kept candidates before it.
        rows = 1 + jnp.sum(kept[None, :] < parents[:, None], axis=1, dtype=jnp.int32)
        return DraftTree(
            tokens=jnp.concatenate([root[None], pool.tokens[kept]]),
            parents=jnp.concatenate([jnp.array([ROOT], jnp.int32), jnp.where(parents == ROOT, 0, rows)]),
            scores=jnp.concatenate([jnp.zeros((1,), jnp.float32), pool.scores[kept]]),
        )

    return jax.vmap(gather)(root, pool, kept)
