"""Builds EAGLE drafters: EAGLE-1/2 and EAGLE-3 heads on chains, static trees and dynamic trees.

The head's cache holds one entry per confirmed position t: the pair (target feature at t, token at t + 1), as
EAGLE-2's reference does. Drafted levels live only within one `draft`. A cycle costs D head passes: one in `update`,
over the accepted tokens, and D - 1 in `draft`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle_jax.config import ConfigError, HeadConfig, TreeConfig
from eagle_jax.core.cache import commit
from eagle_jax.core.types import Drafter, KVCache, NewKV, Params, TargetFn, Verified, empty_cache
from eagle_jax.drafters.tree_growth import Expander, last_state, tree_drafter
from eagle_jax.models.heads import EagleHead
from eagle_jax.models.layers import LayerOutput


class EagleState(NamedTuple):
    """State of an EAGLE drafter.

    Attributes:
      cache: the head's one-layer cache over confirmed pairs; `length` equals the target's.
      hidden: [B, H], recurrent state of the last confirmed pair; its logits are the children of the root.
    """

    cache: KVCache
    hidden: Float[Array, "B H"]


class HeadFns(NamedTuple):
    """A head bound to a target: how its pieces read the engine's `params`; H and F are the head's sizes."""

    config: HeadConfig
    target: TargetFn
    dtype: str

    def embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """Returns token embeddings, the head's own or the target's."""
        if self.config.own_embedding:
            return self._apply(params, tokens, method="embed")
        return self.target.embed(params["target"], tokens)

    def fuse(self, params: Params, features: Float[Array, "B T F"]) -> Float[Array, "B T H"]:
        """Projects target features to the head's width."""
        return self._apply(params, features, method="fuse")

    def run(
        self, params: Params, tokens: Int[Array, "B T"], states: Float[Array, "B T H"], *context: object
    ) -> LayerOutput:
        """Runs one pass; `context` is (positions, mask, cached, earlier)."""
        return self._apply(params, self.embed(params, tokens), states, *context)

    def logits(self, params: Params, states: Float[Array, "*b H"]) -> Float[Array, "*b Vd"]:
        """Returns draft logits, float32, over the draft vocabulary."""
        if self.config.kind == "eagle1":
            return self.target.logits(params["target"], states)
        return self._apply(params, states, method="logits")

    def to_target(self, params: Params, draft_ids: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """Returns draft vocabulary ids as target ids."""
        if self.config.kind == "eagle1":
            return draft_ids
        return draft_ids + params["drafter"]["d2t"][draft_ids]

    def expander(self, params: Params, state: EagleState, root: Array) -> Expander:
        """Returns the head as an `Expander` of the text that `state` has seen."""
        layer = self.config.layer

        def extend(
            tokens: Array, states: Array, level: Array | int, mask: Array, earlier: NewKV
        ) -> tuple[Array, NewKV]:
            # The pair (state at t, token at t + 1) sits at draft position t; the root is at target position `length`.
            positions = jnp.broadcast_to(state.cache.length[:, None] + level - 2, tokens.shape)
            drafted = (earlier.keys[0], earlier.values[0])
            out = self.run(params, tokens, states, positions, mask, _committed(state.cache), drafted)
            return out.states, NewKV((out.keys,), (out.values,))

        def blank(entries: int) -> NewKV:
            zeros = jnp.zeros((state.hidden.shape[0], layer.num_kv_heads, entries, layer.head_dim), self.dtype)
            return NewKV((zeros,), (zeros,))

        return Expander(
            root=state.hidden,
            extend=extend,
            logits=lambda states, level: self.logits(params, states),
            to_target=functools.partial(self.to_target, params),
            vocab=layer.vocab_size,
            blank=blank,
        )

    def _apply(self, params: Params, *args: object, method: str = "__call__") -> Any:
        return EagleHead(self.config).apply({"params": params["drafter"]["head"]}, *args, method=method)


@functools.lru_cache(maxsize=256)
def eagle_drafter(config: HeadConfig, tree: TreeConfig, target: TargetFn, dtype: str = "float32") -> Drafter:
    """Builds the drafter of an EAGLE head; equal arguments give the same object, so jit caches are shared.

    Args:
      config: the head; its `taps` decide which features the target returns.
      tree: chain, static tree or dynamic tree.
      dtype: dtype of the head's cache, that of its weights.

    Raises:
      ConfigError: more children per node than the draft vocabulary has tokens.
    """
    vocab = config.layer.vocab_size if config.kind == "eagle1" else config.draft_vocab_size
    if tree.top_k > vocab:
        raise ConfigError(f"TreeConfig.top_k must be at most {vocab}, the head's draft vocabulary, got {tree.top_k}.")
    head = HeadFns(config, target, dtype)

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
            cache = commit(state.cache, NewKV((out.keys,), (out.values,)), verified.count, result=out.states)
            return EagleState(cache, last_state(state.hidden, out.states, verified.count))

    def rewind(state: EagleState, length: Array) -> EagleState:
        return state._replace(cache=state.cache._replace(length=length))

    return tree_drafter(init, update, head.expander, tree, rewind, config.taps)


def _committed(cache: KVCache) -> tuple[Array, Array, Array]:
    return cache.keys[0], cache.values[0], cache.length
