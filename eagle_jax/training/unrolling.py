"""Runs a draft head on its own outputs over whole texts, as drafting does.

The scheme covers training-time test of EAGLE-3 (arXiv:2503.01840, section 3.2), aligned steps of HASS
(arXiv:2408.15766, section 3.2; here a row is named by its last true feature) and, with one step, EAGLE-1
(arXiv:2401.15077, section 4.2). Row p, step k:

    input    embedding of token p+1+k, with the target's features at p (k = 0) or the head's state of step k-1 at p
    sees     keys of step 0 at rows <= p of the same document, keys of steps 1..k at row p; RoPE position + k
    output   a state for token p+1+k, which predicts token p+2+k
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import HeadConfig
from eagle_jax.core.types import Params
from eagle_jax.models.heads import EagleHead, split_embeddings
from eagle_jax.models.layers import LayerOutput, by_query_blocks
from eagle_jax.packed import PackedTokens
from eagle_jax.training.attention import Bias, bias_of, diagonal_attend
from eagle_jax.training.losses import ahead


def causal_mask(segments: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Returns the mask by which a token sees itself and earlier tokens of its document."""
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    return same & jnp.tril(jnp.ones((length, length), bool))[None]


def _mixer(bias: Bias, earlier: list[tuple[Array, Array]]) -> Callable[..., Array]:
    """Returns a function with the signature of `attend`; `earlier` holds keys and values of steps 0..k-1."""

    def mix(query: Array, keys: Array, values: Array, mask: Array, *cache: None) -> Array:
        first, *own = *earlier, (keys, values)

        def block(rows: tuple[Array, ...]) -> Array:
            query, seen, transposed, *own = rows
            return diagonal_attend(query, *first, (seen, transposed), own[::2], own[1::2])

        flat = [part for pair in own for part in pair]
        return by_query_blocks(block, (query, *bias, *flat), (1, 1, 2, *[2] * len(flat)))

    return mix


def unroll(
    config: HeadConfig,
    head: Params,
    features: Float[Array, "B T F"],
    embeds: Float[Array, "B T E"],
    texts: PackedTokens,
    steps: int,
    *,
    detach: bool = False,
    remat: bool = False,
) -> list[Float[Array, "B T H"]]:
    """Returns the head's states of every step; `detach` and `remat` are those of `Objective`."""
    module = EagleHead(config)
    mask = causal_mask(texts.segments)
    bias = bias_of(mask)

    def fuse(head: Params, features: Array) -> Array:
        return module.apply({"params": head}, features, method="fuse")

    # An EAGLE-3 head reads the same embeddings in every step, shifted by one row.
    shares, layer = split_embeddings(config, head, embeds) if config.kind == "eagle3" else (None, head)

    def step(layer: Params, states: Array, positions: Array, kept: list[tuple[Array, Array]]) -> LayerOutput:
        by = 1 + len(kept)
        shifted = None if shares else ahead(embeds, by)
        added = {name: ahead(share, by) for name, share in shares.items()} if shares else None
        return module.apply({"params": layer}, shifted, states, positions, mask, mixer=_mixer(bias, kept), added=added)

    if remat:
        fuse, step = jax.checkpoint(fuse), jax.checkpoint(step)
    states = fuse(head, features)
    found: list[Array] = []
    kept: list[tuple[Array, Array]] = []
    for k in range(steps):
        out = step(layer, states, texts.positions + k, kept)
        found.append(out.states)
        # Keys are not detached: their gradient reaches the weights.
        states = jax.lax.stop_gradient(out.states) if detach else out.states
        kept.append((out.keys, out.values))
    return found
