"""Answers many prompts in a few lanes that refill themselves: rollouts of reinforcement learning, evaluation."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Literal, Unpack

import jax
import numpy as np

from eagle_jax import core
from eagle_jax.config import check_integer
from eagle_jax.core import CycleCost, Jobs, Payoff, Replies, default_room
from eagle_jax.parallel import row_groups, to_host
from eagle_jax.runtime.drafters import BoundDrafter
from eagle_jax.runtime.errors import check_finite, check_fits, memory_errors
from eagle_jax.runtime.generation import (
    STATIC,
    GenerateOutput,
    Options,
    begun_payoff,
    check_names,
    checked_payoff,
    chosen,
    cut_rows,
    request_of,
)
from eagle_jax.runtime.interrupts import kept_interrupt
from eagle_jax.runtime.profile import Profile
from eagle_jax.runtime.request import bucket, keys_of, round_up, with_taps
from eagle_jax.runtime.target import Target

PASSES = 64
"""Target passes per call; Ctrl-C ends a rollout between calls."""

start_program = jax.jit(core.start_rollout, static_argnames=(*STATIC, "lanes", "room"))
advance_program = jax.jit(core.advance_rollout, static_argnames=(*STATIC, "cycles"), donate_argnums=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutOutput(GenerateOutput):
    """The result of `rollout`: as of `generate`, with J rows; row q * samples_per_prompt + g is sample g of prompt q.

    Attributes:
      finished: [J] bool; False only if the rollout was interrupted: such a row has no tokens.
      passes: target passes over the lanes, without those over prompts.
      interrupted: whether Ctrl-C was pressed, also where all replies were finished.
    """

    finished: np.ndarray
    passes: int
    interrupted: bool = False


def rollout(
    target: Target,
    drafter: BoundDrafter | Literal["auto"] | None,
    prompts: Sequence[Sequence[int]],
    *,
    lanes: int = 16,
    samples_per_prompt: int = 1,
    room: int | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    cycle_cost: float | CycleCost | None = None,
    payoff: Payoff | None = None,
    taps: Sequence[int] | None = None,
    **options: Unpack[Options],
) -> RolloutOutput:
    """Generates like `generate`, but at most `lanes` replies at a time: a lane whose reply is over takes the next one.

    Every text is what `generate` returns for the prompts, each repeated `samples_per_prompt` times, with the same key.
    With the default acceptance rule, in float32, it depends neither on drafter nor on lanes. Memory holds caches
    of `lanes` and `room` rows, and the replies; with `taps`, features of all of these. On a mesh both numbers are
    rounded up to rows for every device. Prompts with the largest `max_new_tokens` come first, so that the last lanes
    end together.

    Ctrl-C ends the rollout after the passes in progress (at most 64) and returns what is finished; before the first
    reply, or pressed twice, it raises `KeyboardInterrupt`.

    Args:
      drafter: None is plain decoding; "auto" is the fastest one of `profile` for a batch of `lanes`.
      prompts: token ids per prompt.
      lanes: replies at a time.
      samples_per_prompt: replies to every prompt, which is read once. At temperature 0 they are all the same.
      room: prompts that are read together; None is a quarter of the lanes.
      profile, cycle_cost, payoff: as in `generate`. While drafts do not pay, an eighth of the lanes may wait for a next
        prompt for up to 32 passes.
      taps: hidden states to return for every token that the target read, as in `generate`.
      options: as in `generate`: `max_new_tokens` and `eos_ids` are one for all or one per prompt, `key` is one key, or
        one per reply.

    Raises:
      ValueError, ConfigError, NotFiniteError, MemoryError: as `generate`.
    """
    room_given = {} if room is None else {"room": room}
    for name, value in {"lanes": lanes, "samples_per_prompt": samples_per_prompt, **room_given}.items():
        check_integer(name, value)
    check_names(rollout, options)
    key = options.get("key")
    placeholder: Options = {**options, "key": None if key is None else 0}
    replies_given = len(prompts) * samples_per_prompt if hasattr(prompts, "__len__") else lanes  # checked below
    request = request_of(
        target, drafter, prompts, profile, cycle_cost=cycle_cost, fits=False, lanes=min(lanes, replies_given),
        **placeholder,
    )  # fmt: skip
    temperature = options.get("temperature", 0.0)
    method = chosen(target, drafter, profile, prompts, temperature, min(lanes, replies_given))
    payoff = checked_payoff(payoff, cycle_cost, drafter, method)
    request = with_taps(request, taps, target.config)
    params, batch, sampling, engine, sizes = request
    count, samples = len(batch.lengths), samples_per_prompt
    rows = row_groups(target.mesh)
    lanes = round_up(min(lanes, count * samples), rows)
    room = round_up(min(default_room(lanes) if room is None else room, count), rows)
    # A group is read beside the one before it. Only a shape: no rows are copied.
    in_memory: Any = np.broadcast_to(np.int32(0), (lanes + 2 * room, batch.prompts.shape[1]))
    held = request._replace(batch=batch._replace(prompts=in_memory))
    replies = bucket(count) * samples
    check_fits(held, replies)

    order = np.argsort(-np.asarray(batch.budget), kind="stable")
    padded = np.pad(order, (0, bucket(count) - count))
    lengths = np.where(np.arange(len(padded)) < count, np.asarray(batch.lengths)[padded], 0)
    reply = (padded[:, None] * samples + np.arange(samples)[None]).reshape(-1)  # the row of every job in the result
    every = np.repeat(padded, samples)
    keys = keys_of(key, count * samples, "reply")[reply]
    jobs = Jobs(batch.prompts[padded], jax.numpy.asarray(lengths), batch.budget[every], batch.eos_ids[every], keys)
    static = {"engine": engine, "sizes": sizes}
    with memory_errors(held, replies):
        begun = begun_payoff(engine, payoff)
        state = start_program(params, jobs, sampling, **static, lanes=lanes, room=room, payoff=begun)
        with kept_interrupt() as pressed:
            while not pressed() and not to_host(state.replies.finished).all():
                state = advance_program(params, state, jobs, sampling, **static, cycles=PASSES)
            found, passes, after = to_host((state.replies, state.passes, state.payoff))
            interrupted = pressed()
    if interrupted and not found.finished[: count * samples].any():
        raise KeyboardInterrupt
    prompt_tokens = np.repeat(np.asarray(batch.lengths), samples)
    after = payoff if begun is None else after
    return _output(found, int(passes), np.argsort(reply[: count * samples]), prompt_tokens, interrupted, after)


def _output(
    replies: Any, passes: int, rows: np.ndarray, prompt_tokens: np.ndarray, interrupted: bool, payoff: Payoff | None
) -> RolloutOutput:
    """Returns the result of `Replies` on the host; row r of it is job `rows[r]`."""
    parts: Any = (None if part is None else part[rows] for part in replies)
    found: Any = Replies(*parts)
    counts = np.where(found.finished, found.num_tokens, 0)
    texts = [row[:count].tolist() for row, count in zip(found.tokens, counts, strict=True)]
    read = np.where(found.finished, prompt_tokens + np.maximum(counts - 1, 0), 0)
    kept = cut_rows(found.log_probs, counts), cut_rows(found.features, read)
    output = RolloutOutput(
        texts, found.cycles, found.accepted, *kept, payoff,
        finished=found.finished, passes=passes, interrupted=interrupted,
    )  # fmt: skip
    check_finite(found.not_finite, found.bad_drafts, output=output)
    return output
