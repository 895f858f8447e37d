"""Measures tau and n-alpha of a drafter with the engine, and records every tree that the target verified."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eagle_jax.config import TreeConfig
from eagle_jax.core.loop import prefill, step
from eagle_jax.core.sampling import make_sampling
from eagle_jax.core.types import Batch, Engine, Params, Sampling, Sizes
from eagle_jax.parallel.processes import to_host
from eagle_jax.runtime.drafters import BoundDrafter, TreeDrafter
from eagle_jax.runtime.errors import check_finite, memory_errors
from eagle_jax.runtime.generation import generate, prefill_program, request_of, step_program
from eagle_jax.runtime.request import check_law
from eagle_jax.runtime.target import Target

CHAIN = 6
"""Most drafted tokens of the chains that n-alpha is measured with: n = 0..5, as in the papers."""


class Tau(NamedTuple):
    """Tokens per target pass over some prompts.

    Attributes:
      tau: (tokens after each reply's first) / cycles. cycles: target passes after the prefill, per reply.
      replies: token ids per prompt.
    """

    tau: float
    cycles: list[int]
    replies: list[list[int]]


class NAlpha(NamedTuple):
    """Acceptance by position in a chain.

    Attributes:
      alpha: entry n is the share of the drafts at position n that the target accepted, of those it looked at; None
        where it never looked.
      tested: how many it looked at. accepted: how many of them it accepted.
    """

    alpha: list[float | None]
    tested: list[int]
    accepted: list[int]


class Cycles(NamedTuple):
    """Every tree that was verified while some replies were written: C cycles of rows that were still running.

    Attributes:
      prompt: [C] the prompt that cycle belongs to. tokens, parents: [C, N+1], scores: [C, N+1], as in `DraftTree`.
      accepted: [C, N+1] nodes that the reply went through, the root among them; drafts beyond the reply's end (its
        budget, a stop token) are not.
      reached: [C, N+1] nodes that the target looked at: those whose parent is accepted, unless the reply ended there.
      emitted: [C] tokens of the cycle that count.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    accepted: np.ndarray
    reached: np.ndarray
    emitted: np.ndarray


def record_cycles(
    target: Target,
    drafter: BoundDrafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    key: jax.Array | int | None = None,
) -> Cycles:
    """Generates from a batch of prompts cycle by cycle and keeps every tree; what `generate` does, watched.

    Raises:
      ValueError: as `eagle_jax.generate`.
    """
    check_law(temperature=temperature)
    request = request_of(target, drafter, prompts, max_new_tokens, make_sampling(temperature), key=key)
    found: list[tuple[np.ndarray, ...]] = []
    with memory_errors(request):
        state = prefill_program(*request)
        while not bool(jnp.all(state.done)):
            state, info = step_program(request.params, state, request.sampling, request.engine)
            tree, walk = info.tree, info.acceptance
            found.append(to_host((tree.tokens, tree.parents, tree.scores, walk.path, walk.count, info.emitted)))
        check_finite(*to_host((state.not_finite, state.bad_drafts)))
    width = request.engine.drafter.num_nodes + 1
    cycles = []
    for tokens, parents, scores, path, count, emitted in found:
        for row in np.flatnonzero(emitted):
            walked = path[row, : min(int(count[row]), int(emitted[row])) + 1]
            accepted = np.zeros(width, bool)
            accepted[walked] = True
            # Behind the reply's last token the target says nothing that counts.
            looked = walked if emitted[row] > count[row] else walked[:-1]
            reached = np.isin(parents[row], looked)
            reached[walked[1:]] = True  # of branches that begin alike (lookahead's) the path may take nodes of several
            cycles.append((row, tokens[row], parents[row], scores[row], accepted, reached, emitted[row]))
    if not cycles:  # every reply ended with its first token
        ids, flags, none = np.zeros((0, width), np.int32), np.zeros((0, width), bool), np.zeros(0, np.int32)
        return Cycles(none, ids, ids, ids.astype(np.float32), flags, flags, none)
    return Cycles._make(np.stack(column) for column in zip(*cycles, strict=True))


def measure_tau(
    target: Target,
    head: BoundDrafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    key: jax.Array | int | None = None,
) -> Tau:
    """Tau of a head and its tree on prompts, decoded as one batch; without a head, plain decoding (tau 1).

    Raises:
      ValueError: as `eagle_jax.generate`.
    """
    out = generate(target, head, prompts, max_new_tokens=max_new_tokens, temperature=temperature, key=key)
    return Tau(out.tau, out.cycles.tolist(), out.tokens)


def measure_n_alpha(
    target: Target,
    head: BoundDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    depth: int | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    key: jax.Array | int | None = None,
) -> NAlpha:
    """n-alpha (arXiv:2401.15077): how often the target accepts the draft that n drafts, all accepted, precede.

    Chains of `depth` tokens are drafted, whatever the head's own tree; None is 6, or as many as Medusa has heads. Where
    the budget or a stop token ends a reply inside a chain, the drafts up to there are counted and those behind are not:
    what the target would say after its last token is nobody's concern, and to leave such chains out whole would count
    fewer of the long ones.

    Raises:
      ValueError: as `eagle_jax.generate`; also a method that fills no tree that it is asked for (lookups), or whose
        rule accepts a path as a whole ("block", "traversal"), so that no draft is accepted by itself.
      MemoryError: the device is too small.
    """
    check_law(temperature=temperature)
    if not isinstance(head, TreeDrafter):
        raise ValueError(
            f"n-alpha is of chains, and {getattr(head, 'name', head)!r} does not draft a tree that it is asked for: "
            "record its own drafts (record_cycles) and count them (positions.n_alpha)"
        )
    if (rule := head.tree.verification) in ("block", "traversal"):
        raise ValueError(
            f"verification={rule!r} accepts a path as a whole: n-alpha is of 'deterministic' or 'rejection'"
        )
    sampling = make_sampling(temperature)
    depth = min(CHAIN, head.deepest or CHAIN) if depth is None else depth
    chain = dataclasses.replace(TreeConfig.chain(depth, rule), sampled_ranking=head.tree.sampled_ranking)
    request = request_of(target, head.with_tree(chain), prompts, max_new_tokens, sampling, key=key)
    with memory_errors(request):
        found = to_host(_chains(*request))
    *counts, not_finite, bad_drafts = found
    check_finite(not_finite, bad_drafts)
    tested, accepted = (np.asarray(count).tolist() for count in counts)
    alpha = [hits / tries if tries else None for hits, tries in zip(accepted, tested, strict=True)]
    return NAlpha(alpha, tested, accepted)


@functools.partial(jax.jit, static_argnames=("engine", "sizes"))
def _chains(params: Params, batch: Batch, sampling: Sampling, engine: Engine, sizes: Sizes) -> tuple[Array, ...]:
    """Generates and counts: [D] drafts that the target verified, [D] those it accepted; then the state's two faults."""
    state, depth = prefill(params, batch, sampling, engine, sizes), engine.drafter.depth
    place = jnp.arange(depth)[None]

    def cycle(carry: tuple) -> tuple:
        state, tested, accepted = carry
        state, info = step(params, state, sampling, engine)
        # Of a chain with c accepted drafts and e emitted tokens (0 in a finished row), the text goes over the first e.
        emitted, count = info.emitted[:, None], info.acceptance.count[:, None]
        seen = _total((place <= count) & (place < emitted))
        return state, tested + seen, accepted + _total((place < count) & (place < emitted))

    zero = jnp.zeros((depth,), jnp.int32)
    state, *counts = jax.lax.while_loop(lambda carry: ~jnp.all(carry[0].done), cycle, (state, zero, zero))
    return *counts, state.not_finite, state.bad_drafts


def _total(flags: Array) -> Int[Array, " D"]:
    return jnp.sum(flags, axis=0, dtype=jnp.int32)
