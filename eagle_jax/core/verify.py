"""Walks a tree with the target's own tokens: from the target's logits to the accepted path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from eagle_jax.core.sampling import draw
from eagle_jax.core.tree import ancestor_mask, children_with, node_depths
from eagle_jax.core.types import ROOT, Acceptance, DraftTree, Sampling

VerifyFn = Callable[..., Acceptance]
"""An acceptance rule: `(tree, logits [B, N+1, V], keys [B], index [B], sampling, depth) -> Acceptance`.

A rule with draws of its own must derive them by `randomness.verify_key`: drafters may read the noise of the target's
draws, and a rule that reused that noise would bias the result.
"""


def deterministic(
    tree: DraftTree,
    logits: Float[Array, "B N1 V"],
    keys: Key[Array, " B"],
    index: Int[Array, " B"],
    sampling: Sampling,
    depth: int,
) -> Acceptance:
    """Draws the target's own token at a node, and descends while the draw is a child.

    Every token is a draw from the target's processed law, so the text has exactly that law. The tree decides only how
    many tokens one pass emits. The accept/reject loop of EAGLE-2 has the same law, and no lossless rule accepts more
    on a tree whose nodes are no random draws. Key and position fix the noise of every draw, so a drafter may read it.

    Args:
      tree: siblings may carry equal tokens; the paths of all of them are walked.
      logits: the target's, at every row of the tree.
      keys: one per row of the batch. index: [B] tokens generated so far; the draw for token i uses `fold_in(key, i)`.
      depth: D, longest path of the tree.
    """
    if sampling.greedy:
        return follow(tree, jnp.argmax(logits, axis=-1).astype(jnp.int32), depth)

    def row(tree: DraftTree, logits: Array, key: Key[Array, ""], index: Array) -> Acceptance:
        return walk(tree, lambda node, step: draw(logits[node], key, index + step, sampling), depth)

    return jax.vmap(row)(tree, logits, keys, index)


def follow(tree: DraftTree, choices: Int[Array, "B N1"], depth: int) -> Acceptance:
    """Returns what `walk` returns if the target's token after every node is known, without its loop.

    Args:
      choices: the target's tokens after all rows of the tree.
    """
    is_root = tree.parents == ROOT
    above = jnp.take_along_axis(choices, jnp.maximum(tree.parents, 0), axis=1)
    follows = is_root | ((tree.parents >= 0) & (tree.tokens == above))
    mask = ancestor_mask(tree.parents, depth)
    accepted = jnp.all(follows[:, None, :] | ~mask, axis=2)
    depths = node_depths(mask)
    count = jnp.minimum(jnp.max(jnp.where(accepted, depths, 0), axis=1), depth)
    steps = jnp.minimum(jnp.arange(depth + 1)[None], count[:, None])
    path = jnp.argmax(accepted[:, None, :] & (depths[:, None, :] == steps[:, :, None]), axis=2).astype(jnp.int32)
    last = jnp.take_along_axis(path, count[:, None], axis=1)
    return Acceptance(path, count, jnp.take_along_axis(choices, last, axis=1)[:, 0])


def walk(tree: DraftTree, choose: Callable[[Array, Array], Array], depth: int) -> Acceptance:
    """Walks one row's tree; `choose(node, step)` is the target's token after the node at depth `step`.

    Tokens are drawn for visited nodes only. Rows with the same text (lookahead's window and an n-gram may coincide) are
    walked together; the path has the first of them.
    """
    zero = jnp.int32(0)

    def visit(carry: Any) -> Any:
        step, nodes, path, _, _ = carry
        node = jnp.argmax(nodes).astype(jnp.int32)
        path = jnp.where(jnp.arange(depth + 1) >= step, node, path)
        token = choose(node, step)
        below = children_with(tree.tokens, tree.parents, nodes, token)
        descends = jnp.any(below) & (step < depth)
        return step + descends.astype(jnp.int32), below, path, token, descends

    carry = (zero, jnp.arange(tree.tokens.shape[0]) == 0, jnp.zeros((depth + 1,), jnp.int32), zero, jnp.bool_(True))
    count, _, path, token, _ = jax.lax.while_loop(lambda carry: carry[-1], visit, carry)
    return Acceptance(path, count, token)
