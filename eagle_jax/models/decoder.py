"""Defines the decoder of all families, from GPT-2 to gpt-oss; a family is a `DecoderConfig`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import DecoderConfig, RopeConfig
from eagle_jax.core import KVCache, NewKV, Params, TargetFn, TargetOutput, empty_cache
from eagle_jax.models.attention import within_window
from eagle_jax.models.experts import MoE
from eagle_jax.models.layers import MLP, Attention, Linear, embed, norm_of, product
from eagle_jax.models.rope import rope_angles


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, or experts, with residual connections; Gemma normalises their results as well."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T H"],
        cos: Float[Array, "B T 2 hd2"],
        sin: Float[Array, "B T 2 hd2"],
        mask: Bool[Array, "*b T T2"],
        cached: tuple[Array | None, ...] | None,
        earlier: tuple[Array, Array] | None = None,
    ) -> tuple[Float[Array, "B T H"], Array, Array]:
        config, gemma = self.config, self.config.block == "gemma3"
        with jax.named_scope("attention"):
            normed = norm_of(config, "input_layernorm")(x)
            mixed, keys, values = Attention(config, name="self_attn")(normed, cos, sin, mask, cached, earlier)
            x = x + (norm_of(config, "post_attention_layernorm")(mixed) if gemma else mixed)
        with jax.named_scope("mlp"):
            normed = norm_of(config, "pre_feedforward_layernorm" if gemma else "post_attention_layernorm")(x)
            mixed = (MLP if config.experts is None else MoE)(config, name="mlp")(normed)
            return x + (norm_of(config, "post_feedforward_layernorm")(mixed) if gemma else mixed), keys, values


class Decoder(nn.Module):
    """Language model with the parameter names of Hugging Face checkpoints (`layers_i` for `layers.i`)."""

    config: DecoderConfig

    def setup(self) -> None:
        config = self.config
        self.embed_tokens = nn.Embed(config.vocab_size, config.hidden_size, embedding_init=nn.initializers.normal(0.02))
        dense = config.experts.dense_layers if config.experts else ()
        plain = dataclasses.replace(config, experts=None)
        self.layers = [DecoderLayer(plain if index in dense else config) for index in range(config.num_layers)]
        self.norm = norm_of(config)
        if config.block == "gpt2":
            self.embed_positions = nn.Embed(
                config.max_position, config.hidden_size, embedding_init=nn.initializers.normal(0.02)
            )
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.vocab_size, dtype="float32")

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "*b T T2"],
        cache: KVCache | None = None,
        taps: tuple[int, ...] = (),
        earlier: NewKV | None = None,
    ) -> TargetOutput:
        """Runs T new tokens against the committed cache; without a cache, by themselves.

        Args:
          positions: position of every token in its text. Only in a layer with a window do they decide which committed
            tokens it sees.
          mask: True where a new token (row) sees a new or earlier token (column); includes the token itself.
          taps: hidden states to return as features, numbered as `hidden_states` of `transformers`.
          earlier: keys and values of T2 - T uncommitted tokens of earlier passes; their columns come first in `mask`.
        """
        config = self.config
        x = self.embed(tokens)
        if config.block == "gemma3":
            x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
        if config.block == "gpt2":  # positions of padding may exceed the table
            x = x + self.embed_positions(jnp.clip(positions, 0, config.max_position - 1))
        states, new_keys, new_values = {0: x}, [], []
        windows = config.windows or (0,) * config.num_layers
        seen = {w: (within_window(mask, w), positions - w + 1) if w else (mask, None) for w in set(windows)}
        ropes = [config.local_rope if w and config.local_rope else config.rope for w in windows]
        ropes = [RopeConfig(kind="none") if i in config.nope_layers else rope for i, rope in enumerate(ropes)]
        angles = {rope: rope_angles(rope, config.head_dim, positions) for rope in set(ropes)}
        for index, (layer, window) in enumerate(zip(self.layers, windows, strict=True)):
            (visible, first), (cos, sin) = seen[window], angles[ropes[index]]
            cached = None if cache is None else (cache.keys[index], cache.values[index], cache.length, first)
            before = None if earlier is None else (earlier.keys[index], earlier.values[index])
            x, keys, values = layer(x, cos, sin, visible, cached, before)
            new_keys.append(keys)
            new_values.append(values)
            states[index + 1] = x
        hidden = self.norm(x)
        states[config.num_layers] = hidden
        features = jnp.concatenate([states[tap] for tap in taps], axis=-1) if taps else hidden[..., :0]
        return TargetOutput(hidden, features, NewKV(tuple(new_keys), tuple(new_values)))

    def embed(self, tokens: Int[Array, "*b"]) -> Float[Array, "*b H"]:
        """Returns token embeddings, as stored: heads that share them do not scale them."""
        return embed(self.embed_tokens, tokens)

    def logits(self, hidden: Float[Array, "*b H"]) -> Float[Array, "*b V"]:
        """Returns next-token logits of final-normed states, float32."""
        if self.config.tie_word_embeddings:
            return product(hidden, self.embed_tokens.embedding, "float32")
        return self.lm_head(hidden)

    def all_logits(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Returns the logits of a plain causal pass, which uses every parameter."""
        batch, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
        return self.logits(self(tokens, positions, jnp.tril(jnp.ones((length, length), bool))).hidden)


def init_params(config: DecoderConfig, key: Array) -> Params:
    """Draws float32 parameters, a plain nested dict."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return Decoder(config).init(key, tokens, method=Decoder.all_logits)["params"]


@functools.lru_cache(maxsize=64)
def target_fn(config: DecoderConfig, dtype: str = "float32") -> TargetFn:
    """Returns the decoder as a `TargetFn`; equal arguments give the same object, so jit caches are shared.

    Args:
      dtype: dtype of weights and key-value cache.
    """
    model = Decoder(config)

    def run(method: str) -> Callable[..., Any]:
        return lambda params, *inputs: model.apply({"params": params}, *inputs, method=method)

    def init_cache(batch: int, slots: int) -> KVCache:
        sizes = batch, config.num_kv_heads, slots, config.head_dim
        return empty_cache(config.num_layers, *sizes, dtype, config.windows)

    return TargetFn(run("__call__"), run("logits"), run("embed"), init_cache, config.windows)
