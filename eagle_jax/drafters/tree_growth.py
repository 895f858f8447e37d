"""Grows draft trees of any draft model: dynamic (EAGLE-2), static or chains, ranked or sampled.

An `Expander` is a method's draft model: it predicts the children of a node. This module selects nodes for all methods.
Candidates of probability zero (beyond the top-p cut, or outside the support of a sampled draft) become padding.

Scores are cumulative log-probabilities in float32, so a child never scores above its parent. `jax.lax.top_k` breaks
ties towards the lower index, and parents are recorded before their children. Hence the best N candidates of a dynamic
tree are closed under "parent of", ties included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle_jax import core
from eagle_jax.config import TreeConfig, sibling_ranks, static_depths
from eagle_jax.core import PADDING, ROOT, Drafter, DraftTree, KVCache, NewKV, Params, RowRandomness, Sampling, Verified
from eagle_jax.drafters.rules import RULES

Pays = Callable[[Array, np.ndarray, Array, Any], Array]  # as in `Drafter.with_limit`


class DraftState(NamedTuple):
    """State of a drafter with a draft model.

    Attributes:
      cache: the draft model's, over the confirmed text; it has no arrays if the model has no attention.
      hidden: [B, H], the model's state after the last confirmed token; its logits are the children of the root.
    """

    cache: KVCache
    hidden: Float[Array, "B H"]


class Expander(NamedTuple):
    """A draft model in one cycle, bound to its parameters and to the text so far.

    Attributes:
      root: [B, H], the state whose logits predict the children of the root.
      extend: `(tokens [B,W], states [B,W,H], level, mask [B,W,E+W], earlier) -> (states [B,W,H], NewKV)`. One pass over
        nodes of depth `level - 1`, given the states that predicted them. `mask`: what a node sees besides the text; its
        columns are the E uncommitted entries of `earlier`, then the W nodes. `level` may be traced.
      logits: `(states [B,W,H], level) -> [B,W,Vd]`, of the tokens at depth `level`; [B,1,Vd] where nodes do not differ.
      to_target: draft vocabulary ids as target ids.
      vocab: V, the target's.
      cache: the state's, whose layout the keys and values of `extend` have.
    """

    root: Float[Array, "B H"]
    extend: Callable[..., tuple[Array, NewKV]]
    logits: Callable[[Array, Array | int], Array]
    to_target: Callable[[Array], Array]
    vocab: int
    cache: KVCache


class Candidates(NamedTuple):
    """Candidate children of W nodes. The best come first, or those drawn first.

    Attributes:
      tokens: [B, W, K] int32, target ids. gains: [B, W, K] float32, log-probabilities; -inf marks no candidate.
      law: [B, W, V] float32, log-probabilities from which they were drawn; None if not sampled.
    """

    tokens: Int[Array, "B W K"]
    gains: Float[Array, "B W K"]
    law: Float[Array, "B W V"] | None = None


class Frontier(NamedTuple):
    """Nodes of one level that are expanded next.

    Attributes:
      tokens: [B, W] int32. states: [B, W, H], the state that predicted each of them. scores: [B, W] float32.
      pool: [B, W] int32, their pool indices. mask: [B, W, E], drafted entries of earlier levels that each node sees.
    """

    tokens: Int[Array, "B W"]
    states: Float[Array, "B W H"]
    scores: Float[Array, "B W"]
    pool: Int[Array, "B W"]
    mask: Bool[Array, "B W E"]


class Pool(NamedTuple):
    """Candidates in the order of their creation, without the root.

    Attributes:
      tokens: [..., P] int32, target ids.
      parents: [..., P] int32, index of the parent in the pool, `ROOT` for children of the root; always below the
        own index.
      scores: [..., P] float32, cumulative draft log-probability.
    """

    tokens: Int[Array, "*b P"]
    parents: Int[Array, "*b P"]
    scores: Float[Array, "*b P"]


def select_best(pool: Pool, num_nodes: int) -> Int[Array, "*b N"]:
    """Returns the pool indices of the `num_nodes` best scores, in order of creation."""
    _, best = jax.lax.top_k(pool.scores, num_nodes)
    return jnp.sort(best, axis=-1)


def gather_tree(root: Int[Array, " B"], pool: Pool, kept: Int[Array, "B N"]) -> DraftTree:
    """Builds the tree of the candidates `kept`, in ascending order and with all their parents."""

    def gather(root: Int[Array, ""], pool: Pool, kept: Int[Array, " N"]) -> DraftTree:
        parents = pool.parents[kept]
        # The row of a kept parent is one (for the root) plus the number of kept candidates before it.
        rows = 1 + jnp.sum(kept[None, :] < parents[:, None], axis=1, dtype=jnp.int32)
        return DraftTree(
            tokens=jnp.concatenate([root[None], pool.tokens[kept]]),
            parents=jnp.concatenate([jnp.array([ROOT], jnp.int32), jnp.where(parents == ROOT, 0, rows)]),
            scores=jnp.concatenate([jnp.zeros((1,), jnp.float32), pool.scores[kept]]),
        )

    return jax.vmap(gather)(root, pool, kept)


def tree_drafter(
    init: Callable[[Params, int, int], DraftState], update: Callable[[Params, DraftState, Verified], DraftState],
    expander: Callable[[Params, DraftState, Array], Expander], tree: TreeConfig, taps: tuple[int, ...] = (),
    ahead: int = 0, windows: tuple[int, ...] = (),
) -> Drafter:  # fmt: skip
    """Builds the drafter that grows `tree` from `expander(params, state, root)`, with the rule of `tree`.

    Args:
      ahead: tokens that the drafter's cache holds beyond the confirmed ones. windows: of its layers; a ring has lost
        the tokens to which `rewind` would return.
    """

    def draft(
        params: Params, state: DraftState, root: Array, randomness: RowRandomness, sampling: Sampling,
        pays: Pays | None = None, running: Array | None = None,
    ) -> tuple[DraftTree, DraftState]:  # fmt: skip
        with jax.named_scope("draft"):
            return grow(expander(params, state, root), tree, root, randomness, sampling, pays, running), state

    def rewind(state: DraftState, length: Array) -> DraftState:
        return state._replace(cache=state.cache._replace(length=length + ahead))

    rule, back = RULES[tree.verification], None if any(windows) else rewind
    drafter = Drafter(init, draft, update, taps, tree.depth, tree.num_nodes, rule, rewind=back)

    def with_limit(pays: Pays | None, running: Array) -> Drafter:
        return drafter._replace(draft=functools.partial(draft, pays=pays, running=running))

    return drafter._replace(with_limit=with_limit if tree.rerank and (rule, tree.parents) == (None, None) else None)


def read_confirmed(
    state: DraftState, verified: Verified, run: Callable[[Array, Array], tuple[Array, NewKV]],
    windows: tuple[int, ...] = (),
) -> DraftState:  # fmt: skip
    """Runs a draft model over confirmed tokens, commits their keys and values, and keeps the last state.

    Args:
      run: `(positions [B, T], mask [T, T]) -> (states [B, T, H], NewKV)`, one causal pass; [B, 1, H] is the last's.
      windows: of the model's layers, as in `TargetFn`.
    """
    with jax.named_scope("head_update"):
        width = verified.tokens.shape[1]
        positions = verified.start[:, None] + jnp.arange(width)[None]
        states, new = run(positions, jnp.tril(jnp.ones((width, width), bool)))
        cache = core.commit(state.cache, new, verified.count, result=states, windows=windows)
        return DraftState(cache, last_state(state.hidden, states, verified.count))


def last_state(before: Float[Array, "B H"], states: Float[Array, "B T H"], count: Int[Array, " B"]) -> Array:
    """Returns the state of the last of `count` confirmed tokens, [B, H]; `before` in rows without one."""
    last = states[jnp.arange(len(states)), jnp.clip(count - 1, 0, states.shape[1] - 1)]
    return jnp.where(count[:, None] > 0, last.astype(before.dtype), before)


def blank_entries(cache: KVCache, entries: int) -> NewKV:
    """Returns zeros as keys and values of uncommitted tokens, in the layout of `cache`."""
    zeros = tuple(jnp.zeros((*v.shape[:2], entries, v.shape[3]), v.dtype) for v in cache.values)
    return NewKV(zeros, zeros)


def grow(
    model: Expander, tree: TreeConfig, root: Int[Array, " B"], randomness: RowRandomness, sampling: Sampling,
    pays: Pays | None = None, running: Bool[Array, " B"] | None = None,
) -> DraftTree:  # fmt: skip
    """Grows one draft tree per row, in the shape of `tree`.

    Args:
      pays: a dynamic tree gets a further level only while it holds; None is no limit.
      running: rows that decide whether there is a further level; None is all.
    """
    running = jnp.ones(root.shape, bool) if running is None else running
    sampled = tree.verification != "deterministic" and not sampling.greedy
    best = functools.partial(_best_children, model, tree, randomness, sampling)
    propose = functools.partial(_draw_children, model, randomness, sampling) if sampled else best
    if tree.parents is None and not sampled:
        return _grow_dynamic(model, tree, root, propose, pays, running)
    return _grow_static(model, tree.parents or tuple(range(-1, tree.depth - 1)), root, propose)


def confidence(
    model: Expander, tree: TreeConfig, randomness: RowRandomness, sampling: Sampling, states: Array, level: Array | int
) -> Float[Array, "B W Vd"]:
    """Returns float32 log-probabilities of acceptance of the draft vocabulary after each of `states`.

    Greedy, this is the model's log-probability. When sampling, the target draws argmax(log p + g). Key and position fix
    the Gumbel noise g, so a model whose law q is near p can predict the drawn token (drafting with shared randomness,
    arXiv:2408.07978). Assume that log p differs from log q by independent Gumbel noise of scale s (`tree.noise_scale`).
    Then P(token drawn | g) = softmax((log q + g) / s).

    Args:
      level: depth of the candidate nodes, from 1.
    """
    logits = model.logits(states, level)
    if sampling.temperature is None or tree.sampled_ranking == "untempered":
        return jax.nn.log_softmax(logits, axis=-1)
    if tree.sampled_ranking == "law":
        return jax.nn.log_softmax(logits / sampling.temperature, axis=-1)
    ids = model.to_target(jnp.arange(logits.shape[-1]))
    drawn = jax.vmap(lambda key, index: core.noise(key, index + level - 1, ids))(*randomness)
    return jax.nn.log_softmax((core.process_logits(logits, sampling) + drawn[:, None]) / tree.noise_scale, axis=-1)


def _best_children(
    model: Expander, tree: TreeConfig, randomness: RowRandomness, sampling: Sampling, states: Array, level: Any,
    count: int,
) -> Candidates:  # fmt: skip
    """Returns the likeliest children; `tree.top_p` limits their total probability."""
    ranked = confidence(model, tree, randomness, sampling, states, level)
    gains, ids = core.largest(ranked, count)
    if tree.top_p < 1:
        probs = jnp.exp(gains)
        gains = jnp.where(jnp.cumsum(probs, axis=-1) - probs < tree.top_p, gains, -jnp.inf)
    shape = (*states.shape[:2], count)
    return Candidates(jnp.broadcast_to(model.to_target(ids).astype(jnp.int32), shape), jnp.broadcast_to(gains, shape))


def _draw_children(
    model: Expander, randomness: RowRandomness, sampling: Sampling, states: Array, level: Any, count: int
) -> Candidates:
    """Draws children without replacement from the draft's processed law, by perturbed log-probability.

    (Gumbel top-k: Kool, van Hoof and Welling, arXiv:1903.06059.)
    """
    law = core.process_logits(model.logits(states, level), sampling)
    law = jnp.broadcast_to(law, (*states.shape[:2], law.shape[-1]))  # every node has its own draws
    keys = jax.vmap(lambda key: jax.random.fold_in(key, level))(randomness.own_keys())
    numbers = jnp.arange(law[0].size).reshape(law.shape[1:])
    fresh = jax.vmap(lambda key: core.gumbel(key, numbers))(keys)
    _, ids = core.largest(law + fresh, count)
    whole = jnp.full((*law.shape[:-1], model.vocab), -jnp.inf, jnp.float32)
    whole = whole.at[..., model.to_target(jnp.arange(law.shape[-1]))].set(law)
    return Candidates(model.to_target(ids).astype(jnp.int32), jnp.take_along_axis(law, ids, axis=-1), whole)


def _grow_dynamic(
    model: Expander, tree: TreeConfig, root: Int[Array, " B"], propose: Callable[..., Candidates],
    pays: Pays | None, running: Bool[Array, " B"],
) -> DraftTree:  # fmt: skip
    """Expands and reranks (EAGLE-2, sections 4.1 and 4.2): K children per frontier node, the best K go on.

    One loop body serves all levels, with buffers of the final size: the program does not grow with the depth. The loop
    ends early where no descendant of a running row's frontier can be among the best N: its tree is that of all levels.
    Where `pays` is false, no further level is drafted.
    """
    batch, width, levels = root.shape[0], tree.top_k, tree.depth - 1
    # Merged with the padding below, top-k would be a sort of the vocabulary on a TPU.
    begin = jax.lax.optimization_barrier(propose(model.root[:, None], 1, width))
    tokens, scores = begin.tokens[:, 0], begin.gains[:, 0]
    first = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    room = ((0, 0), (0, levels * width * width))
    parents = jnp.pad(jnp.full_like(tokens, ROOT), room)
    pool = Pool(jnp.pad(tokens, room), parents, jnp.pad(scores, room, constant_values=-jnp.inf))
    frontiers = jnp.pad(first, ((0, 0), (0, levels * width)))
    front = Frontier(
        tokens=tokens,
        states=jnp.broadcast_to(model.root[:, None], (batch, width, model.root.shape[-1])),
        scores=scores,
        pool=first,
        mask=jnp.zeros((batch, width, levels * width), bool),
    )
    own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
    depths = np.repeat(np.arange(1, tree.depth + 1), [width] + [width * width] * levels)

    def turns(count: Array | int, pool: Pool, front: Frontier) -> Array:
        """Returns `count`, or the last turn's if a further level would not change the tree or is not worth its cost."""
        if not tree.rerank:
            return jnp.asarray(count)
        if pays is not None and levels:
            count = jnp.where(pays(pool.scores, depths, front.scores, count + 1), count, levels)
        # A descendant scores at most what its best ancestor on the frontier scores; ties go to the earlier candidate.
        ahead = pool.scores >= jnp.max(front.scores, axis=1, keepdims=True)
        settled = ~running | (jnp.sum(ahead, axis=1) >= tree.num_nodes)
        return jnp.where(jnp.all(settled), levels, count)

    def expand(carry: tuple[Array, Pool, Array, Frontier, NewKV]) -> tuple:
        """Adds a level below the frontier: level 2 in turn 0."""
        turn, pool, frontiers, front, drafted = carry
        level, done = turn + 2, turn * width  # entries of `drafted` that earlier levels have filled
        mask = jnp.concatenate([front.mask, own], axis=-1)
        states, new = model.extend(front.tokens, front.states, level, mask, drafted)
        drafted = jax.tree.map(lambda whole, part: _put(whole, part, done, 2), drafted, new)
        tokens, gains, _ = propose(states, level, width)
        values = (front.scores[:, :, None] + gains).reshape(batch, -1)
        tokens = tokens.reshape(batch, -1)
        offset = width + done * width
        found = Pool(tokens, jnp.repeat(front.pool, width, axis=1), values)
        pool = Pool(*(_put(whole, part, offset, 1) for whole, part in zip(pool, found, strict=True)))
        # Descendants of a candidate beyond the top-p cut are cut too, whatever their own probability.
        merit = values if tree.rank_by == "value" else jnp.where(values == -jnp.inf, values, gains.reshape(batch, -1))
        _, best = jax.lax.top_k(merit, width)
        parent = best // width
        mask = jnp.take_along_axis(front.mask, parent[:, :, None], axis=1)
        front = Frontier(
            tokens=jnp.take_along_axis(tokens, best, axis=1),
            states=jnp.take_along_axis(states, parent[:, :, None], axis=1),
            scores=jnp.take_along_axis(values, best, axis=1),
            pool=(offset + best).astype(jnp.int32),
            mask=_put(mask, jax.nn.one_hot(parent, width, dtype=bool), done, 2),
        )
        return turns(turn + 1, pool, front), pool, _put(frontiers, front.pool, done + width, 1), front, drafted

    carry = (turns(0, pool, front), pool, frontiers, front, blank_entries(model.cache, levels * width))
    if levels:
        carry = jax.lax.while_loop(lambda carry: carry[0] < levels, expand, carry)
    _, pool, frontiers, _, _ = carry
    if tree.rerank:
        return _mask_zero_probability(gather_tree(root, pool, select_best(pool, tree.num_nodes)))
    # Levels keep their order. Within a level the best nodes come first, so the cut at num_nodes drops the worst.
    return _mask_zero_probability(gather_tree(root, pool, jnp.sort(frontiers[:, : tree.num_nodes], axis=1)))


def _put(whole: Array, part: Array, at: Array | int, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), at, axis)


def _mask_zero_probability(tree: DraftTree) -> DraftTree:
    """Replaces nodes of probability zero by padding. Their descendants have probability zero too."""
    return tree._replace(parents=jnp.where(tree.scores == -jnp.inf, PADDING, tree.parents))


def _grow_static(
    model: Expander, shape: tuple[int, ...], root: Int[Array, " B"], propose: Callable[..., Candidates]
) -> DraftTree:
    """Grows a tree of fixed shape (EAGLE-1, Medusa): child r of a node is its candidate of rank r."""
    nodes, batch = len(shape), root.shape[0]
    depths, ranks = static_depths(shape), sibling_ranks(shape)
    tokens = [jnp.zeros((batch,), jnp.int32)] * nodes
    scores = [jnp.zeros((batch,), jnp.float32)] * nodes
    laws: dict[int, Array] = {}
    expanded: list[int] = [-1]  # the root: its state is known and needs no pass
    states, entries, previous = model.root[:, None], list[int](), expanded
    earlier = blank_entries(model.cache, 0)
    for level in range(1, max(depths) + 1):
        if level > 1:
            # Drafted entries are the earlier expanded nodes, then this level's. A node sees its ancestors and itself.
            entries = entries + expanded
            sees = np.array([[_is_ancestor(shape, e, n) for e in entries] for n in expanded])
            states, new = model.extend(
                jnp.stack([tokens[n] for n in expanded], axis=1),
                states[:, np.array([previous.index(shape[n]) for n in expanded])],
                level,
                jnp.broadcast_to(jnp.asarray(sees), (batch, *sees.shape)),
                earlier,
            )
            earlier = jax.tree.map(lambda old, part: jnp.concatenate([old, part.astype(old.dtype)], 2), earlier, new)
        children = [node for node in range(nodes) if depths[node] == level]
        found = propose(states, level, max(ranks[node] for node in children) + 1)
        if found.law is not None:
            laws |= {node: found.law[:, place] for place, node in enumerate(expanded)}
        for node in children:
            where = expanded.index(shape[node])
            above = scores[shape[node]] if level > 1 else 0.0
            tokens[node] = found.tokens[:, where, ranks[node]]
            scores[node] = above + found.gains[:, where, ranks[node]]
        previous, expanded = expanded, [node for node in children if node in shape]
    rows = jnp.broadcast_to(jnp.array([ROOT, *(parent + 1 for parent in shape)], jnp.int32), (batch, nodes + 1))
    no_law = jnp.full((batch, model.vocab), -jnp.inf, jnp.float32)  # a leaf has no children
    return _mask_zero_probability(
        DraftTree(
            jnp.stack([root, *tokens], axis=1),
            rows,
            jnp.stack([jnp.zeros((batch,), jnp.float32), *scores], axis=1),
            jnp.stack([laws.get(node, no_law) for node in range(-1, nodes)], axis=1) if laws else None,
        )
    )


def _is_ancestor(parents: tuple[int, ...], ancestor: int, node: int) -> bool:
    while node > ancestor:
        node = parents[node]
    return node == ancestor
