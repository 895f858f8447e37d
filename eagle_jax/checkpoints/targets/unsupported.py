"""Checks config.json for keys that change what a model computes and that no decoder here implements."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from eagle_jax.checkpoints.files.errors import notice
from eagle_jax.checkpoints.files.fields import Fields, shown

# Key -> the value that changes nothing. Null, false, zero and an empty list change nothing either.
# Experts are left out: their tensors are reported as unexpected.
_UNSUPPORTED: dict[str, Any] = {
    "embedding_multiplier": 1,  # Granite
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "attention_multiplier": None,
    "logit_scale": 1,  # Cohere
    "scale_emb": 1,  # MiniCPM
    "scale_depth": None,
    "lm_head_multiplier": 1,  # Falcon-H1
    "attn_logit_softcapping": None,  # Gemma 2
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "clip_qkv": None,  # OLMo
    "attention_sinks": None,
    "attention_chunk_size": None,  # Llama 4
    "no_rope_layers": None,  # SmolLM 3
    "rope_interleaved": None,
    "rope_local_base_freq": None,  # Gemma 3
    "use_parallel_residual": None,  # GPT-NeoX
    "parallel_attn": None,  # Falcon
    "alibi": None,
    # Of draft heads: several tokens or a block in one pass, multi-token prediction.
    "parallel_draft_step": 1,
    "parallel_drafting": None,
    "ptd_token_id": None,
    "block_size": None,
    "num_nextn_predict_layers": None,
    "use_mtp_layernorm": None,
}
# Switches that every decoder and head has on. Null, false and zero turn them off: transformers reads `is_causal` so.
_ALWAYS_ON = {
    "is_causal", "use_causal_mask", "use_rope", "use_rotary", "use_rotary_embeddings",
    "use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm",
}  # fmt: skip
# Names that look as if they changed what a model computes: unknown ones cause a warning.
_SUSPECT = re.compile(r"^use_|^fc|norm|scal(e|ing)|multiplier|soft_?cap|sink|window|rotary|rope|alibi|clip")
_HARMLESS = {
    "use_cache", "use_bfloat16", "use_return_dict", "use_mems", "use_flash_attn", "use_flash_attention",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "sliding_window", "use_sliding_window", "max_window_layers", "tie_last_hidden_states",
    "layer_norm_epsilon", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
}  # fmt: skip
"""Read elsewhere, or without effect on the logits."""


def check_features(fields: Fields, known: Collection[str] = ()) -> None:
    """Checks that no unsupported feature is on; warns of unknown keys that look like one.

    Args:
      known: further keys that the caller reads.
    """
    unknown = []
    for key, value in fields.values.items():
        if key in _ALWAYS_ON and value is not True:
            fields.fail(key, "true or absent", "This feature is not supported.")
        if key in _UNSUPPORTED and value and not _same(value, _UNSUPPORTED[key]):
            neutral = _UNSUPPORTED[key]
            fields.fail(key, "absent" if neutral is None else f"{neutral} or absent", "This feature is not supported.")
        if value and _SUSPECT.search(key) and key not in _ALWAYS_ON | _UNSUPPORTED.keys() | _HARMLESS | {*known}:
            unknown.append(f"{fields.inside}{key}={shown(value)}")
    if unknown:
        notice(f"{fields.where}: {', '.join(unknown)}: unknown and ignored")


def _same(value: Any, neutral: Any) -> bool:
    return not isinstance(value, bool) and neutral is not None and value == neutral
