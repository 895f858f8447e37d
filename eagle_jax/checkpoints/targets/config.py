"""Converts config.json of the Llama-like families to `DecoderConfig` and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle_jax.checkpoints.files.errors import CheckpointError, notice
from eagle_jax.checkpoints.files.fields import LARGEST, Fields, shown
from eagle_jax.checkpoints.files.tensors import TensorInfo
from eagle_jax.checkpoints.files.weights import TensorProblems
from eagle_jax.checkpoints.targets.rope import (
    DEFAULT_LENGTH,
    context_length,
    rope_config,
    rope_scaling,
    unstretched_length,
)
from eagle_jax.checkpoints.targets.unsupported import check_features
from eagle_jax.config import ConfigError, DecoderConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
"""model_type -> architecture. Llama 2/3.x, Vicuna and DeepSeek-R1-Distill-Llama are all LlamaForCausalLM."""

# What `transformers` assumes for keys that a config.json leaves out.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128,
    },
    "GPT2LMHeadModel": {},  # see `gpt2`
}  # fmt: skip

MOST_LAYERS = 1024
"""Bound on `num_hidden_layers`: a wrong number would make loading build as many layers before it finds them missing."""


def architecture_of(values: Mapping[str, Any], where: str) -> str:
    """Returns the supported architecture that a config.json names.

    Raises:
      CheckpointError: it names none that is supported.
    """
    fields = Fields(values, where)
    model_type = fields.text("model_type", "", null=True)
    by_type = ARCHITECTURES.get(model_type)
    listed = fields.names("architectures") or (by_type or model_type or "None",)
    named = next((name for name in listed if name in _FAMILY_DEFAULTS), None)
    if named is None:
        raise CheckpointError(
            f"{where}: unknown architecture {', '.join(listed)}; known ones: {', '.join(sorted(_FAMILY_DEFAULTS))}"
        )
    if by_type is not None and by_type != named:
        notice(
            f"{where}: architectures names {named} and model_type={model_type!r} is {by_type}: loads it as {by_type}, "
            "as transformers does"
        )
        return by_type
    return named


def decoder_config(values: Mapping[str, Any], where: str, *, max_position: int | None = None) -> DecoderConfig:
    """Builds the `DecoderConfig` of a config.json.

    Args:
      values: the parsed config.json. where: its path, for messages.
      max_position: cap on the context length; what a model with a sliding window needs to be run without one.

    Raises:
      CheckpointError: an unknown architecture, a value of another type, quantised weights, an active sliding window, or
        any feature that the decoder does not have.

    Warns:
      UserWarning: keys that are not known and that look as if they changed what the model computes.
    """
    architecture = architecture_of(values, where)
    filled = {**_FAMILY_DEFAULTS[architecture], **values}
    fields = Fields(filled, where)
    check_supported(filled, where)
    check_features(fields)
    if architecture == "Qwen3ForCausalLM":
        fields.integer("head_dim")  # null is no size in this family
    has_bias = fields.flag("attention_bias") if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") else False
    config = layer_sizes(
        filled,
        where,
        # Qwen2 always has the first and never the second; Llama and Qwen3 switch both together.
        qkv_bias=has_bias or architecture == "Qwen2ForCausalLM",
        out_bias=has_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        architecture=architecture,
    )
    if max_position is not None:
        if isinstance(max_position, bool) or not isinstance(max_position, int):
            raise CheckpointError(f"max_position={max_position!r} must be an integer, or None")
        if not 0 < max_position <= config.max_position:
            raise CheckpointError(
                f"max_position={max_position} must be 1 to {config.max_position}, the context length in {where}"
            )
        config = dataclasses.replace(config, max_position=max_position)
    _check_sliding_window(fields, architecture, config)
    return config


def layer_sizes(values: Mapping[str, Any], where: str, **decided: Any) -> DecoderConfig:
    """Reads the sizes that targets and heads share; `decided` holds the fields in which they differ."""
    fields = Fields(values, where)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if not fields.given("head_dim") and hidden % heads:
        fields.fail("hidden_size", f"a multiple of num_attention_heads={heads} where there is no head_dim")
    rope = rope_config(values, where)
    length = fields.integer("max_position_embeddings", DEFAULT_LENGTH)
    try:
        return DecoderConfig(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=decided.pop("num_layers", None) or fields.integer("num_hidden_layers", most=MOST_LAYERS),
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads, null=True),
            head_dim=fields.integer("head_dim", hidden // heads, null=True),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            max_position=context_length(length, rope),
            eos_ids=fields.ids("eos_token_id"),
            bos_id=next(iter(fields.ids("bos_token_id")), None),
            **decided,
        )
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error


def check_key_value_heads(
    values: Mapping[str, Any], config: DecoderConfig, keys: TensorInfo | None, problems: TensorProblems
) -> None:
    """Adds to `problems` that `num_key_value_heads` is null or absent, and that the tensors hold another number.

    Args:
      keys: the first layer's `k_proj`; None without one.
    """
    if keys is None or values.get("num_key_value_heads") is not None:
        return
    held = keys.shape[0] / config.head_dim
    if held != config.num_kv_heads:
        stated = "null" if "num_key_value_heads" in values else "absent"
        problems.found["other"].append(
            f"num_key_value_heads is {stated}, which means {config.num_kv_heads}, and the tensors hold {held:g}"
        )


def check_supported(values: Mapping[str, Any], where: object) -> None:
    """Checks that weights are not quantised and that the activation is SiLU.

    Raises:
      CheckpointError: naming the key and its value.
    """
    quantised = values.get("quantization_config") or values.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, Mapping) else quantised
        raise CheckpointError(
            f"{where}: a quantised checkpoint (quant_method {shown(method)}) is not supported; "
            f"load the float32, bfloat16 or float16 original"
        )
    activation = Fields(values, where).text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{where}: hidden_act={activation!r} is not supported, only 'silu'")


def _check_sliding_window(fields: Fields, architecture: str, config: DecoderConfig) -> None:
    """Checks that no window hides tokens of the context; Llama ignores the key."""
    window = fields.integer("sliding_window", LARGEST, null=True, least=0)
    hides = window < config.max_position  # a window of W tokens hides nothing from the first W positions
    slides = _sliding_layers(fields, config.num_layers)
    if architecture == "LlamaForCausalLM":
        if hides and fields.flag("use_sliding_window", True, null=True):
            notice(f"{fields.where}: sliding_window={window} has no effect on a {architecture}, as in transformers")
        return
    if architecture == "MistralForCausalLM":
        active = hides
    else:
        switched = fields.flag("use_sliding_window")
        if slides and not switched:
            fields.fail("layer_types", "without sliding_attention where use_sliding_window is false")
        if switched and slides is None:
            slides = fields.integer("max_window_layers", 28, least=0) < config.num_layers
        active = hides and switched and bool(slides)
    if active:
        raise CheckpointError(
            f"{fields.where}: sliding_window={window} is active below the context length {config.max_position} and "
            f"sliding-window attention is not supported; load with max_position={window} to stay inside the window"
        )


def _sliding_layers(fields: Fields, layers: int) -> bool | None:
    """Returns whether `layer_types` names a sliding layer; None if the key is missing or null."""
    kinds = fields.names("layer_types")
    if not fields.given("layer_types"):
        return None
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        fields.fail("layer_types", f"full_attention or sliding_attention for each of the {layers} layers")
    return "sliding_attention" in kinds


def hf_config(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Returns config.json of a decoder, in keys that every version of `transformers` reads.

    Raises:
      CheckpointError: the architecture cannot express these biases or norms.
    """
    architecture = config.architecture
    types = {name: kind for kind, name in ARCHITECTURES.items()}
    if architecture not in types:
        raise CheckpointError(f"unknown architecture {architecture}; known ones: {', '.join(sorted(types))}")
    switches = (config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm)
    allowed = {
        "LlamaForCausalLM": config.qkv_bias == config.out_bias and not config.qk_norm,
        "MistralForCausalLM": not any(switches),
        "Qwen2ForCausalLM": switches == (True, False, False, False),
        "Qwen3ForCausalLM": config.qkv_bias == config.out_bias and config.qk_norm and not config.mlp_bias,
    }[architecture]
    if not allowed:
        raise CheckpointError(
            f"{architecture} cannot express qkv_bias={config.qkv_bias}, out_bias={config.out_bias}, "
            f"mlp_bias={config.mlp_bias}, qk_norm={config.qk_norm}"
        )
    values = {"architectures": [architecture], "model_type": types[architecture], **common_keys(config, dtype)}
    values |= {"num_hidden_layers": config.num_layers, "tie_word_embeddings": config.tie_word_embeddings}
    if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        values["attention_bias"] = config.qkv_bias
    if architecture == "LlamaForCausalLM":
        values["mlp_bias"] = config.mlp_bias
    if architecture == "MistralForCausalLM":
        values["sliding_window"] = None
    elif architecture != "LlamaForCausalLM":
        values["use_sliding_window"] = False
    return values


def common_keys(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Returns the keys of config.json that targets and heads share."""
    eos = list(config.eos_ids)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": unstretched_length(config.max_position, config.rope),
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_scaling(config.rope),
        "bos_token_id": config.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": dtype,
    }
