"""Adds one method's chain to another method's tree, such as prompt lookup's chain to a head's tree.

Tree and chain begin at the same root. The chain follows the tree's nodes as long as their tokens agree, and branches
off where they differ. A second copy of a node would cost a row of the target's pass.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eagle_jax.config import ConfigError
from eagle_jax.core import (
    PADDING,
    Drafter,
    DraftTree,
    Params,
    RowRandomness,
    Sampling,
    Verified,
    ancestor_mask,
    deterministic,
    node_depths,
)


class CombinedState(NamedTuple):
    """The states of both methods."""

    tree: Any
    chain: Any


@functools.lru_cache(maxsize=256)
def combined_drafter(tree: Drafter, chain: Drafter) -> Drafter:
    """Builds the drafter of both; equal arguments give the same object, so jit caches are shared.

    The engine's `params["drafter"]` are `{"tree": ..., "chain": ...}`, those of the two methods. It drafts
    `tree.num_nodes + chain.num_nodes` nodes; the rows of chain nodes that the tree has already are padding.

    Args:
      chain: drafts chains, and reads no hidden states of the target.

    Raises:
      ConfigError: a method has an acceptance rule for sampled drafts, or `chain` is not such a drafter.
    """
    for method in (tree, chain):
        if method.verify not in (None, deterministic):
            raise ConfigError(
                "verification of combined drafters must be 'deterministic', got a rule for sampled drafts: its law is "
                "not that of the combined tree. Choose another tree with with_tree."
            )
    if chain.num_nodes != chain.depth or chain.taps or chain.reads_choices:
        raise ConfigError(
            "the added drafter must draft chains and read neither hidden states nor choices, got "
            f"{chain.num_nodes} nodes, depth {chain.depth}, taps {chain.taps} and reads_choices {chain.reads_choices}. "
            "Add prompt lookup."
        )

    def init(params: Params, batch: int, slots: int) -> CombinedState:
        return CombinedState(
            tree.init(_own(params, "tree"), batch, slots), chain.init(_own(params, "chain"), batch, slots)
        )

    def update(params: Params, state: CombinedState, verified: Verified) -> CombinedState:
        choices = verified.choices  # the rows of the tree come first
        of_tree = verified._replace(choices=None if choices is None else choices[:, : tree.num_nodes + 1])
        return CombinedState(
            tree.update(_own(params, "tree"), state.tree, of_tree),
            chain.update(_own(params, "chain"), state.chain, verified._replace(choices=None)),
        )

    def draft(
        params: Params, state: CombinedState, root: Array, randomness: RowRandomness, sampling: Sampling
    ) -> tuple[DraftTree, CombinedState]:
        drafted, after_tree = tree.draft(_own(params, "tree"), state.tree, root, randomness, sampling)
        added, after_chain = chain.draft(_own(params, "chain"), state.chain, root, randomness, sampling)
        with jax.named_scope("draft"):
            return add_chain(drafted, added, tree.depth), CombinedState(after_tree, after_chain)

    rewind = None
    if tree.rewind is not None and chain.rewind is not None:
        rewind_tree, rewind_chain = tree.rewind, chain.rewind
        rewind = lambda state, length: CombinedState(  # noqa: E731
            rewind_tree(state.tree, length), rewind_chain(state.chain, length)
        )
    limited = tree.with_limit
    return Drafter(
        init, draft, update, tree.taps, max(tree.depth, chain.depth), tree.num_nodes + chain.num_nodes,
        reads_choices=tree.reads_choices, rewind=rewind,
        with_limit=None if limited is None else lambda *limit: combined_drafter(limited(*limit), chain),
        level_nodes=tree.num_nodes if tree.level_nodes is None else tree.level_nodes,
    )  # fmt: skip


def _own(params: Params, name: str) -> Params:
    """Returns the engine's parameters as one of the methods reads them."""
    return {**params, "drafter": params["drafter"][name]}


def add_chain(tree: DraftTree, chain: DraftTree, depth: int) -> DraftTree:
    """Returns the rows of `tree`, [B, N+1], then the L nodes of `chain`, [B, L+1]: [B, N+L+1].

    A chain node whose path is in the tree is padding. Its successor, if it is not, is the child of the tree's node. An
    added node scores its parent's score plus what it adds to the score of its predecessor in the chain.

    Args:
      depth: D, no path of the tree is longer.

    Raises:
      ValueError: drafts were sampled (`draft_log_probs`).
    """
    if tree.draft_log_probs is not None or chain.draft_log_probs is not None:
        raise ValueError(
            "draft_log_probs of combined trees must be None, got a law. Combine drafters whose drafts are not sampled."
        )
    rows, length = tree.tokens.shape[1], chain.tokens.shape[1] - 1
    known = jnp.sum(chain.valid, axis=1, keepdims=True) - 1  # nodes of the chain
    mask = ancestor_mask(tree.parents, depth)
    depths = node_depths(mask)
    same = tree.tokens == jnp.take_along_axis(chain.tokens, jnp.minimum(depths, length), axis=1)
    # Paths that the chain has. Padding has depth 0, where the root comes first.
    shared = jnp.all(same[:, None, :] | ~mask, axis=2)
    most = jnp.max(jnp.where(shared, depths, 0), axis=1, keepdims=True)
    fork = jnp.argmax(shared & (depths == most), axis=1, keepdims=True).astype(jnp.int32)
    steps = jnp.broadcast_to(jnp.arange(1, length + 1, dtype=jnp.int32)[None], (tree.tokens.shape[0], length))
    is_new = (steps > most) & (steps <= known)
    parents = jnp.where(steps == most + 1, fork, rows + steps - 2)
    gains = chain.scores[:, 1:] - jnp.take_along_axis(chain.scores, jnp.minimum(most, length), axis=1)
    scores = jnp.take_along_axis(tree.scores, fork, axis=1) + gains
    return DraftTree(
        tokens=jnp.concatenate([tree.tokens, chain.tokens[:, 1:]], axis=1),
        parents=jnp.concatenate([tree.parents, jnp.where(is_new, parents, PADDING)], axis=1),
        scores=jnp.concatenate([tree.scores, jnp.where(is_new, scores, -jnp.inf)], axis=1),
    )
