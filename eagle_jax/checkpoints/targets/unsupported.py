"""Checks config.json for keys that change what a model computes and that no decoder here implements."""

from __future__ import annotations

import re
from collections.abc import Collection

from eagle_jax.checkpoints.files.errors import notice
from eagle_jax.checkpoints.files.fields import Fields, shown

# Null, false, zero and an empty list turn all of these off; one is neutral for a scale. Experts are left out: their
# tensors are reported as unexpected. The scales are of Granite, Cohere, MiniCPM, Falcon-H1 and of draft heads.
_SCALES = {
    "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb", "lm_head_multiplier",
    "parallel_draft_step",
}  # fmt: skip
# Of Gemma, OLMo, Llama 4, SmolLM 3, GPT-NeoX and Falcon; and of draft heads that predict several tokens in one pass.
_UNSUPPORTED = _SCALES | {
    "attention_multiplier", "scale_depth", "attn_logit_softcapping", "final_logit_softcapping",
    "query_pre_attn_scalar", "clip_qkv", "attention_sinks", "attention_chunk_size", "no_rope_layers",
    "rope_interleaved", "rope_local_base_freq", "use_parallel_residual", "parallel_attn", "alibi",
    "parallel_drafting", "ptd_token_id", "block_size", "num_nextn_predict_layers", "use_mtp_layernorm",
}  # fmt: skip
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
        scale = key in _SCALES
        on = value is not None if key == "ptd_token_id" else value
        if key in _UNSUPPORTED and on and not (scale and value == 1 and value is not True):
            fields.fail(key, "1 or absent" if scale else "absent", "This feature is not supported.")
        if value and _SUSPECT.search(key) and key not in _ALWAYS_ON | _UNSUPPORTED | _HARMLESS | {*known}:
            unknown.append(f"{fields.inside}{key}={shown(value)}")
    if unknown:
        notice(f"{fields.where}: {', '.join(unknown)}: unknown and ignored")
