"""Measures the cost of a cycle on this machine, by rows of the target pass and by shape of the drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core.loop import prefill, step
from eagle_jax.core.types import ROOT, Drafter, DraftTree, Engine, Params, RowRandomness, Sampling
from eagle_jax.runtime.compilation import forget_programs
from eagle_jax.runtime.generation import request_of
from infer.common.timing import Part, time_repetitions
from infer.tuning.trials import Prompt, Setting, arguments, note

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of measured target passes; of those between, the seconds are interpolated."""
TURNS = 8
"""Cycles in one compiled loop."""


class Costs(NamedTuple):
    """Holds seconds of a cycle of a whole batch at one setting.

    Attributes:
      rows: of a target pass, ascending from 1, plain decoding. passes: seconds of a cycle without drafting.
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
      drafters: of every method, by tree. prompts: of one batch.
    """
    widest = max((tree.num_nodes + 1 for trees in drafters.values() for tree in trees), default=1)
    rows = sorted({*(width for width in WIDTHS if width < widest), widest})
    made: dict[Any, Any] = {width: eagle_jax.BoundDrafter.of(blank(width), target) for width in rows[1:]}
    made[1] = None
    for method, trees in drafters.items():
        made |= {(method, tree): trees[tree] for tree in extremes(trees)}
    forget_programs()
    calls: dict[Any, Callable[[], Any]] = {}
    for name, drafter in made.items():
        note(f"compiling cycle {len(calls) + 1} of {len(made)}")
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
    request = request_of(target, drafter, eos_ids=(), **arguments(prompts, setting))
    state = jax.eval_shape(functools.partial(prefill, engine=request.engine, sizes=request.sizes), *request[:3])
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state._replace(keys=None))
    state = state._replace(cache=state.cache._replace(length=request.batch.lengths), keys=request.batch.keys)
    body = functools.partial(_cycle, sampling=request.sampling, engine=request.engine)
    return Part(body, request.params, state).repeat(TURNS)


def _cycle(params: Params, state: Any, sampling: Sampling, engine: Engine) -> Any:
    return step(params, state, sampling, engine)[0]


@functools.cache
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
