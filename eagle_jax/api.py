"""The host-level interface: load a target and a drafter, generate from lists of token ids.

Everything here checks its arguments before anything is compiled, pads them into buckets, calls one jitted program from
`eagle_jax.generate`, and cuts the result.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import DecoderConfig, HeadConfig, TreeConfig
from eagle_jax.drafters.eagle import eagle
from eagle_jax.drafters.vanilla import vanilla
from eagle_jax.generate import generate as run_generate
from eagle_jax.generate import prefill as run_prefill
from eagle_jax.generate import required_slots
from eagle_jax.generate import step as run_step
from eagle_jax.models.decoder import target_fn
from eagle_jax.sampling import make_sampling
from eagle_jax.types import Drafter, GenerateState, Params, Sampling, TargetFn

DEFAULT_TREE = TreeConfig()
PREFILL_CHUNK = 256
"""Most prompt tokens per prefill pass."""

SHAPES = ("slots", "max_tokens", "chunk")
_generate = jax.jit(run_generate, static_argnames=("target", "drafter", "verify", *SHAPES))
_prefill = jax.jit(run_prefill, static_argnames=("target", "drafter", *SHAPES))
_step = jax.jit(run_step, static_argnames=("target", "drafter", "verify"), donate_argnums=(1,))


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A loaded target model.

    Attributes:
      config: sizes and stop tokens. params: plain nested dict of arrays. fn: the model as the engine sees it.
      name: where it came from. dtype: of its weights and cache.
    """

    config: DecoderConfig
    params: Params
    fn: TargetFn
    name: str
    dtype: str

    @classmethod
    def from_params(cls, config: DecoderConfig, params: Params, name: str = "target") -> Target:
        """Wraps parameters that are already in memory, e.g. a policy in training."""
        dtype = str(jax.tree.leaves(params)[0].dtype)
        return cls(config, params, target_fn(config, dtype), name, dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class DraftHead:
    """A draft head bound to its target.

    Attributes:
      config: the head. params: `{"head": ..., "d2t": ...}`. tree: shape of its drafts. drafter: the three pure functions.
    """

    config: HeadConfig
    params: Params
    tree: TreeConfig
    drafter: Drafter
    target_fn: TargetFn
    name: str

    @classmethod
    def from_params(
        cls, config: HeadConfig, params: Params, target: Target, tree: TreeConfig = DEFAULT_TREE, name: str = "head"
    ) -> DraftHead:
        """Binds parameters that are already in memory to `target`."""
        dtype = str(jax.tree.leaves(params["head"])[0].dtype)
        return cls(config, params, tree, eagle(config, tree, target.fn, dtype), target.fn, name)

    def with_tree(self, tree: TreeConfig) -> DraftHead:
        """The same head with another tree; no weights are copied."""
        dtype = str(jax.tree.leaves(self.params["head"])[0].dtype)
        return dataclasses.replace(self, tree=tree, drafter=eagle(self.config, tree, self.target_fn, dtype))


@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns.

    Attributes:
      tokens: per prompt exactly the new tokens, cut after the first stop token, never more than its budget.
      cycles: [B] target passes after the prefill. The prefill itself yields the first token.
      accepted: [B, depth+1] histogram: in how many cycles i drafted tokens were accepted by the target. A last cycle that the
        budget or a stop token cut short is counted with what was accepted, not with what was emitted.
    """

    tokens: list[list[int]]
    cycles: np.ndarray
    accepted: np.ndarray

    @property
    def tau(self) -> float:
        """Tokens per target pass, pooled over all rows: (tokens after each row's first) / cycles; the target's own counts."""
        new = sum(len(row) - 1 for row in self.tokens)
        return new / max(int(self.cycles.sum()), 1)


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """Tokens of one cycle of one prompt.

    Attributes:
      tokens: emitted now; the first chunk is the prefill's single token.
      drafted: how many of them, from the front, were drafted and accepted; the rest is the target's own.
    """

    tokens: list[int]
    drafted: int


def load_target(
    path_or_hub_id: str | os.PathLike[str],
    dtype: str = "float32",
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    max_position: int | None = None,
) -> Target:
    """Loads a Llama-like model from a local directory or the Hugging Face hub.

    Args:
      dtype: "float32", "bfloat16" or "float16"; of weights, activations and cache. Scores, softmax and norms stay float32.
      revision, token, cache_dir: passed to `huggingface_hub` (ignored for a local path).
      max_position: caps the context length, e.g. to stay inside a sliding window, which is not supported beyond it.

    Raises:
      CheckpointError: nothing there, an unknown architecture, or tensors that do not fit, all named at once.
    """
    from eagle_jax.checkpoints import load_target_checkpoint

    config, params = load_target_checkpoint(
        path_or_hub_id, dtype, revision=revision, token=token, cache_dir=cache_dir, max_position=max_position
    )
    return Target(config, params, target_fn(config, dtype), str(path_or_hub_id), dtype)


def load_drafter(
    path_or_hub_id: str | os.PathLike[str],
    target: Target,
    tree: TreeConfig = DEFAULT_TREE,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    rope_theta: float | int | None = None,
    taps: tuple[int, ...] | None = None,
) -> DraftHead:
    """Loads an EAGLE-1/2 or EAGLE-3 head trained for `target`.

    Args:
      tree: chain, static or dynamic draft tree.
      rope_theta: overrides the head's own base (some published heads work better at 10000 than at their config's value).
      taps: overrides which hidden states the head reads.

    Raises:
      CheckpointError: tensors missing, unexpected or misshaped, or a head made for another target.
      ConfigError: a tree the head cannot fill.
    """
    from eagle_jax.checkpoints import load_head_checkpoint

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
    )
    drafter = eagle(config, tree, target.fn, target.dtype)
    return DraftHead(config, params, tree, drafter, target.fn, str(path_or_hub_id))


@dataclasses.dataclass(frozen=True)
class _Request:
    """Checked and padded arguments of one run."""

    params: Params
    arrays: tuple[jax.Array, ...]
    options: dict[str, Any]
    sampling: Sampling


def generate(
    target: Target,
    drafter: DraftHead | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    eos_ids: int | Sequence[int] | Sequence[Sequence[int]] | None = None,
    key: jax.Array | int | None = None,
) -> GenerateOutput:
    """Generates from a batch of prompts, losslessly: the text is the target's own, whatever the drafter.

    Args:
      prompts: token ids per row; rows may differ in length.
      drafter: None is plain decoding through the same program.
      max_new_tokens: budget, one number or one per row.
      temperature, top_k, top_p, min_p: the sampled law; temperature 0 is greedy.
      eos_ids: stop tokens, for all rows or one set per row; None takes the target's own, () never stops.
      key: `jax.random.key(seed)` or a seed; needed when temperature > 0. For a given key the text is the same with every drafter.

    Raises:
      ValueError: before anything is compiled, naming the argument, its bound and the remedy.
    """
    request = _prepare(
        target, drafter, prompts, max_new_tokens, make_sampling(temperature, top_k, top_p, min_p), eos_ids, key
    )
    state = _generate(request.params, *request.arrays, sampling=request.sampling, **request.options)
    return _collect(jax.device_get((state.tokens, state.num_tokens, state.cycles, state.accepted)))


def stream(
    target: Target,
    drafter: DraftHead | None,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    eos_ids: int | Sequence[int] | None = None,
    key: jax.Array | int | None = None,
) -> Iterator[StreamChunk]:
    """Yields one prompt's tokens as cycles finish, from the same `step` as `generate`. Arguments as there.

    Arguments are checked at the call, not at the first `next`.
    """
    request = _prepare(
        target, drafter, [prompt], max_new_tokens, make_sampling(temperature, top_k, top_p, min_p), eos_ids, key
    )
    return _stream(request)


def _stream(request: _Request) -> Iterator[StreamChunk]:
    fns = {name: request.options[name] for name in ("target", "drafter")}
    state: GenerateState = _prefill(request.params, *request.arrays, sampling=request.sampling, **request.options)
    yield StreamChunk([int(state.root[0])], 0)
    done = bool(state.done[0])
    while not done:
        state, info = _step(request.params, state, sampling=request.sampling, **fns)
        tokens, emitted, count, finished = jax.device_get(
            (info.tokens[0], info.emitted[0], info.acceptance.count[0], state.done[0])
        )
        done = bool(finished)
        yield StreamChunk([int(t) for t in tokens[:emitted]], int(min(count, emitted)))


def _prepare(
    target: Target,
    head: DraftHead | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    sampling: Sampling,
    eos_ids: int | Sequence[int] | Sequence[Sequence[int]] | None,
    key: jax.Array | int | None,
) -> _Request:
    if head is not None and head.target_fn is not target.fn:
        raise ValueError(
            f"drafter {head.name!r} was loaded for another target than {target.name!r}; "
            "load it again with load_drafter(path, target)"
        )
    drafter = vanilla() if head is None else head.drafter
    rows = _check_prompts(prompts, target.config)
    budgets = _check_budgets(max_new_tokens, rows, target.config)
    stops = _stop_table(eos_ids, len(rows), target.config)
    if not sampling.greedy and key is None:
        raise ValueError("temperature > 0 draws at random: pass key=jax.random.key(seed) or key=seed")

    lengths = np.array([len(row) for row in rows], np.int32)
    width = bucket(int(lengths.max()))
    chunk = width if width <= PREFILL_CHUNK else math.gcd(width, PREFILL_CHUNK)
    max_tokens = bucket(max(budgets))
    slots = round_up(required_slots(width, max_tokens, drafter.depth, chunk), 32 if width < 1024 else 128)
    padded = np.zeros((len(rows), width), np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    base = jax.random.key(0 if key is None else key) if key is None or isinstance(key, int) else key
    if not jnp.issubdtype(base.dtype, jax.dtypes.prng_key):
        base = jax.random.wrap_key_data(base)
    keys = jax.vmap(lambda row: jax.random.fold_in(base, row))(jnp.arange(len(rows)))
    params = {"target": target.params, "drafter": {} if head is None else head.params}
    arrays = (jnp.asarray(padded), jnp.asarray(lengths), jnp.asarray(budgets, jnp.int32), jnp.asarray(stops), keys)
    options = dict(target=target.fn, drafter=drafter, slots=slots, max_tokens=max_tokens, chunk=chunk)
    return _Request(params, arrays, options, sampling)


def bucket(size: int, smallest: int = 32) -> int:
    """The next of 32, 48, 64, 96, 128, 192, ...: sizes of a bucket share one compilation, and at most a third is padding."""
    power = smallest
    while power < size:
        if size <= power + power // 2:
            return power + power // 2
        power *= 2
    return power


def round_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def _check_prompts(prompts: Sequence[Sequence[int]], config: DecoderConfig) -> list[np.ndarray]:
    if isinstance(prompts, str | bytes) or len(prompts) == 0:
        raise ValueError("prompts must be a non-empty list of lists of token ids")
    rows = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, int | np.integer | str):
            raise ValueError(f"prompts[{index}] is a {type(prompt).__name__}: pass a list of lists of token ids")
        row = np.asarray(prompt)
        if row.size == 0:
            raise ValueError(f"prompts[{index}] is empty: a prompt needs at least one token, such as the bos token")
        if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
            raise ValueError(f"prompts[{index}] must be a flat list of integer token ids")
        bad = np.flatnonzero((row < 0) | (row >= config.vocab_size))
        if bad.size:
            raise ValueError(
                f"prompts[{index}][{bad[0]}]={row[bad[0]]} lies outside the vocabulary of {config.vocab_size} tokens; "
                "was it made by another tokenizer?"
            )
        rows.append(row.astype(np.int32))
    return rows


def _check_budgets(
    max_new_tokens: int | Sequence[int], rows: list[np.ndarray], config: DecoderConfig
) -> list[int]:
    budgets = [max_new_tokens] * len(rows) if isinstance(max_new_tokens, int | np.integer) else list(max_new_tokens)
    if len(budgets) != len(rows):
        raise ValueError(f"max_new_tokens has {len(budgets)} entries for {len(rows)} prompts")
    for index, (budget, row) in enumerate(zip(budgets, rows, strict=True)):
        if isinstance(budget, bool) or int(budget) != budget or budget < 1:
            raise ValueError(f"max_new_tokens={budget} (row {index}) must be an integer of at least 1")
        if len(row) + budget > config.max_position:
            raise ValueError(
                f"row {index}: a prompt of {len(row)} tokens plus max_new_tokens={budget} exceeds the model's length of "
                f"{config.max_position}; shorten the prompt or lower max_new_tokens to at most {config.max_position - len(row)}"
            )
    return [int(budget) for budget in budgets]


def _stop_table(
    eos_ids: int | Sequence[int] | Sequence[Sequence[int]] | None, batch: int, config: DecoderConfig
) -> np.ndarray:
    """[B, E] int32, padded with -1; E is a multiple of 4 so that a few stop tokens more do not recompile."""
    if eos_ids is None:
        eos_ids = config.eos_ids
    if isinstance(eos_ids, int | np.integer):
        eos_ids = [int(eos_ids)]
    items = list(eos_ids)
    nested = any(not isinstance(item, int | np.integer) for item in items)
    sets: list[list[int]]
    if nested:
        if len(items) != batch:
            raise ValueError(f"eos_ids has {len(items)} sets for {batch} prompts; give one flat list or one set per prompt")
        sets = [[int(token) for token in item] for item in items]  # type: ignore[union-attr]
    else:
        sets = [[int(item) for item in items]] * batch  # type: ignore[arg-type]
    for row in sets:
        for token in row:
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"eos_ids: {token} lies outside the vocabulary of {config.vocab_size} tokens")
    table = np.full((batch, round_up(max(1, *map(len, sets)), 4) if sets else 4), -1, np.int32)
    for index, row in enumerate(sets):
        table[index, : len(row)] = row
    return table


def _collect(arrays: tuple[np.ndarray, ...]) -> GenerateOutput:
    tokens, counts, cycles, accepted = arrays
    return GenerateOutput([row[:count].tolist() for row, count in zip(tokens, counts, strict=True)], cycles, accepted)
