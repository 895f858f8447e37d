"""The host-level interface: load a target and a drafter, generate from lists of token ids.

Everything here checks its arguments before anything is compiled, pads them into buckets, calls one jitted program from
`eagle_jax.generate`, and cuts the result.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from eagle_jax.bound import BoundDrafter, DraftHead, Target, check_target, on_mesh, request_of
from eagle_jax.checkpoints import load_head_checkpoint, load_target_checkpoint
from eagle_jax.checkpoints.mapping import dtype_name
from eagle_jax.config import TreeConfig
from eagle_jax.devices import in_reach, overlooked
from eagle_jax.distributed import to_host
from eagle_jax.finite import check_finite
from eagle_jax.generate import extend as run_extend
from eagle_jax.generate import generate as run_generate
from eagle_jax.generate import prefill as run_prefill
from eagle_jax.generate import step as run_step
from eagle_jax.memory import explained
from eagle_jax.request import Request, StopTokens, check_law
from eagle_jax.sampling import LogProbs, make_sampling
from eagle_jax.sharding import check_mesh, placer
from eagle_jax.types import GenerateState, Sampling

if TYPE_CHECKING:
    from eagle_jax.profile import Profile  # which loads drafters, from here

SHAPES = ("slots", "max_tokens", "chunk")
generate_program = jax.jit(run_generate, static_argnames=("target", "drafter", "verify", "log_probs", *SHAPES))
prefill_program = jax.jit(run_prefill, static_argnames=("target", "drafter", "log_probs", *SHAPES))
extend_program = jax.jit(
    run_extend, static_argnames=("target", "drafter", "log_probs", "max_tokens", "chunk"), donate_argnums=(1, 2)
)
step_program = jax.jit(run_step, static_argnames=("target", "drafter", "verify", "log_probs"), donate_argnums=(1,))
"""Compiled once for all who run them: `generate`, `stream`, recordings."""


@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns.

    Attributes:
      tokens: per prompt exactly the new tokens, cut after the first stop token, never more than its budget.
      cycles: [B] target passes after the prefill. The prefill itself yields the first token.
      accepted: [B, depth+1] histogram: in how many cycles i drafted tokens were accepted by the target. A last
        cycle that the budget or a stop token cut short is counted with what was accepted, not with what was
        emitted.
      log_probs: per prompt one number for each of its tokens, float32, natural logarithm; None where not asked for.
    """

    tokens: list[list[int]]
    cycles: np.ndarray
    accepted: np.ndarray
    log_probs: list[np.ndarray] | None = None

    @property
    def tau(self) -> float:
        """Tokens per target pass, pooled over all rows: (tokens after each row's first) / cycles."""
        new = sum(max(len(row) - 1, 0) for row in self.tokens)
        return new / max(int(self.cycles.sum()), 1)


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """Tokens of one cycle of one prompt.

    Attributes:
      tokens: emitted now; the first chunk is the prefill's single token.
      drafted: how many of them, from the front, were drafted and accepted; the rest is the target's own.
      log_probs: one number for each token, natural logarithm, of the law that was asked for; None where none was.
    """

    tokens: list[int]
    drafted: int
    log_probs: list[float] | None = None


def load_target(
    path_or_hub_id: str | os.PathLike[str],
    dtype: DTypeLike = "float32",
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    max_position: int | None = None,
    mesh: Mesh | None = None,
) -> Target:
    """Loads a Llama-like model from a local directory or the Hugging Face hub.

    Args:
      dtype: "float32", "bfloat16" or "float16" (or JAX's types); of weights, activations and cache. Scores, softmax
        and norms stay float32.
      revision, token, cache_dir: passed to `huggingface_hub` (ignored for a local path).
      max_position: caps the context length, e.g. to stay inside a sliding window, which is not supported beyond it.
      mesh: a ("data", "tensor") mesh; every tensor goes straight to its devices. The drafter follows its target.

    Raises:
      CheckpointError: nothing there, an unknown architecture, a value of config.json of another type, or tensors that
        do not fit or hold NaN or infinity, all named at once.
      ConfigError: the mesh does not divide the model.
      MemoryError: the device is too small for the weights. DeviceError: JAX is told to take a device that is not there.

    Warns:
      UserWarning: JAX runs on the CPU of a machine that seems to have an accelerator. Or two facts of the checkpoint
        contradict, such as a config.json that ties the lm_head and a file that holds one of its own, which is used.
    """
    dtype = dtype_name(dtype)
    if mesh is not None:
        check_mesh(mesh)
    with in_reach():
        config, params = load_target_checkpoint(
            path_or_hub_id,
            dtype,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            max_position=max_position,
            place=None if mesh is None else placer(mesh),
        )
        if told := overlooked():
            warnings.warn(told, stacklevel=2)
    name = str(path_or_hub_id)
    return Target(config, params, on_mesh(config, dtype, mesh), name, dtype, mesh, source=name)


def load_drafter(
    path_or_hub_id: str | os.PathLike[str],
    target: Target,
    tree: TreeConfig | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    rope_theta: float | int | None = None,
    taps: tuple[int, ...] | None = None,
) -> DraftHead:
    """Loads an EAGLE-1/2 or EAGLE-3 head trained for `target` (arXiv:2401.15077, 2406.16858, 2503.01840).

    The official layout of the papers' repository is read, that of SGLang and that of `speculators`.

    Args:
      revision, token, cache_dir: as in `load_target`.
      tree: chain, static or dynamic draft tree; None is the papers' own for 7B and 8B models, `TreeConfig(6, 10, 59)`
        for EAGLE-2 and `TreeConfig(8, 10, 59)` for EAGLE-3.
      rope_theta: overrides the head's own base (some published heads work better at 10000 than at their config's
        value).
      taps: overrides which hidden states the head reads.

    Raises:
      CheckpointError: tensors missing, unexpected, misshaped or not finite, a head made for another target, or an
        option of the head that would change its drafts and is not supported, such as an active sliding window.
      ConfigError: a tree the head cannot fill.
      ValueError: `target` is not what `load_target` returns.
      MemoryError: the device is too small for the weights.

    Warns:
      UserWarning: the head was trained for a target of another family, or has options or an lm_head without effect.
    """
    check_target(target)
    config, params = load_head_checkpoint(
        path_or_hub_id,
        target.config,
        target.dtype,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        rope_theta=rope_theta,
        taps=taps,
        embedding=target.params["embed_tokens"]["embedding"],  # shared where the file only carries a copy of it
        lm_head=None if target.config.tie_word_embeddings else target.params["lm_head"]["kernel"],
        place=None if target.mesh is None else placer(target.mesh),
    )
    return DraftHead.from_params(config, params, target, tree, str(path_or_hub_id))


def generate(
    target: Target,
    drafter: BoundDrafter | Literal["auto"] | None,
    prompts: Sequence[Sequence[int]],
    *,
    profile: Profile | str | os.PathLike[str] | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    eos_ids: StopTokens = None,
    key: jax.Array | int | None = None,
    log_probs: LogProbs | None = None,
) -> GenerateOutput:
    """Generates from a batch of prompts, losslessly: the text is the target's own, whatever the drafter.

    Args:
      prompts: token ids per row; rows may differ in length.
      drafter: None is plain decoding through the same program; "auto" takes what `profile` names for as many rows and
        this temperature.
      profile: for "auto", what `load_profile` returns or the path of the file, read again only when it changes.
      max_new_tokens: budget, one number or one per row.
      temperature, top_k, top_p, min_p: the sampled law; temperature 0 is greedy.
      eos_ids: stop tokens, for all rows or one set per row; None takes the target's own, () never stops.
      key: `jax.random.key(seed)` or a seed; needed when temperature > 0. For a given key the text is the same with
        every drafter: row r draws its token i with `fold_in(fold_in(key, r), i)`. An array of keys is one per prompt:
        row r draws with `fold_in(key[r], i)`, whatever else is in the batch.
      log_probs: "target" returns the log-probability of every emitted token by the target as it is (temperature 1,
        nothing cut off); "law" by the law that is sampled, with temperature, top-k, top-p and min-p.

    Raises:
      ValueError: before anything is compiled, naming the argument, its bound and the remedy.
      NotFiniteError: logits that are NaN or infinite, naming rows and positions; it carries the output of all rows.
      ConfigError: `profile` is none that can be read, or of another target. CheckpointError: weights that it names.
      MemoryError: the device has too little memory, saying for what and what to lower.
    """
    sampling = _law(temperature, top_k, top_p, min_p)
    drafter = _chosen(target, drafter, profile, prompts, temperature)
    request = request_of(target, drafter, prompts, max_new_tokens, sampling, eos_ids, key)
    return _run(telling(request, log_probs))


def first_tokens(
    target: Target,
    drafter: BoundDrafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    key: jax.Array | int | None = None,
) -> GenerateOutput:
    """`generate` up to the end of the prefill, by the very program that the same arguments of `generate` compile.

    Every row has a budget of one token, the prefill's own, so that the loop does not turn: for timing a prefill apart.

    Raises:
      ValueError: as `generate`.
    """
    request = request_of(target, drafter, prompts, max_new_tokens, _law(temperature, 0, 1.0, 0.0), None, key)
    prompt_ids, lengths, budget, *rest = request.arrays
    return _run(request._replace(arrays=(prompt_ids, lengths, jnp.ones_like(budget), *rest)))


def stream(
    target: Target,
    drafter: BoundDrafter | Literal["auto"] | None,
    prompt: Sequence[int],
    *,
    profile: Profile | str | os.PathLike[str] | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    eos_ids: int | Sequence[int] | None = None,
    key: jax.Array | int | None = None,
    log_probs: LogProbs | None = None,
) -> Iterator[StreamChunk]:
    """Yields one prompt's tokens as cycles finish, from the same `step` as `generate`. Arguments as there.

    A chunk holds the tokens of one cycle; on a mesh, the "data" axis must have size 1, since there is one row.
    Arguments are checked at the call, not at the first `next`.

    Raises:
      ValueError, ConfigError, CheckpointError, MemoryError: as `generate`.
      NotFiniteError: while it is iterated, after the tokens before the fault.
    """
    sampling = _law(temperature, top_k, top_p, min_p)
    drafter = _chosen(target, drafter, profile, [prompt], temperature)
    request = request_of(target, drafter, [prompt], max_new_tokens, sampling, eos_ids, key, name="prompt")
    return _stream(telling(request, log_probs))


def _stream(request: Request) -> Iterator[StreamChunk]:
    fns = {name: request.options[name] for name in ("target", "drafter", "log_probs") if name in request.options}
    options = {"sampling": request.sampling, **request.options}
    with explained(request):
        state: GenerateState = prefill_program(request.params, *request.arrays, **options)
        root = int(state.root[0])
        check_finite(*to_host((state.not_finite, state.bad_drafts)))
    first = None if state.log_probs is None else [float(state.log_probs[0, 0])]
    yield StreamChunk([root], 0, first)
    done = bool(state.done[0])
    while not done:
        with explained(request):
            state, info = step_program(request.params, state, sampling=request.sampling, **fns)
            told = None if info.log_probs is None else info.log_probs[0]
            tokens, emitted, count, finished, told, *faults = jax.device_get(
                (info.tokens[0], info.emitted[0], info.acceptance.count[0], state.done[0], told,
                 state.not_finite, state.bad_drafts)
            )  # fmt: skip
        done = bool(finished)
        own = None if told is None else [float(value) for value in told[:emitted]]
        if emitted:
            yield StreamChunk([int(t) for t in tokens[:emitted]], int(min(count, emitted)), own)
        check_finite(*faults, ended=done)


def telling(request: Request, log_probs: LogProbs | None) -> Request:
    """The request with the log-probabilities that it shall return.

    Raises:
      ValueError: of no law that there is.
    """
    if log_probs is None:
        return request
    if log_probs not in get_args(LogProbs):
        raise ValueError(
            f"log_probs={log_probs!r} must be 'target' (the model as it is), 'law' (what is sampled) or None"
        )
    return request._replace(options={**request.options, "log_probs": log_probs})


def _law(temperature: float, top_k: int, top_p: float, min_p: float) -> Sampling:
    check_law(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return make_sampling(temperature, top_k, top_p, min_p)


def _chosen(
    target: Target,
    drafter: Any,
    profile: Profile | str | os.PathLike[str] | None,
    prompts: Sequence[Sequence[int]],
    temperature: float,
) -> BoundDrafter | None:
    """What "auto" stands for; every other drafter as it is."""
    if not (isinstance(drafter, str) and drafter == "auto"):
        if profile is not None and not isinstance(drafter, str):  # of another name its own check tells
            raise ValueError('profile= is what drafter="auto" follows: pass "auto", or leave profile out')
        return drafter
    from eagle_jax.profile import bound_profile

    check_target(target)
    # What is no list of prompts is refused later.
    rows = len(prompts) if hasattr(prompts, "__len__") else 1
    longest = max((len(prompt) for prompt in prompts if hasattr(prompt, "__len__")), default=1) if rows else 1
    return bound_profile(profile, target).choose(rows, float(temperature), longest)


def _run(request: Request) -> GenerateOutput:
    with explained(request):
        state = generate_program(request.params, *request.arrays, sampling=request.sampling, **request.options)
        wanted = (state.tokens, state.num_tokens, state.cycles, state.accepted, state.log_probs)
        tokens, counts, cycles, accepted, log_probs, *faults = to_host((*wanted, state.not_finite, state.bad_drafts))
    texts = [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]
    told = None if log_probs is None else [row[:count] for row, count in zip(log_probs, counts, strict=True)]
    output = GenerateOutput(texts, cycles, accepted, told)
    check_finite(*faults, output=output)
    return output
