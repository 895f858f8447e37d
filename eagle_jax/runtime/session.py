"""Generates the replies of a conversation turn by turn, and keeps the caches between turns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp
import numpy as np

from eagle_jax.core import GenerateState, required_slots
from eagle_jax.runtime.drafters import BoundDrafter
from eagle_jax.runtime.errors import NotFiniteError, check_finite, check_fits, memory_errors
from eagle_jax.runtime.generation import (
    Options,
    StreamChunk,
    check_names,
    extend_program,
    first_chunk,
    next_chunk,
    request_of,
)
from eagle_jax.runtime.request import PREFILL_CHUNK, Request, bucket, check_drafter, empty_caches, round_up
from eagle_jax.runtime.target import Target, check_target


class Session:
    """One conversation. Every prompt is the whole text so far; only its new tokens are read.

    `stream` yields the same chunks as `eagle_jax.stream` for the same prompt, key and settings. The session keeps the
    longest prefix that the new prompt shares with the text so far, and reads the prompt from there on. A drafter
    without `rewind` reads an edited text from its beginning; so does a target with windows, once the text is longer
    than one of them. A reply with `plain=True` extends the target's cache only; the drafter reads the missed tokens
    later.

    Args:
      drafter: None is plain decoding.
      context: most tokens of prompt and reply together, and the size of the caches. None is the target's number of
        positions, at most 4096.

    Attributes:
      context: as given.
      text: tokens of the last prompt and its reply; the cache holds all but the last one.
      read: how many tokens of the last prompt were not in the caches.

    Raises:
      ValueError: `target` or `drafter` has another type, or `context` exceeds the target's positions.
    """

    def __init__(self, target: Target, drafter: BoundDrafter | None = None, *, context: int | None = None) -> None:
        check_target(target)
        check_drafter(drafter, target)
        most = target.config.max_position
        self.context = min(most, 4096) if context is None else context
        if isinstance(self.context, bool) or not isinstance(self.context, int) or not 2 <= self.context <= most:
            raise ValueError(f"context must be an integer from 2 to the target's {most}, got {context!r}. Omit it.")
        self.target, self.drafter = target, drafter
        self.reset()

    def reset(self) -> None:
        """Drops the text and the caches."""
        self.read = 0
        self.text: list[int] = []
        self._state: GenerateState | None = None
        self._waiting: _Drafted | None = None  # while replies are decoded plainly

    def stream(
        self, prompt: Sequence[int], *, plain: bool = False, **options: Unpack[Options]
    ) -> Iterator[StreamChunk]:
        """Yields the reply to a prompt; arguments as in `eagle_jax.stream`, without `profile`.

        The caller may stop after any chunk; the yielded tokens stay in the caches for the next prompt.

        Args:
          plain: decode this reply without the drafter.

        Raises:
          ValueError, MemoryError: as `eagle_jax.stream`, at the call; also if prompt and reply exceed the context.
          ValueError: during iteration, if another prompt was streamed before the end of this reply.
          NotFiniteError: as `eagle_jax.stream`; the caches are emptied.
        """
        if not isinstance(plain, bool):
            raise ValueError(f"plain must be True or False, got {plain!r}. Choose one.")
        check_names(self.stream, options)
        request = request_of(self.target, None if plain else self.drafter, [prompt], None, "prompt", **options)
        budget = int(request.batch.budget[0])
        if len(prompt) + budget > self.context:
            raise ValueError(
                f"prompt and max_new_tokens must fit in the session's context of {self.context}, got {len(prompt)} + "
                f"{budget}. Shorten the conversation, lower max_new_tokens, or pass Session a larger context."
            )
        return self._stream(list(map(int, prompt)), request, plain and self.drafter is not None)

    def _stream(self, prompt: list[int], request: Request, plain: bool) -> Iterator[StreamChunk]:
        # After the context a last chunk, or the path of a tree, must have room.
        usual = request.engine.drafter if self.drafter is None else self.drafter.drafter
        slots = round_up(required_slots(self.context, 1, usual.depth, PREFILL_CHUNK), 128)
        request = request._replace(sizes=request.sizes._replace(slots=slots))
        # Interrupted in a program, the donated caches would be gone.
        before, waiting, self._state, self._waiting = self._state, self._waiting, None, None
        there = 0 if before is None else int(before.cache.length[0])
        drafted = waiting or (_Drafted() if before is None else _Drafted(before.drafter, there))
        # The drafter's state holds the token after the last one in the cache: the prompt must have the same one.
        # At least one prompt token runs through the target, for the logits of the next.
        shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, self.text, strict=False))
        known = min(there, len(list(shared)) - 1, len(prompt) - 1)
        if drafted.length > known:
            longer, drafted = drafted.state, _Drafted()
            if usual.rewind is not None and known >= 1:
                drafted = _Drafted(usual.rewind(longer, jnp.array([known], jnp.int32)), known)
        if not plain:
            known = min(known, drafted.length)
        if before is not None and known < there:
            ring = min(layer.shape[2] for layer in before.cache.values)
            known = known if there <= ring else 0  # a ring has lost the tokens before those that are dropped
        if before is None or known < 1:
            check_fits(request)  # with the slots of the whole context
            with memory_errors(request):
                cache, memory = empty_caches(request.params, request.engine, 1, slots)
            known, drafted = 0, _Drafted()
        else:
            cache, memory = before.cache, () if plain else drafted.state
            if known < there:
                cache = cache._replace(length=jnp.array([known], jnp.int32))
        new = prompt[known:]
        chunk = min(bucket(len(new)), PREFILL_CHUNK)
        padded = np.zeros((1, round_up(bucket(len(new)), chunk)), np.int32)
        padded[0, : len(new)] = new
        batch = request.batch._replace(prompts=jnp.asarray(padded), lengths=jnp.asarray([len(new)], jnp.int32))
        sizes = request.sizes._replace(chunk=chunk, slots=None)  # `extend` takes a cache of any size
        with memory_errors(request):
            state, reply, done = first_chunk(
                extend_program(request.params, cache, memory, batch, request.sampling, request.engine, sizes)
            )
        self.read, self.text, self._state = len(new), [*prompt, *reply.tokens], state
        self._waiting = drafted if plain else None
        yield reply
        while not done:
            if self._state is not state:
                raise ValueError(
                    "reply must be read to its end before the next prompt, got another prompt first. Stream it again."
                )
            self._state = None
            state, reply, done, faults = next_chunk(request, state)
            self.text += reply.tokens
            self._state = state
            if reply.tokens:
                yield reply
            try:
                check_finite(*faults, ended=done)
            except NotFiniteError:
                self.reset()  # the next prompt is read from its beginning, into empty caches
                raise


class _Drafted(NamedTuple):
    """A drafter's state when `length` tokens of the text were confirmed."""

    state: Any = None
    length: int = 0
