"""Generates tokens from lists of token ids: `generate` for a batch, `stream` for one prompt.

Both check their arguments, pad them into buckets, run a jitted function of `eagle_jax.core`, and remove the padding.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypedDict, Unpack, get_args

import jax
import numpy as np

from eagle_jax import core
from eagle_jax.core import CycleCost, Engine, GenerateState, LogProbs, Payoff, adaptive
from eagle_jax.core.loop import check_cost
from eagle_jax.drafters import vanilla_drafter
from eagle_jax.parallel import to_host
from eagle_jax.runtime.drafters import BoundDrafter
from eagle_jax.runtime.errors import check_finite, check_fits, memory_errors
from eagle_jax.runtime.profile import Chosen, Profile, bound_profile
from eagle_jax.runtime.request import Request, StopTokens, check_drafter, is_number, prepare, sampling_of, with_taps
from eagle_jax.runtime.target import Target, check_target

STATIC = ("engine", "sizes")
generate_program = jax.jit(core.generate, static_argnames=STATIC)
prefill_program = jax.jit(core.prefill, static_argnames=STATIC)
extend_program = jax.jit(core.extend, static_argnames=STATIC, donate_argnums=(1, 2))
step_program = jax.jit(core.step, static_argnames="engine", donate_argnums=(1,))
"""Shared by `generate`, `stream`, sessions and measuring programs: a process compiles once per
engine, shape and set of sampling processors."""


@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """The result of `generate`.

    Attributes:
      tokens: the new tokens per prompt, up to and including the first stop token, at most `max_new_tokens`.
      cycles: [B] target passes after the prefill. The prefill itself yields the first token.
      accepted: [B, depth+1] histogram: the number of cycles in which the target accepted i drafted tokens. In a last
        cycle cut by the budget or a stop token, accepted tokens count even if they were not emitted.
      log_probs: per prompt a float32 log-probability (natural logarithm) per token; None without `log_probs=`.
      features: per prompt the hidden states of `taps=`, side by side, [n, F] in the target's dtype; None without. Row p
        belongs to token p of prompt and reply together. The last token has none: the target did not read it, so n is
        their length - 1.
      payoff: what drafts have yielded, for `payoff=` of the next call with the same drafter and costs; None without
        costs.
    """

    tokens: list[list[int]]
    cycles: np.ndarray
    accepted: np.ndarray
    log_probs: list[np.ndarray] | None = None
    features: list[np.ndarray] | None = None
    payoff: Payoff | None = None

    @property
    def tau(self) -> float:
        """Tokens per target pass, pooled over all rows: (tokens after each row's first) / cycles."""
        new = sum(max(len(row) - 1, 0) for row in self.tokens)
        return new / max(int(self.cycles.sum()), 1)


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """Tokens of one cycle of one prompt.

    Attributes:
      tokens: emitted tokens; the first chunk is the prefill's single token.
      drafted: number of accepted drafted tokens, which come first; the rest is the target's own choice.
      log_probs: a log-probability (natural logarithm) per token; None without `log_probs=`.
    """

    tokens: list[int]
    drafted: int
    log_probs: list[float] | None = None


class Options(TypedDict, total=False):
    """Options of `generate`, `stream` and `Session.stream`.

    Attributes:
      max_new_tokens: most tokens to generate, 128 by default; one number, or one per row.
      temperature, top_k, top_p, min_p: of the sampled distribution; temperature 0, the default, is greedy.
      eos_ids: stop tokens, for all rows or one list per row; None is the target's own, () never stops.
      key: `jax.random.key(seed)` or a seed; needed when temperature > 0. For a given key the default acceptance rule
        gives the same text with every drafter: row r draws token i with `fold_in(fold_in(key, r), i)`. An array has one
        key per prompt: row r draws with `fold_in(key[r], i)` in every batch. Keys of another generator than Threefry
        are converted first (`eagle_jax.core.randomness`).
      log_probs: "target" returns the log-probability of every token under the target at temperature 1; "law" under the
        sampled distribution, after temperature, top-k, top-p and min-p.
    """

    max_new_tokens: int | Sequence[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    eos_ids: StopTokens
    key: jax.Array | int | None
    log_probs: LogProbs | None


def generate(
    target: Target,
    drafter: BoundDrafter | Literal["auto"] | None,
    prompts: Sequence[Sequence[int]],
    *,
    profile: Profile | str | os.PathLike[str] | None = None,
    cycle_cost: float | CycleCost | None = None,
    payoff: Payoff | None = None,
    taps: Sequence[int] | None = None,
    **options: Unpack[Options],
) -> GenerateOutput:
    """Generates from a batch of prompts, losslessly: the text is the target's own, whatever the drafter.

    Args:
      prompts: token ids per row; rows may differ in length.
      drafter: None is plain decoding with the same program; "auto" is the fastest one of `profile` for this batch
        size, temperature and prompt length.
      cycle_cost: of a drafted cycle, in plain steps, as `infer.cycle` measures it or `infer.aot` computes it. While
        cycles emit fewer tokens than that, plain steps take their place, in the same program: the text is the same, and
        `tau` counts them as cycles. With the costs of its parts, a `CycleCost`, a cycle drafts and verifies only as
        many nodes as pay: the program has a pass for each of the sizes. None drafts always, and all nodes; with "auto"
        it is the profile's.
      payoff: `payoff` of an earlier result with the same costs. Then the choice begins with what drafts have yielded
        so far, and what tries may cost counts over all calls; None knows nothing yet, but with "auto" what the tuning
        predicted.
      profile: for "auto", the result of `load_profile` or a path; the file is read again only when it changes.
      taps: hidden states of the target to return for every token that it read, 0 to its number of layers, as in
        `HeadConfig.taps`. The last number is the state after the final norm. They are computed anyway; None keeps none.
      options: `max_new_tokens=128`, `temperature=0.0`, `top_k=0`, `top_p=1.0`, `min_p=0.0`, `eos_ids=None`, `key=None`,
        `log_probs=None`; see `Options`.

    Raises:
      ValueError: an argument breaks its rule; raised before anything is compiled.
      NotFiniteError: logits are NaN or infinite; it names rows and positions and holds the output of all rows.
      ConfigError: `profile` cannot be read, or is for another target; or the mesh does not divide the rows.
      CheckpointError: weights of `profile` do not load.
      MemoryError: the run does not fit in device memory.
    """
    check_names(generate, options)
    request = request_of(target, drafter, prompts, profile, cycle_cost=cycle_cost, fits=taps is None, **options)
    if taps is not None:  # no option of `request_of`: a stream keeps none
        request = with_taps(request, taps, target.config)
        check_fits(request)
    method = chosen(target, drafter, profile, prompts, options.get("temperature", 0.0))
    return run_request(request, checked_payoff(payoff, cycle_cost, drafter, method))


def stream(
    target: Target,
    drafter: BoundDrafter | Literal["auto"] | None,
    prompt: Sequence[int],
    *,
    profile: Profile | str | os.PathLike[str] | None = None,
    **options: Unpack[Options],
) -> Iterator[StreamChunk]:
    """Yields the tokens of one prompt, cycle by cycle; arguments as in `generate`.

    On a mesh "data" and "fsdp" must have size 1, since there is one row.
    Arguments are checked at the call, not at the first `next`.

    Raises:
      ValueError, ConfigError, CheckpointError, MemoryError: as `generate`.
      NotFiniteError: during iteration, after the tokens that precede the fault.
    """
    check_names(stream, options)
    return _stream(request_of(target, drafter, [prompt], profile, "prompt", **options))


def check_names(function: Callable[..., Any], options: Options) -> None:
    """Checks that options have the names of `Options`: `request_of` has others, which a stream would ignore.

    Raises:
      TypeError: naming the unexpected one, as a call does, and the option of `function` that it is like.
    """
    if others := sorted(options.keys() - Options.__annotations__.keys()):
        names = [*Options.__annotations__, *inspect.signature(function).parameters]
        alike = difflib.get_close_matches(others[0], names, 1)
        hint = f". Did you mean {alike[0]!r}?" if alike else ""
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {others[0]!r}{hint}")


def _stream(request: Request) -> Iterator[StreamChunk]:
    with memory_errors(request):
        state, chunk, done = first_chunk(prefill_program(*request))
    yield chunk
    while not done:
        state, chunk, done, faults = next_chunk(request, state)
        if chunk.tokens:
            yield chunk
        check_finite(*faults, ended=done)


def first_chunk(state: GenerateState) -> tuple[GenerateState, StreamChunk, bool]:
    """Reads the token of a prefill: (state, chunk, whether the row is done).

    Raises:
      NotFiniteError: the target has no finite logits after the prompt.
    """
    root, done, log_probs, *faults = jax.device_get(
        (state.root[0], state.done[0], None if state.log_probs is None else state.log_probs[0, :1],
         state.not_finite, state.bad_drafts)
    )  # fmt: skip
    check_finite(*faults)
    return state, StreamChunk([int(root)], 0, None if log_probs is None else log_probs.tolist()), bool(done)


def next_chunk(request: Request, state: GenerateState) -> tuple[GenerateState, StreamChunk, bool, list[np.ndarray]]:
    """Runs one cycle; returns (state, chunk, whether the row is done, arguments of `check_finite`)."""
    with memory_errors(request):
        state, info = step_program(request.params, state, request.sampling, request.engine)
        log_probs = None if info.log_probs is None else info.log_probs[0]
        tokens, emitted, count, done, log_probs, *faults = jax.device_get(
            (info.tokens[0], info.emitted[0], info.acceptance.count[0], state.done[0], log_probs,
             state.not_finite, state.bad_drafts)
        )  # fmt: skip
    own = None if log_probs is None else log_probs[:emitted].tolist()
    return state, StreamChunk(tokens[:emitted].tolist(), int(min(count, emitted)), own), bool(done), faults


def request_of(
    target: Target,
    drafter: BoundDrafter | Literal["auto"] | None,
    prompts: Sequence[Sequence[int]],
    profile: Profile | str | os.PathLike[str] | None = None,
    name: str = "prompts[{}]",
    *,
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    eos_ids: StopTokens = None,
    key: jax.Array | int | None = None,
    log_probs: LogProbs | None = None,
    cycle_cost: float | CycleCost | None = None,
    fits: bool = True,
    lanes: int | None = None,
) -> Request:
    """Builds the engine's arguments from those of `generate`; error messages name a prompt by `name`.

    Args:
      fits: also check that caches of all rows fit in memory.
      lanes: rows at a time, by which "auto" chooses; None is the number of prompts.

    Raises:
      ValueError, ConfigError, CheckpointError, MemoryError: as `generate`, before anything is compiled.
    """
    check_target(target)
    sampling = sampling_of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if log_probs is not None and log_probs not in get_args(LogProbs):
        raise ValueError(f"log_probs must be 'target', 'law' or None, got {log_probs!r}. 'target' is at temperature 1.")
    drafter, cost, _ = chosen(target, drafter, profile, prompts, temperature, lanes)
    cost = cost if cycle_cost is None else cycle_cost
    check_drafter(drafter, target)
    method, own = (vanilla_drafter(), {}) if drafter is None else (drafter.drafter, drafter.params)
    engine = Engine(target.fn, method, log_probs, cycle_cost=_checked_cost(cost, method))
    check_cost(engine)
    batch, sizes = prepare(prompts, max_new_tokens, eos_ids, key, name, target.config, method.depth)
    if not sampling.greedy and key is None:
        raise ValueError("key must be given at temperature > 0, got None. Pass key=jax.random.key(seed) or key=seed.")
    params = {"target": target.params, "drafter": own}
    request = Request(params, batch, sampling, engine, sizes)
    if fits:
        check_fits(request)
    return request


def _checked_cost(cost: float | CycleCost | None, method: core.Drafter) -> CycleCost | None:
    """Returns the cost as the engine takes it; None for plain decoding, which has nothing to leave out."""
    rows = method.num_nodes + 1
    if isinstance(cost, CycleCost):
        if not method.reads_choices:  # such a drafter takes no cost at all: `check_cost` raises
            cost.prices(rows)  # raises if they do not reach the tree's rows
    elif cost is not None and not (is_number(cost) and 1 <= cost < np.inf):
        remedy = "what infer.cycle measures"
        if isinstance(cost, dict):
            remedy = 'CycleCost(**cost["cycle_cost"])' if "cycle_cost" in cost else "CycleCost(**cost)"
        raise ValueError(
            f"cycle_cost must be a number of plain steps, at least 1, or a CycleCost, got {cost!r}. Pass {remedy}."
        )
    if cost is None or not method.num_nodes:
        return None
    return cost if isinstance(cost, CycleCost) else CycleCost((rows,), (float(cost),))


def chosen(
    target: Target, drafter: Any, profile: Any, prompts: Any, temperature: float, lanes: int | None = None
) -> Chosen:
    """Returns what "auto" selects; any other drafter unchanged, without costs."""
    if not (isinstance(drafter, str) and drafter == "auto"):
        if profile is not None and not isinstance(drafter, str):  # `check_drafter` reports another string
            raise ValueError(
                f'profile must be None unless drafter is "auto", got {profile!r:.40}. Pass drafter="auto", or no '
                "profile."
            )
        return Chosen(drafter)
    rows = prompts if hasattr(prompts, "__len__") else [prompts]  # `prepare` checks them
    longest = max((len(row) for row in rows if hasattr(row, "__len__")), default=1)
    return bound_profile(profile, target).choose(lanes or len(rows), float(temperature), longest)


def checked_payoff(
    payoff: Payoff | None, cost: float | CycleCost | None, drafter: Any, method: Chosen
) -> Payoff | None:
    """Returns the payoff of an earlier call; without one what the tuning of `method` predicted, unless a cost is given.

    Raises:
      ValueError: it is none, or no costs are given, nor a profile that may have some.
    """
    if payoff is None:
        return expected_payoff(method) if cost is None else None
    if not isinstance(payoff, Payoff):
        found = type(payoff).__name__ if hasattr(payoff, "payoff") else f"{payoff!r:.40}"
        raise ValueError(f"payoff must be that of an earlier output, got {found}. Pass out.payoff.")
    for name, value in payoff._asdict().items():
        whole = name in ("wait", "pause")
        if not (is_number(value) and np.isfinite(value)) or (whole and (int(value) != value or value < 0)):
            kind = "a whole number, at least 0" if whole else "a finite number"
            raise ValueError(f"payoff.{name} must be {kind}, got {value!r}. Pass out.payoff of another call.")
    if cost is None and not isinstance(drafter, str):
        raise ValueError("payoff must come with cycle_cost, got none. Pass the cycle_cost of the earlier call.")
    return payoff


def expected_payoff(method: Chosen) -> Payoff | None:
    """Returns the payoff that a tuning promises, on the host; None where it says nothing or costs do not choose."""
    return None if None in (method.cost, method.expected) else to_host(adaptive.start(method.expected))


def run_request(request: Request, payoff: Payoff | None = None) -> GenerateOutput:
    """Runs the program of `generate` and reads its result; without costs the payoff is returned as it is.

    Raises:
      NotFiniteError, MemoryError: as `generate`.
    """
    with memory_errors(request):
        state = generate_program(*request, begun_payoff(request.engine, payoff))
        results = (state.tokens, state.num_tokens, state.cycles, state.accepted, state.log_probs, state.features)
        found = to_host((*results, state.payoff, request.batch.lengths, state.not_finite, state.bad_drafts))
    tokens, counts, cycles, accepted, log_probs, features, after, lengths, *faults = found
    texts = [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]
    read = lengths + np.maximum(counts - 1, 0)
    kept = cut_rows(log_probs, counts), cut_rows(features, read)
    output = GenerateOutput(texts, cycles, accepted, *kept, payoff if after is None else after)
    check_finite(*faults, output=output)
    return output


def begun_payoff(engine: Engine, payoff: Payoff | None) -> Payoff | None:
    """Returns the argument of a program: a first call and later ones share it."""
    if engine.cycle_cost is None:
        return None
    return to_host(adaptive.start()) if payoff is None else payoff


def cut_rows(rows: np.ndarray | None, counts: np.ndarray) -> list[np.ndarray] | None:
    """Returns the first `counts` entries of every row, without the memory of the others; None of None."""
    return None if rows is None else [row[:count].copy() for row, count in zip(rows, counts, strict=True)]
