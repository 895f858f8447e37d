"""The EAGLE draft heads: one decoder layer over fused (token embedding, feature) pairs.

EAGLE-1/2 (arXiv:2401.15077, section 4; arXiv:2406.16858) and EAGLE-3 (arXiv:2503.01840, section 3), one interface:

    fuse(features [B, T, F]) -> states [B, T, H]          target features into the head's own space
    __call__(embeds, states, ...) -> HeadOutput           one step, for target features and own states alike
    logits(states) -> [..., Vd]                           EAGLE-3 only; EAGLE-1/2 read the target's lm_head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import HeadConfig
from eagle_jax.core.types import Params
from eagle_jax.models.layers import Attention, GatedMLP, Linear, RMSNorm, attend
from eagle_jax.models.rope import rope_angles


class HeadOutput(NamedTuple):
    """One pass of a head.

    Attributes:
      states: [B, T, H], the recurrent state; what `logits` reads and what the next step takes as feature.
      keys, values: [B, G, T, head_dim] of the T tokens, not committed.
    """

    states: Float[Array, "B T H"]
    keys: Float[Array, "B G T hd"]
    values: Float[Array, "B G T hd"]


class Eagle1Head(nn.Module):
    """The head of EAGLE-1 and EAGLE-2: no input norm, no final norm, no lm_head of its own."""

    config: HeadConfig

    def setup(self) -> None:
        config = self.config
        self.fc = Linear(config.layer.hidden_size, config.fc_bias)
        self.self_attn = Attention(config.layer)
        self.post_attention_layernorm = RMSNorm(config.layer.rms_norm_eps)
        self.mlp = GatedMLP(config.layer)
        if config.own_embedding:
            self.embed_tokens = nn.Embed(config.layer.vocab_size, config.layer.hidden_size)

    def fuse(self, features: Float[Array, "*b F"]) -> Float[Array, "*b H"]:
        """The feature itself: EAGLE-1/2 predict in the target's feature space."""
        return features

    def embed(self, tokens: Int[Array, "*b"]) -> Float[Array, "*b H"]:
        """The head's own copy of the embedding (`own_embedding` only)."""
        return self.embed_tokens(tokens)

    def __call__(
        self,
        embeds: Float[Array, "B T H"],
        states: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "*b T T2"],
        cached: tuple[Array, Array, Array] | None = None,
        earlier: tuple[Array, Array] | None = None,
        mixer: Callable[..., Array] = attend,
    ) -> HeadOutput:
        """Pairs (embedding of the token at t+1, feature at t); the result estimates the feature at t+1."""
        cos, sin = rope_angles(self.config.layer.rope, self.config.layer.head_dim, positions)
        x = self.fc(jnp.concatenate([embeds, states], axis=-1))
        mixed, keys, values = self.self_attn(x, cos, sin, mask, cached, earlier, mixer)
        x = x + mixed
        return HeadOutput(x + self.mlp(self.post_attention_layernorm(x)), keys, values)

    def everything(self, features: Float[Array, "B T F"], embeds: Float[Array, "B T E"]) -> Array:
        """Touches every parameter, for initialisation."""
        if self.config.own_embedding:
            self.embed(jnp.zeros((1,), jnp.int32))
        length = features.shape[1]
        return self(
            embeds, self.fuse(features), jnp.arange(length)[None], jnp.tril(jnp.ones((length, length), bool))
        ).states


class Eagle3Head(nn.Module):
    """The head of EAGLE-3: fused low, middle and high features, own norm and lm_head over the draft vocabulary."""

    config: HeadConfig

    def setup(self) -> None:
        config, layer = self.config, self.config.layer
        self.fc = Linear(layer.hidden_size, config.fc_bias)
        self.input_layernorm = RMSNorm(layer.rms_norm_eps)
        self.hidden_norm = RMSNorm(layer.rms_norm_eps)
        self.self_attn = Attention(layer)
        self.post_attention_layernorm = RMSNorm(layer.rms_norm_eps)
        self.mlp = GatedMLP(layer)
        self.norm = RMSNorm(layer.rms_norm_eps)
        self.lm_head = Linear(config.draft_vocab_size, dtype="float32")
        if config.fc_norm:
            self.tap_norms = [RMSNorm(layer.rms_norm_eps, name=f"fc_norm_{i}") for i in range(len(config.taps))]
        if config.norm_before_fc:
            self.input_norm = RMSNorm(layer.rms_norm_eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embed(layer.vocab_size, layer.hidden_size)

    def fuse(self, features: Float[Array, "*b F"]) -> Float[Array, "*b H"]:
        """Projects the concatenated taps [.., taps * Ht] to the head's width."""
        if self.config.fc_norm:
            parts = jnp.split(features, len(self.config.taps), axis=-1)
            features = jnp.concatenate([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], axis=-1)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        return self.fc(features)

    def embed(self, tokens: Int[Array, "*b"]) -> Float[Array, "*b H"]:
        """The head's own embedding (`own_embedding` only)."""
        return self.embed_tokens(tokens)

    def __call__(
        self,
        embeds: Float[Array, "B T H"] | None,
        states: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "*b T T2"],
        cached: tuple[Array, Array, Array] | None = None,
        earlier: tuple[Array, Array] | None = None,
        mixer: Callable[..., Array] = attend,
        added: Mapping[str, Array] | None = None,
    ) -> HeadOutput:
        """Pairs (embedding of the token at t+1, fused feature or own state at t).

        Where `embeds` is None, `added` is their share of the projections and the parameters are `embedding_shares`'.
        """
        cos, sin = rope_angles(self.config.layer.rope, self.config.layer.head_dim, positions)
        normed = self.hidden_norm(states)
        residual = normed if self.config.norm_before_residual else states
        x = normed if embeds is None else jnp.concatenate([self.input_layernorm(embeds), normed], axis=-1)
        mixed, keys, values = self.self_attn(x, cos, sin, mask, cached, earlier, mixer, added)
        x = residual + mixed
        x = x + self.mlp(self.post_attention_layernorm(x))
        return HeadOutput(self.norm(x) if self.config.norm_output else x, keys, values)

    def logits(self, states: Float[Array, "*b H"]) -> Float[Array, "*b Vd"]:
        """Logits over the draft vocabulary, float32."""
        return self.lm_head(states if self.config.norm_output else self.norm(states))

    def everything(self, features: Float[Array, "B T F"], embeds: Float[Array, "B T E"]) -> Array:
        """Touches every parameter, for initialisation."""
        if self.config.own_embedding:
            self.embed(jnp.zeros((1,), jnp.int32))
        length = features.shape[1]
        causal = jnp.tril(jnp.ones((length, length), bool))
        return self.logits(self(embeds, self.fuse(features), jnp.arange(length)[None], causal).states)


def make_head(config: HeadConfig) -> Eagle1Head | Eagle3Head:
    """The Linen module of a head configuration."""
    return Eagle1Head(config) if config.kind == "eagle1" else Eagle3Head(config)


def embedding_shares(
    config: HeadConfig, head: Params, embeds: Float[Array, "B T E"]
) -> tuple[dict[str, Array], Params]:
    """What an EAGLE-3 head's attention makes of embeddings alone, for passes that read the same ones again and again.

    Returns:
      their share of `q_proj`, `k_proj` and `v_proj`, [B, T, out] each; and the parameters of the head without it.
    """
    normed = RMSNorm(config.layer.rms_norm_eps).apply({"params": head["input_layernorm"]}, embeds)
    width, shares, attention = embeds.shape[-1], {}, dict(head["self_attn"])
    for name in ("q_proj", "k_proj", "v_proj"):
        kernel = attention[name]["kernel"]
        shares[name] = Linear(kernel.shape[1]).apply({"params": {"kernel": kernel[:width]}}, normed)
        attention[name] = {**attention[name], "kernel": kernel[width:]}
    return shares, {**head, "self_attn": attention}


def init_head_params(config: HeadConfig, key: Array) -> Params:
    """Fresh float32 parameters `{"head": ..., "d2t": [Vd] int32}` (`d2t`, EAGLE-3 only: target id minus draft id)."""
    module = make_head(config)
    features = jnp.zeros((1, 1, len(config.taps) * config.target_hidden_size))
    embeds = jnp.zeros((1, 1, config.layer.hidden_size))
    params = {"head": module.init(key, features, embeds, method="everything")["params"]}
    if config.kind == "eagle3":
        params["d2t"] = jnp.zeros((config.draft_vocab_size,), jnp.int32)
    return params
