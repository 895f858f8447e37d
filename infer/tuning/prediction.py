"""Predicts the speed of a draft tree from the cost of a cycle and the cycles on recorded drafts.

Drafts do not persist: the state of a drafter depends on the confirmed text alone. So one run of plain decoding gives a
wide tree at every position. Where the cycles of a smaller tree would begin and end follows from that. The count is
exact for trees of the recorded width. A narrower tree opens other nodes than the wide one; the drafts below them were
not recorded and count as rejected.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core import Drafter, DraftTree, Params, Verified, empty_tree
from eagle_jax.evaluate import depths_and_ranks
from eagle_jax.parallel import to_host
from eagle_jax.runtime.errors import check_finite
from eagle_jax.runtime.generation import prefill_program, step_program
from infer.tuning.trials import Prompt, Setting, request_at_width, show_progress

RECORDED = 16
"""Maximum replies recorded at a time."""


def record(
    target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter, prompts: Sequence[Prompt], setting: Setting
) -> Drafts:
    """Decodes prompts plainly and records what `drafter` drafts at every position.

    Raises:
      ValueError, NotFiniteError: as `eagle_jax.generate`.
    """
    shadow = dataclasses.replace(drafter, drafter=unverified(drafter.drafter))
    found = []
    for start in range(0, len(prompts), RECORDED):
        part = prompts[start : start + RECORDED]
        request = request_at_width(target, shadow, part, prompts, setting)
        state, running = prefill_program(*request), np.zeros(len(part), bool)
        for position in itertools.count(1):
            tree = to_host(state.drafter[1])
            rows = np.flatnonzero(running)
            found.append((start + rows, tree.tokens[rows], tree.parents[rows], tree.scores[rows]))
            running = ~to_host(state.done)
            if not running.any():
                break
            if position % 16 == 0:
                show_progress(f"recording: token {position} of at most {setting.max_new_tokens}, {len(part)} replies")
            state, _ = step_program(request.params, state, request.sampling, request.engine)
        check_finite(*to_host((state.not_finite, state.bad_drafts)))
    return Drafts(len(prompts), *map(np.concatenate, zip(*found, strict=True)))


def unverified(drafter: Drafter) -> Drafter:
    """Returns a drafter whose trees stay in its state: the target runs over the root alone."""

    def init(params: Params, rows: int, slots: int) -> tuple[Any, DraftTree]:
        ids = jnp.zeros((rows, drafter.num_nodes + 1), jnp.int32)
        return drafter.init(params, rows, slots), DraftTree(ids, ids, ids.astype(jnp.float32))

    def draft(params: Params, state: Any, root: jax.Array, *rest: Any) -> tuple[DraftTree, Any]:
        tree, own = drafter.draft(params, state[0], root, *rest)
        return empty_tree(root), (own, tree)

    def update(params: Params, state: Any, verified: Verified) -> Any:
        return drafter.update(params, state[0], verified), state[1]

    return Drafter(init, draft, update, drafter.taps, depth=0, num_nodes=0)


class Drafts:
    """Holds the drafts of a wide tree at every position of some replies.

    Args:
      replies: their number R; a reply of one token has no position.
      prompt: [P] row of the prompt; the positions of a reply are in order.
      tokens, parents, scores: [P, N+1] of the tree that was drafted there, as in `DraftTree`.

    Attributes:
      depths: [P, N+1] level of every node; 0 is the root.
      ranks: largest rank among siblings on the path to a node.
      on_text: whether the reply goes through the node.
      scores: as in `DraftTree`; -inf where there is no node.
    """

    def __init__(
        self, replies: int, prompt: np.ndarray, tokens: np.ndarray, parents: np.ndarray, scores: np.ndarray
    ) -> None:
        self.rows = [np.flatnonzero(prompt == reply) for reply in range(replies)]
        positions, width = np.arange(len(tokens)), tokens.shape[1]
        text = np.full(tokens.shape, -1)  # column d: the reply's token d positions after the root
        for rows in self.rows:
            for ahead in range(min(width, len(rows))):
                text[rows[: len(rows) - ahead], ahead] = tokens[rows[ahead:], 0]
        self.depths, self.ranks = depths_and_ranks(parents)
        self.on_text = np.zeros(tokens.shape, bool)
        self.on_text[:, 0] = True
        for node in range(1, width):
            parent = np.maximum(parents[:, node], 0)
            self.ranks[:, node] = np.maximum(self.ranks[:, node], self.ranks[positions, parent])
            follows = tokens[:, node] == text[positions, self.depths[:, node]]
            self.on_text[:, node] = self.on_text[positions, parent] & follows
        self.scores = np.where(parents >= 0, scores, -np.inf)
        self.on_text &= np.isfinite(self.scores)

    def cycles(self, tree: TreeConfig | None) -> list[int]:
        """Returns [R] cycles of every reply after prefill, with a chain or dynamic tree; None: plain decoding."""
        if tree is None:
            return [len(rows) for rows in self.rows]
        offered = np.isfinite(self.scores) & (self.ranks < tree.top_k) & (self.depths <= tree.depth)
        best = np.argsort(np.where(offered, -self.scores, np.inf), axis=1, kind="stable")[:, : tree.num_nodes]
        # [P] of a cycle that begins here
        accepted = np.take_along_axis(offered & self.on_text, best, axis=1).sum(axis=1)
        found = []
        for rows in self.rows:
            at = count = 0
            while at < len(rows):
                at += int(accepted[rows[at]]) + 1
                count += 1
            found.append(count)
        return found
