"""A draft head run on its own outputs over whole texts, as drafting will use it.

One scheme serves them all: the training-time test of EAGLE-3 (arXiv:2503.01840, section 3.2), the aligned steps of HASS
(arXiv:2408.15766, section 3.2, whose rows are named here by the last true feature they see) and, with one step, EAGLE-1
(arXiv:2401.15077, section 4.2). Row p, step k:

    input    embedding of token p+1+k, with the target's features at p (k = 0) or the head's own state of step k-1 at p
    sees     the keys of step 0 at rows <= p of the same document, and those of steps 1..k at row p; RoPE position + k
    gives    a state that stands for token p+1+k, from which token p+2+k is guessed
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import HeadConfig
from eagle_jax.models.heads import HeadOutput, make_head
from eagle_jax.models.layers import attend, by_query_blocks
from eagle_jax.training.losses import ahead
from eagle_jax.types import Params, Texts


def causal_mask(segments: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Who sees whom: earlier tokens of the same document, and itself."""
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    return same & jnp.tril(jnp.ones((length, length), bool))[None]


def diagonal_attend(
    query: Float[Array, "B T A hd"],
    keys: Float[Array, "B G S hd"],
    values: Float[Array, "B G S hd"],
    mask: Bool[Array, "B T S"],
    own_keys: Float[Array, "B G T n hd"],
    own_values: Float[Array, "B G T n hd"],
) -> Float[Array, "B T A*hd"]:
    """Attention of a later step: causal over the keys of step 0, and n keys that only their own row sees.

    The latter are n dot products per row: no [T, n T] score matrix.
    """
    batch, length, heads, head_dim = query.shape
    groups = keys.shape[1]
    grouped = query.reshape(batch, length, groups, heads // groups, head_dim).transpose(0, 2, 3, 1, 4)
    scale, wide = head_dim**-0.5, jnp.float32
    causal = jnp.einsum("bgrtd,bgsd->bgrts", grouped, keys, preferred_element_type=wide) * scale
    causal = jnp.where(mask[:, None, None], causal, jnp.finfo(wide).min)
    own = jnp.einsum("bgrtd,bgtnd->bgrtn", grouped, own_keys, preferred_element_type=wide) * scale
    top = jnp.maximum(jnp.max(causal, axis=-1, keepdims=True), jnp.max(own, axis=-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    causal, own = jnp.exp(causal - top), jnp.exp(own - top)
    total = jnp.sum(causal, axis=-1, keepdims=True) + jnp.sum(own, axis=-1, keepdims=True)
    mixed = jnp.einsum("bgrts,bgsd->bgrtd", causal.astype(values.dtype), values, preferred_element_type=wide)
    mixed += jnp.einsum("bgrtn,bgtnd->bgrtd", own.astype(values.dtype), own_values, preferred_element_type=wide)
    mixed = (mixed / total).astype(query.dtype)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * head_dim)


def _mixer(first: tuple[Array, Array], earlier: list[tuple[Array, Array]]) -> Callable[..., Array]:
    """What stands in for `attend` in a later step: `first` are the keys and values of step 0, `earlier` of 1..k-1."""

    def mix(query: Array, keys: Array, values: Array, mask: Array, *cache: None) -> Array:
        own_keys = jnp.stack([*(pair[0] for pair in earlier), keys], axis=3)
        own_values = jnp.stack([*(pair[1] for pair in earlier), values], axis=3)

        def block(rows: tuple[Array, ...]) -> Array:
            query, mask, own_keys, own_values = rows
            return diagonal_attend(query, *first, mask, own_keys, own_values)

        return by_query_blocks(block, (query, mask, own_keys, own_values), (1, 1, 2, 2))

    return mix


def unroll(
    config: HeadConfig,
    head: Params,
    features: Float[Array, "B T F"],
    embeds: Float[Array, "B T E"],
    texts: Texts,
    steps: int,
    *,
    detach: bool = False,
    remat: bool = False,
) -> list[Float[Array, "B T H"]]:
    """The head's states of every step.

    Args:
      features: of the target. embeds: of `texts.tokens`.
      detach: the states that a step starts from count as given: no gradient flows into the step before (HASS).
      remat: a step's activations are computed again for its gradient instead of kept.
    """
    module = make_head(config)
    mask = causal_mask(texts.segments)

    def fuse(head: Params, features: Array) -> Array:
        return module.apply({"params": head}, features, method="fuse")

    def step(
        head: Params, embeds: Array, states: Array, positions: Array, kept: list[tuple[Array, Array]]
    ) -> HeadOutput:
        mixer = _mixer(kept[0], kept[1:]) if kept else attend
        return module.apply({"params": head}, embeds, states, positions, mask, mixer=mixer)

    if remat:
        fuse, step = jax.checkpoint(fuse), jax.checkpoint(step)
    states = fuse(head, features)
    found: list[Array] = []
    kept: list[tuple[Array, Array]] = []
    for k in range(steps):
        out = step(head, ahead(embeds, 1 + k), states, texts.positions + k, kept)
        found.append(out.states)
        # The keys go on carrying gradients to the weights that made them, from a state that counts as given.
        states = jax.lax.stop_gradient(out.states) if detach else out.states
        kept.append((out.keys, out.values))
    return found
