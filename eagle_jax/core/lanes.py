"""Answers many prompts in a few lanes: a lane whose reply is over takes the next one, in one program.

Prompts are read in groups, each once for all of its samples, into a room beside the lanes. From there replies begin in
lanes that are free. With the default acceptance rule a reply depends on its prompt and key alone, so every text is
that of `generate`. Every leaf of the drafter's state must have its rows on axis 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from eagle_jax.core import adaptive
from eagle_jax.core.costs import Payoff
from eagle_jax.core.loop import burst, check_cost, drafted_cycle, step
from eagle_jax.core.prompts import Prefix, begin, empty_caches, empty_features, read, slots_of
from eagle_jax.core.randomness import threefry_keys
from eagle_jax.core.types import FINITE, Engine, GenerateState, Params, Sampling, Sizes


class Jobs(NamedTuple):
    """Replies to write: J = Q times G, G samples of each of Q prompts. Job q * G + g is sample g of prompt q.

    Attributes:
      prompts: [Q, P] int32, padded on the right. lengths: [Q] int32, tokens of every prompt; the last prompts may have
        0: they are padding, without replies, so that numbers of prompts share a program.
      budget: [J] int32, most tokens of a reply. eos_ids: [J, E] int32, stop tokens, padded with -1.
      keys: [J] PRNG keys.
    """

    prompts: Int[Array, "Q P"]
    lengths: Int[Array, " Q"]
    budget: Int[Array, " J"]
    eos_ids: Int[Array, "J E"]
    keys: Key[Array, " J"]


class Replies(NamedTuple):
    """Holds finished replies, as in `GenerateState`; other rows are 0, or `FINITE` in the last two.

    Attributes:
      tokens: [J, M] int32. num_tokens, cycles, not_finite, bad_drafts: [J] int32. accepted: [J, D+1] int32.
      log_probs: [J, M] float32 or None. finished: [J] bool, also of padding.
      features: [J, S, F] or None, of prompt and reply.
    """

    tokens: Int[Array, "J M"]
    num_tokens: Int[Array, " J"]
    cycles: Int[Array, " J"]
    accepted: Int[Array, "J D1"]
    not_finite: Int[Array, " J"]
    bad_drafts: Int[Array, " J"]
    log_probs: Float[Array, "J M"] | None
    finished: Bool[Array, " J"]
    features: Float[Array, "J S F"] | None = None


class RolloutState(NamedTuple):
    """Holds a rollout in progress.

    Attributes:
      lanes: the B replies in progress. job: [B] int32, their jobs; J marks a free lane.
      room: the R prompts read last. ready: the next sample of each, after its first token, without a cache
        and features, which are the room's.
      waiting: [R] bool, rows of `ready` that are not yet in a lane.
      first: int32, prompt in the first row of the room. sample: int32, samples of its prompts that have begun.
      replies: finished ones. passes: int32, target passes over the lanes.
      payoff: what the drafts have yielded; read with `engine.cycle_cost` alone.
    """

    lanes: GenerateState
    job: Int[Array, " B"]
    room: Prefix
    ready: GenerateState
    waiting: Bool[Array, " R"]
    first: Int[Array, ""]
    sample: Int[Array, ""]
    replies: Replies
    passes: Int[Array, ""]
    payoff: Payoff


def start_rollout(
    params: Params, jobs: Jobs, sampling: Sampling, engine: Engine, sizes: Sizes, lanes: int, room: int,
    payoff: Payoff | None = None,
) -> RolloutState:  # fmt: skip
    """Returns the state of a rollout before its first reply.

    Args:
      sizes: `sizes.slots` is the capacity of every lane and row of the room.
      lanes: B, replies at a time. room: R, prompts that are read together. payoff: as in `generate`.

    Raises:
      ValueError: lanes, room or slots are too few, the chunk does not divide P, the numbers of jobs and prompts do not
        fit, or the drafter cannot follow `engine.cycle_cost`, as in `generate`.
    """
    count, prompts = len(jobs.budget), len(jobs.lengths)
    if min(lanes, room) < 1:
        raise ValueError(f"lanes and room must be at least 1, got {lanes} and {room}. Raise them.")
    if not prompts or count % prompts:
        raise ValueError(f"jobs must be a multiple of the {prompts} prompts, got {count}. Give every prompt as many.")
    check_cost(engine)
    slots, samples = slots_of(jobs.prompts.shape[1], engine, sizes), count // prompts

    def first_group() -> tuple[Prefix, GenerateState]:
        first = jnp.zeros((room,), jnp.int32)
        caches = empty_caches(params, engine, room, slots)
        kept = empty_features(params, engine, room, slots)
        prefix = read(params, *caches, jobs.prompts[first], jobs.lengths[first], engine, sizes.chunk, kept)
        return prefix, _begin(params, prefix, jobs, first, sampling, engine, sizes)

    def zeros(tree: Any, rows: int) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), tree)

    prefix, ready = jax.eval_shape(first_group)
    key, without_keys = threefry_keys(jobs.keys[:1]), ready._replace(keys=())
    running = zeros(without_keys, lanes)._replace(keys=jnp.repeat(key, lanes), done=jnp.ones((lanes,), bool))
    begun = zeros(without_keys._replace(cache=(), features=None), room)._replace(keys=jnp.repeat(key, room))
    names = [name for name in Replies._fields if name != "finished"]
    kept = {name: zeros(getattr(ready, name), count) for name in names}
    kept |= {name: jnp.full((count,), FINITE, jnp.int32) for name in ("not_finite", "bad_drafts")}
    finished = jnp.repeat(jobs.lengths == 0, samples, total_repeat_length=count)
    return RolloutState(
        running, jnp.full((lanes,), count, jnp.int32), zeros(prefix, room), begun, jnp.zeros((room,), bool),
        jnp.int32(-room), jnp.int32(samples), Replies(**kept, finished=finished), jnp.int32(0),
        adaptive.start() if payoff is None else adaptive.resume(payoff),
    )  # fmt: skip


def advance_rollout(
    params: Params, state: RolloutState, jobs: Jobs, sampling: Sampling, engine: Engine, sizes: Sizes, cycles: int
) -> RolloutState:
    """Runs `cycles` target passes over the lanes, or fewer if all replies are finished; free lanes are filled first.

    With `engine.cycle_cost` drafts that do not pay are followed by plain steps, up to `adaptive.BURST` for one pass. An
    eighth of the lanes may be over before they end.
    `engine` and `sizes` are those of `start_rollout`.
    """
    count, prompts, rows = len(jobs.budget), len(jobs.lengths), len(state.waiting)
    samples, slots = count // prompts, slots_of(jobs.prompts.shape[1], engine, sizes)

    def group(first: Array) -> tuple[Array, Array]:
        """Returns the prompts of a group, and their lengths; 0 beyond the last prompt."""
        place = first + jnp.arange(rows)
        prompt = jnp.minimum(place, prompts - 1)
        return prompt, jnp.where(place < prompts, jobs.lengths[prompt], 0)

    def read_group(state: RolloutState) -> RolloutState:
        first = state.first + rows
        prompt, lengths = group(first)
        caches = empty_caches(params, engine, rows, slots)
        kept = empty_features(params, engine, rows, slots)
        room = read(params, *caches, jobs.prompts[prompt], jnp.maximum(lengths, 1), engine, sizes.chunk, kept)
        return state._replace(room=room, first=first, sample=jnp.int32(0))

    def begin_sample(state: RolloutState) -> RolloutState:
        prompt, lengths = group(state.first)
        ready: Any = _begin(params, state.room, jobs, prompt * samples + state.sample, sampling, engine, sizes)
        ready = ready._replace(cache=(), features=None)
        return state._replace(ready=ready, waiting=lengths > 0, sample=state.sample + 1)

    def enter(state: RolloutState) -> RolloutState:
        row, lane = jnp.argmax(state.waiting), jnp.argmax(state.job == count)
        new = state.ready._replace(cache=state.room.cache, features=state.room.kept)
        pick, put = jax.lax.dynamic_index_in_dim, jax.lax.dynamic_update_index_in_dim
        lanes = jax.tree.map(lambda rows, part: put(rows, pick(part, row), lane, 0), state.lanes, new)
        job = (state.first + row) * samples + state.sample - 1
        return state._replace(
            lanes=lanes, job=state.job.at[lane].set(job.astype(jnp.int32)), waiting=state.waiting.at[row].set(False)
        )

    def is_free(state: RolloutState) -> Array:
        return jnp.any(state.job == count)

    def nobody_waits(state: RolloutState) -> Array:
        return ~jnp.any(state.waiting)

    def fill(state: RolloutState) -> RolloutState:
        # The first two loops make at most one turn: a `lax.cond` would copy the caches.
        state = jax.lax.while_loop(lambda now: nobody_waits(now) & (now.sample == samples), read_group, state)
        state = jax.lax.while_loop(nobody_waits, begin_sample, state)
        state = jax.lax.while_loop(lambda now: is_free(now) & ~nobody_waits(now), enter, state)
        return _harvest(state)  # a first token may end its reply

    def more(state: RolloutState) -> Array:
        return ~nobody_waits(state) | (state.sample < samples) | (group(state.first + rows)[1][0] > 0)

    def cycle(carry: tuple[Array, RolloutState]) -> tuple[Array, RolloutState]:
        turn, state = carry
        state = jax.lax.while_loop(lambda now: is_free(now) & more(now), fill, state)
        return turn + 1, _harvest(_pass(params, state, sampling, engine, more(state)))

    def unfinished(carry: tuple[Array, RolloutState]) -> Array:
        return (carry[0] < cycles) & ~jnp.all(carry[1].replies.finished)

    return jax.lax.while_loop(unfinished, cycle, (jnp.int32(0), state))[1]


def _pass(params: Params, state: RolloutState, sampling: Sampling, engine: Engine, more: Array) -> RolloutState:
    """Runs a cycle over the lanes, or plain steps; these end sooner if there are `more` replies for free lanes."""
    cost = engine.cycle_cost
    if cost is None:
        running = jnp.any(~state.lanes.done)
        return state._replace(lanes=step(params, state.lanes, sampling, engine)[0], passes=state.passes + running)
    enough = jnp.where(more, -(-len(state.job) // 8), 0)

    def drafted(carry: tuple[Array, Payoff, GenerateState]) -> tuple[Array, Payoff, GenerateState]:
        return jnp.bool_(True), *drafted_cycle(params, *carry[1:], sampling, engine, cost, refilled=True)

    def plain(carry: tuple[Array, Payoff, GenerateState]) -> tuple[Array, Payoff, GenerateState]:
        return jnp.bool_(True), *burst(params, *carry[1:], sampling, engine, enough)

    # Two loops, of at most one turn together, and not `lax.cond`, whose branches would copy the caches.
    carry = jnp.all(state.lanes.done), state.payoff, state.lanes
    carry = jax.lax.while_loop(lambda carry: ~carry[0] & (carry[1].wait == 0), drafted, carry)
    _, payoff, lanes = jax.lax.while_loop(lambda carry: ~carry[0] & (carry[1].wait > 0), plain, carry)
    passes = jnp.max(lanes.cycles - state.lanes.cycles)  # of a row that ran to the end
    return state._replace(lanes=lanes, payoff=payoff, passes=state.passes + passes)


def rollout(
    params: Params, jobs: Jobs, sampling: Sampling, engine: Engine, sizes: Sizes, lanes: int, room: int | None = None,
    payoff: Payoff | None = None,
) -> RolloutState:  # fmt: skip
    """Writes all replies in `lanes` lanes: one program, for use inside `jit`.

    Args:
      room: prompts that are read together; None is a quarter of the lanes. payoff: as in `generate`.

    Raises:
      ValueError: as `start_rollout`.
    """
    count = len(jobs.budget)
    rows = default_room(lanes) if room is None else room
    state = start_rollout(params, jobs, sampling, engine, sizes, lanes, rows, payoff)
    passes = min(count * (sizes.max_tokens + 1), 2**31 - 1)
    return advance_rollout(params, state, jobs, sampling, engine, sizes, passes)


def default_room(lanes: int) -> int:
    """Returns the default number of prompts per group. Larger groups are read faster and take more memory."""
    return max(1, lanes // 4)


def _begin(
    params: Params, prefix: Prefix, jobs: Jobs, job: Int[Array, " R"], sampling: Sampling, engine: Engine, sizes: Sizes
) -> GenerateState:
    parts = jobs.budget[job], jobs.eos_ids[job], jobs.keys[job]
    return begin(params, prefix, *parts, sampling, engine, sizes.max_tokens)


def _harvest(state: RolloutState) -> RolloutState:
    """Keeps the replies that are over, and frees their lanes."""
    count, lanes = len(state.replies.finished), state.lanes
    at = jnp.where(lanes.done, state.job, count)  # a row beyond the last one is dropped

    def keep(name: str, rows: Array | None) -> Array | None:
        return None if rows is None else getattr(state.replies, name).at[at].set(rows, mode="drop")

    names = [name for name in Replies._fields if name not in ("finished", "features")]
    kept: dict[str, Any] = {name: keep(name, getattr(lanes, name)) for name in names}
    finished = state.replies.finished.at[at].set(True, mode="drop")
    features = _harvest_features(state, at)
    replies = Replies(**kept, finished=finished, features=features)
    return state._replace(replies=replies, job=jnp.where(lanes.done, count, state.job))


def _harvest_features(state: RolloutState, at: Int[Array, " B"]) -> Float[Array, "J S F"] | None:
    """Keeps the features of the replies that are over; `at` is their job, or the number of jobs.

    They are large: a scatter of all lanes would move them in every cycle, and the loop moves those of ended replies.
    """
    source, kept = state.lanes.features, state.replies.features
    if source is None or kept is None:
        return None

    def move(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        at, kept = carry
        lane = jnp.argmin(at)
        row = jax.lax.dynamic_index_in_dim(source, lane, keepdims=False)
        return at.at[lane].set(len(kept)), jax.lax.dynamic_update_index_in_dim(kept, row, at[lane], 0)

    return jax.lax.while_loop(lambda carry: jnp.any(carry[0] < len(kept)), move, (at, kept))[1]
