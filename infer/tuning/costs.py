"""Measures what the parts of a cycle cost on this machine: passes, drafting, draws, and cycles that verify nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core import (
    ROOT,
    CycleCost,
    Drafter,
    DraftTree,
    GenerateState,
    Params,
    RowRandomness,
    Verified,
    adaptive,
    deterministic,
)
from eagle_jax.core.cache import slots_read
from eagle_jax.core.costs import Payoff
from eagle_jax.core.loop import drafted_cycle, drafted_levels, step
from eagle_jax.core.prompts import prefill
from eagle_jax.drafters import vanilla_drafter
from eagle_jax.drafters.tree_growth import DraftState
from eagle_jax.runtime.compilation import forget_programs
from eagle_jax.runtime.generation import request_of
from eagle_jax.runtime.request import Request, empty_caches
from infer.common.methods import tree_words
from infer.common.timing import FEW, Part, time_turns
from infer.tuning.trials import Prompt, Setting, arguments, show_progress

WIDTHS = tuple(2**power for power in range(9))
"""Rows of measured target passes; of those between, the seconds are interpolated."""
RUNGS = (4, 8, 16, 32)
"""Rows of the smaller passes of a ladder of tree sizes; plain decoding has one row."""
CHEAPER = 0.95
"""Cost of a size over that of the next larger one, above which a ladder does without it: every size is compiled."""
ENOUGH = 30.0
"""Seconds over which costs are measured at least: their lower quartile varies little then."""
TURNS = 8
"""Cycles that are timed at once."""
WALKED = 3
"""Accepted tokens per row in a measured walk."""
WALK, DRAW = f"walk of {WALKED} tokens", "draw"
"""Names of calls."""
APART = 64
"""Tokens between the shortest and the longest prompts from which costs are measured at both."""
MEASURED = (0.25, 0.75)
"""Parts of a reply that are written where costs are measured: attention reads the cache up to there."""


class Costs(NamedTuple):
    """Holds seconds of a cycle of a whole batch at one setting.

    Attributes:
      rows: of a target pass, ascending from 1, plain decoding.
      passes: seconds of a cycle without drafting.
      drafts: of a method, for some top_k and numbers of drafted levels: (levels, top_k, seconds), for drafting and
        updating its state.
      draw: seconds in which the target draws a further token for every row; 0 at temperature 0.
      empty: of a method, seconds of a cycle that drafts as little as it can and verifies nothing, beyond those of a
        plain step.
      levels: of a method, drafted levels of such a cycle: 1, or all of a tree whose drafting cannot stop.
      slots: as in `CycleCost`, the mean over measured places.
    """

    rows: list[int]
    passes: list[float]
    drafts: dict[str, list[tuple[float, int, float]]]
    draw: float = 0.0
    empty: Mapping[str, float] = MappingProxyType({})
    levels: Mapping[str, int] = MappingProxyType({})
    slots: float | None = None

    def at_rows(self, rows: int) -> float:
        """Returns the seconds of a cycle that verifies `rows` rows, without drafting."""
        return float(np.interp(rows, self.rows, self.passes))

    def cycle(self, method: str, tree: TreeConfig) -> float:
        """Returns the seconds of a cycle of a method with a tree, bilinear in its depth and top_k."""
        terms = np.array([[1, levels, width, levels * width] for levels, width, _ in self.drafts[method]], float)
        weights = np.linalg.lstsq(terms, [seconds for *_, seconds in self.drafts[method]], rcond=None)[0]
        added = weights @ [1, tree.depth, tree.top_k, tree.depth * tree.top_k]
        return self.at_rows(tree.num_nodes + 1) + max(float(added), 0.0)

    def parts(self, method: str, tree: TreeConfig, longer: Costs | None = None) -> CycleCost:
        """Returns the costs by which `generate` chooses the size of a tree.

        Two rows are a size as well, where they are much cheaper than four: on CPUs, in batches.

        Args:
          longer: seconds in a larger cache; without more slots they do not count.
        """
        points = [self] if longer is None or longer.slots == self.slots else [self, longer]
        most = tree.num_nodes + 1
        sizes: tuple[int, ...] = (most,)
        for rows in reversed(ladder(most, (2, *RUNGS))[:-1]):
            if rows == 1 or any(one.at_rows(rows) < CHEAPER * one.at_rows(sizes[0]) for one in points):
                sizes = (rows, *sizes)
        cost: CycleCost | None = None
        for one in reversed(points):
            plain = one.at_rows(1)
            level = (one.cycle(method, tree) - one.at_rows(most)) / tree.depth
            draft = max(one.empty.get(method, 0.0) - level * one.levels.get(method, 1), 0.0)
            passes = tuple(round(one.at_rows(rows) / plain, 3) for rows in sizes)
            level, token, draft = (round(seconds / plain, 4) for seconds in (level, one.draw, draft))
            cost = CycleCost(sizes, passes, level, token, draft, one.slots, cost)
        assert cost is not None
        return cost


def ladder(most: int, smaller: Sequence[int] = RUNGS) -> tuple[int, ...]:
    """Returns the rows of all passes that a ladder may have, up to a tree of `most` rows."""
    return 1, *(rows for rows in smaller if rows < most), most


def measure_costs(
    target: eagle_jax.Target,
    drafters: Mapping[str, Mapping[TreeConfig, eagle_jax.BoundDrafter]],
    prompts: Sequence[Prompt],
    setting: Setting,
    repeats: int,
) -> Costs:
    """Measures passes of some widths, and drafting of the extreme trees of every method (`time_turns`).

    Widths are powers of two, and that of the widest tree and of a method's only one.

    Args:
      drafters: of every method, by tree.
      prompts: of one batch.

    Raises:
      DeviceError: other programs disturb the times.
    """
    widest = max((tree.num_nodes + 1 for trees in drafters.values() for tree in trees), default=1)
    alone = [tree for trees in drafters.values() if len(trees) == 1 for tree in trees]
    # Costs rise in steps: between 4 and 8 rows, 6 may cost as much as 8.
    rows = sorted({*(width for width in WIDTHS if width < widest), *(tree.num_nodes + 1 for tree in alone), widest})
    depth = max((tree.depth for trees in drafters.values() for tree in trees), default=1)
    forget_programs()
    calls: dict[Any, Callable[[int], Any]] = passes_of(target, rows, depth, prompts, setting)
    ends = {(method, tree): trees[tree] for method, trees in drafters.items() for tree in extremes(trees)}
    calls |= {name: drafting_of(target, drafter, prompts, setting) for name, drafter in ends.items()}
    calls |= walks_of(target, prompts, setting) if setting.temperature else {}
    empty = {f"empty cycles of {method}": (method, trees[extremes(trees)[-1]]) for method, trees in drafters.items()}
    calls |= {name: empty_cycles_of(target, drafter, prompts, setting) for name, (_, drafter) in empty.items()}
    levels = {}
    for number, (name, call) in enumerate(calls.items(), 1):
        pass_words = f"a target pass of {name} rows" if name in rows else name
        what = f"drafts of {name[0]}, {tree_words(name[1])}" if name in ends else pass_words
        show_progress(f"costs: compiling {number} of {len(calls)}, {what}")
        found = call(FEW)
        if name in ends:
            levels[name] = float(found.levels) / FEW
    show_progress(f"costs: measuring, {repeats} repetitions or more")
    seconds = time_turns(calls, TURNS, 1, repeats, enough=ENOUGH)
    seconds = {name: time if name in (WALK, DRAW) else time / len(MEASURED) for name, time in seconds.items()}
    passes = [seconds[width] for width in rows]
    beyond = {method: seconds[name] - seconds[1] for name, (method, _) in empty.items()}
    least = {method: least_levels(drafter.drafter) for method, drafter in empty.values()}
    plain = eagle_jax.BoundDrafter.bind(blank(1, 0), target)
    _, states = blank_states(target, prompts, setting, plain)
    slots = float(np.mean([slots_read(state.cache) for state in states]))
    costs = Costs(rows, passes, {method: [] for method in drafters}, further_draw(seconds), beyond, least, slots)
    for method, tree in ends:
        drafting = max(seconds[method, tree] - seconds[1], 0.0)
        costs.drafts[method].append((levels[method, tree], tree.top_k, drafting))
    return costs


def ends_of(parts: Sequence[Sequence[Prompt]]) -> list[list[Prompt]]:
    """Returns the batches at whose lengths costs are measured: the shortest and the longest, or the middle one alone.

    Args:
      parts: batches. The longest prompt of each decides on the size of its cache.
    """
    length = lambda part: max(len(prompt.tokens) for prompt in part)  # noqa: E731
    order = sorted(map(list, parts), key=length)
    apart = length(order[-1]) - length(order[0]) >= APART
    return [order[0], order[-1]] if apart else [order[(len(order) - 1) // 2]]


def between(few: Costs, many: Costs, share: float) -> Costs:
    """Returns costs so far from `few` on the way to `many`, from which speeds are predicted."""
    at = lambda first, last: first + share * (last - first)  # noqa: E731
    drafts = {
        method: [
            (at(levels, later), width, at(seconds, longer))
            for (levels, width, seconds), (later, _, longer) in zip(own, many.drafts[method], strict=True)
        ]
        for method, own in few.drafts.items()
    }
    return few._replace(
        passes=[at(*both) for both in zip(few.passes, many.passes, strict=True)],
        drafts=drafts,
        draw=at(few.draw, many.draw),
        empty={method: at(seconds, many.empty[method]) for method, seconds in few.empty.items()},
    )


def extremes(trees: Iterable[TreeConfig]) -> list[TreeConfig]:
    """Returns the shallowest and the deepest of the narrowest and of the widest trees."""
    order = sorted(trees, key=lambda tree: (tree.top_k, tree.depth))
    ends = [[tree for tree in order if tree.top_k == end.top_k] for end in (order[0], order[-1])]
    return list(dict.fromkeys(tree for alike in ends for tree in (alike[0], alike[-1])))


def blank_states(
    target: eagle_jax.Target, prompts: Sequence[Prompt], setting: Setting, drafter: eagle_jax.BoundDrafter,
    written: Sequence[float] = MEASURED, cost: CycleCost | None = None,
) -> tuple[Request, list[GenerateState]]:  # fmt: skip
    """Returns a request after these prompts, and a state of it for every part of the replies that is `written`.

    The states are empty caches with the right lengths: no prefill is compiled, and the work of a cycle does not depend
    on the numbers in it.
    """
    request = request_of(target, drafter, eos_ids=(), cycle_cost=cost, **arguments(prompts, setting))
    params, batch, sampling, engine, sizes = request
    start = functools.partial(prefill, engine=engine, sizes=sizes)
    state = jax.eval_shape(start, params, batch, sampling)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state._replace(keys=None))
    state = state._replace(keys=batch.keys, budget=batch.budget, eos_ids=batch.eos_ids)
    lengths = [batch.lengths + int(part * setting.max_new_tokens) for part in written]
    return request, [filled(state._replace(drafter=filled(state.drafter, length)), length) for length in lengths]


def passes_of(
    target: eagle_jax.Target, widths: Iterable[int], depth: int, prompts: Sequence[Prompt], setting: Setting
) -> dict[Any, Callable[[int], Any]]:
    """Returns calls by width that run cycles of so many rows, without drafting, at the places `MEASURED` of replies.

    A pass of more than one row picks and commits a path of `depth` levels, as that of a drafted tree. One row is a
    plain step.
    """
    bind = functools.partial(eagle_jax.BoundDrafter.bind, target=target)
    plain, trees = (blank_states(target, prompts, setting, bind(one)) for one in (blank(1, 0), blank(2, depth)))

    def repeated(width: int) -> Callable[[int], Any]:
        (params, _, sampling, engine, _), (state, *others) = plain if width == 1 else trees
        if width > 1:
            engine = engine._replace(drafter=blank(width, depth))
        return Part(lambda params, state: step(params, state, sampling, engine)[0], params, state).program(*others)

    return {width: repeated(width) for width in widths}


def walks_of(target: eagle_jax.Target, prompts: Sequence[Prompt], setting: Setting) -> dict[Any, Callable[[int], Any]]:
    """Returns calls that walk down a chain of which every token is accepted (`WALK`), and draw at its root (`DRAW`)."""
    bound = eagle_jax.BoundDrafter.bind(blank(1, 0), target)
    (_, _, sampling, engine, _), (state, *_) = blank_states(target, prompts, setting, bound)
    rows, length = len(prompts), WALKED + 1
    sure = jnp.zeros((rows, length, target.config.vocab_size), jnp.float32).at[:, :, 0].set(1e6)
    tokens = jnp.zeros((rows, length), jnp.int32)
    chain = DraftTree(tokens, tokens + jnp.arange(length)[None] - 1, jnp.zeros(tokens.shape, jnp.float32))

    def walk(depth: int) -> Callable[[int], Any]:
        def turn(params: Params, index: jax.Array) -> jax.Array:
            found = deterministic(chain, params["logits"], state.keys, index, sampling, depth, engine.target.row_groups)
            return index + 1 + (found.next_token < 0)  # the next turn depends on this one

        return Part(turn, {"logits": sure}, state.num_tokens).program()

    return {WALK: walk(WALKED), DRAW: walk(0)}


def further_draw(seconds: Mapping[Any, float]) -> float:
    """Returns the seconds of a further draw for every row from those of `walks_of`; 0 at temperature 0."""
    return max(seconds.get(WALK, 0.0) - seconds.get(DRAW, 0.0), 0.0) / WALKED


class Drafting(NamedTuple):
    """Holds the carry of `drafting_of`: states of target and drafter, and the levels that were drafted so far."""

    target: GenerateState
    drafter: Any
    levels: jax.Array


def drafting_of(
    target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter, prompts: Sequence[Prompt], setting: Setting,
    written: Sequence[float] = MEASURED,
) -> Callable[[int], Drafting]:  # fmt: skip
    """Returns a call that runs plain steps, and after each drafts and confirms a whole path, for all `written` parts.

    Between two drafts the weights of the target pass through the caches of the processor, as in generation. On an empty
    state some levels may not be drafted, since no node of theirs could enter the tree: the call returns their number.
    """
    plain, states = blank_states(
        target, prompts, setting, eagle_jax.BoundDrafter.bind(blank(1, 0), target), written=written
    )
    params, batch, sampling, engine, sizes = request_of(target, drafter, **arguments(prompts, setting))
    method = engine.drafter
    _, own = empty_caches(params, engine, len(prompts), sizes.slots)
    shape = len(prompts), method.depth + 1, len(method.taps) * target.config.hidden_size

    def cycle(params: Params, carry: Drafting) -> Drafting:
        state, _ = step(params, carry.target, sampling, plain.engine)
        randomness = RowRandomness(batch.keys, carry.target.cache.length)
        tree, own = method.draft(params, carry.drafter, state.root, randomness, sampling)
        levels = drafted_levels(method, tree)
        path = tree.tokens[:, : method.depth + 1]
        features = jnp.broadcast_to(state.root[:, None, None].astype(target.dtype), shape)  # no constant of the loop
        verified = Verified(path, path, features, carry.target.cache.length, jnp.ones_like(state.root))
        own = method.update(params, own, verified)
        # The next step follows from this draft, so that the compiler keeps both.
        return Drafting(state._replace(root=path[:, -1]), own, carry.levels + levels)

    carry, *others = [Drafting(state, filled(own, state.cache.length), jnp.int32(0)) for state in states]
    return Part(cycle, params, carry).program(*others)


def empty_cycles_of(
    target: eagle_jax.Target, drafter: eagle_jax.BoundDrafter, prompts: Sequence[Prompt], setting: Setting,
    written: Sequence[float] = MEASURED,
) -> Callable[[int], Any]:  # fmt: skip
    """Returns a call that runs cycles of a ladder that draft `least_levels`, and choose to verify no node."""
    cost = CycleCost((1, drafter.drafter.num_nodes + 1), (0.5, 99.0), 1e-6)  # by which nodes never pay
    (params, _, sampling, engine, _), states = blank_states(target, prompts, setting, drafter, written, cost)
    carry, *others = [(adaptive.start(), state) for state in states]

    def cycle(params: Params, carry: tuple[Payoff, GenerateState]) -> tuple[Payoff, GenerateState]:
        payoff, state = carry
        return drafted_cycle(params, payoff, state, sampling, engine, cost)

    return Part(cycle, params, carry).program(*others)


def least_levels(drafter: Drafter) -> int:
    """Returns the fewest levels that a drafted cycle has: one, if drafting can stop where levels do not pay."""
    return drafter.depth if drafter.with_limit is None else 1


def filled(state: Any, length: jax.Array) -> Any:
    """Returns the state of a drafter or of generation with so many tokens in its cache, if it has one."""
    if not isinstance(state, DraftState | GenerateState):
        return state
    return state._replace(cache=state.cache._replace(length=length))


def blank(rows: int, depth: int = 1) -> Drafter:
    """Returns a drafter of trees without cost: a root and copies of it, `rows` in all, of at most `depth` levels."""

    def draft(params: Params, state: Any, root: jax.Array, *rest: Any) -> tuple[DraftTree, Any]:
        tokens = jnp.broadcast_to(root[:, None], (root.shape[0], rows))
        parents = jnp.zeros_like(tokens).at[:, 0].set(ROOT)
        return DraftTree(tokens, parents, jnp.zeros(tokens.shape, jnp.float32)), state

    return vanilla_drafter()._replace(draft=draft, depth=depth, num_nodes=rows - 1)
