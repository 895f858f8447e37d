"""Reads prompts, and begins replies to them: `prefill` and `extend` do both."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from eagle_jax.core import adaptive
from eagle_jax.core.cache import commit
from eagle_jax.core.checked import check_arguments, update_checked, update_if
from eagle_jax.core.randomness import threefry_keys
from eagle_jax.core.sampling import draw, log_prob
from eagle_jax.core.types import (
    FINITE,
    Batch,
    Engine,
    GenerateState,
    KVCache,
    Params,
    Sampling,
    Sizes,
    TargetOutput,
    Verified,
)


class Prefix(NamedTuple):
    """Holds prompts that were read; any number of replies may begin after each.

    Attributes:
      cache: the target's, with the prompts. drafter: state of the drafter, which has read all but the last position.
      hidden, features: of the last position. last: [B, 1] int32, the last token of every prompt.
      kept: of all positions, `GenerateState.features`.
    """

    cache: KVCache
    drafter: Any
    hidden: Float[Array, "B H"]
    features: Float[Array, "B F"]
    last: Int[Array, "B 1"]
    kept: Float[Array, "B S F"] | None = None


def required_slots(prompt_width: int, max_tokens: int, depth: int, chunk: int) -> int:
    """Returns the number of cache slots that a run needs."""
    # After the committed tokens, a chunk or a whole path must fit.
    return prompt_width + max(chunk, max_tokens + depth + 1)


def slots_of(prompt_width: int, engine: Engine, sizes: Sizes) -> int:
    """Returns the capacity of the caches of a run.

    Raises:
      ValueError: `sizes.slots` are too few.
    """
    needed = required_slots(prompt_width, sizes.max_tokens, engine.drafter.depth, sizes.chunk)
    slots = needed if sizes.slots is None else sizes.slots
    if slots < needed:
        raise ValueError(f"slots must be at least required_slots, {needed}, got {slots}. Raise it, or pass None.")
    return slots


def empty_caches(params: Params, engine: Engine, rows: int, slots: int) -> tuple[KVCache, Any]:
    """Returns the empty cache of the target and the first state of the drafter."""
    # A drafter writes room for all tokens of a burst of plain steps, however few there are.
    more = 0 if engine.cycle_cost is None else max(adaptive.BURST - engine.drafter.depth, 0)
    return engine.target.init_cache(rows, slots), engine.drafter.init(params, rows, slots + more)


def empty_features(params: Params, engine: Engine, rows: int, slots: int) -> Float[Array, "B S F"] | None:
    """Returns the first `GenerateState.features`, for `extend`; None without `engine.taps`."""
    if engine.taps is None:
        return None
    found = engine.target.output_shapes(params["target"], engine.target.init_cache(rows, slots), engine.taps).features
    return jnp.zeros((rows, slots, found.shape[2]), found.dtype)


def run_target(
    params: Params, engine: Engine, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], mask: Array, cache: KVCache
) -> tuple[TargetOutput, Float[Array, "B T F"] | None]:
    """Runs the target once, and returns its results with the drafter's features, and those of `engine.taps`."""
    own, taps = engine.drafter.taps, engine.taps
    out = engine.target.forward(params["target"], tokens, positions, mask, cache, (*own, *(taps or ())))
    if taps is None:
        return out, None
    width = out.features.shape[2] * len(own) // max(len(own) + len(taps), 1)
    return out._replace(features=out.features[..., :width]), out.features[..., width:]


def append(rows: Array, new: Array, at: Int[Array, " B"]) -> Array:
    """Writes `new` into every row, from the row's own index on."""
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    return jax.vmap(put)(rows, new, at)


def prefill(
    params: Params, batch: Batch, sampling: Sampling, engine: Engine, sizes: Sizes,
    drafts: Bool[Array, ""] | bool = True,
) -> GenerateState:  # fmt: skip
    """Runs the target over the prompts in chunks and emits the first token of every row.

    The lm_head runs for the last position of a prompt only. Chunks beyond the longest prompt are not computed.

    Args:
      drafts: whether the drafter reads the prompts. Their last position it reads always: then the compiler leaves out
        what only a draft after an earlier position would need.

    Raises:
      ValueError: an argument has another type or shape, the chunk does not divide P, the slots are too few, or the
        drafter's `update` returns a state of another structure, shape or dtype.
    """
    check_arguments(params, batch, sampling, engine, sizes)
    rows, width = batch.prompts.shape
    slots = slots_of(width, engine, sizes)
    caches, features = empty_caches(params, engine, rows, slots), empty_features(params, engine, rows, slots)
    return extend(params, *caches, batch, sampling, engine, sizes, features, drafts)


def extend(
    params: Params, cache: KVCache, drafter_state: Any, batch: Batch, sampling: Sampling, engine: Engine, sizes: Sizes,
    features: Float[Array, "B S F"] | None = None, drafts: Bool[Array, ""] | bool = True,
) -> GenerateState:  # fmt: skip
    """Runs `prefill` after the committed tokens of a cache, for the next turn of a conversation.

    Args:
      cache: the target's cache, with the text so far, and room for `required_slots` of the new prompts.
      drafter_state: the drafter's state, updated with the same text.
      batch: the prompts continue that text; the first token of each is the last emitted one, not yet committed.
      features: `GenerateState.features` of the text so far, with `engine.taps`; else None.
      drafts: as in `prefill`.

    Raises:
      ValueError: the chunk does not divide P, `update` returns another state, as in `prefill`, or only one of
        `features` and `engine.taps` is given.
    """
    with jax.named_scope("prefill"):
        prefix = read(params, cache, drafter_state, batch.prompts, batch.lengths, engine, sizes.chunk, features, drafts)
        return begin(params, prefix, batch.budget, batch.eos_ids, batch.keys, sampling, engine, sizes.max_tokens)


def read(
    params: Params, cache: KVCache, drafter_state: Any, prompts: Int[Array, "B P"], lengths: Int[Array, " B"],
    engine: Engine, chunk: int, kept: Float[Array, "B S F"] | None = None, drafts: Bool[Array, ""] | bool = True,
) -> Prefix:  # fmt: skip
    """Runs the target over prompts, `chunk` tokens at a time, after the committed tokens of a cache.

    The drafter reads them if it `drafts`.

    Raises:
      ValueError: as `extend`, whose `features` are `kept`.
    """
    target, drafter = engine.target, engine.drafter
    rows, width = prompts.shape
    if width % chunk:
        raise ValueError(f"chunk must divide the padded prompt width, {width}, got {chunk}. Pad prompts to a multiple.")
    if (kept is None) != (engine.taps is None):
        raise ValueError(
            f"features must be given with engine.taps, and only then, got taps {engine.taps} and "
            f"{'no' if kept is None else 'these'} features. Pass GenerateState.features of the text so far."
        )
    base = cache.length
    following = jnp.concatenate([prompts[:, 1:], jnp.zeros((rows, 1), prompts.dtype)], axis=1)
    causal = jnp.tril(jnp.ones((chunk, chunk), bool))

    def run_chunk(index: Array, carry: tuple) -> tuple:
        cache, state, kept, last = carry
        start = index * chunk
        tokens = jax.lax.dynamic_slice_in_dim(prompts, start, chunk, axis=1)
        next_tokens = jax.lax.dynamic_slice_in_dim(following, start, chunk, axis=1)
        positions = base[:, None] + start + jnp.arange(chunk)[None]
        out, found = run_target(params, engine, tokens, positions, causal, cache)
        if found is not None:
            kept = append(kept, found, base + start)
        # A row's last prompt position has no next token yet: the update after the loop adds this position.
        pairs = jnp.clip(lengths - 1 - start, 0, chunk)
        verified = Verified(tokens, next_tokens, out.features, base + start, pairs)
        state = update_if(drafts, drafter, params, state, verified)
        cache = commit(cache, out.new, jnp.clip(lengths - start, 0, chunk), result=out.hidden, windows=target.windows)
        is_here = (lengths - 1 >= start) & (lengths - 1 < start + chunk)
        row = jnp.clip(lengths - 1 - start, 0, chunk - 1)
        ends = (_take(out.hidden, row), _take(out.features, row))
        return cache, state, kept, jax.tree.map(lambda new, old: jnp.where(is_here[:, None], new, old), ends, last)

    shapes = target.output_shapes(params["target"], cache, drafter.taps)
    last = tuple(jnp.zeros((rows, part.shape[2]), part.dtype) for part in (shapes.hidden, shapes.features))
    chunks = (jnp.max(lengths) + chunk - 1) // chunk
    cache, state, kept, (hidden, features) = jax.lax.fori_loop(0, chunks, run_chunk, (cache, drafter_state, kept, last))
    return Prefix(cache, state, hidden, features, _take(prompts[..., None], lengths - 1), kept)


def begin(
    params: Params, prefix: Prefix, budget: Int[Array, " B"], eos_ids: Int[Array, "B E"], keys: Key[Array, " B"],
    sampling: Sampling, engine: Engine, max_tokens: int,
) -> GenerateState:  # fmt: skip
    """Emits the first token after every prompt; the arguments are those of a `Batch`.

    Raises:
      ValueError: the drafter's `update` returns another state.
    """
    rows, keys, drafter = len(prefix.last), threefry_keys(keys), engine.drafter
    logits = engine.target.logits(params["target"], prefix.hidden)
    finite, zero = has_finite_maximum(logits), jnp.zeros((rows,), jnp.int32)
    root = jax.vmap(lambda row, key, index: draw(row, key, index, sampling))(logits, keys, zero)
    last = Verified(
        prefix.last, root[:, None], prefix.features[:, None], prefix.cache.length - 1, jnp.ones((rows,), jnp.int32)
    )
    tokens = jnp.zeros((rows, max_tokens + drafter.depth + 1), jnp.int32).at[:, 0].set(root)
    log_probs = None
    if engine.log_probs is not None:
        first = log_prob(logits, root, engine.log_probs, sampling)
        log_probs = jnp.zeros(tokens.shape, jnp.float32).at[:, 0].set(first)
    return GenerateState(
        cache=prefix.cache,
        drafter=update_checked(drafter, params, prefix.drafter, last),
        root=root,
        tokens=tokens,
        num_tokens=finite.astype(jnp.int32),
        budget=jnp.minimum(budget, max_tokens),  # a larger budget would overflow the output and the cache
        eos_ids=eos_ids,
        done=is_stop(root[:, None], eos_ids)[:, 0] | (budget <= 1) | ~finite,
        cycles=zero,
        accepted=jnp.zeros((rows, drafter.depth + 1), jnp.int32),
        keys=keys,
        not_finite=jnp.where(finite, FINITE, zero),  # not 0: a weak type would compile `step` twice
        bad_drafts=jnp.full_like(zero, FINITE),
        log_probs=log_probs,
        features=prefix.kept,
    )


def has_finite_maximum(logits: Float[Array, "*b V"]) -> Bool[Array, "*b"]:
    """Returns whether a token can be drawn: no NaN, no +inf, not only -inf. A maximum with a NaN is NaN."""
    return jnp.isfinite(jnp.max(logits, axis=-1))


def is_stop(tokens: Int[Array, "B M"], eos_ids: Int[Array, "B E"]) -> Bool[Array, "B M"]:
    """Returns which tokens end their row."""
    return jnp.any(tokens[:, :, None] == eos_ids[:, None, :], axis=-1)


def _take(values: Array, row: Int[Array, " B"]) -> Array:
    return jnp.take_along_axis(values, row[:, None, None], axis=1)[:, 0]
