"""Runs the cycle: draft a tree, verify it in one target pass, commit the accepted path; `generate` repeats it.

Pure functions for use inside `jit`, under `vmap` over keys or in `shard_map`. `params` is
`{"target": ..., "drafter": ...}`; `engine` and `sizes` are static under `jit`. `eagle_jax.generate` is the host-level
wrapper.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.core import adaptive
from eagle_jax.core.cache import commit, slots_read
from eagle_jax.core.checked import draft_checked, update_if, update_up_to
from eagle_jax.core.costs import CycleCost, Payoff
from eagle_jax.core.prompts import append, has_finite_maximum, is_stop, prefill, run_target
from eagle_jax.core.sampling import first_largest, log_prob
from eagle_jax.core.tree import ancestor_mask, by_score, node_depths
from eagle_jax.core.types import (
    FINITE,
    Acceptance,
    Batch,
    Drafter,
    DraftTree,
    Engine,
    GenerateState,
    Params,
    RowRandomness,
    Sampling,
    Sizes,
    StepInfo,
    TargetOutput,
    Verified,
)
from eagle_jax.core.verify import VerifyFn, deterministic


class Checked(NamedTuple):
    """What the target found in a tree of any size; path as in `Acceptance`.

    Attributes:
      on_path: [B, D+1] int32, tokens of the path. tokens: [B, D+1] int32, the target's token after each of them.
      num_finite: [B] int32, tokens before the first visited node without finite logits; D + 2 without such a node.
      out: the target's results on the path. log_probs: [B, D+1] float32, of `tokens`. choices: as in `Verified`.
      kept: [B, D+1, F], the states of `Engine.taps` on the path; None without taps.
    """

    acceptance: Acceptance
    on_path: Int[Array, "B D1"]
    tokens: Int[Array, "B D1"]
    num_finite: Int[Array, " B"]
    out: TargetOutput
    log_probs: Float[Array, "B D1"] | None
    choices: Int[Array, "B N1"] | None
    kept: Float[Array, "B D1 F"] | None


def step(params: Params, state: GenerateState, sampling: Sampling, engine: Engine) -> tuple[GenerateState, StepInfo]:
    """Runs one cycle for every row of the batch; a finished row changes nothing and emits nothing.

    With the default acceptance rule, token i of a row is drawn with `fold_in(state.keys[row], i)`.

    Returns:
      the next state, and the cycle's tree, acceptance and tokens.

    Raises:
      ValueError: only one of this engine and the engine of `prefill` keeps log-probabilities, or features; the
        drafter's tree does not have `num_nodes` nodes; or `draft` or `update` returns another state, as in `prefill`.
    """
    drafter = engine.drafter
    if (engine.log_probs is None) != (state.log_probs is None):
        raise ValueError(
            f"engine.log_probs must be the same in prefill and step, got {engine.log_probs!r} in step. Pass one engine."
        )
    if (engine.taps is None) != (state.features is None):
        raise ValueError(
            f"engine.taps must be the same in prefill and step, got {engine.taps!r} in step. Pass one engine."
        )
    randomness = RowRandomness(state.keys, state.num_tokens)
    tree, drafter_state = draft_checked(drafter, params, state, randomness, sampling)
    checked = _verify(params, state, tree, sampling, engine)
    return _commit(params, state._replace(drafter=drafter_state), tree, checked, engine)


def _verify(params: Params, state: GenerateState, tree: DraftTree, sampling: Sampling, engine: Engine) -> Checked:
    """Runs the target over the tree, walks it, and returns what happened on the accepted path."""
    target, drafter, depth = engine.target, engine.drafter, engine.drafter.depth
    with jax.named_scope("verify"):
        mask = ancestor_mask(tree.parents, depth)
        positions = state.cache.length[:, None] + node_depths(mask)
        out, kept = run_target(params, engine, tree.tokens, positions, mask, state.cache)
        logits = target.logits(params["target"], out.hidden)
        finite = has_finite_maximum(logits)
        rule = rule_of(engine)
        if rule is deterministic:
            rule = functools.partial(deterministic, row_groups=target.row_groups)
        acceptance = rule(tree, logits, state.keys, state.num_tokens, sampling, depth)
        choices = first_largest(logits) if drafter.reads_choices else None
        path, count = acceptance.path, acceptance.count
        on_path = jnp.take_along_axis(tree.tokens, path, axis=1)
        shifted = jnp.concatenate([on_path[:, 1:], on_path[:, :1]], axis=1)
        tokens = jnp.where(jnp.arange(depth + 1)[None] < count[:, None], shifted, acceptance.next_token[:, None])
        log_probs = None
        if engine.log_probs is not None:
            on_path_logits = jnp.take_along_axis(logits, path[:, :, None], axis=1)
            log_probs = log_prob(on_path_logits, tokens, engine.log_probs, sampling)
        pick = lambda rows: jnp.take_along_axis(rows, path[:, :, None], axis=1)  # noqa: E731
        new = jax.tree.map(lambda rows: jnp.take_along_axis(rows, path[:, None, :, None], axis=2), out.new)
        num_finite = _tokens_before_fault(finite, acceptance)
        accepted_out = TargetOutput(pick(out.hidden), pick(out.features), new)
        kept = None if kept is None else pick(kept)
        return Checked(acceptance, on_path, tokens, num_finite, accepted_out, log_probs, choices, kept)


def _commit(
    params: Params, state: GenerateState, tree: DraftTree, checked: Checked, engine: Engine,
    widths: tuple[int, ...] = (),
) -> tuple[GenerateState, StepInfo]:  # fmt: skip
    """Commits the accepted path, and ends the rows that are done.

    Args:
      widths: tokens of a path, ascending, by which `update_up_to` reads no more than is emitted; none reads all.
    """
    target, cache, acceptance = engine.target, state.cache, checked.acceptance
    with jax.named_scope("commit"):
        tokens, count, out = checked.tokens, acceptance.count, checked.out
        emitted = _count_emitted(tokens, jnp.minimum(count + 1, checked.num_finite), state)
        verified = Verified(checked.on_path, tokens, out.features, cache.length, emitted, checked.choices)
        drafter_state = update_up_to(widths, engine.drafter, params, state.drafter, verified)
        last = jnp.take_along_axis(tokens, jnp.maximum(emitted - 1, 0)[:, None], axis=1)[:, 0]
        log_probs = None
        if checked.log_probs is not None and state.log_probs is not None:
            log_probs = append(state.log_probs, checked.log_probs, state.num_tokens)
        features = state.features
        if checked.kept is not None and features is not None:
            features = append(features, checked.kept, cache.length)  # rows beyond `emitted` are written over
        running, num_tokens = ~state.done, state.num_tokens + emitted
        ends = (emitted > 0) & is_stop(last[:, None], state.eos_ids)[:, 0]
        stopped = running & (ends | (num_tokens >= state.budget))
        failed = running & ~stopped & (emitted == checked.num_finite)  # the next token would have no finite logits
        has_nan_scores = running & jnp.any(jnp.isnan(tree.scores), axis=1) & (state.bad_drafts == FINITE)
        at_count = jnp.arange(tokens.shape[1])[None] == count[:, None]
        new_state = GenerateState(
            cache=commit(cache, out.new, emitted, result=out.hidden, windows=target.windows),
            drafter=drafter_state,
            root=jnp.where(emitted > 0, last, state.root),
            tokens=append(state.tokens, tokens, state.num_tokens),
            num_tokens=num_tokens,
            budget=state.budget,
            eos_ids=state.eos_ids,
            done=state.done | stopped | failed,
            cycles=state.cycles + running.astype(jnp.int32),
            accepted=state.accepted + (at_count & running[:, None]).astype(jnp.int32),
            keys=state.keys,
            not_finite=jnp.where(failed, num_tokens, state.not_finite),
            bad_drafts=jnp.where(has_nan_scores, state.num_tokens, state.bad_drafts),
            log_probs=log_probs,
            features=features,
        )
    return new_state, StepInfo(tree, acceptance, tokens, emitted, checked.log_probs)


def drafted_cycle(
    params: Params, payoff: Payoff, state: GenerateState, sampling: Sampling, engine: Engine, cost: CycleCost,
    refilled: bool = False,
) -> tuple[Payoff, GenerateState]:  # fmt: skip
    """Runs a cycle that verifies as many of the best drafted nodes as pay.

    Args:
      refilled: whether a row that is done makes room for another one.
    """
    drafter = engine.drafter
    # Another rule than `deterministic` would be biased by a choice among sampled drafts.
    all_sizes = rule_of(engine) is deterministic
    prices = cost.prices(drafter.num_nodes + 1, slots_read(state.cache), all_sizes)
    believed = adaptive.trusted(payoff, sampling)
    if drafter.with_limit is not None:
        weigh = functools.partial(adaptive.deepens, believed, state, prices, drafter.depth, refilled=refilled)
        drafter = drafter.with_limit(weigh if cost.has_levels else None, ~state.done)
    randomness = RowRandomness(state.keys, state.num_tokens)
    tree, drafter_state = draft_checked(drafter, params, state, randomness, sampling)
    levels = drafted_levels(drafter, tree) if cost.has_levels else 0
    tree = by_score(tree, drafter.depth) if len(prices.rows) > 1 else tree
    choice = adaptive.choose(believed, state, tree, prices, drafter.depth, levels, refilled)

    def verify_best(rows: int) -> Checked:
        return _verify(params, state, jax.tree.map(lambda column: column[:, :rows], tree), sampling, engine)

    # Branches only read the caches, which are written below: nothing is copied.
    branches = [functools.partial(verify_best, rows) for rows in prices.rows]
    checked = jax.lax.switch(choice.rung, branches) if len(branches) > 1 else branches[0]()
    widths = tuple(sorted({min(rows, drafter.depth + 1) for rows in prices.rows}))
    after, info = _commit(params, state._replace(drafter=drafter_state), tree, checked, engine, widths)
    usual = adaptive.usual_worth(prices, drafter.depth)
    return adaptive.judge(payoff, state, info, choice, refilled, prices.token, usual), after


def drafted_levels(drafter: Drafter, tree: DraftTree) -> Int[Array, ""]:
    """Returns how many levels of a tree were drafted one after the other, in the deepest row."""
    parents = tree.parents if drafter.level_nodes is None else tree.parents[:, : drafter.level_nodes + 1]
    return jnp.max(node_depths(ancestor_mask(parents, drafter.depth)))


def check_cost(engine: Engine) -> None:
    """Checks that the engine's drafter can follow its `cycle_cost`.

    Raises:
      ValueError: a cost is given, and the drafter reads choices.
    """
    if engine.cycle_cost is not None and engine.drafter.reads_choices:
        raise ValueError(
            "cycle_cost must be None for a drafter that reads the target's choices (lookahead), got a cost. Leave it "
            "out."
        )


def generate(
    params: Params, batch: Batch, sampling: Sampling, engine: Engine, sizes: Sizes, payoff: Payoff | None = None
) -> GenerateState:
    """Runs `prefill`, then `step` in a `lax.while_loop` until every row is done: one program.

    With `engine.cycle_cost` a cycle verifies as many of the drafted nodes as pay, and plain steps take the place of
    drafted cycles while these do not pay. What no later draft of the call needs, the drafter does not read: do not
    `extend` such a state.

    Args:
      payoff: of the state that an earlier call returned, for the same costs; None knows nothing yet. Read with
        `engine.cycle_cost` alone.

    Returns:
      the last state; `emitted_tokens` and `emitted_log_probs` read it.

    Raises:
      ValueError: as `prefill` and `step`; or `cycle_cost` is given, and the drafter reads choices.
    """
    check_cost(engine)
    if engine.cycle_cost is None:
        state = prefill(params, batch, sampling, engine, sizes)
        return jax.lax.while_loop(
            lambda state: ~jnp.all(state.done), lambda state: step(params, state, sampling, engine)[0], state
        )
    cost = engine.cycle_cost

    def drafted(carry: tuple[Payoff, GenerateState]) -> tuple[Payoff, GenerateState]:
        return drafted_cycle(params, *carry, sampling, engine, cost)

    def plain(carry: tuple[Payoff, GenerateState]) -> tuple[Payoff, GenerateState]:
        return burst(params, *carry, sampling, engine)

    def rounds(carry: tuple[Payoff, GenerateState]) -> tuple[Payoff, GenerateState]:
        running = lambda carry: ~jnp.all(carry[1].done)  # noqa: E731
        # Two loops and not `lax.cond`, whose branches would copy the caches.
        carry = jax.lax.while_loop(lambda carry: (carry[0].wait == 0) & running(carry), drafted, carry)
        return jax.lax.while_loop(lambda carry: (carry[0].wait > 0) & running(carry), plain, carry)

    begun = adaptive.start() if payoff is None else adaptive.resume(payoff)
    drafts = adaptive.drafts_later(begun, jnp.minimum(batch.budget, sizes.max_tokens) - 1)
    state = prefill(params, batch, sampling, engine, sizes, drafts)
    after, state = jax.lax.while_loop(lambda carry: ~jnp.all(carry[1].done), rounds, (begun, state))
    return state._replace(payoff=after)


def burst(
    params: Params, payoff: Payoff, state: GenerateState, sampling: Sampling, engine: Engine, enough: Array | int = 0
) -> tuple[Payoff, GenerateState]:
    """Runs at most `adaptive.BURST` plain steps, whose tokens the drafter reads at the end if it will draft again.

    Args:
      enough: rows that may end before the last step; 0 is all of them.
    """
    plain = Engine(engine.target, adaptive.recorder(engine), engine.log_probs, taps=engine.taps)
    record = plain.drafter.init(params, len(state.root), state.cache.slots)._replace(start=state.cache.length)
    begun = state._replace(drafter=record, accepted=jnp.zeros_like(state.accepted[:, :1]))

    def goes_on(carry: tuple[Array, GenerateState]) -> Array:
        turn, now = carry
        over = (enough > 0) & (jnp.sum(now.done & ~state.done) >= enough)
        return (turn < adaptive.BURST) & ~jnp.all(now.done) & ~over

    steps, after = jax.lax.while_loop(
        goes_on, lambda carry: (carry[0] + 1, step(params, carry[1], sampling, plain)[0]), (jnp.int32(0), begun)
    )
    paid = adaptive.repay(payoff, steps)
    drafts = adaptive.drafts_later(paid, jnp.where(after.done, 0, after.budget - after.num_tokens))
    after = after._replace(
        drafter=update_if(drafts, engine.drafter, params, state.drafter, after.drafter),
        accepted=state.accepted.at[:, 0].add(after.accepted[:, 0]),
    )
    return paid, after


def emitted_tokens(state: GenerateState) -> Int[Array, "B M"]:
    """Returns the output buffer [B, max_tokens]; a row's entries beyond `num_tokens` are 0."""
    return _emitted(state, state.tokens)


def emitted_log_probs(state: GenerateState) -> Float[Array, "B M"]:
    """Returns the log-probabilities of `emitted_tokens`, [B, max_tokens]; 0 beyond `num_tokens`.

    Raises:
      ValueError: the state has no log-probabilities.
    """
    if state.log_probs is None:
        raise ValueError('state must have log-probabilities, got none. Use Engine(log_probs="target") or "law".')
    return _emitted(state, state.log_probs)


def _emitted(state: GenerateState, rows: Array) -> Array:
    width = rows.shape[1] - state.accepted.shape[1]
    return jnp.where(jnp.arange(width)[None] < state.num_tokens[:, None], rows[:, :width], 0)


def rule_of(engine: Engine) -> VerifyFn:
    """Returns the acceptance rule of an engine."""
    return engine.verify or engine.drafter.verify or deterministic


def _tokens_before_fault(finite: Bool[Array, "B N1"], acceptance: Acceptance) -> Int[Array, " B"]:
    """Counts the tokens before the first visited node without finite logits; D + 2 if there is none."""
    path, count = acceptance.path, acceptance.count
    broken = ~jnp.take_along_axis(finite, path, axis=1) & (jnp.arange(path.shape[1])[None] <= count[:, None])
    first = jnp.where(jnp.any(broken, axis=1), jnp.argmax(broken, axis=1), path.shape[1] + 1)
    return first.astype(jnp.int32)


def _count_emitted(tokens: Int[Array, "B D1"], available: Int[Array, " B"], state: GenerateState) -> Int[Array, " B"]:
    """Counts the emitted tokens: none in a finished row, up to the first stop token, within the budget."""
    stops = is_stop(tokens, state.eos_ids)
    first = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, tokens.shape[1])
    emitted = jnp.minimum(jnp.minimum(available, first), state.budget - state.num_tokens)
    return jnp.where(state.done, 0, emitted).astype(jnp.int32)
