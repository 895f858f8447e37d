"""Counts the cycles of any draft tree on recorded drafts, without running a model.

Drafts do not persist: the state of a drafter depends on the confirmed text alone. So one run that accepts no draft
gives plain decoding's text and a wide tree at every position. Where the cycles of a smaller tree would begin and end
follows from that. The count is exact for trees of the recorded width. A narrower tree opens other nodes than the wide
one; the drafts below them were not recorded and count as rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core.types import Acceptance, DraftTree, Sampling
from eagle_jax.core.verify import deterministic
from eagle_jax.evaluate.acceptance import Cycles, record_cycles
from infer.tuning.trials import Prompt, Setting, arguments


def record(
    target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter, prompts: Sequence[Prompt], setting: Setting
) -> Drafts:
    """Decodes a batch of prompts plainly and records what `drafter` drafts at every position.

    Raises:
      ValueError: as `eagle_jax.generate`.
    """
    shadow = dataclasses.replace(drafter, drafter=drafter.drafter._replace(verify=accept_none))
    return Drafts(record_cycles(target, shadow, **arguments(prompts, setting)), len(prompts))


def accept_none(
    tree: DraftTree, logits: jax.Array, keys: jax.Array, index: jax.Array, sampling: Sampling, depth: int
) -> Acceptance:
    """Draws the target's token after the root and accepts no draft."""
    found = deterministic(tree, logits, keys, index, sampling, 0)
    return found._replace(path=jnp.zeros((len(found.count), depth + 1), jnp.int32))


class Drafts:
    """Holds the drafts of a wide tree at every position of some replies.

    Args:
      cycles: P cycles without accepted tokens, in order. replies: their number R; a reply of one token has no cycle.

    Attributes:
      depths: [P, N+1] level of every node; 0 is the root. ranks: largest rank among siblings on the path to a node.
      on_text: whether the reply goes through the node. scores: as in `DraftTree`; -inf where there is no node.
    """

    def __init__(self, cycles: Cycles, replies: int) -> None:
        tokens, parents = cycles.tokens, cycles.parents
        self.rows = [np.flatnonzero(cycles.prompt == reply) for reply in range(replies)]
        positions, width = np.arange(len(tokens)), tokens.shape[1]
        text = np.full(tokens.shape, -1)  # column d: the reply's token d positions after the root
        for rows in self.rows:
            for ahead in range(min(width, len(rows))):
                text[rows[: len(rows) - ahead], ahead] = tokens[rows[ahead:], 0]
        self.depths, self.ranks = np.zeros((2, *tokens.shape), int)
        self.on_text = np.zeros(tokens.shape, bool)
        self.on_text[:, 0] = True
        for node in range(1, width):
            parent = np.maximum(parents[:, node], 0)
            self.depths[:, node] = depth = self.depths[positions, parent] + 1
            rank = np.sum(parents[:, 1:node] == parents[:, node, None], axis=1)
            self.ranks[:, node] = np.maximum(rank, self.ranks[positions, parent])
            self.on_text[:, node] = self.on_text[positions, parent] & (tokens[:, node] == text[positions, depth])
        self.scores = np.where(parents >= 0, cycles.scores, -np.inf)
        self.on_text &= np.isfinite(self.scores)

    def accepted(self, tree: TreeConfig) -> np.ndarray:
        """Returns [P] accepted drafts of a cycle with this chain or dynamic tree at every position."""
        offered = np.isfinite(self.scores) & (self.ranks < tree.top_k) & (self.depths <= tree.depth)
        best = np.argsort(np.where(offered, -self.scores, np.inf), axis=1, kind="stable")[:, : tree.num_nodes]
        return np.take_along_axis(offered & self.on_text, best, axis=1).sum(axis=1)

    def cycles(self, tree: TreeConfig | None) -> list[int]:
        """Returns [R] cycles of every reply after the prefill; None is plain decoding."""
        if tree is None:
            return [len(rows) for rows in self.rows]
        accepted, found = self.accepted(tree), []
        for rows in self.rows:
            at = count = 0
            while at < len(rows):
                at += int(accepted[rows[at]]) + 1
                count += 1
            found.append(count)
        return found
