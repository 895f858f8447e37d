"""Reads parameters of Gemma 3 in the layout of the library gemma 3.3.0 (`gemma/gm/nn/_modules.py`, Linen)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.checkpoints.memory.names import Leaf, Names
from eagle_jax.config import ConfigError, DecoderConfig, RopeConfig


def attention_leaves(layer: str) -> tuple[Leaf, ...]:
    """Returns the rules of attention and norms of a layer whose leaves begin with `layer`; tunix has the same."""
    attention = f"{layer}attn/"
    return (
        Leaf("layers_{i}/self_attn/q_proj/weight", f"{attention}q_einsum/w", "NDH->NH,D"),
        Leaf("layers_{i}/self_attn/k_proj/weight", f"{attention}kv_einsum/w", "NDH->NH,D", 0),
        Leaf("layers_{i}/self_attn/v_proj/weight", f"{attention}kv_einsum/w", "NDH->NH,D", 1),
        # With as many key-value heads as heads, the three are one array.
        *(
            Leaf(f"layers_{{i}}/self_attn/{proj}_proj/weight", f"{attention}qkv_einsum/w", "NDH->NH,D", index)
            for index, proj in enumerate("qkv")
        ),
        Leaf("layers_{i}/self_attn/o_proj/weight", f"{attention}attn_vec_einsum/w", "NHD->D,NH"),
        Leaf("layers_{i}/self_attn/q_norm/scale", f"{attention}_query_norm/scale"),
        Leaf("layers_{i}/self_attn/k_norm/scale", f"{attention}_key_norm/scale"),
        Leaf("layers_{i}/input_layernorm/scale", f"{layer}pre_attention_norm/scale"),
        Leaf("layers_{i}/post_attention_layernorm/scale", f"{layer}post_attention_norm/scale"),
        Leaf("layers_{i}/pre_feedforward_layernorm/scale", f"{layer}pre_ffw_norm/scale"),
        Leaf("layers_{i}/post_feedforward_layernorm/scale", f"{layer}post_ffw_norm/scale"),
        Leaf("norm/scale", "final_norm/scale"),
        Leaf("embed_tokens/embedding", "embedder/input_embedding"),
    )


def gemma_names(config: Any) -> Names:
    """Returns the table of a `TransformerConfig`."""
    gate = "FD->F,D" if config.transpose_gating_einsum else "DF->F,D"
    return Names(
        (
            *attention_leaves("layer_{i}/"),
            Leaf("layers_{i}/mlp/gate_proj/weight", "layer_{i}/mlp/gating_einsum", gate, 0),
            Leaf("layers_{i}/mlp/up_proj/weight", "layer_{i}/mlp/gating_einsum", gate, 1),
            Leaf("layers_{i}/mlp/down_proj/weight", "layer_{i}/mlp/linear", "FD->D,F"),
        ),
        ignored=(r"vision_encoder/.*", r"embedder/mm_.*"),
    )


def gemma_config(config: Any, max_position: int, eos_ids: Sequence[int] = ()) -> DecoderConfig:
    """Returns the configuration of a `TransformerConfig` of Gemma 3, such as `gm.nn.Gemma3_1B().config`.

    Args:
      max_position, eos_ids: fields of `DecoderConfig`, which it does not state.

    Raises:
      CheckpointError: it is of another model than Gemma 3.
    """
    for name, expected in (
        ("final_logit_softcap", None), ("attn_logits_soft_cap", None), ("use_post_attn_norm", True),
        ("use_post_ffw_norm", True), ("use_qk_norm", True),
    ):  # fmt: skip
        if (value := getattr(config, name, "no such field")) != expected:
            raise CheckpointError(f"config must have {name}={expected}, got {value}. Pass a Gemma 3 model.")
    slides = [kind.name == "LOCAL_SLIDING" for kind in config.attention_types]
    return gemma3_decoder(config, slides, max_position, eos_ids)


def gemma3_decoder(config: Any, slides: Sequence[bool], max_position: int, eos_ids: Sequence[int]) -> DecoderConfig:
    """Returns the configuration of a Gemma 3 from the fields that tunix and gemma share.

    Args:
      slides: per layer, whether it has a window.

    Raises:
      CheckpointError: a field breaks its rule.
    """
    full, local = (
        RopeConfig(float(theta), "linear" if factor != 1 else "default", float(factor))
        for theta, factor in (
            (config.global_base_frequency, config.global_scale_factor),
            (config.local_base_frequency, config.local_scale_factor),
        )
    )
    scalars = {
        "BY_ONE_OVER_SQRT_HEAD_DIM": config.head_dim,
        "BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS": config.embed_dim // config.num_heads,
    }
    if (scaling := config.query_pre_attn_norm.name) not in scalars:
        raise CheckpointError(f"query_pre_attn_norm must be one of {', '.join(scalars)}, got {scaling}. Choose one.")
    try:
        return DecoderConfig(
            vocab_size=config.num_embed,
            hidden_size=config.embed_dim,
            intermediate_size=config.hidden_dim,
            num_layers=len(slides),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=1e-6,
            rope=full,
            max_position=max_position,
            local_rope=local,
            windows=tuple((config.sliding_window_size or 0) * slide for slide in slides),
            query_scalar=scalars[scaling],
            qk_norm=True,
            block="gemma3",
            tie_word_embeddings=True,
            eos_ids=tuple(eos_ids),
            architecture="Gemma3ForCausalLM",
        )
    except ConfigError as error:
        raise CheckpointError(f"model: {error}") from error
