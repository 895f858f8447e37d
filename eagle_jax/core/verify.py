"""Walks a tree with the target's own tokens: from the target's logits to the accepted path."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from eagle_jax.core.sampling import draw, first_largest
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
    row_groups: int = 1,
) -> Acceptance:
    """Draws the target's own token at a node, and descends while the draw is a child.

    Every token is a draw from the target's processed law, so the text has exactly that law. The tree decides only how
    many tokens one pass emits. The accept/reject loop of EAGLE-2 has the same law, and no lossless rule accepts more
    on a tree whose nodes are no random draws. Key and position fix the noise of every draw, so a drafter may read it.

    Args:
      tree: siblings may carry equal tokens; the paths of all of them are walked.
      logits: the target's, at every row of the tree.
      keys: one per row of the batch. index: [B] tokens generated so far; the draw for token i uses `fold_in(key, i)`.
      depth: D, longest path of the tree. row_groups: as in `TargetFn`; it divides B.
    """
    if sampling.greedy:
        return follow(tree, first_largest(logits), depth)

    def together(tree: DraftTree, logits: Array, keys: Key[Array, " b"], index: Array) -> Place:
        """Walks some rows, of which few go as deep as the deepest: first all, then a quarter of those that descend."""
        few = max(1, len(index) // 4)

        def visit(tree: DraftTree, place: Place, row: Array) -> Place:
            choose = lambda node, step: draw(logits[row, node], keys[row], index[row] + step, sampling)  # noqa: E731
            return _visit(tree, place, choose, depth)

        def turn(places: Place) -> Place:
            rows = jnp.argsort(~places.descends, stable=True)[:few]
            some, mine = jax.tree.map(lambda column: column[rows], (tree, places))
            after = jax.vmap(visit)(some, mine, rows)

            def put(column: Array, old: Array, new: Array) -> Array:
                return column.at[rows].set(jnp.where(jnp.expand_dims(mine.descends, range(1, new.ndim)), new, old))

            return jax.tree.map(put, places, mine, after)

        roots = jax.vmap(lambda tree: _root(tree, depth))(tree)
        places = jax.vmap(visit)(tree, roots, jnp.arange(len(index)))
        return jax.lax.while_loop(lambda places: jnp.any(places.descends), turn, places) if depth else places

    # Groups of at most eight rows: no group, and no draw, spans devices.
    size = math.gcd(len(index) // row_groups, 8)
    split = lambda column: column.reshape(-1, size, *column.shape[1:])  # noqa: E731
    grouped = jax.tree.map(split, (tree._replace(draft_log_probs=None), logits, keys, index))
    places = jax.vmap(together)(*grouped)
    return _outcome(jax.tree.map(lambda column: column.reshape(-1, *column.shape[2:]), places))


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
    visit = lambda place: _visit(tree, place, choose, depth)  # noqa: E731
    return _outcome(jax.lax.while_loop(lambda place: place.descends, visit, _root(tree, depth)))


class Place(NamedTuple):
    """Holds how far the walk of a row has come.

    Attributes:
      step: nodes below the root on the path. nodes: [T], those that the walk visits next, all of the same text.
      path: as in `Acceptance`. token: the target's, after the last visited node. descends: whether the walk goes on.
    """

    step: Int[Array, "*b"]
    nodes: Bool[Array, "*b T"]
    path: Int[Array, "*b D1"]
    token: Int[Array, "*b"]
    descends: Bool[Array, "*b"]


def _root(tree: DraftTree, depth: int) -> Place:
    zero = jnp.int32(0)
    first = jnp.arange(tree.tokens.shape[0]) == 0
    return Place(zero, first, jnp.zeros((depth + 1,), jnp.int32), zero, jnp.bool_(True))


def _visit(tree: DraftTree, place: Place, choose: Callable[[Array, Array], Array], depth: int) -> Place:
    step = place.step
    node = jnp.argmax(place.nodes).astype(jnp.int32)
    path = jnp.where(jnp.arange(depth + 1) >= step, node, place.path)
    token = choose(node, step)
    below = children_with(tree.tokens, tree.parents, place.nodes, token)
    descends = jnp.any(below) & (step < depth)
    return Place(step + descends.astype(jnp.int32), below, path, token, descends)


def _outcome(place: Place) -> Acceptance:
    return Acceptance(place.path, place.step, place.token)
