"""The one cycle and the one loop: draft a tree, verify it in one target pass, commit what was accepted.

Pure functions over explicit parameter trees; use them inside another `jit`, under `vmap` over keys, in `shard_map`,
or with `jax.eval_shape`. `params` is `{"target": ..., "drafter": ...}` throughout. `eagle_jax.generate` (module
`api`) is the host-level wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from eagle_jax.core import contract
from eagle_jax.core.cache import commit
from eagle_jax.core.randomness import threefry_keys
from eagle_jax.core.sampling import LogProbs, draw, log_prob
from eagle_jax.core.tree import ancestor_mask, node_depths
from eagle_jax.core.types import (
    FINITE,
    Acceptance,
    Chance,
    Drafter,
    GenerateState,
    KVCache,
    Params,
    Sampling,
    StepInfo,
    TargetFn,
    Verified,
)
from eagle_jax.core.verify import VerifyFn, deterministic


def required_slots(prompt_width: int, max_tokens: int, depth: int, chunk: int) -> int:
    """Cache slots that a run can touch: a chunk or a whole path must always fit behind the committed tokens."""
    return prompt_width + max(chunk, max_tokens + depth + 1)


def prefill(
    params: Params,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    budget: Int[Array, " B"],
    eos_ids: Int[Array, "B E"],
    keys: Key[Array, " B"],
    *,
    target: TargetFn,
    drafter: Drafter,
    sampling: Sampling,
    slots: int,
    max_tokens: int,
    chunk: int,
    log_probs: LogProbs | None = None,
) -> GenerateState:
    """Sends the prompts through the target in chunks and emits each row's first token.

    Only the last prompt position of every row meets the lm_head. Chunks beyond the longest prompt are not computed.

    Args:
      prompts: token ids, padded on the right. lengths: tokens of every prompt, at least 1.
      budget: most tokens each row may emit, 1 to `max_tokens`. eos_ids: stop tokens per row, padded with -1.
      keys: [B] PRNG keys, one per row (unused when greedy).
      slots: S, cache capacity, at least `required_slots(...)`. max_tokens: capacity of the output. chunk: divides P.
      log_probs: the law by which the state has log-probabilities of what is emitted; None for none.

    Raises:
      ValueError: an argument of another kind or shape, `chunk` does not divide P, or `slots` is below what the run can
        touch.
    """
    arrays = {"prompts": prompts, "lengths": lengths, "budget": budget, "eos_ids": eos_ids, "keys": keys}
    _check(params, target, drafter, sampling, **arrays)
    batch, width = prompts.shape
    needed = required_slots(width, max_tokens, drafter.depth, chunk)
    if slots < needed:
        raise ValueError(f"slots={slots} is below the {needed} cache slots that this run can touch; see required_slots")
    return extend(
        params,
        target.init_cache(batch, slots),
        drafter.init(params, batch, slots),
        prompts,
        lengths,
        budget,
        eos_ids,
        keys,
        target=target,
        drafter=drafter,
        sampling=sampling,
        max_tokens=max_tokens,
        chunk=chunk,
        log_probs=log_probs,
    )


def extend(
    params: Params,
    cache: KVCache,
    state: Any,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    budget: Int[Array, " B"],
    eos_ids: Int[Array, "B E"],
    keys: Key[Array, " B"],
    *,
    target: TargetFn,
    drafter: Drafter,
    sampling: Sampling,
    max_tokens: int,
    chunk: int,
    log_probs: LogProbs | None = None,
) -> GenerateState:
    """`prefill` behind what a cache already holds: a text that goes on, as a conversation does.

    Args:
      cache: the target's, with the text so far committed. It must have room: every row for `lengths`, rounded up to a
        multiple of `chunk`, and for `max_tokens` and a path of the tree.
      state: the drafter's, which has been told of that text.
      prompts: what comes behind it, first of all the last token that was emitted and is not committed yet.

    Raises:
      ValueError: `chunk` does not divide P.
    """
    batch, width = prompts.shape
    if width % chunk:
        raise ValueError(f"chunk={chunk} must divide the padded prompt width {width}")
    base, keys = cache.length, threefry_keys(keys)
    following = jnp.concatenate([prompts[:, 1:], jnp.zeros((batch, 1), prompts.dtype)], axis=1)
    causal = jnp.tril(jnp.ones((chunk, chunk), bool))

    def run_chunk(index: Array, carry: tuple) -> tuple:
        cache, state, last = carry
        start = index * chunk
        tokens = jax.lax.dynamic_slice_in_dim(prompts, start, chunk, axis=1)
        next_tokens = jax.lax.dynamic_slice_in_dim(following, start, chunk, axis=1)
        positions = base[:, None] + start + jnp.arange(chunk)[None]
        out = target.forward(params["target"], tokens, positions, causal, cache, drafter.taps)
        # The pair at a row's last prompt position waits for the first generated token.
        pairs = jnp.clip(lengths - 1 - start, 0, chunk)
        run = Verified(tokens, next_tokens, out.features, base + start, pairs)
        state = contract.told(drafter, params, state, run)
        cache = commit(cache, out.new, jnp.clip(lengths - start, 0, chunk), result=out.hidden)
        here = (lengths - 1 >= start) & (lengths - 1 < start + chunk)
        row = jnp.clip(lengths - 1 - start, 0, chunk - 1)
        found = (_take(out.hidden, row), _take(out.features, row))
        return cache, state, jax.tree.map(lambda new, old: jnp.where(here[:, None], new, old), found, last)

    shapes = jax.eval_shape(
        lambda: target.forward(
            params["target"], prompts[:, :1], prompts[:, :1], jnp.ones((1, 1), bool), cache, drafter.taps
        )
    )
    last = (_blank(shapes.hidden), _blank(shapes.features))
    with jax.named_scope("prefill"):
        chunks = (jnp.max(lengths) + chunk - 1) // chunk
        cache, state, (hidden, feature) = jax.lax.fori_loop(0, chunks, run_chunk, (cache, state, last))
        logits = target.logits(params["target"], hidden)
        zero = jnp.zeros((batch,), jnp.int32)
        finite = _has_finite_maximum(logits)
        root = jax.vmap(lambda row, key, index: draw(row, key, index, sampling))(logits, keys, zero)
        ends, one = _take(prompts[..., None], lengths - 1), jnp.ones_like(lengths)
        run = Verified(ends, root[:, None], feature[:, None], base + lengths - 1, one)
        state = contract.told(drafter, params, state, run)
    tokens = jnp.zeros((batch, max_tokens + drafter.depth + 1), jnp.int32).at[:, 0].set(root)
    known = None
    if log_probs is not None:
        known = jnp.zeros(tokens.shape, jnp.float32).at[:, 0].set(log_prob(logits, root, log_probs, sampling))
    return GenerateState(
        cache=cache,
        drafter=state,
        root=root,
        tokens=tokens,
        num_tokens=finite.astype(jnp.int32),
        budget=jnp.minimum(budget, max_tokens),  # more would run past the output and the cache
        eos_ids=eos_ids,
        done=_is_stop(root[:, None], eos_ids)[:, 0] | (budget <= 1) | ~finite,
        cycles=zero,
        accepted=jnp.zeros((batch, drafter.depth + 1), jnp.int32),
        keys=keys,
        not_finite=jnp.where(finite, FINITE, 0),
        bad_drafts=jnp.full_like(zero, FINITE),
        log_probs=known,
    )


def _has_finite_maximum(logits: Float[Array, "*b V"]) -> Bool[Array, "*b"]:
    """Whether a token can be drawn from `logits`: no NaN, no +inf, not only -inf. A maximum with a NaN is NaN."""
    return jnp.isfinite(jnp.max(logits, axis=-1))


def _check(params: Params, target: Any, drafter: Any, sampling: Any, **arrays: Any) -> None:
    """Refuses what a caller of these functions is likely to mistake, before tracing fails on it somewhere inside."""
    for name, value, kind, remedy in (
        ("target", target, TargetFn, "its .fn"),
        ("drafter", drafter, Drafter, "its .drafter"),
        ("sampling", sampling, Sampling, "eagle_jax.core.sampling.make_sampling(temperature)"),
    ):
        if not isinstance(value, kind):
            raise ValueError(f"{name} is a {type(value).__name__}, expected a {kind.__name__}: give {remedy}")
    if not isinstance(params, Mapping) or not params.keys() >= {"target", "drafter"}:
        raise ValueError('params must be {"target": ..., "drafter": ...}, the parameters of both')
    for name, value in arrays.items():
        axes = "B, P" if name == "prompts" else "B, E" if name == "eos_ids" else "B"
        array = isinstance(value, jax.Array | np.ndarray)
        if not array or value.ndim != axes.count(",") + 1 or value.shape[0] != arrays["prompts"].shape[0]:
            found = f"of shape {list(value.shape)}" if array else f"a {type(value).__name__}"
            raise ValueError(f"{name} is {found}, expected an array [{axes}] with a row for every prompt")


def _take(values: Array, row: Int[Array, " B"]) -> Array:
    return jnp.take_along_axis(values, row[:, None, None], axis=1)[:, 0]


def _blank(like: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros((like.shape[0], like.shape[2]), like.dtype)


def _is_stop(tokens: Int[Array, "B M"], eos_ids: Int[Array, "B E"]) -> Bool[Array, "B M"]:
    return jnp.any(tokens[:, :, None] == eos_ids[:, None, :], axis=-1)


def step(
    params: Params,
    state: GenerateState,
    *,
    target: TargetFn,
    drafter: Drafter,
    sampling: Sampling,
    verify: VerifyFn | None = None,
    log_probs: LogProbs | None = None,
) -> tuple[GenerateState, StepInfo]:
    """One cycle for every row of the batch. A finished row keeps its lane, changes nothing and emits nothing.

    Randomness lives in the state: the token of generated position i of a row is drawn with
      `fold_in(state.keys[row], i)`.

    Args:
      verify: None is the drafter's own rule, `deterministic` where it names none.
      log_probs: as in `prefill`, which made the state.

    Returns:
      the state after it, and what it saw: the tree, what was accepted, and the emitted tokens.

    Raises:
      ValueError: log-probabilities are asked for that the state has no place for, or the other way round.
    """
    if (log_probs is None) != (state.log_probs is None):
        raise ValueError("log_probs must be the same in prefill and step: the state has the place for them, or not")
    rule = verify or drafter.verify or deterministic
    cache, depth = state.cache, drafter.depth
    chance = Chance(state.keys, state.num_tokens)
    tree, drafter_state = contract.drafted(drafter, params, state, chance, sampling)
    with jax.named_scope("verify"):
        mask = ancestor_mask(tree.parents, depth)
        positions = cache.length[:, None] + node_depths(mask)
        out = target.forward(params["target"], tree.tokens, positions, mask, cache, drafter.taps)
        logits = target.logits(params["target"], out.hidden)
        finite = _has_finite_maximum(logits)
        acceptance = rule(tree, logits, state.keys, state.num_tokens, sampling, depth)
        choices = jnp.argmax(logits, axis=-1).astype(jnp.int32) if drafter.reads_choices else None

    with jax.named_scope("commit"):
        path, count = acceptance.path, acceptance.count
        on_path = jnp.take_along_axis(tree.tokens, path, axis=1)
        steps = jnp.arange(depth + 1)
        shifted = jnp.concatenate([on_path[:, 1:], on_path[:, :1]], axis=1)
        tokens = jnp.where(steps[None] < count[:, None], shifted, acceptance.next_token[:, None])
        sound = _tokens_before_fault(finite, acceptance)
        emitted = _cut(tokens, jnp.minimum(count + 1, sound), state)
        features = jnp.take_along_axis(out.features, path[:, :, None], axis=1)
        drafter_state = contract.told(
            drafter, params, drafter_state, Verified(on_path, tokens, features, cache.length, emitted, choices)
        )
        last = jnp.take_along_axis(tokens, jnp.maximum(emitted - 1, 0)[:, None], axis=1)[:, 0]
        told = known = None
        if log_probs is not None and state.log_probs is not None:
            rows = jnp.take_along_axis(logits, path[:, :, None], axis=1)
            told = log_prob(rows, tokens, log_probs, sampling)
            known = _append(state.log_probs, told, state.num_tokens)
        running = ~state.done
        num_tokens = state.num_tokens + emitted
        stops = (emitted > 0) & _is_stop(last[:, None], state.eos_ids)[:, 0]
        stopped = running & (stops | (num_tokens >= state.budget))
        failed = running & ~stopped & (emitted == sound)  # the next token would be the one without finite logits
        spoiled = running & jnp.any(jnp.isnan(tree.scores), axis=1) & (state.bad_drafts == FINITE)
        new_state = GenerateState(
            cache=commit(cache, out.new, emitted, path, out.hidden),
            drafter=drafter_state,
            root=jnp.where(emitted > 0, last, state.root),
            tokens=_append(state.tokens, tokens, state.num_tokens),
            num_tokens=num_tokens,
            budget=state.budget,
            eos_ids=state.eos_ids,
            done=state.done | stopped | failed,
            cycles=state.cycles + running.astype(jnp.int32),
            accepted=state.accepted + ((steps[None] == count[:, None]) & running[:, None]).astype(jnp.int32),
            keys=state.keys,
            not_finite=jnp.where(failed, num_tokens, state.not_finite),
            bad_drafts=jnp.where(spoiled, state.num_tokens, state.bad_drafts),
            log_probs=known,
        )
    return new_state, StepInfo(tree, acceptance, tokens, emitted, told)


def _tokens_before_fault(finite: Bool[Array, "B N1"], acceptance: Acceptance) -> Int[Array, " B"]:
    """Tokens of a cycle that were drawn before the first visited node without finite logits; D + 2 where all have."""
    path, count = acceptance.path, acceptance.count
    broken = ~jnp.take_along_axis(finite, path, axis=1) & (jnp.arange(path.shape[1])[None] <= count[:, None])
    first = jnp.where(jnp.any(broken, axis=1), jnp.argmax(broken, axis=1), path.shape[1] + 1)
    return first.astype(jnp.int32)


def _append(rows: Array, new: Array, at: Int[Array, " B"]) -> Array:
    """`new` in every row from its own place on."""
    return jax.vmap(lambda row, part, place: jax.lax.dynamic_update_slice(row, part, (place,)))(rows, new, at)


def _cut(tokens: Int[Array, "B D1"], available: Int[Array, " B"], state: GenerateState) -> Int[Array, " B"]:
    """Tokens of this cycle that count: none in a finished row, up to the first stop token, within the budget."""
    stops = _is_stop(tokens, state.eos_ids)
    first = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, tokens.shape[1])
    emitted = jnp.minimum(jnp.minimum(available, first), state.budget - state.num_tokens)
    return jnp.where(state.done, 0, emitted).astype(jnp.int32)


def generate(
    params: Params,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    budget: Int[Array, " B"],
    eos_ids: Int[Array, "B E"],
    keys: Key[Array, " B"],
    *,
    target: TargetFn,
    drafter: Drafter,
    sampling: Sampling,
    slots: int,
    max_tokens: int,
    chunk: int,
    verify: VerifyFn | None = None,
    log_probs: LogProbs | None = None,
) -> GenerateState:
    """Prefill, then `lax.while_loop` over `step` until every row is done: one program. Arguments as in `prefill`.

    Args:
      verify: as in `step`.

    Returns:
      the last state; `emitted_tokens` and `emitted_log_probs` read it.

    Raises:
      ValueError: as `prefill`.
    """
    state = prefill(
        params,
        prompts,
        lengths,
        budget,
        eos_ids,
        keys,
        target=target,
        drafter=drafter,
        sampling=sampling,
        slots=slots,
        max_tokens=max_tokens,
        chunk=chunk,
        log_probs=log_probs,
    )

    def cycle(state: GenerateState) -> GenerateState:
        return step(
            params, state, target=target, drafter=drafter, sampling=sampling, verify=verify, log_probs=log_probs
        )[0]

    return jax.lax.while_loop(lambda state: ~jnp.all(state.done), cycle, state)


def emitted_tokens(state: GenerateState) -> Int[Array, "B M"]:
    """The output buffer [B, max_tokens]; a row's tokens beyond `num_tokens` are zeroed."""
    return _emitted(state, state.tokens)


def emitted_log_probs(state: GenerateState) -> Float[Array, "B M"]:
    """Log-probabilities of `emitted_tokens`, [B, max_tokens]; 0 beyond `num_tokens`.

    Raises:
      ValueError: the state was made without them.
    """
    if state.log_probs is None:
        raise ValueError('this state has no log-probabilities: pass log_probs="target" or "law" to generate')
    return _emitted(state, state.log_probs)


def _emitted(state: GenerateState, rows: Array) -> Array:
    width = rows.shape[1] - state.accepted.shape[1]
    return jnp.where(jnp.arange(width)[None] < state.num_tokens[:, None], rows[:, :width], 0)
