"""Reads models of tunix: Llama 3, Qwen2, Qwen3 and Gemma 3, as of google-tunix 0.1.7 (`tunix/models/*/model.py`).

The models are recognised by the names of their classes, so nothing here imports tunix.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Sequence
from typing import Any

from eagle_jax.checkpoints.files.fields import CheckpointError, notice
from eagle_jax.checkpoints.memory.adapters import adapter_alpha
from eagle_jax.checkpoints.memory.gemma import attention_leaves, gemma3_decoder
from eagle_jax.checkpoints.memory.names import Leaf, Names
from eagle_jax.config import ConfigError, DecoderConfig, RopeConfig

_LINEAR = "DF->F,D"
_MLP = Leaf("layers_{i}/mlp/{proj}_proj/weight", "layers/{i}/mlp/{proj}_proj/kernel", _LINEAR)
_EMBEDDING = Leaf("embed_tokens/embedding", "embedder/input_embedding")
LLAMA = Names(
    (
        _EMBEDDING,
        Leaf("layers_{i}/self_attn/o_proj/weight", "layers/{i}/attn/o_proj/w", "NHD->D,NH"),
        Leaf("layers_{i}/self_attn/{proj}_proj/weight", "layers/{i}/attn/{proj}_proj/w", "DNH->NH,D"),
        Leaf("layers_{i}/self_attn/{proj}_proj/bias", "layers/{i}/attn/{proj}_bias"),
        Leaf("layers_{i}/self_attn/{norm}_norm/scale", "layers/{i}/attn/{norm}_norm/w"),
        _MLP,
        Leaf("layers_{i}/{norm}_layernorm/scale", "layers/{i}/{norm}_layernorm/w"),
        Leaf("norm/scale", "final_norm/w"),
        Leaf("lm_head/weight", "lm_head/w", "DV->V,D"),
    )
)
"""Llama 3, Qwen2 and Qwen3."""
GEMMA3 = Names((*attention_leaves("layers/{i}/"), _MLP), ignored=(r"vision_encoder/.*", r"embedder/mm_.*"))
_NAMES = {"Llama3": LLAMA, "Qwen2": LLAMA, "Qwen3": LLAMA, "Gemma3": GEMMA3}
_PERIOD = 6  # of Gemma 3: five layers with a window, then one without


def tunix_names(model: Any, lora_alpha: float | None = None) -> Names:
    """Returns the table of a model of tunix.

    Args:
      lora_alpha: of `Names`; None reads it from the rules of qwix (`adapter_alpha`).

    Raises:
      CheckpointError: the class of the model is not supported, or its LoRA rules have several alphas or dropout.
      ConfigError: `lora_alpha` is no number above 0, or not that of the rules.
    """
    own, given = adapter_alpha(model), lora_alpha
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    if given is not None and not (is_number and 0 < given < math.inf):
        raise ConfigError(f"lora_alpha must be a number above 0, got {given!r}. Leave it out for adapters of qwix.")
    if None not in (own, given) and own != given:
        raise ConfigError(f"lora_alpha must be that of the model's LoRA rules, {own}, got {given}. Leave it out.")
    kind = type(model).__name__
    if kind not in _NAMES:
        raise CheckpointError(
            f"model must be a tunix {', '.join(_NAMES)}, got a {kind}. For another model pass its configuration and "
            "table to Target.from_tree."
        )
    return _NAMES[kind]._replace(lora_alpha=own if given is None else given)


def tunix_config(model: Any, max_position: int, eos_ids: Sequence[int] = ()) -> DecoderConfig:
    """Returns the configuration of a model of tunix, with what the model itself computes.

    Args:
      max_position, eos_ids: fields of `DecoderConfig`, which the model does not state.

    Warns:
      UserWarning: the model does not rotate by the base of its configuration, as Llama 3 and Qwen3 of tunix 0.1.7.

    Raises:
      CheckpointError: the class of the model, or an option of its configuration, is not supported.
    """
    tunix_names(model)
    config, kind = model.config, type(model).__name__
    if getattr(config, "num_experts", None) is not None:
        raise CheckpointError(
            f"model must be without experts, got num_experts={config.num_experts}. Load its checkpoint with "
            "load_target, or keep tunix's own rollout engine."
        )
    if kind == "Gemma3":
        slides = [(layer + 1) % _PERIOD > 0 for layer in range(config.num_layers)]
        return gemma3_decoder(config, slides, max_position, eos_ids)
    try:
        return DecoderConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.embed_dim,
            intermediate_size=config.hidden_dim,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope=RopeConfig(_theta(model)),
            tie_word_embeddings=config.weight_tying if kind == "Llama3" else config.use_tied_embedding,
            qkv_bias=kind == "Qwen2",
            qk_norm=kind == "Qwen3",
            wide_norms=True,
            max_position=max_position,
            eos_ids=tuple(eos_ids),
            architecture={"Llama3": "LlamaForCausalLM"}.get(kind, f"{kind}ForCausalLM"),
        )
    except ConfigError as error:
        raise CheckpointError(f"model: {error}") from error


def _theta(model: Any) -> float:
    """Returns the base of the rotary embedding that the model computes with.

    In tunix 0.1.7 the attention of Llama 3 and Qwen3 calls `apply_rope` without `config.rope_theta`, so the function's
    default of 1,000,000 counts. A target must have the law of the policy, not of its configuration.
    """
    stated = model.config.rope_theta
    block: Any = getattr(type(model.layers[0].attn), "block", None)
    rotate = getattr(block, "__globals__", {}).get("apply_rope")
    default = inspect.signature(rotate).parameters.get("rope_theta") if rotate is not None else None
    if default is None or default.default is inspect.Parameter.empty or "rope_theta" in block.__code__.co_names:
        return float(stated)
    if default.default != stated:
        notice(
            f"model: config.rope_theta is {stated}, but its attention rotates by the default of apply_rope, "
            f"{default.default}: uses the latter."
        )
    return float(default.default)
