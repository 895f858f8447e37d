"""Defines the layers of decoders and heads: linear, norm, attention over cache and new tokens, MLP.

All modules are stateless. Weights may be float32, bfloat16 or float16, or quantised. Activations have the dtype of the
weights, or of the scales of quantised weights.
Norms, attention scores and softmax are computed in float32; their results have the activations' dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from eagle_jax.config import DecoderConfig
from eagle_jax.models.attention import attend
from eagle_jax.models.projections import JOINED, project
from eagle_jax.models.quantised import Weight, is_quantised, look_up, scaled
from eagle_jax.models.rope import rotate


class LayerOutput(NamedTuple):
    """Result of one pass of a draft head, or of Hydra++'s extra layer; `states` are the input of `logits`."""

    states: Float[Array, "B T H"]
    keys: Float[Array, "B G T hd"]  # of the T tokens, not committed
    values: Float[Array, "B G T hd"]


FEW_ROWS = 64
"""Rows below which a product on CPU has the weight as its first factor."""


def product(x: Float[Array, "*b I"], weight: Weight, dtype: str | None = None) -> Float[Array, "*b O"]:
    """Returns `x @ weight.T` in `dtype`; None is that of `x`. A quantised weight is read in its small type."""
    if not isinstance(weight, Mapping):
        return _product(x, weight, dtype)
    if weight["q"].ndim == 3 or "zero" in weight:
        return _product(x, scaled(weight, x.dtype), dtype)
    # One scale per output may follow the sum, and the product reads nothing but `q`.
    columns = _product(x, weight["q"].astype(x.dtype), "float32")
    return (columns * jnp.broadcast_to(weight["scale"], columns.shape)).astype(dtype or x.dtype)


def _product(x: Float[Array, "*b I"], weight: Float[Array, "O *I"], dtype: str | None) -> Float[Array, "*b O"]:
    """Computes a product with a weight [O, I], or [O, I / g, g] with its inputs in groups."""
    rows = math.prod(x.shape[:-1])
    plain = functools.partial(jnp.dot, preferred_element_type=dtype)

    def weight_last(x: Float[Array, "*b I"], weight: Float[Array, "O *I"]) -> Float[Array, "*b O"]:
        if weight.ndim == 2:
            return plain(x, weight.T)
        groups = x.reshape(*x.shape[:-1], *weight.shape[1:])
        return jnp.einsum("...gi,ogi->...o", groups, weight, preferred_element_type=dtype)

    def weight_first(x: Float[Array, "*b I"], weight: Float[Array, "O *I"]) -> Float[Array, "*b O"]:
        # 12 rows cost more than 16: the library computes blocks of four and eight, and single rows for the rest.
        block = 1 if rows == 1 else 4 if rows <= 4 else 8
        padded = jnp.pad(x.reshape(rows, -1), ((0, -rows % block), (0, 0)))
        # Without the barrier XLA would swap the factors back.
        columns = jax.lax.optimization_barrier(plain(weight.reshape(len(weight), -1), padded.T))
        return columns.T[:rows].reshape(*x.shape[:-1], -1)

    if rows >= FEW_ROWS:
        return weight_last(x, weight)
    # On CPU, XLA's library packs the second factor in every call, which costs more than reading a weight. Eight rows
    # cost 1.5 times one row with the weight first, 3.5 times with the weight second, and one row with the weight second
    # 1.2 times (SmolLM2's sizes, two cores).
    return jax.lax.platform_dependent(x, weight, cpu=weight_first, default=weight_last)


def _draw_weight(key: Array, shape: tuple[int, int]) -> Float[Array, "O I"]:
    # Drawn as [in, out]: a seed gives the weights that it gave when weights had this layout.
    return nn.initializers.normal(0.02)(key, shape[::-1]).T


def parameter(module: nn.Module, name: str, init: Callable[..., Array], shape: tuple[int, ...]) -> Any:
    """Returns a weight of a module, which may be quantised: Flax would compare `q` with the shape of the weight."""
    stored = module.get_variable("params", name)
    return stored if is_quantised(stored) else module.param(name, init, shape)


def embed(table: nn.Embed, tokens: Int[Array, "*b"]) -> Float[Array, "*b H"]:
    """Looks up rows of a table [V, H], which may be quantised by rows."""
    return look_up(table.embedding, tokens) if is_quantised(table.embedding) else table(tokens)


class Linear(nn.Module):
    """Returns `x @ weight.T (+ bias)`; weight is [out, in], as in checkpoints, and may be quantised.

    Attributes:
      features: size of the last axis of the result.
      use_bias: adds a bias [out].
      dtype: of the result; None takes that of `x`.
    """

    features: int
    use_bias: bool = False
    dtype: str | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*b I"]) -> Float[Array, "*b O"]:
        y = product(x, parameter(self, "weight", _draw_weight, (self.features, x.shape[-1])), self.dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
        return y


class Norm(nn.Module):
    """RMSNorm (arXiv:1910.07467) or layer normalisation (arXiv:1607.06450), in float32 inside.

    Attributes:
      eps: added to the mean square, or to the variance.
      centred: subtracts the mean and adds a bias (layer normalisation).
      plus_one: multiplies by 1 + scale, in float32 (Gemma).
      wide: multiplies in float32, not in the dtype of the input (gpt-oss).
    """

    eps: float
    centred: bool = False
    plus_one: bool = False
    wide: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*b H"]) -> Float[Array, "*b H"]:
        initial = nn.initializers.zeros if self.plus_one else nn.initializers.ones
        scale = self.param("scale", initial, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        if self.centred:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.wide or self.plus_one:
            factor = scale.astype(jnp.float32) + float(self.plus_one)
            return (wide * jnp.broadcast_to(factor, x.shape)).astype(x.dtype)
        y = wide.astype(x.dtype) * jnp.broadcast_to(scale, x.shape)
        if self.centred:
            y = y + jnp.broadcast_to(self.param("bias", nn.initializers.zeros, (x.shape[-1],)), x.shape)
        return y


def norm_of(config: DecoderConfig, name: str | None = None) -> Norm:
    """Returns the norm of a model family."""
    return Norm(config.rms_norm_eps, config.block == "gpt2", config.block == "gemma3", config.wide_norms, name=name)


class Attention(nn.Module):
    """Self-attention of one layer. Returns new keys and values instead of writing a cache."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T I"],
        cos: Float[Array, "B T 2 hd2"],
        sin: Float[Array, "B T 2 hd2"],
        mask: Bool[Array, "*b T T2"],
        cached: tuple[Any, ...] | None,
        earlier: tuple[Array, Array] | None = None,
        mixer: Callable[..., Array] = attend,
        added: Mapping[str, Array] | None = None,
        only: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T3 H"], Array, Array]:
        """Attends from `x` to the committed, the earlier and the new tokens.

        Args:
          x: input of the layer; I may differ from H (2H in EAGLE-3).
          mask: [T, T2] or [B, T, T2]; columns are the tokens of `earlier`, then the T new ones.
          cached: committed (keys [B, G, hd, S], values [B, G, S, hd], length [B]) or None; with a window, also the
            first position that every token sees, [B, T].
          earlier: uncommitted keys and values [B, G, T2 - T, hd] of earlier passes (drafted levels) or None.
          mixer: attention without a cache, with the signature of `attend`. Training-time test has its own.
          added: [B, T, out] per name of a projection, added to its output before norms and rotation: products of
            inputs that are not in `x`.
          only: the token of every row whose output is wanted; None is all.

        Returns:
          output [B, T, H], or [B, 1, H] of `only`; new keys [B, G, T, hd], new values [B, G, T, hd].
        """
        config = self.config
        batch, new, _ = x.shape

        counts = config.num_heads, config.num_kv_heads, config.num_kv_heads
        linear = functools.partial(Linear, use_bias=config.qkv_bias)
        parts = project(self, x, "qkv_proj", [count * config.head_dim for count in counts], linear)
        if added is not None:  # keeps one sum: XLA for CPU would repeat it in every use
            sums = zip(JOINED["qkv_proj"], parts, strict=True)
            parts = [jax.lax.optimization_barrier(part + added[name]) for name, part in sums]
        query, keys, values = (
            part.reshape(batch, new, count, config.head_dim) for part, count in zip(parts, counts, strict=True)
        )
        if config.qk_norm:
            query, keys = norm_of(config, "q_norm")(query), norm_of(config, "k_norm")(keys)
        query, keys = rotate(query, cos, sin), rotate(keys, cos, sin)
        keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
        if only is not None:
            query, mask, cached = _query_of(only, query, mask, cached)
        all_keys, all_values = keys, values
        if earlier is not None:
            all_keys = jnp.concatenate([earlier[0], keys], axis=2)
            all_values = jnp.concatenate([earlier[1], values], axis=2)
        sinks = None
        if config.sinks:
            sinks = self.param("sinks", nn.initializers.normal(0.02), (config.num_heads,))
        if cached is not None:
            mixed = self.mix(query, all_keys, all_values, mask, sinks, *cached)
        elif mixer is attend:
            mixed = attend(query, all_keys, all_values, mask, scale=self._scale(), sinks=sinks)
        else:
            mixed = mixer(query, all_keys, all_values, mask)
        return Linear(config.hidden_size, config.out_bias, name="o_proj")(mixed), keys, values

    def mix(
        self,
        query: Float[Array, "B T A hd"],
        keys: Float[Array, "B G T2 hd"],
        values: Float[Array, "B G T2 hd"],
        mask: Bool[Array, "*b T T2"],
        sinks: Float[Array, " A"] | None,
        cached_keys: Float[Array, "B G hd S"],
        cached_values: Float[Array, "B G S hd"],
        length: Int[Array, " B"],
        first: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T I"]:
        """Attends to a cache; a mesh intercepts this, so that every device attends with its own rows and heads."""
        return attend(query, keys, values, mask, cached_keys, cached_values, length, first, self._scale(), sinks)

    def _scale(self) -> float | None:
        scalar = self.config.query_scalar
        return None if scalar is None else scalar**-0.5


def take_token(rows: Shaped[Array, "B T *n"], token: Int[Array, " B"]) -> Shaped[Array, "B 1 *n"]:
    """Returns one token of every row."""
    return jnp.take_along_axis(rows, jnp.expand_dims(token, range(1, rows.ndim)), axis=1)


def _query_of(
    token: Int[Array, " B"], query: Array, mask: Array, cached: tuple[Any, ...] | None
) -> tuple[Array, Array, tuple[Any, ...] | None]:
    """Returns what `Attention` reads for one token of every row."""
    mask = mask[token][:, None] if mask.ndim == 2 else take_token(mask, token)
    if cached is not None:
        cached = *cached[:3], *(take_token(first, token) for first in cached[3:])
    return take_token(query, token), mask, cached


class MLP(nn.Module):
    """Feed-forward block: `down(silu(gate(x)) * up(x))`, with tanh GELU for Gemma; `down(gelu(up(x)))` for GPT-2."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        config = self.config
        linear = functools.partial(Linear, use_bias=config.mlp_bias)
        if config.block == "gpt2":
            inner = nn.gelu(linear(config.intermediate_size, name="up_proj")(x), approximate=True)
        else:
            activation = functools.partial(nn.gelu, approximate=True) if config.block == "gemma3" else nn.silu
            gate, up = project(self, x, "gate_up_proj", [config.intermediate_size] * 2, linear)
            inner = activation(gate) * up
        return Linear(config.hidden_size, config.mlp_bias, name="down_proj")(inner)
