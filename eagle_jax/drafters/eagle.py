"""The EAGLE drafters: EAGLE-1/2 and EAGLE-3 heads on chains, static trees and dynamic trees.

The head's cache holds one entry per confirmed position t: the pair (target feature at t, token at t + 1), as
EAGLE-2's reference does. Drafted levels live only within one `draft` call; after verification `update` extends the
head over the accepted tokens with the target's own features. One cycle thus costs D head passes: one in `update`, D
- 1 in `draft`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.cache import commit
from eagle_jax.config import ConfigError, HeadConfig, TreeConfig, sibling_ranks, static_depths
from eagle_jax.models.heads import HeadOutput, make_head
from eagle_jax.sampling import noise, process_logits
from eagle_jax.tree import Pool, gather_tree, select_best
from eagle_jax.types import (
    ROOT,
    Chance,
    Drafter,
    DraftTree,
    KVCache,
    NewKV,
    Params,
    Sampling,
    TargetFn,
    Verified,
    empty_cache,
)

Judge = Callable[[Array, Array | int], Array]
"""`(states [B, W, H], level) -> [B, W, Vd]`, see `confidence`."""


class EagleState(NamedTuple):
    """State of an EAGLE drafter.

    Attributes:
      cache: the head's one-layer cache over confirmed pairs; `length` equals the target's.
      hidden: [B, H], recurrent state of the last confirmed pair; its logits are the children of the root.
    """

    cache: KVCache
    hidden: Float[Array, "B H"]


class Frontier(NamedTuple):
    """Nodes of one level that the head expands next.

    Attributes:
      tokens: [B, W] int32. states: [B, W, H], the state that predicted each of them. scores: [B, W] float32.
      pool: [B, W] int32, their pool indices. mask: [B, W, E], which drafted entries of earlier levels each sees.
    """

    tokens: Int[Array, "B W"]
    states: Float[Array, "B W H"]
    scores: Float[Array, "B W"]
    pool: Int[Array, "B W"]
    mask: Bool[Array, "B W E"]


class HeadFns(NamedTuple):
    """A head bound to a target: how its pieces read the engine's `params`; H and F are the head's sizes."""

    config: HeadConfig
    target: TargetFn
    dtype: str

    def embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """Token embeddings, the head's own or the target's."""
        if self.config.own_embedding:
            return self._apply(params, tokens, method="embed")
        return self.target.embed(params["target"], tokens)

    def fuse(self, params: Params, features: Float[Array, "B T F"]) -> Float[Array, "B T H"]:
        """Target features in the head's space."""
        return self._apply(params, features, method="fuse")

    def run(
        self, params: Params, tokens: Int[Array, "B T"], states: Float[Array, "B T H"], *context: object
    ) -> HeadOutput:
        """One pass; `context` is (positions, mask, cached, earlier)."""
        return self._apply(params, self.embed(params, tokens), states, *context)

    def logits(self, params: Params, states: Float[Array, "*b H"]) -> Float[Array, "*b Vd"]:
        """Draft logits, float32, over the draft vocabulary."""
        if self.config.kind == "eagle1":
            return self.target.logits(params["target"], states)
        return self._apply(params, states, method="logits")

    def to_target(self, params: Params, draft_ids: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """Draft vocabulary ids as target ids."""
        if self.config.kind == "eagle1":
            return draft_ids
        return draft_ids + params["drafter"]["d2t"][draft_ids]

    def _apply(self, params: Params, *args: object, method: str = "__call__") -> Any:
        return make_head(self.config).apply({"params": params["drafter"]["head"]}, *args, method=method)


@functools.lru_cache(maxsize=256)
def eagle(config: HeadConfig, tree: TreeConfig, target: TargetFn, dtype: str = "float32") -> Drafter:
    """Builds the drafter of an EAGLE head. Equal arguments give the same object, so that jit caches are shared.

    Args:
      config: the head; its `taps` decide which features the target returns.
      tree: chain, static tree or dynamic tree.
      dtype: dtype of the head's cache, that of its weights.

    Raises:
      ConfigError: more children per node than the draft vocabulary has tokens.
    """
    vocab = config.layer.vocab_size if config.kind == "eagle1" else config.draft_vocab_size
    if tree.top_k > vocab:
        raise ConfigError(f"TreeConfig.top_k={tree.top_k} exceeds the head's draft vocabulary of {vocab} tokens")
    head = HeadFns(config, target, dtype)
    grow = _grow_dynamic if tree.parents is None else _grow_static

    def init(params: Params, batch: int, slots: int) -> EagleState:
        layer = config.layer
        cache = empty_cache(1, batch, layer.num_kv_heads, slots, layer.head_dim, dtype)
        return EagleState(cache, jnp.zeros((batch, layer.hidden_size), dtype))

    def update(params: Params, state: EagleState, verified: Verified) -> EagleState:
        with jax.named_scope("head_update"):
            width = verified.tokens.shape[1]
            positions = verified.start[:, None] + jnp.arange(width)[None]
            causal = jnp.tril(jnp.ones((width, width), bool))
            states = head.fuse(params, verified.features)
            out = head.run(params, verified.next_tokens, states, positions, causal, _committed(state.cache))
            cache = commit(state.cache, NewKV((out.keys,), (out.values,)), verified.count)
            last = jnp.maximum(verified.count - 1, 0)[:, None, None]
            hidden = jnp.take_along_axis(out.states, last, axis=1)[:, 0].astype(state.hidden.dtype)
            return EagleState(cache, jnp.where(verified.count[:, None] > 0, hidden, state.hidden))

    def draft(
        params: Params, state: EagleState, root: Array, chance: Chance, sampling: Sampling
    ) -> tuple[DraftTree, EagleState]:
        with jax.named_scope("draft"):
            judge = functools.partial(confidence, head, params, tree.sampled_ranking, chance, sampling)
            return grow(head, tree, params, state, root, judge), state

    return Drafter(init, draft, update, taps=config.taps, depth=tree.depth, num_nodes=tree.num_nodes)


SPREAD = 0.7
"""Scale of the Gumbel noise by which a head's log-probabilities are taken to miss the target's: 0.5 to 1 serve the
bundled heads equally well, small trees at 1, wide ones at 0.7."""


def confidence(
    head: HeadFns, params: Params, ranking: str, chance: Chance, sampling: Sampling, states: Array, level: Array | int
) -> Array:
    """Log of how likely each token of the draft vocabulary is accepted after each of `states`, float32 [B, W, Vd].

    Greedy, this is the head's log-probability. When sampling, the target draws argmax(log p + g) with Gumbel noise g
    that the row's key and the position fix beforehand, so a head whose law q is near p can know the outcome and not
    only its probability (drafting with shared randomness: Daliri, Musco and Suresh, arXiv:2408.07978). If log p differs
    from log q by independent Gumbel noise of scale s, then P(token drawn | g) = softmax((log q + g) / s).

    Args:
      level: depth of the nodes that the tokens would be, from 1.
    """
    logits = head.logits(params, states)
    if sampling.temperature is None or ranking == "untempered":
        return jax.nn.log_softmax(logits, axis=-1)
    if ranking == "law":
        return jax.nn.log_softmax(logits / sampling.temperature, axis=-1)
    ids = head.to_target(params, jnp.arange(logits.shape[-1]))
    drawn = jax.vmap(lambda key, index: noise(key, index + level - 1, head.config.layer.vocab_size)[ids])(*chance)
    return jax.nn.log_softmax((process_logits(logits, sampling) + drawn[:, None]) / SPREAD, axis=-1)


def _committed(cache: KVCache) -> tuple[Array, Array, Array]:
    return cache.keys[0], cache.values[0], cache.length


def _grow_dynamic(
    head: HeadFns, tree: TreeConfig, params: Params, state: EagleState, root: Array, judge: Judge
) -> DraftTree:
    """Expand and rerank (EAGLE-2, sections 4.1 and 4.2): K children per frontier node, the best K go on.

    One loop body serves all levels, with buffers of the final size: the program does not grow with the depth.
    """
    batch, width, levels = root.shape[0], tree.top_k, tree.depth - 1
    layer = head.config.layer
    scores, ids = jax.lax.top_k(judge(state.hidden[:, None], 1)[:, 0], width)
    tokens = head.to_target(params, ids).astype(jnp.int32)
    first = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    pool = Pool(tokens, jnp.full_like(tokens, ROOT), scores)
    pool = Pool(*(jnp.pad(part, ((0, 0), (0, levels * width * width))) for part in pool))
    frontiers = jnp.pad(first, ((0, 0), (0, levels * width)))
    front = Frontier(
        tokens=tokens,
        states=jnp.broadcast_to(state.hidden[:, None], (batch, width, state.hidden.shape[-1])),
        scores=scores,
        pool=first,
        mask=jnp.zeros((batch, width, levels * width), bool),
    )
    blank = jnp.zeros((batch, layer.num_kv_heads, levels * width, layer.head_dim), head.dtype)
    own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))

    def expand(level: Array, carry: tuple[Pool, Array, Frontier, tuple[Array, Array]]) -> tuple:
        """Level `level` (2 to D) from the frontier above it."""
        pool, frontiers, front, drafted = carry
        done = (level - 2) * width  # entries of `drafted` that earlier levels have filled
        mask = jnp.concatenate([front.mask, own], axis=-1)
        out = _run_frontier(head, params, state, front, level, mask, drafted)
        drafted = (_put(drafted[0], out.keys, done, 2), _put(drafted[1], out.values, done, 2))
        gains, ids = jax.lax.top_k(judge(out.states, level), width)
        values = (front.scores[:, :, None] + gains).reshape(batch, -1)
        tokens = head.to_target(params, ids).astype(jnp.int32).reshape(batch, -1)
        offset = width + done * width
        found = Pool(tokens, jnp.repeat(front.pool, width, axis=1), values)
        pool = Pool(*(_put(whole, part, offset, 1) for whole, part in zip(pool, found, strict=True)))
        merit = values if tree.rank_by == "value" else gains.reshape(batch, -1)
        _, best = jax.lax.top_k(merit, width)
        parent = best // width
        mask = jnp.take_along_axis(front.mask, parent[:, :, None], axis=1)
        front = Frontier(
            tokens=jnp.take_along_axis(tokens, best, axis=1),
            states=jnp.take_along_axis(out.states, parent[:, :, None], axis=1),
            scores=jnp.take_along_axis(values, best, axis=1),
            pool=(offset + best).astype(jnp.int32),
            mask=_put(mask, jax.nn.one_hot(parent, width, dtype=bool), done, 2),
        )
        return pool, _put(frontiers, front.pool, done + width, 1), front, drafted

    carry = (pool, frontiers, front, (blank, blank))
    pool, frontiers, _, _ = jax.lax.fori_loop(2, tree.depth + 1, expand, carry) if levels else carry
    if tree.rerank:
        return gather_tree(root, pool, select_best(pool, tree.num_nodes))
    # Creation order between levels; within a level the better nodes come first, so the cut at num_nodes drops the
    # worst.
    return gather_tree(root, pool, jnp.sort(frontiers[:, : tree.num_nodes], axis=1))


def _put(whole: Array, part: Array, at: Array | int, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), at, axis)


def _run_frontier(
    head: HeadFns,
    params: Params,
    state: EagleState,
    front: Frontier,
    level: Array | int,
    mask: Array,
    drafted: tuple[Array, Array] | None,
) -> HeadOutput:
    """Runs the head on nodes of level `level - 1`; `mask` covers the `drafted` entries, then the nodes themselves."""
    # The pair (state at t, token at t + 1) sits at draft position t; the root is at target position `length`.
    positions = jnp.broadcast_to(state.cache.length[:, None] + level - 2, front.tokens.shape)
    return head.run(params, front.tokens, front.states, positions, mask, _committed(state.cache), drafted)


def _grow_static(
    head: HeadFns, tree: TreeConfig, params: Params, state: EagleState, root: Array, judge: Judge
) -> DraftTree:
    """A tree of fixed shape (EAGLE-1, Medusa): child number r of a node is the head's candidate of rank r there."""
    parents = np.array(tree.parents)
    depths, ranks = np.array(static_depths(tree.parents or ())), np.array(sibling_ranks(tree.parents or ()))
    batch = root.shape[0]
    tokens = [jnp.zeros((batch,), jnp.int32)] * tree.num_nodes
    scores = [jnp.zeros((batch,), jnp.float32)] * tree.num_nodes
    expanded = np.array([-1])  # the root: its state is known, it needs no pass
    states, entries, previous = state.hidden[:, None], np.zeros((0,), int), expanded
    earlier: tuple[Array, Array] | None = None
    for level in range(1, tree.depth + 1):
        if level > 1:
            # Which drafted entries (earlier expanded nodes, then this level's) each expanded node sees: itself and
            # its ancestors.
            entries = np.concatenate([entries, expanded])
            sees = np.array([[_is_ancestor(parents, int(e), int(n)) for e in entries] for n in expanded])
            front = Frontier(
                tokens=jnp.stack([tokens[n] for n in expanded], axis=1),
                states=states[:, _positions(previous, parents[expanded])],
                scores=jnp.stack([scores[n] for n in expanded], axis=1),
                pool=jnp.zeros((batch, len(expanded)), jnp.int32),
                mask=jnp.broadcast_to(jnp.asarray(sees), (batch, *sees.shape)),
            )
            out = _run_frontier(head, params, state, front, level, front.mask, earlier)
            earlier = (
                out.keys if earlier is None else jnp.concatenate([earlier[0], out.keys], axis=2),
                out.values if earlier is None else jnp.concatenate([earlier[1], out.values], axis=2),
            )
            states = out.states
        children = np.flatnonzero(depths == level)
        gains, ids = jax.lax.top_k(judge(states, level), int(ranks[children].max()) + 1)
        ids = head.to_target(params, ids).astype(jnp.int32)
        for node in children:
            where = int(_positions(expanded, parents[node : node + 1])[0])
            above = scores[parents[node]] if level > 1 else 0.0
            tokens[node] = ids[:, where, ranks[node]]
            scores[node] = above + gains[:, where, ranks[node]]
        previous, expanded = expanded, np.array([n for n in children if n in parents], int)
    rows = jnp.broadcast_to(jnp.asarray(np.concatenate([[ROOT], parents + 1]), jnp.int32), (batch, tree.num_nodes + 1))
    return DraftTree(
        jnp.stack([root, *tokens], axis=1), rows, jnp.stack([jnp.zeros((batch,), jnp.float32), *scores], axis=1)
    )


def _is_ancestor(parents: np.ndarray, ancestor: int, node: int) -> bool:
    while node > ancestor:
        node = int(parents[node])
    return node == ancestor


def _positions(of: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return np.array([int(np.flatnonzero(of == w)[0]) for w in wanted], int)
