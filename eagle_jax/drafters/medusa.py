"""Builds Medusa-1, Hydra and Hydra++ drafters: a head on the target's last state per level of a tree.

A Medusa tree costs no pass at all: all levels read one state. Hydra's heads read the drafted tokens as well, level by
level; Hydra++ adds one layer over the confirmed tokens, with a cache in the drafter's state.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eagle_jax.config import ConfigError, MedusaConfig, TreeConfig
from eagle_jax.core import Drafter, KVCache, NewKV, Params, TargetFn, Verified, empty_cache
from eagle_jax.drafters.tree_growth import DraftState, Expander, read_confirmed, tree_drafter
from eagle_jax.models import MedusaHeads


@functools.lru_cache(maxsize=256)
def medusa_drafter(
    config: MedusaConfig, tree: TreeConfig, target: TargetFn, tap: int, dtype: str = "float32"
) -> Drafter:
    """Builds the drafter. Equal arguments give the same object, so that jit caches are shared.

    Args:
      config: the heads; the engine's `params["drafter"]` are `{"heads": their parameters}`.
      tree: static, chain or dynamic, at most as deep as there are heads.
      tap: of the target's state after its final norm, that is, its number of layers.
      dtype: of the heads' weights.

    Raises:
      ConfigError: the tree is deeper than there are heads, or wider than the vocabulary.
    """
    if tree.depth > config.num_heads:
        raise ConfigError(f"TreeConfig.depth must be at most {config.num_heads} (heads), got {tree.depth}. Lower it.")
    if tree.top_k > config.vocab_size:
        raise ConfigError(
            f"TreeConfig.top_k must be at most {config.vocab_size} (vocabulary), got {tree.top_k}. Lower it."
        )
    model, width, hydra = MedusaHeads(config), config.hidden_size, config.kind == "hydra"

    def run(params: Params, *args: object, method: str = "__call__") -> Any:
        return model.apply({"params": params["drafter"]["heads"]}, *args, method=method)

    def init(params: Params, batch: int, slots: int) -> DraftState:
        cache, layer = KVCache((), (), jnp.zeros((batch,), jnp.int32)), config.prefix
        if layer is not None:
            cache = empty_cache(1, batch, layer.num_kv_heads, slots, layer.head_dim, dtype)
        return DraftState(cache, jnp.zeros((batch, width), dtype))

    def update(params: Params, state: DraftState, verified: Verified) -> DraftState:
        def run_prefix(positions: Array, mask: Array) -> tuple[Array, NewKV]:
            if config.prefix is None:
                return verified.features, NewKV((), ())
            cached = state.cache.keys[0], state.cache.values[0], state.cache.length
            out = run(params, verified.features, positions, mask, cached, method="prefix")
            return out.states, NewKV((out.keys,), (out.values,))

        return read_confirmed(state, verified, run_prefix)

    def expander(params: Params, state: DraftState, root: Array) -> Expander:
        def embed(tokens: Array) -> Array:
            return target.embed(params["target"], tokens).astype(state.hidden.dtype)

        def extend(
            tokens: Array, states: Array, level: Array | int, mask: Array, earlier: NewKV
        ) -> tuple[Array, NewKV]:
            if hydra:  # the token's embedding follows those of its ancestors
                states = jax.lax.dynamic_update_slice_in_dim(states, embed(tokens), level * width, axis=2)
            return states, NewKV((), ())

        def logits(states: Array, level: Array | int) -> Array:
            def of(head: int) -> Array:
                # Nodes of a level have different inputs of a Hydra head, and the same input of a Medusa head.
                return run(params, states[..., : (head + 2) * width] if hydra else states[:, :1], head)

            if isinstance(level, int):
                return of(level - 1)
            return jax.lax.switch(level - 1, [functools.partial(of, head) for head in range(config.num_heads)])

        begin = state.hidden
        if hydra:
            blank = jnp.zeros((root.shape[0], (config.num_heads - 1) * width), begin.dtype)
            begin = jnp.concatenate([begin, embed(root), blank], axis=-1)
        uncached = KVCache((), (), state.cache.length)  # drafted tokens have no keys: the heads have no attention
        return Expander(begin, extend, logits, lambda ids: ids, config.vocab_size, uncached)

    return tree_drafter(init, update, expander, tree, (tap,))
