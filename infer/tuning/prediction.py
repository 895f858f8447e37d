"""Predicts the speed of a draft tree from the cost of a cycle and the cycles on recorded drafts.

Drafts do not persist: the state of a drafter depends on the confirmed text alone. So one run of plain decoding gives a
wide tree at every position. Where the cycles of a smaller tree would begin and end follows from that. The count is
exact for trees of the recorded width. A narrower tree opens other nodes than the wide one; the drafts below them were
not recorded and count as rejected.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    deterministic,
    empty_tree,
)
from eagle_jax.core.loop import drafted_levels, step
from eagle_jax.core.prompts import prefill
from eagle_jax.drafters import vanilla_drafter
from eagle_jax.drafters.tree_growth import DraftState
from eagle_jax.evaluate import depths_and_ranks
from eagle_jax.parallel import to_host
from eagle_jax.runtime.compilation import forget_programs
from eagle_jax.runtime.errors import check_finite
from eagle_jax.runtime.generation import prefill_program, request_of, step_program
from eagle_jax.runtime.request import Request, empty_caches
from infer.common.methods import tree_words
from infer.common.timing import FEW, Part, time_turns
from infer.tuning.trials import Prompt, Setting, arguments, request_at_width, show_progress

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
MEASURED = (0.25, 0.75)
"""Parts of a reply that are written where costs are measured: attention reads the cache up to there."""
RECORDED = 16
"""Maximum replies recorded at a time."""


class Costs(NamedTuple):
    """Holds seconds of a cycle of a whole batch at one setting.

    Attributes:
      rows: of a target pass, ascending from 1, plain decoding.
      passes: seconds of a cycle without drafting.
      drafts: of a method, for some top_k and numbers of drafted levels: (levels, top_k, seconds), for drafting and
        updating its state.
      draw: seconds in which the target draws a further token for every row; 0 at temperature 0.
    """

    rows: list[int]
    passes: list[float]
    drafts: dict[str, list[tuple[float, int, float]]]
    draw: float = 0.0

    def at_rows(self, rows: int) -> float:
        """Returns the seconds of a cycle that verifies `rows` rows, without drafting."""
        return float(np.interp(rows, self.rows, self.passes))

    def cycle(self, method: str, tree: TreeConfig) -> float:
        """Returns the seconds of a cycle of a method with a tree, bilinear in its depth and top_k."""
        terms = np.array([[1, levels, width, levels * width] for levels, width, _ in self.drafts[method]], float)
        weights = np.linalg.lstsq(terms, [seconds for *_, seconds in self.drafts[method]], rcond=None)[0]
        added = weights @ [1, tree.depth, tree.top_k, tree.depth * tree.top_k]
        return self.at_rows(tree.num_nodes + 1) + max(float(added), 0.0)

    def parts(self, method: str, tree: TreeConfig) -> CycleCost:
        """Returns the costs by which `generate` chooses the size of a tree.

        Two rows are a size as well, where they are much cheaper than four: on CPUs, in batches.
        """
        most, plain = tree.num_nodes + 1, self.at_rows(1)
        sizes: tuple[int, ...] = (most,)
        for rows in reversed(ladder(most, (2, *RUNGS))[:-1]):
            if rows == 1 or self.at_rows(rows) < CHEAPER * self.at_rows(sizes[0]):
                sizes = (rows, *sizes)
        drafting = self.cycle(method, tree) - self.at_rows(most)
        return CycleCost(
            sizes, tuple(round(self.at_rows(rows) / plain, 3) for rows in sizes),
            round(drafting / tree.depth / plain, 4), round(self.draw / plain, 4),
        )  # fmt: skip


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
    costs = Costs(rows, passes, {method: [] for method in drafters}, further_draw(seconds))
    for method, tree in ends:
        drafting = max(seconds[method, tree] - seconds[1], 0.0)
        costs.drafts[method].append((levels[method, tree], tree.top_k, drafting))
    return costs


def extremes(trees: Iterable[TreeConfig]) -> list[TreeConfig]:
    """Returns the shallowest and the deepest of the narrowest and of the widest trees."""
    order = sorted(trees, key=lambda tree: (tree.top_k, tree.depth))
    ends = [[tree for tree in order if tree.top_k == end.top_k] for end in (order[0], order[-1])]
    return list(dict.fromkeys(tree for alike in ends for tree in (alike[0], alike[-1])))


def blank_states(
    target: eagle_jax.Target, prompts: Sequence[Prompt], setting: Setting, drafter: Drafter | None = None,
    written: Sequence[float] = MEASURED,
) -> tuple[Request, list[GenerateState]]:  # fmt: skip
    """Returns a request after these prompts, and a state of it for every part of the replies that is `written`.

    The states are empty caches with the right lengths: no prefill is compiled, and the work of a cycle does not depend
    on the numbers in it.

    Args:
      drafter: a `blank` one; None decodes plainly.
    """
    bound = eagle_jax.BoundDrafter.bind(drafter or blank(1, 0), target)
    request = request_of(target, bound, eos_ids=(), **arguments(prompts, setting))
    params, batch, sampling, engine, sizes = request
    start = functools.partial(prefill, engine=engine, sizes=sizes)
    state = jax.eval_shape(start, params, batch, sampling)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state._replace(keys=None))
    state = state._replace(keys=batch.keys, budget=batch.budget, eos_ids=batch.eos_ids)
    lengths = [batch.lengths + int(part * setting.max_new_tokens) for part in written]
    return request, [state._replace(cache=state.cache._replace(length=length)) for length in lengths]


def passes_of(
    target: eagle_jax.Target, widths: Iterable[int], depth: int, prompts: Sequence[Prompt], setting: Setting
) -> dict[Any, Callable[[int], Any]]:
    """Returns calls by width that run cycles of so many rows, without drafting, at the places `MEASURED` of replies.

    A pass of more than one row picks and commits a path of `depth` levels, as that of a drafted tree. One row is a
    plain step.
    """
    plain, trees = (blank_states(target, prompts, setting, drafter) for drafter in (None, blank(2, depth)))

    def repeated(width: int) -> Callable[[int], Any]:
        (params, _, sampling, engine, _), (state, *others) = plain if width == 1 else trees
        if width > 1:
            engine = engine._replace(drafter=blank(width, depth))
        return Part(lambda params, state: step(params, state, sampling, engine)[0], params, state).program(*others)

    return {width: repeated(width) for width in widths}


def walks_of(target: eagle_jax.Target, prompts: Sequence[Prompt], setting: Setting) -> dict[Any, Callable[[int], Any]]:
    """Returns calls that walk down a chain of which every token is accepted (`WALK`), and draw at its root (`DRAW`)."""
    (_, _, sampling, engine, _), (state, *_) = blank_states(target, prompts, setting)
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
    plain, states = blank_states(target, prompts, setting, written=written)
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


def filled(state: Any, length: jax.Array) -> Any:
    """Returns the state of a drafter with so many tokens in its cache, if it has one."""
    return state._replace(cache=state.cache._replace(length=length)) if isinstance(state, DraftState) else state


def blank(rows: int, depth: int = 1) -> Drafter:
    """Returns a drafter of trees without cost: a root and copies of it, `rows` in all, of at most `depth` levels."""

    def draft(params: Params, state: Any, root: jax.Array, *rest: Any) -> tuple[DraftTree, Any]:
        tokens = jnp.broadcast_to(root[:, None], (root.shape[0], rows))
        parents = jnp.zeros_like(tokens).at[:, 0].set(ROOT)
        return DraftTree(tokens, parents, jnp.zeros(tokens.shape, jnp.float32)), state

    return vanilla_drafter()._replace(draft=draft, depth=depth, num_nodes=rows - 1)


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
