"""`config.json` of the Llama-like families to `DecoderConfig`, and back. Nothing here reads a weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle_jax.checkpoints.errors import CheckpointError
from eagle_jax.config import ConfigError, DecoderConfig, RopeConfig

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

_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def architecture_of(values: Mapping[str, Any], where: str) -> str:
    """The supported architecture that a config.json names.

    Raises:
      CheckpointError: it names none that is supported.
    """
    named = values.get("architectures") or [ARCHITECTURES.get(str(values.get("model_type")), values.get("model_type"))]
    for name in named:
        if name in _FAMILY_DEFAULTS:
            return name
    raise CheckpointError(
        f"{where}: unknown architecture {', '.join(str(name) for name in named)}; "
        f"known ones: {', '.join(sorted(_FAMILY_DEFAULTS))}"
    )


def decoder_config(values: Mapping[str, Any], where: str, *, max_position: int | None = None) -> DecoderConfig:
    """The decoder that a config.json describes.

    Args:
      values: the parsed config.json. where: its path, for messages.
      max_position: cap on the context length; what a model with a sliding window needs to be run without one.

    Raises:
      CheckpointError: an unknown architecture, quantised weights, an active sliding window, or any feature that the
        decoder does not have: nothing is ignored silently.
    """
    architecture = architecture_of(values, where)
    filled = {**_FAMILY_DEFAULTS[architecture], **values}
    check_supported(filled, where)
    attention_bias = bool(filled.get("attention_bias", False)) and architecture in (
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
    )
    config = layer_sizes(
        filled,
        where,
        # Qwen2 always has the first and never the second; Llama and Qwen3 switch both together.
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        out_bias=attention_bias,
        mlp_bias=bool(filled.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_word_embeddings=bool(filled.get("tie_word_embeddings", False)),
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
    _refuse_sliding_window(filled, architecture, config, where)
    return config


def required(values: Mapping[str, Any], key: str, where: object) -> int:
    """A size that a config.json must have.

    Raises:
      CheckpointError: it is no positive integer.
    """
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{where}: {key}={value!r} must be a positive integer")
    return value


def layer_sizes(values: Mapping[str, Any], where: str, **fields: Any) -> DecoderConfig:
    """The fields that targets and heads read alike; `fields` gives those that they decide differently."""
    heads, hidden = required(values, "num_attention_heads", where), required(values, "hidden_size", where)
    kv_heads = heads if values.get("num_key_value_heads") is None else required(values, "num_key_value_heads", where)
    rope = rope_config(values, where)
    try:
        return DecoderConfig(
            vocab_size=required(values, "vocab_size", where),
            hidden_size=hidden,
            intermediate_size=required(values, "intermediate_size", where),
            num_layers=fields.pop("num_layers", None) or required(values, "num_hidden_layers", where),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=hidden // heads if values.get("head_dim") is None else required(values, "head_dim", where),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope=rope,
            max_position=context_length(int(values.get("max_position_embeddings", 2048)), rope),
            eos_ids=token_ids(values.get("eos_token_id")),
            bos_id=next(iter(token_ids(values.get("bos_token_id"))), None),
            **fields,
        )
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error


def check_supported(values: Mapping[str, Any], where: str) -> None:
    """Refuses quantised weights and activations other than SiLU.

    Raises:
      CheckpointError: naming the key and its value.
    """
    quantised = values.get("quantization_config") or values.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, Mapping) else quantised
        raise CheckpointError(
            f"{where}: a quantised checkpoint (quant_method {method}) is not supported; "
            f"load the float32, bfloat16 or float16 original"
        )
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{where}: hidden_act={values['hidden_act']!r} is not supported, only 'silu'")


def token_ids(value: Any) -> tuple[int, ...]:
    """Token ids of a config key that holds one, several, or none."""
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, (list, tuple)) else (int(value),)


def rope_config(values: Mapping[str, Any], where: str) -> RopeConfig:
    """RoPE from `rope_theta` + `rope_scaling` (up to transformers 4) or `rope_parameters` (from 5).

    Raises:
      CheckpointError: a scaling that is not known, partial rotation, or a parameter missing.
    """
    given: dict[str, Any] = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    kind: Any = given.get("rope_type", given.get("type", "default")) or "default"
    if any(isinstance(value, Mapping) for value in given.values()) or kind not in _ROPE_KINDS:
        raise CheckpointError(
            f"{where}: RoPE {kind!r} with {sorted(given)} is not supported; known types: {', '.join(_ROPE_KINDS)}"
        )
    if given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise CheckpointError(f"{where}: partial_rotary_factor other than 1 is not supported")
    max_position = int(values.get("max_position_embeddings", 2048))
    theta = float(given.get("rope_theta") or values.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    # "dynamic" stretches the configured context, "linear" needs none, the others may name the one trained on.
    original = RopeConfig.original_max_position if kind == "linear" else max_position
    if kind in ("llama3", "yarn"):
        outer = values.get("original_max_position_embeddings")
        original = int(outer or given.get("original_max_position_embeddings") or max_position)
    factor = given.get("factor")
    if factor is None and kind == "yarn":
        factor = max_position / original
    needed: dict[str, Any] = {"factor": factor}
    if kind == "llama3":
        needed |= {key: given.get(key) for key in ("low_freq_factor", "high_freq_factor")}
    absent = [key for key, value in needed.items() if value is None]
    if absent:
        raise CheckpointError(f"{where}: RoPE type {kind!r} needs {', '.join(absent)}")
    optional = {
        name: float(given[name])
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
                     "mscale_all_dim")
        if given.get(name) is not None
    }  # fmt: skip
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(needed["factor"]),
        original_max_position=original,
        truncate=bool(given.get("truncate", True)),
        **optional,
    )


def context_length(length: int, rope: RopeConfig) -> int:
    """Tokens the model was made for: `max_position_embeddings`, stretched by the scalings that do not count in it.

    "linear" and "dynamic" stretch it by their factor (Vicuna-16k says 4096 and 4), yarn where a config keeps the
    original length (Qwen2.5 says 32768 and 4); a llama3 config gives the stretched length already.
    """
    if rope.kind in ("linear", "dynamic"):
        return int(length * rope.factor)
    return max(length, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else length


def _refuse_sliding_window(values: Mapping[str, Any], architecture: str, config: DecoderConfig, where: str) -> None:
    if architecture == "LlamaForCausalLM":
        return
    window = values.get("sliding_window")
    if architecture != "MistralForCausalLM":
        if not values.get("use_sliding_window", False):
            return
        layer_types = values.get("layer_types")
        if layer_types:
            slides = "sliding_attention" in layer_types
        else:
            slides = int(values.get("max_window_layers", 28)) < config.num_layers
        window = window if slides else None
    # A window of W tokens hides nothing from the first W positions.
    if window is not None and int(window) < config.max_position:
        raise CheckpointError(
            f"{where}: sliding_window={window} is active below the context length {config.max_position} and "
            f"sliding-window attention is not supported; load with max_position={window} to stay inside the window"
        )


def hf_config(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a decoder, in the keys that every version of `transformers` reads.

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
    """The keys that the config.json of a target and of a head share."""
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
        "max_position_embeddings": _unstretched(config),
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_scaling(config.rope),
        "bos_token_id": config.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": dtype,
    }


def _unstretched(config: DecoderConfig) -> int:
    """`max_position_embeddings` of which `context_length` makes the context again."""
    rope = config.rope
    if rope.kind == "dynamic":
        return rope.original_max_position
    return int(config.max_position / rope.factor) if rope.kind == "linear" else config.max_position


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json; None where there is no scaling."""
    if rope.kind == "default":
        return None
    values: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(rope, name) is not None:
                values[name] = getattr(rope, name)
    if rope.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.original_max_position
    return values
