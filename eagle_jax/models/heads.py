"""Defines the EAGLE draft heads: one decoder layer over fused (token embedding, feature) pairs.

EAGLE-1/2 (arXiv:2401.15077, section 4; arXiv:2406.16858) and EAGLE-3 (arXiv:2503.01840, section 3) share an interface:

    fuse(features [B, T, F]) -> states [B, T, H]          projects target features to the head's width
    __call__(embeds, states, ...) -> LayerOutput          one step, from target features or from own states
    logits(states) -> [..., Vd]                           EAGLE-3 only; EAGLE-1/2 use the target's lm_head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import HeadConfig
from eagle_jax.core import Params
from eagle_jax.models.attention import attend, within_window
from eagle_jax.models.layers import MLP, Attention, LayerOutput, Linear, Norm, embed, take_token
from eagle_jax.models.rope import rope_angles


class EagleHead(nn.Module):
    """Draft head of EAGLE-1, EAGLE-2 or EAGLE-3.

    An EAGLE-1/2 head has no input norm, no final norm and no lm_head. An EAGLE-3 head fuses low, middle and high
    features, and has norms and an lm_head over the draft vocabulary.
    """

    config: HeadConfig

    def setup(self) -> None:
        config, layer = self.config, self.config.layer
        eps = layer.rms_norm_eps
        self.fc = Linear(layer.hidden_size, config.fc_bias)
        self.self_attn = Attention(layer)
        self.post_attention_layernorm = Norm(eps)
        self.mlp = MLP(layer)
        if config.own_embedding:
            self.embed_tokens = nn.Embed(layer.vocab_size, layer.hidden_size)
        if config.kind == "eagle1":
            return
        self.input_layernorm = Norm(eps)
        self.hidden_norm = Norm(eps)
        self.norm = Norm(eps)
        self.lm_head = Linear(config.draft_vocab_size, dtype="float32")
        if config.fc_norm:
            self.tap_norms = [Norm(eps, name=f"fc_norm_{i}") for i in range(len(config.taps))]
        if config.norm_before_fc:
            self.input_norm = Norm(eps)

    def fuse(self, features: Float[Array, "*b F"]) -> Float[Array, "*b H"]:
        """Projects the concatenated taps to the head's width; EAGLE-1/2 use the target's last state unchanged."""
        if self.config.kind == "eagle1":
            return features
        if self.config.fc_norm:
            parts = jnp.split(features, len(self.config.taps), axis=-1)
            features = jnp.concatenate([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], axis=-1)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        return self.fc(features)

    def embed(self, tokens: Int[Array, "*b"]) -> Float[Array, "*b H"]:
        """Returns embeddings of a head with `own_embedding`."""
        return embed(self.embed_tokens, tokens)

    def __call__(
        self,
        embeds: Float[Array, "B T H"] | None,
        states: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "*b T T2"],
        cached: tuple[Array | None, ...] | None = None,
        earlier: tuple[Array, Array] | None = None,
        mixer: Callable[..., Array] = attend,
        added: Mapping[str, Array] | None = None,
        only: Int[Array, " B"] | None = None,
    ) -> LayerOutput:
        """Returns states that estimate the feature at t + 1.

        Args:
          embeds: embeddings of the tokens at t + 1. None: `added` holds their share of the projections, and the
            parameters are those of `split_embeddings` (EAGLE-3 only).
          states: fused features or own states at t.
          mask, cached, earlier, mixer, added, only: as in `Attention`, without the head's window, which is added here.
        """
        config = self.config
        if window := max(config.layer.windows, default=0):
            mask = within_window(mask, window)
            cached = None if cached is None else (*cached, positions - window + 1)
        cos, sin = rope_angles(config.layer.rope, config.layer.head_dim, positions)
        if config.kind == "eagle1":
            assert embeds is not None, "only EAGLE-3 heads have split embeddings"
            residual = x = self.fc(jnp.concatenate([embeds, states], axis=-1))
        else:
            x = self.hidden_norm(states)
            residual = x if config.norm_before_residual else states
            if embeds is not None:
                x = jnp.concatenate([self.input_layernorm(embeds), x], axis=-1)
        mixed, keys, values = self.self_attn(x, cos, sin, mask, cached, earlier, mixer, added, only)
        x = (residual if only is None else take_token(residual, only)) + mixed
        x = x + self.mlp(self.post_attention_layernorm(x))
        return LayerOutput(self.norm(x) if config.norm_output else x, keys, values)

    def logits(self, states: Float[Array, "*b H"]) -> Float[Array, "*b Vd"]:
        """Returns logits over the draft vocabulary, float32 (EAGLE-3 only)."""
        return self.lm_head(states if self.config.norm_output else self.norm(states))

    def init_all(self, features: Float[Array, "B T F"], embeds: Float[Array, "B T E"]) -> None:
        """Runs every part once, to initialise all parameters."""
        if self.config.own_embedding:
            self.embed(jnp.zeros((1,), jnp.int32))
        length = features.shape[1]
        causal = jnp.tril(jnp.ones((length, length), bool))
        out = self(embeds, self.fuse(features), jnp.arange(length)[None], causal)
        if self.config.kind == "eagle3":
            self.logits(out.states)


def split_embeddings(
    config: HeadConfig, head: Params, embeds: Float[Array, "B T E"]
) -> tuple[dict[str, Array], Params]:
    """Splits the projections of an EAGLE-3 head: embeddings that several passes read are multiplied once.

    Returns:
      products of the embeddings with `q_proj`, `k_proj` and `v_proj`, [B, T, out] each; and the head's parameters
      without the columns of the weights that were used.
    """
    normed = Norm(config.layer.rms_norm_eps).apply({"params": head["input_layernorm"]}, embeds)
    width, shares, attention = embeds.shape[-1], {}, dict(head["self_attn"])
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = attention[name]["weight"]
        shares[name] = Linear(weight.shape[0]).apply({"params": {"weight": weight[:, :width]}}, normed)
        attention[name] = {**attention[name], "weight": weight[:, width:]}
    return shares, {**head, "self_attn": attention}


def init_head_params(config: HeadConfig, key: Array) -> Params:
    """Draws float32 `{"head": ..., "d2t": [Vd] int32}` (`d2t`, EAGLE-3 only: target id minus draft id)."""
    features = jnp.zeros((1, 1, len(config.taps) * config.target_hidden_size))
    embeds = jnp.zeros((1, 1, config.layer.hidden_size))
    params = {"head": EagleHead(config).init(key, features, embeds, method="init_all")["params"]}
    if config.kind == "eagle3":
        params["d2t"] = jnp.zeros((config.draft_vocab_size,), jnp.int32)
    return params
