"""Layers shared by the decoder and the draft heads: linear, norms, two-part attention, MLPs.

All modules are stateless. Weights may be float32, bfloat16 or float16; activations follow the weights, while norms,
attention scores and softmax are always float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import DecoderConfig
from eagle_jax.models.rope import rotate


class Linear(nn.Module):
    """`x @ kernel (+ bias)`; kernel is [in, out], the transpose of the checkpoint's.

    Attributes:
      features: size of the last axis of the result.
      use_bias: whether there is a bias [out].
      init_scale: standard deviation of a fresh kernel.
      dtype: of the result; None is that of `x`. The products are summed in float32 either way.
    """

    features: int
    use_bias: bool = False
    init_scale: float = 0.02
    dtype: str | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*b I"]) -> Float[Array, "*b O"]:
        kernel = self.param("kernel", nn.initializers.normal(self.init_scale), (x.shape[-1], self.features))
        y = jnp.dot(x, kernel, preferred_element_type=self.dtype)
        if self.use_bias:
            y = y + jnp.broadcast_to(self.param("bias", nn.initializers.zeros, (self.features,)), y.shape)
        return y


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv:1910.07467) computed in float32, returned in the dtype of `x`."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*b H"]) -> Float[Array, "*b H"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * jnp.broadcast_to(scale, x.shape)


class LayerNorm(nn.Module):
    """Layer normalisation (arXiv:1607.06450) with scale and bias, computed in float32, returned in the dtype of `x`."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*b H"]) -> Float[Array, "*b H"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * jnp.broadcast_to(scale, x.shape) + jnp.broadcast_to(bias, x.shape)


def norm_of(config: DecoderConfig, name: str | None = None) -> RMSNorm | LayerNorm:
    """The norm of the model's family."""
    return (LayerNorm if config.block == "gpt2" else RMSNorm)(config.rms_norm_eps, name=name)


QUERY_BLOCK = 512
"""Longer texts than this, where there is no cache, attend block by block: scores of [A, 512, T], not [A, T, T]."""


def by_query_blocks(
    mix: Callable[[tuple[Array, ...]], Array], rows: tuple[Array, ...], axes: tuple[int, ...]
) -> Float[Array, "B T I"]:
    """`mix(rows)`, block of queries by block of queries where there are more than `QUERY_BLOCK`.

    Args:
      rows: arrays with the T queries along `axes`. mix: gives [B, T, I], every query by itself.
    """
    length = rows[0].shape[axes[0]]
    if length <= QUERY_BLOCK:
        return mix(rows)
    blocks = -(-length // QUERY_BLOCK)

    def cut(x: Array, axis: int) -> Array:
        padding = [(0, blocks * QUERY_BLOCK - length if i == axis else 0) for i in range(x.ndim)]
        shape = (*x.shape[:axis], blocks, QUERY_BLOCK, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, padding).reshape(shape), axis, 0)

    # Nothing of a block is kept for the gradient: its scores are what would not fit.
    mixed = jax.lax.map(jax.checkpoint(mix), tuple(cut(x, axis) for x, axis in zip(rows, axes, strict=True)))
    mixed = jnp.moveaxis(mixed, 0, 1)
    return mixed.reshape(mixed.shape[0], -1, mixed.shape[-1])[:, :length]


def attend(
    query: Float[Array, "B T A hd"],
    new_keys: Float[Array, "B G T2 hd"],
    new_values: Float[Array, "B G T2 hd"],
    mask: Bool[Array, "*b T T2"],
    cached_keys: Float[Array, "B G hd S"] | None = None,
    cached_values: Float[Array, "B G S hd"] | None = None,
    length: Int[Array, " B"] | None = None,
) -> Float[Array, "B T A*hd"]:
    """Grouped-query attention over committed and new tokens, joined in one float32 softmax.

    Every query sees the first `length` cache slots of its row and the new tokens that `mask` ([T, T2] or [B, T, T2])
    allows; no mask of the size of the cache exists. The cache is only read.
    """
    batch, new, heads, head_dim = query.shape
    if cached_keys is None and new > QUERY_BLOCK:
        mask = jnp.broadcast_to(mask, (batch, *mask.shape[-2:]))
        return by_query_blocks(lambda rows: attend(rows[0], new_keys, new_values, rows[1]), (query, mask), (1, 1))
    groups = new_keys.shape[1]
    # [B, G, R*T, hd]: all query heads of a group are rows of one matrix product with that group's keys.
    grouped = query.reshape(batch, new, groups, heads // groups, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, groups, -1, head_dim)
    scale = head_dim**-0.5  # applied to the float32 scores, not to a half-precision query
    lowest = jnp.finfo(jnp.float32).min

    visible = mask[None, None, None] if mask.ndim == 2 else mask[:, None, None]
    fresh = jnp.einsum("bgmd,bgtd->bgmt", grouped, new_keys, preferred_element_type=jnp.float32) * scale
    fresh = fresh.reshape(batch, groups, heads // groups, new, -1)
    fresh = jnp.where(visible, fresh, lowest).reshape(batch, groups, -1, fresh.shape[-1])
    # The softmax does not depend on what is subtracted, so no gradient need flow through the maximum.
    top = jax.lax.stop_gradient(jnp.max(fresh, axis=-1, keepdims=True))
    if cached_keys is None or cached_values is None or length is None:
        weights = jnp.exp(fresh - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mixed = _weigh(weights, new_values)
    else:
        old = jnp.einsum("bgmd,bgds->bgms", grouped, cached_keys, preferred_element_type=jnp.float32) * scale
        committed = jnp.arange(cached_keys.shape[3])[None, :] < length[:, None]
        old = jnp.where(committed[:, None, None, :], old, lowest)
        top = jnp.maximum(top, jax.lax.stop_gradient(jnp.max(old, axis=-1, keepdims=True)))
        weights, old_weights = jnp.exp(fresh - top), jnp.exp(old - top)
        total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.sum(old_weights, axis=-1, keepdims=True)
        # A hidden node must not spoil the others: its weight is 0, and 0 * NaN is NaN. (Its own scores stay NaN.)
        sound = jnp.where(jnp.isfinite(new_values), new_values, 0)
        mixed = _weigh(weights, sound) + _weigh(old_weights, cached_values)
    mixed = (mixed / total).astype(query.dtype)
    mixed = mixed.reshape(batch, groups, heads // groups, new, head_dim).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(batch, new, heads * head_dim)


def _weigh(weights: Float[Array, "B G M S"], values: Float[Array, "B G S hd"]) -> Float[Array, "B G M hd"]:
    return jnp.einsum("bgms,bgsd->bgmd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)


class Attention(nn.Module):
    """Self-attention of one layer; returns its new keys and values instead of writing a cache."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T I"],
        cos: Float[Array, "B T 2 hd2"],
        sin: Float[Array, "B T 2 hd2"],
        mask: Bool[Array, "*b T T2"],
        cached: tuple[Array, Array, Array] | None,
        earlier: tuple[Array, Array] | None = None,
        mixer: Callable[..., Array] = attend,
        added: Mapping[str, Array] | None = None,
    ) -> tuple[Float[Array, "B T H"], Array, Array]:
        """Attends from `x` to the committed, the earlier and the new tokens.

        Args:
          x: input of the layer; its width may differ from H (EAGLE-3 feeds 2H).
          mask: [T, T2] or [B, T, T2]; T2 counts the tokens of `earlier` first, then the T new ones.
          cached: committed (keys [B, G, hd, S], values [B, G, S, hd], length [B]) or None.
          earlier: uncommitted keys and values [B, G, T2 - T, hd] of earlier passes (drafted levels) or None.
          mixer: what joins queries, keys and values; called as `attend` is. Training-time test brings its own.
          added: to the projections of these names, [B, T, out], before norms and rotation: the share of inputs that `x`
            leaves out.

        Returns:
          output [B, T, H], new keys [B, G, T, hd], new values [B, G, T, hd].
        """
        config = self.config
        batch, new, _ = x.shape

        def heads(name: str, count: int) -> Array:
            projected = Linear(count * config.head_dim, config.qkv_bias, name=name)(x)
            if added is not None:
                projected = jax.lax.optimization_barrier(projected + added[name])
            return projected.reshape(batch, new, count, config.head_dim)

        query = heads("q_proj", config.num_heads)
        keys = heads("k_proj", config.num_kv_heads)
        values = heads("v_proj", config.num_kv_heads)
        if config.qk_norm:
            query = RMSNorm(config.rms_norm_eps, name="q_norm")(query)
            keys = RMSNorm(config.rms_norm_eps, name="k_norm")(keys)
        query, keys = rotate(query, cos, sin), rotate(keys, cos, sin)
        keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
        all_keys, all_values = keys, values
        if earlier is not None:
            all_keys = jnp.concatenate([earlier[0], keys], axis=2)
            all_values = jnp.concatenate([earlier[1], values], axis=2)
        mixed = mixer(query, all_keys, all_values, mask, *(cached or (None, None, None)))
        return Linear(config.hidden_size, config.out_bias, name="o_proj")(mixed), keys, values


class GatedMLP(nn.Module):
    """SwiGLU feed-forward block: `down(silu(gate(x)) * up(x))`."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        config = self.config
        gate = Linear(config.intermediate_size, config.mlp_bias, name="gate_proj")(x)
        up = Linear(config.intermediate_size, config.mlp_bias, name="up_proj")(x)
        return Linear(config.hidden_size, config.mlp_bias, name="down_proj")(nn.silu(gate) * up)


class PlainMLP(nn.Module):
    """The feed-forward block of GPT-2: `down(gelu(up(x)))`, GELU by its tanh approximation."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        config = self.config
        up = Linear(config.intermediate_size, config.mlp_bias, name="up_proj")(x)
        return Linear(config.hidden_size, config.mlp_bias, name="down_proj")(nn.gelu(up, approximate=True))
