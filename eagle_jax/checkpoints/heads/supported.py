"""Refuses draft heads that the engine cannot run: other methods, other layers, and unknown keys of config.json."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Literal, NoReturn

from eagle_jax.checkpoints.files.fields import CheckpointError, Fields, notice, shown
from eagle_jax.checkpoints.targets.config import CHECKED, check_supported

SWITCHES = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
"""Fields of `HeadConfig` in which EAGLE-3 heads differ, and their keys in every layout."""
_INSTEAD = (
    "Load an EAGLE-1/2 or EAGLE-3 head with one Llama-like layer, train one with train.head, or draft without a head: "
    "prompt_lookup, lookahead or load_draft_model."
)
_LLAMA_LIKE = re.compile(
    r"(eagle3?)?(llama|mistral|qwen2|qwen3|phi3)?(forcausallm|model|draftmodel|speculator)(eagle3?)?", re.IGNORECASE
)
"""Architectures of heads with a Llama-like layer; those of a whole model stand in official files."""
# Patterns of architectures, `model_type` and algorithms of `speculators`, then of keys of config.json and of tensors.
_OTHERS = (
    (r"peagle|parallel_?draft", r"parallel_drafting|ptd_token_id|mask_hidden",
     "a P-EAGLE head, which drafts several tokens in one pass"),
    (r"dflash|dspark|domino", r"dflash_config|block_size|markov_rank|conv_kernel_size",
     "a DFlash or DSpark head, which drafts a block in one pass"),
    (r"mtp|nextn", r"num_nextn_predict_layers|eh_proj\.weight|.*\.eh_proj\.weight",
     "a multi-token-prediction layer of its model"),
    (r"gemma4.*assistant", r"masked_embedding\..*|pre_projection\.weight",
     "a Gemma 4 assistant, which reads the cache of its target"),
    (r"deepseek|kimi|mistrallarge|mistral_large", r"kv_lora_rank|q_lora_rank|.*\.kv_a_proj_with_mqa\.weight",
     "a head with latent attention (MLA)"),
    (r"moe|gptoss|gpt_oss|mixtral|llama4", r".*\.experts\..*",
     "a head with a mixture of experts"),
    (r"medusa|hydra|mlp_speculator", r"medusa_num_heads|hydra_num_heads", "not an EAGLE head"),
)  # fmt: skip
_READ = frozenset(SWITCHES) | {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings",
    "original_max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "hidden_act", "attention_bias", "qkv_bias", "mlp_bias", "bias", "bos_token_id", "eos_token_id",
    "tie_word_embeddings", "draft_vocab_size", "target_hidden_size", "target_model_type", "num_aux_hidden_states",
    "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "use_aux_hidden_state", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "eagle_config", "speculators_config",
    "speculators_model_type", "transformer_layer_config", "quantization_config", "compression_config",
}  # fmt: skip
_READ_INSIDE = {*SWITCHES, "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "use_aux_hidden_state"}
"""Keys that are read inside `eagle_config`."""
_READ_OF_SPECULATORS = {"algorithm", "verifier", "proposal_methods", "default_proposal_method"}
"""Keys inside `speculators_config`: of the method and the target, and how an engine may propose and accept."""
NO_EFFECT = frozenset({
    # Of training and bookkeeping.
    "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "initializer_range", "embed_requires_grad",
    "pretraining_tp", "torch_dtype", "dtype", "transformers_version", "speculators_version", "use_cache",
    "_name_or_path", "name_or_path", "auto_map", "modal_type", "pad_token_id", "sep_token_id",
    "next_layer_regular", "id2label", "label2id", "problem_type", "task_specific_params", "finetuning_task",
    "is_decoder", "_commit_hash", "return_dict", "output_attentions", "output_hidden_states", "torchscript",
    "use_bfloat16", "has_no_defaults_at_init", "use_return_dict", "chunk_size_feed_forward", "aux_loss_alpha",
    "router_aux_loss_coef", "parallel_draft_heads_num_layers",
    # Of the target; a head's experts show in its tensors.
    "num_local_experts", "experts_per_token", "num_experts", "num_experts_per_tok",
    # Of generation, as configs of transformers 4 repeat them.
    "do_sample", "early_stopping", "max_length", "min_length", "num_beams", "num_beam_groups", "num_return_sequences",
    "temperature", "top_k", "top_p", "typical_p", "diversity_penalty", "length_penalty", "repetition_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "output_scores", "remove_invalid_values",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "bad_words_ids",
})  # fmt: skip
"""Keys without effect on drafts, whatever their value."""
_SUSPECT = re.compile(
    r"att(entio)?n|norm|fc|residual|embed|expert|moe|lora|draft|head|feature|hidden|layer|scal|multipl|cap|sink|window"
    r"|rot|rope|alibi|clip|gate|conv|mask|causal|vocab|token|logit|softmax|bias|^use_|reuse"
)
"""Unknown keys that look as if they changed what a head computes."""


def refuse(name: str, wanted: str, found: str) -> NoReturn:
    """Raises the error of a head of another kind; `name` is the file and its key."""
    raise CheckpointError(f"{name} must be {wanted}, got {found}. {_INSTEAD}")


def check_head(fields: Fields, stored: Collection[str]) -> None:
    """Checks that config.json and tensors are of an EAGLE head with a Llama-like layer, and that every key is read.

    Args:
      fields: of the flattened config.json. stored: canonical names of the tensors.

    Raises:
      CheckpointError: another method or layer, or a key that changes drafts and is not supported.

    Warns:
      UserWarning: an unknown key that does not look as if it changed drafts, or is off.
    """
    _check_method(fields, stored)
    only: Mapping[str, tuple[str, ...]] = {
        "hidden_act": ("silu", "swish"), "hidden_activation": ("silu", "swish"), "position_embedding_type": ("rope",)
    }  # fmt: skip
    inner = fields.mapping("eagle_config")
    check_supported(fields, only, fields.values)
    check_supported(inner, {}, inner.values)
    unknown = []
    speculators = fields.mapping("speculators_config")
    for part, read in ((fields, _READ | set(only)), (inner, _READ_INSIDE), (speculators, _READ_OF_SPECULATORS)):
        known = read | NO_EFFECT | CHECKED
        for key, value in part.values.items():
            if value in (None, "", [], {}) or key in known:
                continue
            if value and _SUSPECT.search(key):  # a switch that is off may be what every head of this layout lacks
                part.fail(
                    key, "absent", "Remove it from config.json if the head was trained without it; else load another."
                )
            unknown.append(f"{part.inside}{key}={shown(value)}")
    if unknown:
        notice(f"{fields.where}: {', '.join(unknown)}: unknown and ignored")


def _check_method(fields: Fields, stored: Collection[str]) -> None:
    """Checks the method and the layer by names, then by keys and tensors."""
    listed = fields.names_of("architectures")
    # Some configs of Llama-like heads have the model_type of their target.
    names = " ".join(listed or (fields.text("model_type", "", null=True),))
    for pattern, marks, description in _OTHERS:
        if re.search(pattern, names, re.IGNORECASE):
            key = "architectures" if listed else "model_type"
            refuse(f"{fields.where}: {key}", "an EAGLE head with a Llama-like layer", f"{names} ({description})")
        on = (key for part in (fields, fields.mapping("eagle_config")) for key, value in part.values.items() if value)
        found = next((mark for mark in (*on, *stored) if re.fullmatch(marks, mark)), None)
        if found is not None:
            refuse(f"{fields.where}", "an EAGLE head with a Llama-like layer", f"{found}: {description}")
    if listed and not any(_LLAMA_LIKE.fullmatch(name) for name in listed):
        refuse(f"{fields.where}: architectures", "an EAGLE head with a Llama-like layer", shown(list(listed)))


def check_claim(fields: Fields, kind: Literal["eagle1", "eagle3"], stored: Collection[str]) -> None:
    """Checks that config.json and tensors agree whether the head is of EAGLE-1/2 or EAGLE-3.

    Engines that follow the claim draft with the wrong layer, and accept almost nothing.

    Raises:
      CheckpointError: the two disagree; the message names the key to correct.
    """
    named = " ".join(fields.names_of("architectures")).lower()
    norms = {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight"}
    if kind == "eagle3" and "fc.weight" in stored and not norms & set(stored):
        if fields.given("speculators_model_type"):
            rule = "absent for EAGLE-1/2, whose tensors the file holds: no hidden_norm and no norm"
            fields.fail("speculators_model_type", rule, "Write config.json as the papers' repository does.")
        key = "architectures" if "eagle3" in named else "draft_vocab_size"
        fields.fail(
            key, "that of EAGLE-1/2, whose tensors the file holds: no hidden_norm and no norm",
            "Set architectures to LlamaForCausalLM and remove draft_vocab_size.",
        )  # fmt: skip
    if kind == "eagle3" and "eagle" in named and "eagle3" not in named:
        fields.fail(
            "architectures", "that of EAGLE-3, whose tensors the file holds", "Set it to LlamaForCausalLMEagle3."
        )
