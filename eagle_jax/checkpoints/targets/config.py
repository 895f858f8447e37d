"""Converts the config.json of a model to `DecoderConfig` and back, by the table of families."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from eagle_jax.checkpoints.files.fields import CheckpointError, Fields, notice, shown
from eagle_jax.checkpoints.targets import gemma3
from eagle_jax.checkpoints.targets.families import FAMILIES, family_of
from eagle_jax.checkpoints.targets.quantisation import KEYS, quantisation_of
from eagle_jax.checkpoints.targets.rope import context_length, length_keys, rope_config, rope_scaling
from eagle_jax.checkpoints.targets.windows import read_windows, window_keys
from eagle_jax.config import ConfigError, DecoderConfig

_MOST_LAYERS = 1024  # a wrong number would make loading build as many layers before it finds them missing
_CHECKED = (
    "block", "num_kv_heads", "head_dim", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "windows", "local_rope",
    "query_scalar", "sinks", "wide_norms", "experts", "nope_layers",
)  # fmt: skip
"""Fields of `DecoderConfig` that a family may be unable to express."""
# Null, false, zero and an empty list turn all of these off; one is neutral for a scale. Some families have one of them:
# see `Family.reads`. Keys of experts are not listed: in a family without experts their tensors are unexpected.
# The scales are of Granite, Cohere, MiniCPM, Falcon-H1 and of draft heads.
_SCALES = {
    "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb", "lm_head_multiplier",
    "parallel_draft_step",
}  # fmt: skip
# Of Gemma, OLMo, Llama 4, Qwen2.5-1M, SmolLM3, GPT-NeoX and Falcon; and of draft heads that predict several tokens in
# one pass.
_UNSUPPORTED = _SCALES | {
    "attention_multiplier", "scale_depth", "attn_logit_softcapping", "final_logit_softcapping",
    "query_pre_attn_scalar", "clip_qkv", "attention_sinks", "attention_chunk_size", "no_rope_layers",
    "rope_interleaved", "rope_local_base_freq", "dual_chunk_attention_config", "use_parallel_residual", "parallel_attn",
    "alibi", "parallel_drafting", "ptd_token_id", "block_size", "num_nextn_predict_layers", "use_mtp_layernorm",
}  # fmt: skip
# Switches that every decoder and head has on. Null, false and zero turn them off: transformers reads `is_causal` so.
_ALWAYS_ON = {
    "is_causal", "use_causal_mask", "use_rope", "use_rotary", "use_rotary_embeddings",
    "use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm",
}  # fmt: skip
CHECKED = frozenset(_UNSUPPORTED | _ALWAYS_ON | set(KEYS))
"""Keys that `check_supported` checks in every config."""
# Names that look as if they changed what a model computes: unknown ones cause a warning.
_SUSPECT = re.compile(r"^use_|^fc|norm|scal(e|ing)|multiplier|soft_?cap|sink|window|rotary|rope|alibi|clip")
HARMLESS = {
    "use_cache", "use_bfloat16", "use_return_dict", "use_mems", "use_flash_attn", "use_flash_attention",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "norm_topk_prob", "sliding_window", "use_sliding_window", "max_window_layers", "tie_last_hidden_states",
    "layer_norm_epsilon", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
}  # fmt: skip
"""Read elsewhere, or without effect on the logits."""
_ANOTHER = "Load another checkpoint: other values are not supported."


def decoder_config(values: Mapping[str, Any], where: str, *, max_position: int | None = None) -> DecoderConfig:
    """Builds the `DecoderConfig` of a config.json; arguments of `read_target_config`.

    Raises:
      CheckpointError: an unknown architecture, a value of another type, an unknown kind of quantised weights, or any
        feature that the decoder does not have.
    """
    values = gemma3.text_values(values, where)
    family = family_of(values, where)
    values = family.flat(values, where)
    own = {key: value for key, value in values.items() if key not in family.absent}
    for key, name in family.names.items():
        if key in own and name in own and own[key] != own[name]:
            Fields(own, where).fail(key, f"{name}={shown(own[name])}, which is the same size", "Remove one of them.")
    renamed = {name: own[key] for key, name in family.names.items() if key in own}  # as transformers does
    fields = Fields({**family.defaults, **renamed, **own}, where, names=family.names)
    quantised = next((key for key in KEYS if fields.values.get(key)), None)
    if quantised is not None and not family.quantised:
        raise CheckpointError(
            f"{where}: quantised weights must not be of {family.model_type}, got {quantised}. Load the float "
            'checkpoint, with weights="int8" or "fp8" to quantise it.'
        )
    quantisation_of(fields)  # an unknown kind is an error
    check_supported(fields, family.only, has=(*KEYS, *family.reads))
    layers = fields.integer("num_hidden_layers", most=_MOST_LAYERS)
    switched = {name: fields.flag(key) for key, names in family.switches.items() for name in names}
    fixed = {**family.fixed, **family.read(fields)}
    rope = fixed.get("rope") or rope_config(
        fields, theta=family.theta, partial=family.partial_rotary, context=max_position
    )
    config = layer_sizes(
        fields,
        num_layers=layers,
        inner=family.inner,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        architecture=family.architecture,
        **{**fixed, "rope": rope},
        **switched,
    )
    longest = fields.integer("max_position_embeddings", config.max_position)
    if max_position is None and rope.kind == "longrope" and longest > config.max_position:
        notice(
            f"{where}: the context length is {config.max_position}, within which longrope takes short_factor. Pass "
            f"max_position={longest} to take long_factor for every position of longer texts."
        )
    if max_position is not None:
        least = config.max_position if config.rope.kind == "none" else 1  # learned positions are loaded as a whole
        if type(max_position) is not int or not least <= max_position <= config.max_position:
            raise CheckpointError(
                f"max_position must be an integer from {least} to {config.max_position}, the context length in "
                f"{where}, got {max_position!r}. Leave it out for the whole length."
            )
        config = dataclasses.replace(config, max_position=max_position)
    return dataclasses.replace(config, windows=read_windows(fields, family.window, config))


def layer_sizes(fields: Fields, *, inner: int | None = None, **decided: Any) -> DecoderConfig:
    """Reads the sizes that targets and heads share; `decided` holds the fields in which they differ.

    Raises:
      CheckpointError: a key is missing or breaks its rule.
    """
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if not fields.given("head_dim") and hidden % heads:
        name = fields.names.get("num_attention_heads", "num_attention_heads")
        fields.fail("hidden_size", f"a multiple of {name}={heads}")
    rope = decided.pop("rope", None) or rope_config(fields)
    try:
        return DecoderConfig(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size", inner and inner * hidden, null=inner is not None),
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads, null=True),
            head_dim=fields.integer("head_dim", hidden // heads, null=True),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            max_position=decided.pop("max_position", None) or context_length(fields, rope),
            eos_ids=fields.ids("eos_token_id"),
            bos_id=next(iter(fields.ids("bos_token_id")), None),
            **decided,
        )
    except ConfigError as error:
        raise CheckpointError(f"{fields.where}: {error}") from error


def check_supported(
    fields: Fields, only: Mapping[str, tuple[Any, ...]], known: Collection[str] = (), has: Collection[str] = ()
) -> None:
    """Checks that no unsupported feature is on; warns of unknown keys that look like one.

    Args:
      only: key -> its supported values, of which the first is the default. known: keys that cause no warning.
      has: keys that most decoders do not support and the caller does.

    Raises:
      CheckpointError: a feature is on, a value is not supported, or the weights are quantised.
    """
    for key, (default, *others) in only.items():
        read = fields.text if isinstance(default, str) else fields.flag
        if read(key, default) not in (default, *others):
            fields.fail(key, f"{str(default).lower()} or absent", _ANOTHER)
    unknown = []
    for key, value in fields.values.items():
        if key in KEYS and value and key not in has:
            fields.fail(key, "absent", "Load the original checkpoint, with weights= to quantise it here.")
        if key in _ALWAYS_ON and value is not True:
            fields.fail(key, "true or absent", _ANOTHER)
        scale = key in _SCALES
        on = value is not None if key == "ptd_token_id" else value
        if key in _UNSUPPORTED and key not in has and on and not (scale and value == 1 and value is not True):
            fields.fail(key, "1 or absent" if scale else "absent", _ANOTHER)
        if value and _SUSPECT.search(key) and key not in CHECKED | HARMLESS | {*only, *known, *has}:
            unknown.append(f"{fields.inside}{key}={shown(value)}")
    if unknown:
        notice(f"{fields.where}: {', '.join(unknown)}: unknown and ignored")


def config_values(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Returns config.json of a decoder, in keys that every version of `transformers` reads.

    Raises:
      CheckpointError: the architecture is unknown, or cannot express the configuration.
    """
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise CheckpointError(
            f"architecture must be one of {', '.join(sorted(FAMILIES))}, got {config.architecture!r}. Choose one."
        )
    common = common_keys(config, dtype) | {"num_hidden_layers": config.num_layers}
    values: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for key, value in common.items():
        if key in family.names or key not in family.absent:
            values[family.names.get(key, key)] = value
    values |= {"tie_word_embeddings": config.tie_word_embeddings, **window_keys(config, family.window)}
    values |= {key: supported[0] for key, supported in family.only.items()}
    values |= {key: getattr(config, names[0]) for key, names in family.switches.items()}
    values |= family.keys(config)
    within = config.max_position if config.rope.kind == "longrope" else None  # decides between its factors
    again = decoder_config(values, "config.json", max_position=within)
    lost = [name for name in _CHECKED if getattr(again, name) != getattr(config, name)]
    if lost:
        stated = ", ".join(f"{name}={getattr(config, name)}" for name in lost)
        raise CheckpointError(f"architecture must express {stated}, got {config.architecture}. Choose another.")
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
        **length_keys(config.max_position, config.rope),
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_scaling(config.rope),
        "bos_token_id": config.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": dtype,
    }
