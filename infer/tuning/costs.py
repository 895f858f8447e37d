"""Measures what a cycle costs on this machine, by the rows of its target pass and by the levels that are drafted."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core.loop import prefill, step
from eagle_jax.core.sampling import make_sampling
from eagle_jax.core.types import ROOT, Batch, Drafter, DraftTree, Engine, Params, RowRandomness, Sampling, Verified
from eagle_jax.runtime.compilation import forget_programs
from eagle_jax.runtime.generation import request_of
from infer.common.timing import Part, time_repetitions
from infer.tuning.trials import Sample, Setting, note, timed_call


@dataclasses.dataclass(frozen=True)
class PassCosts:
    """Measured seconds of a cycle that drafts nothing, by the rows that it verifies.

    Attributes:
      rows: ascending, the root counted; the first is 1, plain decoding. seconds: per cycle of the whole batch.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, rows: int) -> float:
        """Interpolates between the measured widths; extrapolates from the last two."""
        if rows <= self.rows[-1] or len(self.rows) < 2:
            return float(np.interp(rows, self.rows, self.seconds))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        return self.seconds[-1] + max(slope, 0.0) * (rows - self.rows[-1])


@dataclasses.dataclass(frozen=True)
class DraftCosts:
    """Seconds that a method adds to a pass of the width of its tree: drafting, its update, a longer commit.

    Attributes:
      measured: (depth, top_k, seconds) of some cycles, less `PassCosts.at` of their width. One or two depths per top_k.
    """

    measured: tuple[tuple[int, int, float], ...]

    def at(self, depth: int, top_k: int) -> float:
        """Interpolates linearly in the depth for every measured top_k, then between these."""
        widths = sorted({width for _, width, _ in self.measured})
        return float(np.interp(top_k, widths, [self._level(depth, width) for width in widths]))

    def _level(self, depth: int, top_k: int) -> float:
        points = sorted((d, seconds) for d, width, seconds in self.measured if width == top_k)
        (low, first), (high, last) = points[0], points[-1]
        if high == low:
            return max(first, 0.0)
        return max(first + (last - first) / (high - low) * (depth - low), 0.0)


def speedup(plain_passes: int, plain: float, passes: int, cycle: float, plain_prefill: float, prefill: float) -> float:
    """Returns tokens per second over those of plain decoding, for the same text.

    Args:
      plain_passes, passes: target passes after the prefill, without and with drafts. plain, cycle: seconds of each.
      plain_prefill, prefill: seconds of all prefills, likewise: a drafter may read the prompt too.
    """
    return (plain_prefill + plain_passes * plain) / (prefill + passes * cycle)


class Costs(NamedTuple):
    """Seconds of cycles at one setting.

    Attributes:
      passes: by rows. drafts: what a method adds, by method. whole: of cycles that were measured as they are, by label.
    """

    passes: PassCosts
    drafts: dict[str, DraftCosts]
    whole: dict[str, float]


@functools.lru_cache(maxsize=64)
def blank(rows: int) -> Drafter:
    """Returns a drafter of free trees: copies of the root below the root, `rows` with the root."""

    def init(params: Params, batch: int, slots: int) -> tuple[()]:
        return ()

    def update(params: Params, state: tuple[()], verified: Verified) -> tuple[()]:
        return state

    def draft(
        params: Params, state: tuple[()], root: jax.Array, chance: RowRandomness, sampling: Sampling
    ) -> tuple[DraftTree, tuple[()]]:
        tokens = jnp.broadcast_to(root[:, None], (root.shape[0], rows))
        parents = jnp.zeros_like(tokens).at[:, 0].set(ROOT)
        return DraftTree(tokens, parents, jnp.zeros(tokens.shape, jnp.float32)), state

    return Drafter(init, draft, update, taps=(), depth=min(rows - 1, 1), num_nodes=rows - 1)


def cycle_call(
    target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter | None, sample: Sample, setting: Setting, turns: int
) -> Callable[[], Any]:
    """Returns a call of `turns` cycles after these prompts, in one compiled loop.

    The state is an empty cache with the right lengths: no prefill is compiled, and the work of a cycle does not depend
    on the numbers in it.
    """
    sampling = make_sampling(setting.temperature)
    request = request_of(target, drafter, sample.prompts, setting.max_new_tokens, sampling, (), sample.keys)

    def empty(params: Params, batch: Batch) -> Any:
        return prefill(params, batch, sampling, request.engine, request.sizes)._replace(keys=jnp.zeros(()))

    shapes = jax.eval_shape(empty, request.params, request.batch)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    state = state._replace(cache=state.cache._replace(length=request.batch.lengths), keys=request.batch.keys)
    body = functools.partial(_cycle, sampling=sampling, engine=request.engine)
    return Part(body, request.params, state).repeat(turns)


def _cycle(params: Params, state: Any, sampling: Sampling, engine: Engine) -> Any:
    return step(params, state, sampling, engine)[0]


def designs(depths: Sequence[int], top_ks: Sequence[int], widths: Sequence[int]) -> list[TreeConfig]:
    """Returns the trees that are measured, from which all others are interpolated: extremes, and a middle top_k."""
    found = []
    ks = sorted(set(top_ks))
    for top_k in sorted({ks[0], ks[len(ks) // 2], ks[-1]}):
        for depth in sorted({min(depths), max(depths)}):
            most = TreeConfig(depth, top_k, depth).pool_size
            fitting = [rows - 1 for rows in widths if depth <= rows - 1 <= most]
            found.append(TreeConfig(depth, top_k, min(fitting, default=depth) if top_k > 1 else depth))
    return found


def measure_costs(
    target: eagle_jax.Target,
    heads: Mapping[str, tuple[Any, Sequence[TreeConfig]]],
    fixed: Mapping[str, eagle_jax.BoundDrafter],
    sample: Sample,
    setting: Setting,
    widths: Sequence[int],
    turns: int,
    repeats: int,
) -> Costs:
    """Measures cycles of some widths and trees in turns; the median of every one counts.

    Args:
      heads: by method, what fills trees, and the trees that are measured. fixed: by label, measured as they are.
      sample: the prompts of one batch.
    """
    forget_programs()
    calls: dict[Any, Callable[[], Any]] = {}
    for rows in widths:
        drafter = None if rows == 1 else eagle_jax.BoundDrafter.of(blank(rows), target, name=f"{rows} rows")
        calls["pass", rows] = cycle_call(target, drafter, sample, setting, turns)
    for method, (head, shapes) in heads.items():
        for tree in shapes:
            calls[method, tree] = cycle_call(target, head.with_tree(tree), sample, setting, turns)
    for label, drafter in fixed.items():
        calls["whole", label] = cycle_call(target, drafter, sample, setting, turns)
    for index, call in enumerate(calls.values(), 1):
        note(f"compiling loop {index} of {len(calls)}")
        call()
    seconds = {name: statistics.median(times) / turns for name, times in time_repetitions(calls, repeats).items()}
    passes = PassCosts(tuple(widths), tuple(seconds["pass", rows] for rows in widths))
    drafts = {
        method: DraftCosts(tuple((t.depth, t.top_k, seconds[method, t] - passes.at(t.num_nodes + 1)) for t in shapes))
        for method, (_, shapes) in heads.items()
    }
    return Costs(passes, drafts, {label: seconds["whole", label] for label in fixed})


def prefill_seconds(
    target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter | None, samples: Mapping[str, Sample], setting: Setting
) -> dict[str, float]:
    """Measures the calls of a task up to every first token, with a drafter or plainly; the least of three.

    The first token of every reply is made its stop token, so that the compiled program is the one of whole replies.
    """
    found = {}
    for task, sample in samples.items():
        found[task] = 0.0
        for part in sample.batches(setting.batch):
            call = timed_call(target, drafter, part, setting)
            first = [[row[0]] for row in call().tokens]
            timed = {task: functools.partial(call, eos_ids=first)}
            timed[task]()
            found[task] += min(time_repetitions(timed, 3)[task])
    return found
