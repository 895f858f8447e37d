"""Tests heads by the config.json that each project writes, with tiny sizes; other methods are refused by name.

The keys are those of SpecForge's `configs/`, of the papers' repository, of `speculators` 0.9 and its rewrite in vLLM
0.11, of AngelSlim and of NVIDIA's Model-Optimizer. The numbers of layers and sizes are those of `TARGET`.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from eagle_jax.checkpoints import CheckpointError, load_head_checkpoint
from eagle_jax.checkpoints.files.mapping import canonical_name
from eagle_jax.checkpoints.files.tensors import TensorInfo
from eagle_jax.checkpoints.files.weights import TensorProblems
from eagle_jax.checkpoints.heads.config import flat_config, head_config
from eagle_jax.checkpoints.heads.supported import NO_EFFECT
from eagle_jax.checkpoints.targets.config import CHECKED, HARMLESS
from eagle_jax.config import ConfigError, RopeConfig
from eagle_jax.models import presets
from tests.checkpoints.common import quiet
from tests.checkpoints.random_heads import TARGET, eagle1, eagle3, write

SIZES = {
    "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 53,
    "draft_vocab_size": 17, "num_hidden_layers": 1,
}  # fmt: skip
SPECFORGE = SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "initializer_range": 0.02, "pad_token_id": 0, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "transformers_version": "4.53.2", "use_cache": True, "max_position_embeddings": 2048,
}  # fmt: skip
QWEN = SPECFORGE | {
    "attention_bias": False, "attention_dropout": 0.0, "max_window_layers": 36, "rope_scaling": None,
    "sliding_window": None, "use_sliding_window": False, "head_dim": 10,
}  # fmt: skip
FACTORS = {"long_factor": [1.0, 1.5, 3.0], "short_factor": [1.0, 1.5, 3.0]}
LONGROPE = {"rope_type": "longrope", "factor": 1.0, "original_max_position_embeddings": 2048} | FACTORS
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False}  # fmt: skip
LAYER = {
    "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 10, "hidden_act": "silu",
    "hidden_size": 24, "initializer_range": 0.02, "intermediate_size": 40, "max_position_embeddings": 2048,
    "mlp_bias": False, "num_attention_heads": 6, "num_hidden_layers": 1, "num_key_value_heads": 3, "pretraining_tp": 1,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "use_cache": True, "vocab_size": 53,
}  # fmt: skip
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"}, "draft_vocab_size": 17,
    "has_no_defaults_at_init": False, "norm_before_residual": True, "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0.dev42", "target_hidden_size": None, "tie_word_embeddings": False,
    "torch_dtype": "float32", "transformer_layer_config": LAYER, "transformers_version": "4.53.3",
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": "somebody/model", "architectures": ["LlamaForCausalLM"]},
    },
}  # fmt: skip
SPECULATORS_9 = SPECULATORS | {
    "architectures": ["Eagle3DraftModel"], "eagle_aux_hidden_state_layer_ids": [2, 4, 6], "embed_requires_grad": False,
    "fc_norm": False, "norm_before_fc": True, "norm_output": True, "speculators_version": "0.9.0",
}  # fmt: skip
VLLM = LAYER | {  # what vLLM makes of SPECULATORS_9
    "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": 17, "norm_before_residual": True,
    "norm_before_fc": True, "fc_norm": False, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
}  # fmt: skip
OFFICIAL = SIZES | {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "initializer_range": 0.02, "max_position_embeddings": 2048, "model_type": "llama", "pad_token_id": 0,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.28.1",
    "use_cache": True,
}  # fmt: skip
EAGLE1 = {key: value for key, value in OFFICIAL.items() if key != "draft_vocab_size"}
MODELOPT = QWEN | {
    "mlp_bias": False, "pretraining_tp": 1, "position_embedding_type": "rope", "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True, "use_mtp_layernorm": False,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "next_layer_regular": True,
        "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
    },
}  # fmt: skip
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "eos_token_id": 1, "pad_token_id": 0, "head_dim": 256, "hidden_act": "silu", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "llama",
    "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 262144, "draft_vocab_size": 32000, "target_model_type": "gemma3_text",
}  # fmt: skip
"""SpecForge's configs/gemma3-1b-eagle3.json, since pull request 537."""
IDS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7], "use_aux_hidden_state": True}}

# name -> (config.json, what `HeadConfig` must hold, what its layer must hold)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "SpecForge Llama-3.1-8B": (SPECFORGE, {"taps": (2, 4, 6)}, {"rope": RopeConfig(10000.0), "rms_norm_eps": 1e-6}),
    "SpecForge Llama-3.3-70B": (
        SPECFORGE | {"rope_theta": 5e5, "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            "rope_type": "llama3"}},
        {}, {"rope": RopeConfig(5e5, "llama3", 8.0, 64, 1.0, 4.0)},
    ),
    "SpecForge Qwen3-8B": (QWEN | {"rope_theta": 1000000}, {}, {"head_dim": 10, "rope": RopeConfig(1e6)}),
    "SpecForge Qwen3-235B": (QWEN | IDS, {"taps": (2, 4, 8)}, {}),  # outputs of layers
    "SpecForge Qwen3-30B 3.1": (
        QWEN | {"fc_norm": True, "norm_output": True}, {"fc_norm": True, "norm_output": True, "norm_before_fc": False},
        {},
    ),
    "SpecForge gpt-oss dense": (
        SPECFORGE | IDS | {"model_type": "gpt_oss", "num_local_experts": 16, "experts_per_token": 4, "head_dim": 8},
        {"taps": (2, 4, 8)}, {"rope": RopeConfig(10000.0)},
    ),
    "SpecForge Gemma3-1B": (
        GEMMA3_1B | SIZES | {"head_dim": 10, "sliding_window": 16, "target_model_type": "llama_text"}, {},
        {"windows": ()},  # switched off
    ),
    "SpecForge Phi-4": (SPECFORGE | {"rope_theta": 250000}, {}, {"rope": RopeConfig(250000.0)}),
    "a layer of Mistral": (SPECFORGE | {"model_type": "mistral", "sliding_window": 16}, {}, {"windows": (16,)}),
    "a window by layer_types": (
        QWEN | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0,
                "layer_types": ["sliding_attention"]}, {},
        {"windows": (16,)},
    ),
    "SpecForge MiniCPM4": (
        SPECFORGE | {"rope_scaling": LONGROPE, "head_dim": 6}, {},
        {"rope": RopeConfig(10000.0, "longrope", 1.0, 2048, short_factor=(1.0, 1.5, 3.0), long_factor=(1.0, 1.5, 3.0))},
    ),
    "SpecForge LongCat": (QWEN | {"draft_vocab_size": 53}, {"draft_vocab_size": 53}, {}),
    "SpecForge DeepSeek-V3": (SPECFORGE | IDS, {"taps": (2, 4, 8)}, {}),
    "AngelSlim Qwen3-8B": (QWEN | {"architectures": ["Eagle3LlamaForCausalLM"]}, {"norm_before_residual": False}, {}),
    "Model-Optimizer": (MODELOPT, {"taps": (2, 4, 6)}, {}),
    "Model-Optimizer gpt-oss": (MODELOPT | {"rope_scaling": YARN}, {}, {}),
    "official EAGLE-3": (OFFICIAL, {"kind": "eagle3", "taps": (2, 4, 6)}, {"rms_norm_eps": 1e-5}),
    "official EAGLE-3, own width": (
        OFFICIAL | {"hidden_size": 36, "target_hidden_size": 24}, {"target_hidden_size": 24, "own_embedding": True},
        {"hidden_size": 36},
    ),
    "official EAGLE-1": (EAGLE1 | {"bias": True}, {"kind": "eagle1", "fc_bias": True, "taps": (9,)}, {}),
    "official EAGLE-1 Qwen2": (
        EAGLE1 | {"bias": True, "qkv_bias": True, "rope_theta": 1e6, "sliding_window": 32, "max_window_layers": 28,
                  "use_sliding_window": False},
        {"kind": "eagle1"}, {"qkv_bias": True, "out_bias": False},
    ),
    "vLLM EAGLE-1": (EAGLE1 | {"bias": True, "architectures": ["EagleLlamaForCausalLM"]}, {"kind": "eagle1"}, {}),
    "RedHat": (SPECULATORS, {"taps": (2, 4, 6), "norm_before_residual": True}, {"rope": RopeConfig(10000.0)}),
    "RedHat gpt-oss v2": (
        SPECULATORS_9, {"norm_before_fc": True, "norm_output": True, "fc_norm": False, "taps": (2, 4, 6)}, {},
    ),
    "RedHat, null ids": (SPECULATORS_9 | {"eagle_aux_hidden_state_layer_ids": None}, {"taps": (2, 4, 6)}, {}),
    "vLLM's rewrite": (VLLM, {"norm_before_fc": True, "norm_before_residual": True, "taps": (2, 4, 6)}, {}),
}  # fmt: skip


def tensors_of(values):
    """Returns random tensors that fit a config.json."""
    flat = flat_config(values, "config.json")
    eagle = eagle3 if flat.get("draft_vocab_size") else eagle1
    width = flat["hidden_size"] // flat["num_attention_heads"]
    given = {"head_dim": flat.get("head_dim") or width, "target_hidden_size": flat.get("target_hidden_size") or 24}
    return eagle(**flat | given)[1]


@pytest.mark.parametrize("name", KINDS)
def test_the_head_of_a_project_loads_without_a_warning(name, tmp_path):
    values, head, layer = KINDS[name]
    directory = write(tmp_path, values, tensors_of(values))
    with quiet():
        config, params = load_head_checkpoint(directory, TARGET)
    assert {key: getattr(config, key) for key in head} == head
    assert {key: getattr(config.layer, key) for key in layer} == layer
    assert ("d2t" in params) == (config.kind == "eagle3")


def test_vllm_reads_the_same_head_from_its_rewrite(tmp_path):
    configs = [
        load_head_checkpoint(write(tmp_path / name, values, tensors_of(SPECULATORS_9)), TARGET)[0]
        for name, values in (("speculators", SPECULATORS_9), ("vllm", VLLM))
    ]
    assert configs[0] == configs[1]


MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, r"Eagle3DeepseekV2ForCausalLM \(a head with latent att"),
        ({"architectures": ["EagleMistralLarge3ForCausalLM"]}, "a head with latent attention"),
        (MLA, "got kv_lora_rank: a head with latent attention"),
        ({"architectures": ["PEagleDraftModel"], "num_hidden_layers": 4}, "a P-EAGLE head, which drafts several"),
        ({"parallel_drafting": True}, "got parallel_drafting: a P-EAGLE head"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type must be 'eagle3', got 'peagle'"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type must be 'eagle3', got 'dflash'"),
        ({"architectures": ["DFlashDraftModel"]}, "a DFlash or DSpark head, which drafts a block"),
        ({"architectures": ["DFlash2DraftModel"]}, "a DFlash or DSpark head"),
        ({"architectures": ["Qwen3DSparkModel"]}, "a DFlash or DSpark head"),
        *(({"architectures": [name]}, "a multi-token-prediction layer of its model")
          for name in ("DeepSeekMTPModel", "Qwen3NextMTP", "Qwen3_5MoeMTP", "Glm4MoeMTPModel", "LlamaForCausalNextN")),
        ({"architectures": ["Gemma4AssistantForCausalLM"]}, "a Gemma 4 assistant, which reads the cache"),
        ({"architectures": ["GptOssForCausalLMEagle3"]}, "a head with a mixture of experts"),
        ({"architectures": ["Qwen3MoEForCausalLMEagle3"]}, "a head with a mixture of experts"),
        ({"architectures": ["EagleLlama4ForCausalLM"]}, "a head with a mixture of experts"),
        ({"architectures": ["EagleMiniCPMForCausalLM"]}, r"got \['EagleMiniCPMForCausalLM'\]"),
        ({"architectures": ["Eagle3Qwen2_5vlForCausalLM"]}, r"got \['Eagle3Qwen2_5vlForCausalLM'\]"),
    ],
)  # fmt: skip
def test_another_method_or_layer_is_refused_with_what_to_do_instead(changes, message, tmp_path):
    values = QWEN | changes
    with pytest.raises(CheckpointError, match=message) as caught:
        load_head_checkpoint(write(tmp_path, values, tensors_of(QWEN)), TARGET)
    remedy = "Load an EAGLE-1/2 or EAGLE-3 head with one Llama-like layer, train one with train.head, or draft without"
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("midlayer.self_attn.kv_a_proj_with_mqa.weight", "latent attention"),
        ("midlayer.mlp.experts.0.up_proj.weight", "experts"),
        ("eh_proj.weight", "multi-token"),
        ("mask_hidden", "P-EAGLE"),
    ],
)
def test_tensors_of_another_layer_are_refused_by_name(extra, message, tmp_path):
    tensors = tensors_of(QWEN) | {extra: np.zeros((3, 4), np.float32)}
    with pytest.raises(CheckpointError, match=f"must be an EAGLE head with a Llama-like layer, got .*{message}"):
        load_head_checkpoint(write(tmp_path, QWEN, tensors), TARGET)


def test_medusa_heads_name_their_loader(tmp_path):
    values = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 24, "num_heads": 5}
    with pytest.raises(CheckpointError, match=r"got Medusa heads\. Load them with load_medusa"):
        load_head_checkpoint(write(tmp_path, values, {"blocks.0.weight": np.zeros((4, 4), np.float32)}), TARGET)


@pytest.mark.parametrize(
    ("claimed", "stored", "message"),
    [
        (SPECFORGE, EAGLE1 | {"bias": True}, "architectures must be that of EAGLE-1/2, whose tensors .* Set architec"),
        (OFFICIAL, EAGLE1 | {"bias": True}, "draft_vocab_size must be that of EAGLE-1/2, .* remove draft_vocab_size"),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": EAGLE1}, EAGLE1 | {"bias": True},
            "speculators_model_type must be absent for EAGLE-1/2, whose tensors the file holds",
        ),
        (
            OFFICIAL | {"architectures": ["EagleLlamaForCausalLM"]}, OFFICIAL,
            "architectures must be that of EAGLE-3, whose tensors .* Set it to LlamaForCausalLMEagle3",
        ),
        (
            EAGLE1 | {"architectures": ["LlamaForCausalLMEagle"]}, OFFICIAL,
            "architectures must be that of EAGLE-3, whose tensors the file holds",
        ),
    ],
)  # fmt: skip
def test_a_claim_that_contradicts_the_tensors_is_refused(claimed, stored, message, tmp_path):
    """Engines that follow the claim accept almost nothing (sglang #21272)."""
    with pytest.raises(CheckpointError, match=message):
        load_head_checkpoint(write(tmp_path, claimed, tensors_of(stored)), TARGET)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_output": True}, "norm_output"),
        ({"fc_norm": True}, "fc_norm"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, "eagle_aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [2, 4, 6]}, "aux_hidden_state_layer_ids"),
        ({"num_aux_hidden_states": 3}, "num_aux_hidden_states"),
    ],
)  # fmt: skip
def test_options_of_eagle3_in_an_eagle1_head_are_refused(changes, key, tmp_path):
    values = EAGLE1 | {"bias": True} | changes
    with pytest.raises(CheckpointError, match=rf"{key} must be absent .*in an EAGLE-1/2 head"):
        load_head_checkpoint(write(tmp_path, values, tensors_of(EAGLE1 | {"bias": True})), TARGET)
    off = EAGLE1 | {"bias": True, "norm_output": False, "num_aux_hidden_states": None}
    assert load_head_checkpoint(write(tmp_path, off, tensors_of(EAGLE1 | {"bias": True})), TARGET)[0].kind == "eagle1"


def test_two_names_of_taps_must_agree(tmp_path):
    both = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "aux_hidden_state_layer_ids": [2, 4, 6]}
    for changes in (both, {"eagle_config": both}):
        with pytest.raises(CheckpointError, match=r"aux_hidden_state_layer_ids must be \[1, 3, 5\], as eagle_aux"):
            load_head_checkpoint(write(tmp_path, QWEN | changes, tensors_of(QWEN)), TARGET)


@pytest.mark.parametrize(
    "ids",
    [
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}},
    ],
)
def test_the_state_before_the_final_norm_is_refused(ids, tmp_path):
    """Engines read the last layer's output before the final norm, `transformers` and this library after it."""
    directory = write(tmp_path, QWEN | ids, tensors_of(QWEN))
    with pytest.raises(CheckpointError, match=r"got the output of the last layer \(8\) in .* pass taps=\(2, 4, 9\)"):
        load_head_checkpoint(directory, TARGET)
    assert load_head_checkpoint(directory, TARGET, taps=(2, 4, 9))[0].taps == (2, 4, 9)


def test_a_head_that_reuses_the_lm_head_of_its_target_is_refused(tmp_path):
    """As SpecForge's for Gemma3-27B."""
    values = QWEN | {"draft_vocab_size": 53, "reuse_target_lm_head": True}
    tensors = {name: value for name, value in tensors_of(values).items() if name != "lm_head.weight"}
    with pytest.raises(CheckpointError, match="reuse_target_lm_head must be absent, got True"):
        load_head_checkpoint(write(tmp_path, values, tensors), TARGET)


STORED = {
    canonical_name(name): TensorInfo(tensor.shape, tensor.dtype.name, "f")
    for name, tensor in tensors_of(QWEN).items()
}  # fmt: skip


def read(values, stored=STORED, target=TARGET):
    """Returns the head, problems and warnings of a config.json; None where it is refused."""
    problems = TensorProblems()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = head_config(flat_config(values, "config.json"), stored, target, "config.json", problems)
        except (CheckpointError, ConfigError):
            return None
    return config, problems.found, [str(warning.message) for warning in caught]


PLAIN = read(QWEN)


def test_the_config_of_gemma3_1b_fits_its_target():
    """Before its correction it had the vocabulary of a private model, whose embedding SpecForge copies for training."""
    target = presets.model("gemma-3-1b")
    stored = STORED | {"fc.weight": TensorInfo((1152, 3 * 1152), "bfloat16", "f")}
    config, problems, warned = read(GEMMA3_1B, stored, target)
    assert config == presets.eagle3_head(dataclasses.replace(target, rms_norm_eps=1e-6, eos_ids=(1,), bos_id=2))
    assert not any(problems.values()) and not warned
    problems = read(GEMMA3_1B | {"vocab_size": 262145}, stored, target)[1]
    assert problems["other"] == ["vocab_size is 262145, the target's 262144"]


KEYS = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=3, max_size=18)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(KEYS, st.sampled_from([True, False, 0, 1, 2.5, "x", [1], {"a": 1}]), st.booleans())
@example("attention_temperature", 0.5, False)
@example("logit_bias", True, True)
@example("hidden_size", 48, True)
@example("short_mscale", 1.2, True)
def test_an_unknown_key_never_passes_in_silence(key, value, inside):
    places = ("eagle_config", "speculators_config", *(("rope_scaling", "rope_parameters") if value else ()))
    places = places if inside else (None,)
    if key in QWEN and not inside:
        return
    for place in places:
        found = read(QWEN | ({key: value} if place is None else {place: {key: value}}))
        # Hypothesis draws words of our own code too: keys that are known, with a value that changes nothing.
        is_default = getattr(PLAIN[0], key, None) == value
        assert found is None or found != PLAIN or is_default or key in NO_EFFECT | CHECKED | HARMLESS


OTHER_VALUES: dict[str, Any] = {
    **{key: value * 2 for key, value in SIZES.items()}, "num_key_value_heads": 2, "vocab_size": 54,
    "draft_vocab_size": 16, "architectures": ["LlamaForCausalLMEagle"], "model_type": "mistral", "hidden_act": "relu",
    "max_position_embeddings": 99, "rms_norm_eps": 1e-3, "rope_theta": 7.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "rope_parameters": {"rope_theta": 7.0}, "partial_rotary_factor": 0.5, "head_dim": 8, "attention_bias": True,
    "qkv_bias": True, "mlp_bias": True, "bos_token_id": 7, "eos_token_id": 7, "tie_word_embeddings": True,
    "target_hidden_size": 48, "target_model_type": "gemma3", "num_aux_hidden_states": 4,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "aux_hidden_state_layer_ids": [1, 2, 3],
    "use_aux_hidden_state": False,
    "use_sliding_window": True, "layer_types": ["sliding_attention"], "eagle_config": {"norm_output": True},
    "speculators_config": {"verifier": {"architectures": ["X"]}}, "speculators_model_type": "mtp",
    "quantization_config": {"bits": 4}, "compression_config": {"bits": 4}, "fc_norm": True, "norm_before_fc": True,
    "norm_output": True, "norm_before_residual": True, "sliding_window": 16,
}  # fmt: skip


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_every_key_that_is_read_has_an_effect(key):
    """On the head, as an error or as a warning."""
    base = QWEN | {"sliding_window": 16, "use_sliding_window": None} if key in ("model_type", "layer_types") else QWEN
    base = base | {"sliding_window": 16} if key == "use_sliding_window" else base
    base = {k: v for k, v in base.items() if not (key == "sliding_window" and k == "use_sliding_window")}
    assert read(base | {key: OTHER_VALUES[key]}) != read(base)


def test_a_longrope_head_follows_the_context_of_its_target(tmp_path):
    values = SPECFORGE | {"head_dim": 6, "rope_scaling": LONGROPE | {"original_max_position_embeddings": 64}}
    directory = write(tmp_path, values, tensors_of(values))
    assert load_head_checkpoint(directory, TARGET)[0].layer.rope.is_long
    assert not load_head_checkpoint(directory, dataclasses.replace(TARGET, max_position=64))[0].layer.rope.is_long
