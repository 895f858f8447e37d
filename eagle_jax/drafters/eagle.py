"""Builds EAGLE drafters: EAGLE-1/2 and EAGLE-3 heads on chains, static trees and dynamic trees.

The head's cache holds one entry per confirmed position t: the pair (target feature at t, token at t + 1), as
EAGLE-2's reference does. Drafted levels live only within one `draft`. A cycle costs D head passes: one in `update`,
over the accepted tokens, and D - 1 in `draft`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle_jax.config import ConfigError, HeadConfig, TreeConfig
from eagle_jax.core import Drafter, KVCache, NewKV, Params, TargetFn, Verified, empty_cache
from eagle_jax.drafters.tree_growth import DraftState, Expander, read_confirmed, tree_drafter
from eagle_jax.models import EagleHead


class HeadFns(NamedTuple):
    """A head bound to a target: how its pieces read the engine's `params`; H and F are the head's sizes."""

    config: HeadConfig
    target: TargetFn

    def apply(self, params: Params, *args: object, method: str = "__call__", **options: object) -> Any:
        """Applies a method of `EagleHead`."""
        return EagleHead(self.config).apply({"params": params["drafter"]["head"]}, *args, method=method, **options)

    def run(
        self, params: Params, tokens: Int[Array, "B T"], states: Float[Array, "B T H"], positions: Int[Array, "B T"],
        mask: Array, cache: KVCache, earlier: NewKV | None = None, only: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T2 H"], NewKV]:  # fmt: skip
        """Runs one pass over pairs of a state and the next token; returns states, and keys and values.

        Args:
          only: the pair of every row whose state is wanted; None is all.
        """
        own = self.config.own_embedding
        embeds = self.apply(params, tokens, method="embed") if own else self.target.embed(params["target"], tokens)
        committed = cache.keys[0], cache.values[0], cache.length
        drafted = None if earlier is None else (earlier.keys[0], earlier.values[0])
        out = self.apply(params, embeds, states, positions, mask, committed, drafted, only=only)
        return out.states, NewKV((out.keys,), (out.values,))

    def logits(self, params: Params, states: Float[Array, "*b H"]) -> Float[Array, "*b Vd"]:
        """Returns draft logits, float32, over the draft vocabulary."""
        if self.config.kind == "eagle1":
            return self.target.logits(params["target"], states)
        return self.apply(params, states, method="logits")

    def to_target(self, params: Params, draft_ids: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """Returns draft vocabulary ids as target ids."""
        if self.config.kind == "eagle1":
            return draft_ids
        return draft_ids + params["drafter"]["d2t"][draft_ids]

    def expander(self, params: Params, state: DraftState, root: Array) -> Expander:
        """Returns the head as an `Expander` of the text that `state` has seen."""

        def extend(
            tokens: Array, states: Array, level: Array | int, mask: Array, earlier: NewKV
        ) -> tuple[Array, NewKV]:
            # The pair (state at t, token at t + 1) sits at draft position t; the root is at target position `length`.
            positions = jnp.broadcast_to(state.cache.length[:, None] + level - 2, tokens.shape)
            return self.run(params, tokens, states, positions, mask, state.cache, earlier)

        return Expander(
            root=state.hidden,
            extend=extend,
            logits=lambda states, level: self.logits(params, states),
            to_target=functools.partial(self.to_target, params),
            vocab=self.config.layer.vocab_size,
            cache=state.cache,
        )


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
        raise ConfigError(
            f"TreeConfig.top_k must be at most the draft vocabulary, {vocab}, got {tree.top_k}. Lower it."
        )
    head, layer = HeadFns(config, target), config.layer

    def init(params: Params, batch: int, slots: int) -> DraftState:
        cache = empty_cache(1, batch, layer.num_kv_heads, slots, layer.head_dim, dtype, layer.windows)
        return DraftState(cache, jnp.zeros((batch, layer.hidden_size), dtype))

    def update(params: Params, state: DraftState, verified: Verified) -> DraftState:
        def run(positions: Array, mask: Array) -> tuple[Array, NewKV]:
            states = head.apply(params, verified.features, method="fuse")
            last = jnp.maximum(verified.count - 1, 0)  # of the others, keys and values are all that a draft reads
            return head.run(params, verified.next_tokens, states, positions, mask, state.cache, only=last)

        return read_confirmed(state, verified, run, layer.windows)

    return tree_drafter(init, update, head.expander, tree, config.taps, windows=layer.windows)
