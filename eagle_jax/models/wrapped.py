"""Wraps models of other libraries whose parameters cannot be imported, layer by layer, for the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from eagle_jax.core import KVCache, NewKV, Params, TargetFn, TargetOutput, empty_cache

Layer = Callable[[Params, Array, Array, Mapping[str, Array], Array], tuple[Mapping[str, Array], Array]]
"""`(params, x [B,T,H], positions [B,T], cache, mask [B,T,S+T] bool) -> (cache, x)`; see `target_from_layers`."""


def target_from_layers(
    embed: Callable[[Params, Array], Array], layers: Sequence[Layer], norm: Callable[[Params, Array], Array],
    logits: Callable[[Params, Array], Array], *, num_kv_heads: int, head_dim: int, dtype: str = "float32",
) -> TargetFn:  # fmt: skip
    """Returns the functions of a model whose layers write keys and values into a cache before they attend to it.

    Layers of tunix and gemma are of this kind. The cache of a layer is `{"k": [B, S+T, G, hd], "v": [B, S+T, G, hd],
    "end_index": [B] int32}`. The layer must write the T new tokens at slot `end_index`, which is S in all rows, and
    read what `mask` shows. Every pass copies all caches, so an imported model (`Target.from_tree`) is faster.

    A layer must compute the same for a token in a tree as for the token alone: by `positions` and `mask`, never by the
    order of the slots. Layers with a sliding window by slots, and routing that depends on the other tokens, do not.

    Args:
      embed: `(params, tokens [B, T]) -> [B, T, H]`, the input of the first layer.
      norm: `(params, x) -> hidden`, after the last layer. logits: `(params, hidden [..., H]) -> [..., V]`.
      num_kv_heads: G. head_dim: hd. dtype: of the caches.
    """

    def forward(
        params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], mask: Bool[Array, "*b T T"],
        cache: KVCache | None, taps: tuple[int, ...] = (),
    ) -> TargetOutput:  # fmt: skip
        batch, new = tokens.shape
        cache = init_cache(batch, 0) if cache is None else cache
        slots = cache.slots
        committed = jnp.arange(slots)[None, None] < cache.length[:, None, None]
        parts = (jnp.broadcast_to(committed, (batch, new, slots)), jnp.broadcast_to(mask, (batch, new, new)))
        seen = jnp.concatenate(parts, axis=-1)
        room = ((0, 0), (0, new), (0, 0), (0, 0))
        x = embed(params, tokens)
        states, keys, values = {0: x}, [], []
        for index, layer in enumerate(layers):
            given = {
                "k": jnp.pad(cache.keys[index].transpose(0, 3, 1, 2), room),
                "v": jnp.pad(cache.values[index].transpose(0, 2, 1, 3), room),
                "end_index": jnp.full((batch,), slots, jnp.int32),
            }
            written, x = layer(params, x, positions, given, seen)
            keys.append(written["k"][:, slots:].transpose(0, 2, 1, 3))
            values.append(written["v"][:, slots:].transpose(0, 2, 1, 3))
            states[index + 1] = x
        hidden = states[len(layers)] = norm(params, x)
        features = jnp.concatenate([states[tap] for tap in taps], axis=-1) if taps else hidden[..., :0]
        return TargetOutput(hidden, features, NewKV(tuple(keys), tuple(values)))

    def float_logits(params: Params, hidden: Array) -> Array:
        return logits(params, hidden).astype(jnp.float32)

    def init_cache(batch: int, slots: int) -> KVCache:
        return empty_cache(len(layers), batch, num_kv_heads, slots, head_dim, dtype)

    return TargetFn(forward, float_logits, embed, init_cache)
