"""Validates the arguments of `generate` and `stream`, and pads them into buckets.

Traced code cannot raise on values, so every check is made here on the host, before anything is compiled.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import core
from eagle_jax.config import DecoderConfig, check_integer
from eagle_jax.core import Batch, Drafter, Engine, Params, Sampling, Sizes, make_sampling, required_slots
from eagle_jax.runtime.drafters import BoundDrafter
from eagle_jax.runtime.target import Target
from eagle_jax.runtime.tokens import integers, is_list, token_rows

PREFILL_CHUNK = 256
"""Most prompt tokens per prefill pass."""

NESTING = "generate and rollout take a list of prompts, and stream takes one prompt."
"""Remedy for prompts that are nested too much or too little."""

StopTokens = int | Sequence[int] | Sequence[Sequence[int]] | None
"""One id, one set for all rows, one set per row, or None for the target's own."""


class Request(NamedTuple):
    """Validated and padded arguments of `eagle_jax.core.generate` and `prefill`, in their order."""

    params: Params
    batch: Batch
    sampling: Sampling
    engine: Engine
    sizes: Sizes


def prepare(
    prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], eos_ids: StopTokens,
    key: jax.Array | int | None, name: str, config: DecoderConfig, depth: int,
) -> tuple[Batch, Sizes]:  # fmt: skip
    """Checks arguments of `eagle_jax.generate` and pads them into buckets.

    Args:
      name: of a prompt in messages; {} stands for its index. config: the target's. depth: D of the drafter.

    Raises:
      ValueError: naming the argument, its rule and the remedy.
    """
    _check_not_traced(prompts=prompts, max_new_tokens=max_new_tokens, eos_ids=eos_ids, key=key, arrays=jnp.zeros(()))
    rows = token_rows(prompts, "prompts", config.vocab_size, place=name, nesting=NESTING)
    budgets = _check_budgets(max_new_tokens, rows, config)
    stops = _stop_table(eos_ids, len(rows), config)
    lengths = np.array([len(row) for row in rows], np.int32)
    width, max_tokens = bucket(int(lengths.max())), bucket(max(budgets))
    chunk = width if width <= PREFILL_CHUNK else math.gcd(width, PREFILL_CHUNK)
    slots = round_up(required_slots(width, max_tokens, depth, chunk), 32 if width < 1024 else 128)
    padded = np.zeros((len(rows), width), np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    arrays = (jnp.asarray(padded), jnp.asarray(lengths), jnp.asarray(budgets, jnp.int32), jnp.asarray(stops))
    return Batch(*arrays, keys_of(key, len(rows))), Sizes(max_tokens, chunk, slots)


empty_caches = jax.jit(core.prompts.empty_caches, static_argnames=("engine", "rows", "slots"))
empty_features = jax.jit(core.prompts.empty_features, static_argnames=("engine", "rows", "slots"))


# Jitted: an eager `vmap` costs milliseconds of host time per call.
_row_keys = jax.jit(lambda key, batch: core.row_keys(key, jnp.arange(batch)), static_argnames="batch")
_threefry_keys = jax.jit(core.threefry_keys)


def keys_of(key: jax.Array | int | None, batch: int, row: str = "prompt") -> jax.Array:
    """Returns a Threefry key per row, from a seed, a raw key, or one key or one per row of any generator.

    Messages name a row by `row`.
    """
    if key is None:
        key = 0
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        if not 0 <= key < 2**32:
            raise ValueError(f"key must be a seed from 0 to 2**32 - 1, got {key}. JAX keeps 32 bits of a seed.")
        return _row_keys(jax.random.key(key, impl="threefry2x32"), batch)  # not JAX's default generator
    if isinstance(key, jax.Array | np.ndarray):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape in ((), (batch,)):
            return _threefry_keys(key) if key.shape else _row_keys(key, batch)
        if key.dtype == jnp.uint32 and key.shape in ((2,), (4,)):
            return _row_keys(_threefry_keys(key), batch)
        raise ValueError(
            f"key must be one key, an array of {batch} keys (one per {row}) or an integer seed, got an array of "
            f"{key.dtype}{list(key.shape)}. Pass jax.random.key(seed); every row derives its own key."
        )
    raise ValueError(f"key must be jax.random.key(seed) or an integer seed, got {key!r}. Pass one.")


def check_drafter(drafter: Any, target: Target) -> None:
    """Checks that `drafter` is None or bound to `target`.

    Raises:
      ValueError: it has another type, is bound to another target, or reads hidden states that the target lacks.
    """
    if drafter is None:
        return
    if isinstance(drafter, Drafter):
        raise ValueError("drafter must be bound to a target, got a Drafter. Pass BoundDrafter.bind(drafter, target).")
    if not isinstance(drafter, BoundDrafter):
        raise ValueError(
            f'drafter must be a result of eagle_jax.load_drafter, None, or "auto" with profile=, got {drafter!r:.40}. '
            "Choose one."
        )
    if drafter.target.fn is not target.fn:
        raise ValueError(
            f"drafter {drafter.name!r} must be bound to the target {target.name!r}, got one for another target. "
            "Load it again with load_drafter(path, target)."
        )
    layers = target.config.num_layers
    if wrong := [tap for tap in drafter.drafter.taps if not 0 <= tap <= layers]:
        raise ValueError(
            f"the taps of drafter {drafter.name!r} must be hidden states 0 to {layers}, got {wrong}. Load a drafter of "
            "this target."
        )


def with_taps(request: Request, taps: Any, config: DecoderConfig) -> Request:
    """Returns the request of a run that keeps hidden states of the target; `taps` None keeps none.

    Raises:
      ValueError: they are not hidden states of the target.
    """
    if taps is None:
        return request
    found = None if isinstance(taps, str) else integers(taps)
    layers = config.num_layers
    if found is None or found.ndim != 1 or not found.size or found.min() < 0 or found.max() > layers:
        raise ValueError(
            f"taps must be hidden states 0 to {layers}, or None, got {taps!r:.40}. Pass for example "
            f"(*head.config.taps, {layers})."
        )
    return request._replace(engine=request.engine._replace(taps=tuple(found.tolist())))


def _check_not_traced(**arguments: Any) -> None:
    """Checks that no argument is a tracer of `jit` or `vmap`. Inside them, every new array is a tracer."""
    for name, value in arguments.items():
        rows = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(row, jax.core.Tracer) for row in rows):
            raise ValueError(
                f"{name} must be a concrete value, got a JAX tracer. eagle_jax.generate and stream run outside of jit, "
                "vmap and shard_map; call eagle_jax.core.generate there (docs/generating.md, Inside your own program)."
            )


def sampling_of(**settings: Any) -> Sampling:
    """Returns `make_sampling(temperature, top_k, top_p, min_p)` of numbers.

    Raises:
      ValueError: an argument is not a number, or outside its range.
    """
    _check_not_traced(**settings)
    for name, value in settings.items():
        if not is_number(value):
            raise ValueError(f"{name} must be a number, got {value!r}. Pass a number or a scalar array.")
    return make_sampling(**settings)


def is_number(value: Any) -> bool:
    """Returns whether a value is a real number that is known, or an array of one without axes."""
    if isinstance(value, jax.Array | np.ndarray):
        return value.ndim == 0 and value.dtype.kind in "iuf" and not isinstance(value, jax.core.Tracer)
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def bucket(size: int) -> int:
    """Returns the next of 32, 48, 64, 96, 128, ...: one program each, above 32 at most 1/3 padding."""
    return next(one for power in itertools.count(5) for one in (2**power, 3 * 2 ** (power - 1)) if one >= size)


def round_up(size: int, multiple: int) -> int:
    """Rounds `size` up to a multiple."""
    return -(-size // multiple) * multiple


def _check_budgets(max_new_tokens: int | Sequence[int], rows: list[np.ndarray], config: DecoderConfig) -> list[int]:
    given: Any = max_new_tokens.tolist() if isinstance(max_new_tokens, np.ndarray | jax.Array) else max_new_tokens
    several = isinstance(given, Sequence) and not isinstance(given, str)
    budgets: list[Any] = list(given) if several else [given] * len(rows)
    budgets = [int(budget) if isinstance(budget, np.integer) else budget for budget in budgets]
    if len(budgets) != len(rows):
        raise ValueError(
            f"max_new_tokens must be a number, or one per prompt ({len(rows)}), got {len(budgets)}. Pass one number."
        )
    for index, budget in enumerate(budgets):
        check_integer(f"max_new_tokens[{index}]" if several else "max_new_tokens", budget)
    rooms = [config.max_position - len(row) for row in rows]
    index = min(range(len(rows)), key=lambda at: rooms[at] - budgets[at])  # lowered to fit there, it fits everywhere
    if budgets[index] > rooms[index]:
        remedy = "Lower it, or shorten the prompt." if rooms[index] > 0 else "Shorten the prompt."
        raise ValueError(
            f"max_new_tokens must be at most {max(0, rooms[index])} after the {len(rows[index])} tokens of row {index} "
            f"(max_position is {config.max_position}), got {budgets[index]}. {remedy}"
        )
    return budgets


def _stop_table(eos_ids: StopTokens, batch: int, config: DecoderConfig) -> np.ndarray:
    """Returns [B, E] int32, padded with -1; E is a multiple of 4, so few stop tokens compile anew."""
    if eos_ids is None:
        eos_ids = config.eos_ids
    given: Any = eos_ids
    if isinstance(given, str) or (is_list(given) and any(isinstance(one, str) for one in given)):
        raise ValueError(f"eos_ids must be a token id, a list, or a list per prompt, got {eos_ids!r}. Give ids.")
    rows = list(given) if is_list(given) and any(map(is_list, given)) else [given] * batch
    if len(rows) != batch:
        raise ValueError(f"eos_ids must have a list per prompt ({batch}), got {len(rows)} lists. Give one flat list.")
    sets = []
    for row in rows:
        ids = integers(row)
        if ids is None or ids.ndim > 1:
            raise ValueError(f"eos_ids must be a token id, a list, or a list per prompt, got {eos_ids!r}. Give ids.")
        if bad := [token for token in ids.flat if not 0 <= token < config.vocab_size]:
            raise ValueError(f"eos_ids must be 0 to {config.vocab_size - 1}, got {bad[0]}. Use the target's tokenizer.")
        sets.append(ids.reshape(-1))
    table = np.full((batch, round_up(max(1, *map(len, sets)), 4)), -1, np.int32)
    for index, ids in enumerate(sets):
        table[index, : len(ids)] = ids
    return table
