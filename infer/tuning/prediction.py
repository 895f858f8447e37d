"""Predicts the speed of a draft tree from the cost of a cycle and the cycles on recorded drafts.

Drafts do not persist: the state of a drafter depends on the confirmed text alone. So one run that accepts no draft
gives plain decoding's text and a wide tree at every position. Where the cycles of a smaller tree would begin and end
follows from that. The count is exact for trees of the recorded width. A narrower tree opens other nodes than the wide
one; the drafts below them were not recorded and count as rejected.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core import ROOT, Acceptance, Drafter, DraftTree, Params, RowRandomness, Sampling, prefill, step
from eagle_jax.core.verify import deterministic
from eagle_jax.evaluate import Cycles, record_cycles
from eagle_jax.runtime.compilation import forget_programs
from eagle_jax.runtime.generation import request_of
from infer.common.timing import Part, time_repetitions
from infer.tuning.trials import Prompt, Setting, arguments, show_progress

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of measured target passes; of those between, the seconds are interpolated."""
TURNS = 8
"""Cycles in one compiled loop."""


class Costs(NamedTuple):
    """Holds seconds of a cycle of a whole batch at one setting.

    Attributes:
      rows: of a target pass, ascending from 1, plain decoding.
      passes: seconds of a cycle without drafting.
      drafts: seconds that a method adds to the pass of some trees: (depth, top_k, seconds), for drafting, updating its
        state and committing longer paths.
    """

    rows: list[int]
    passes: list[float]
    drafts: dict[str, list[tuple[int, int, float]]]

    def at_rows(self, rows: int) -> float:
        """Returns the seconds of a cycle that verifies `rows` rows, without drafting."""
        return float(np.interp(rows, self.rows, self.passes))

    def cycle(self, method: str, tree: TreeConfig) -> float:
        """Returns the seconds of a cycle of a method with a tree, bilinear in its depth and top_k."""
        terms = np.array([[1, depth, width, depth * width] for depth, width, _ in self.drafts[method]], float)
        weights = np.linalg.lstsq(terms, [seconds for *_, seconds in self.drafts[method]], rcond=None)[0]
        added = weights @ [1, tree.depth, tree.top_k, tree.depth * tree.top_k]
        return self.at_rows(tree.num_nodes + 1) + max(float(added), 0.0)


def measure_costs(
    target: eagle_jax.Target,
    drafters: Mapping[str, Mapping[TreeConfig, eagle_jax.BoundDrafter]],
    prompts: Sequence[Prompt],
    setting: Setting,
    repeats: int,
) -> Costs:
    """Measures cycles of some widths and of the extreme trees of every method; the least times count.

    Args:
      drafters: of every method, by tree.
      prompts: of one batch.
    """
    widest = max((tree.num_nodes + 1 for trees in drafters.values() for tree in trees), default=1)
    rows = sorted({*(width for width in WIDTHS if width < widest), widest})
    made: dict[Any, Any] = {width: eagle_jax.BoundDrafter.bind(blank(width), target) for width in rows[1:]}
    made[1] = None
    for method, trees in drafters.items():
        made |= {(method, tree): trees[tree] for tree in extremes(trees)}
    forget_programs()
    calls: dict[Any, Callable[[], Any]] = {}
    for name, drafter in made.items():
        show_progress(f"compiling cycle {len(calls) + 1} of {len(made)}")
        calls[name] = cycles_of(target, drafter, prompts, setting)
        calls[name]()
    seconds = {name: min(values) / TURNS for name, values in time_repetitions(calls, repeats).items()}
    costs = Costs(rows, [seconds[width] for width in rows], {method: [] for method in drafters})
    for method, tree in (name for name in made if isinstance(name, tuple)):
        added = seconds[method, tree] - costs.at_rows(tree.num_nodes + 1)
        costs.drafts[method].append((tree.depth, tree.top_k, added))
    return costs


def extremes(trees: Iterable[TreeConfig]) -> list[TreeConfig]:
    """Returns the shallowest and the deepest of the narrowest and of the widest trees."""
    order = sorted(trees, key=lambda tree: (tree.top_k, tree.depth))
    ends = [[tree for tree in order if tree.top_k == end.top_k] for end in (order[0], order[-1])]
    return list(dict.fromkeys(tree for alike in ends for tree in (alike[0], alike[-1])))


def cycles_of(
    target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter | None, prompts: Sequence[Prompt], setting: Setting
) -> Callable[[], Any]:
    """Returns a call that runs `TURNS` cycles after these prompts.

    The state is an empty cache with the right lengths: no prefill is compiled, and the work of a cycle does not depend
    on the numbers in it.
    """
    params, batch, sampling, engine, sizes = request_of(target, drafter, eos_ids=(), **arguments(prompts, setting))
    start = functools.partial(prefill, engine=engine, sizes=sizes)
    state = jax.eval_shape(start, params, batch, sampling)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state._replace(keys=None))
    state = state._replace(cache=state.cache._replace(length=batch.lengths), keys=batch.keys)
    return Part(lambda params, state: step(params, state, sampling, engine)[0], params, state).repeat(TURNS)


def blank(rows: int) -> Drafter:
    """Returns a drafter of trees without cost: a root and copies of it, `rows` in all."""

    def draft(
        params: Params, state: tuple[()], root: jax.Array, randomness: RowRandomness, sampling: Sampling
    ) -> tuple[DraftTree, tuple[()]]:
        tokens = jnp.broadcast_to(root[:, None], (root.shape[0], rows))
        parents = jnp.zeros_like(tokens).at[:, 0].set(ROOT)
        return DraftTree(tokens, parents, jnp.zeros(tokens.shape, jnp.float32)), state

    return Drafter(
        init=lambda params, batch, slots: (),
        draft=draft,
        update=lambda params, state, verified: state,
        taps=(),
        depth=1,
        num_nodes=rows - 1,
    )


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
      cycles: P cycles without accepted tokens, in order.
      replies: their number R; a reply of one token has no cycle.

    Attributes:
      depths: [P, N+1] level of every node; 0 is the root.
      ranks: largest rank among siblings on the path to a node.
      on_text: whether the reply goes through the node.
      scores: as in `DraftTree`; -inf where there is no node.
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
