"""Grows draft trees of any draft model: dynamic (EAGLE-2), static or chains, ranked or sampled.

An `Expander` is a method's draft model: it predicts the children of a node. This module selects nodes for all methods.
Candidates of probability zero (beyond the top-p cut, or outside the support of a sampled draft) become padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import TreeConfig, sibling_ranks, static_depths
from eagle_jax.core.randomness import gumbel
from eagle_jax.core.sampling import noise, process_logits
from eagle_jax.core.types import PADDING, ROOT, Drafter, DraftTree, NewKV, Params, RowRandomness, Sampling
from eagle_jax.drafters.rerank import Pool, gather_tree, select_best
from eagle_jax.drafters.rules import RULES


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
      blank: `(entries) -> NewKV` of zeros, in the layout of `extend`'s.
    """

    root: Float[Array, "B H"]
    extend: Callable[..., tuple[Array, NewKV]]
    logits: Callable[[Array, Array | int], Array]
    to_target: Callable[[Array], Array]
    vocab: int
    blank: Callable[[int], NewKV]


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


def tree_drafter(
    init: Callable[..., Any], update: Callable[..., Any], expander: Callable[[Params, Any, Array], Expander],
    tree: TreeConfig, rewind: Callable[[Any, Array], Any], taps: tuple[int, ...] = (),
) -> Drafter:  # fmt: skip
    """Builds the drafter that grows `tree` from `expander(params, state, root)`, with the rule of `tree`."""

    def draft(
        params: Params, state: Any, root: Array, randomness: RowRandomness, sampling: Sampling
    ) -> tuple[DraftTree, Any]:
        with jax.named_scope("draft"):
            return grow(expander(params, state, root), tree, root, randomness, sampling), state

    rule = RULES[tree.verification]
    return Drafter(init, draft, update, taps, tree.depth, tree.num_nodes, rule, rewind=rewind)


def last_state(before: Float[Array, "B H"], states: Float[Array, "B T H"], count: Int[Array, " B"]) -> Array:
    """Returns the state of the last of `count` confirmed tokens, [B, H]; `before` in rows without one."""
    last = jnp.take_along_axis(states, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where(count[:, None] > 0, last.astype(before.dtype), before)


def grow(
    model: Expander, tree: TreeConfig, root: Int[Array, " B"], randomness: RowRandomness, sampling: Sampling
) -> DraftTree:
    """Grows one draft tree per row, in the shape of `tree`."""
    sampled = tree.verification != "deterministic" and not sampling.greedy
    if sampled:
        propose = functools.partial(_draw_children, model, randomness, sampling)
    else:
        propose = functools.partial(_best_children, model, tree, randomness, sampling)
    if tree.parents is None and not sampled:
        return _grow_dynamic(model, tree, root, propose)
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
    drawn = jax.vmap(lambda key, index: noise(key, index + level - 1, ids))(*randomness)
    return jax.nn.log_softmax((process_logits(logits, sampling) + drawn[:, None]) / tree.noise_scale, axis=-1)


def _best_children(
    model: Expander,
    tree: TreeConfig,
    randomness: RowRandomness,
    sampling: Sampling,
    states: Array,
    level: Any,
    count: int,
) -> Candidates:
    """Returns the likeliest children; `tree.top_p` limits their total probability."""
    ranked = confidence(model, tree, randomness, sampling, states, level)
    gains, ids = jax.lax.top_k(ranked, count)
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
    law = process_logits(model.logits(states, level), sampling)
    law = jnp.broadcast_to(law, (*states.shape[:2], law.shape[-1]))  # every node has its own draws
    keys = jax.vmap(lambda key: jax.random.fold_in(key, level))(randomness.own_keys())
    numbers = jnp.arange(law[0].size).reshape(law.shape[1:])
    fresh = jax.vmap(lambda key: gumbel(key, numbers))(keys)
    _, ids = jax.lax.top_k(law + fresh, count)
    whole = jnp.full((*law.shape[:-1], model.vocab), -jnp.inf, jnp.float32)
    whole = whole.at[..., model.to_target(jnp.arange(law.shape[-1]))].set(law)
    return Candidates(model.to_target(ids).astype(jnp.int32), jnp.take_along_axis(law, ids, axis=-1), whole)


def _grow_dynamic(
    model: Expander, tree: TreeConfig, root: Int[Array, " B"], propose: Callable[..., Candidates]
) -> DraftTree:
    """Expands and reranks (EAGLE-2, sections 4.1 and 4.2): K children per frontier node, the best K go on.

    One loop body serves all levels, with buffers of the final size: the program does not grow with the depth.
    """
    batch, width, levels = root.shape[0], tree.top_k, tree.depth - 1
    begin = propose(model.root[:, None], 1, width)
    tokens, scores = begin.tokens[:, 0], begin.gains[:, 0]
    first = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    pool = Pool(tokens, jnp.full_like(tokens, ROOT), scores)
    pool = Pool(*(jnp.pad(part, ((0, 0), (0, levels * width * width))) for part in pool))
    frontiers = jnp.pad(first, ((0, 0), (0, levels * width)))
    front = Frontier(
        tokens=tokens,
        states=jnp.broadcast_to(model.root[:, None], (batch, width, model.root.shape[-1])),
        scores=scores,
        pool=first,
        mask=jnp.zeros((batch, width, levels * width), bool),
    )
    own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))

    def expand(level: Array, carry: tuple[Pool, Array, Frontier, NewKV]) -> tuple:
        """Adds level `level` (2 to D) below the frontier."""
        pool, frontiers, front, drafted = carry
        done = (level - 2) * width  # entries of `drafted` that earlier levels have filled
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
        return pool, _put(frontiers, front.pool, done + width, 1), front, drafted

    carry = (pool, frontiers, front, model.blank(levels * width))
    pool, frontiers, _, _ = jax.lax.fori_loop(2, tree.depth + 1, expand, carry) if levels else carry
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
    parents, nodes, batch = np.array(shape), len(shape), root.shape[0]
    depths, ranks = np.array(static_depths(shape)), np.array(sibling_ranks(shape))
    tokens = [jnp.zeros((batch,), jnp.int32)] * nodes
    scores = [jnp.zeros((batch,), jnp.float32)] * nodes
    laws: dict[int, Array] = {}
    expanded = np.array([-1])  # the root: its state is known and needs no pass
    states, entries, previous = model.root[:, None], np.zeros((0,), int), expanded
    earlier = model.blank(0)
    for level in range(1, int(depths.max()) + 1):
        if level > 1:
            # Drafted entries are the earlier expanded nodes, then this level's. A node sees its ancestors and itself.
            entries = np.concatenate([entries, expanded])
            sees = np.array([[_is_ancestor(parents, int(e), int(n)) for e in entries] for n in expanded])
            states, new = model.extend(
                jnp.stack([tokens[n] for n in expanded], axis=1),
                states[:, _positions(previous, parents[expanded])],
                level,
                jnp.broadcast_to(jnp.asarray(sees), (batch, *sees.shape)),
                earlier,
            )
            earlier = jax.tree.map(lambda old, part: jnp.concatenate([old, part.astype(old.dtype)], 2), earlier, new)
        children = np.flatnonzero(depths == level)
        found = propose(states, level, int(ranks[children].max()) + 1)
        if found.law is not None:
            laws |= {int(node): found.law[:, place] for place, node in enumerate(expanded)}
        for node in children:
            where = int(_positions(expanded, parents[node : node + 1])[0])
            above = scores[parents[node]] if level > 1 else 0.0
            tokens[node] = found.tokens[:, where, ranks[node]]
            scores[node] = above + found.gains[:, where, ranks[node]]
        previous, expanded = expanded, np.array([n for n in children if n in parents], int)
    rows = jnp.broadcast_to(jnp.asarray(np.concatenate([[ROOT], parents + 1]), jnp.int32), (batch, nodes + 1))
    no_law = jnp.full((batch, model.vocab), -jnp.inf, jnp.float32)  # a leaf has no children
    return _mask_zero_probability(
        DraftTree(
            jnp.stack([root, *tokens], axis=1),
            rows,
            jnp.stack([jnp.zeros((batch,), jnp.float32), *scores], axis=1),
            jnp.stack([laws.get(node, no_law) for node in range(-1, nodes)], axis=1) if laws else None,
        )
    )


def _is_ancestor(parents: np.ndarray, ancestor: int, node: int) -> bool:
    while node > ancestor:
        node = int(parents[node])
    return node == ancestor


def _positions(of: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return np.array([int(np.flatnonzero(of == w)[0]) for w in wanted], int)
