"""Checks logits against `transformers` on directories with edited config.json and tensors."""

from __future__ import annotations

import json
import warnings

import hypothesis
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install eagle-jax[test]")

import hypothesis.strategies as st  # noqa: E402
import safetensors.torch  # noqa: E402

from eagle_jax.checkpoints import CheckpointError, load_target_checkpoint, save_target_checkpoint  # noqa: E402
from eagle_jax.config import ConfigError  # noqa: E402
from tests.checkpoints.test_config_fuzz import COMMON, values  # noqa: E402
from tests.parity.test_families import TOLERANCE, jax_outputs  # noqa: E402
from tests.parity.tiny import random_tokens, save, tiny_model, torch_outputs  # noqa: E402

PLAIN = {"head_dim": None, "num_key_value_heads": None, "hidden_size": 48}
GPT2 = {"hidden_size": 48, "n_inner": 50}
YARN = {"rope_type": "yarn", "rope_theta": 700.0, "factor": 3.0, "original_max_position_embeddings": 40}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}

# name -> (family, sizes, keys of config.json to set, or `...` to remove)
EDITS = {
    "heads_null": ("Llama", PLAIN, {"num_key_value_heads": None, "head_dim": None}),
    "eps_absent": ("Llama", {}, {"rms_norm_eps": ...}),
    "rope_parameters_null": ("Llama", {}, {"rope_parameters": None}),
    "rope_theta_outside": ("Qwen3", {}, {"rope_parameters": None, "rope_theta": 300}),
    "rope_theta_twice": ("Llama", {}, {"rope_parameters": {"rope_theta": 40.0}, "rope_theta": 9e4}),
    "rope_scaling_and_parameters": ("Llama", {}, {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "rope_scaling_empty": ("Llama", {}, {"rope_scaling": {}}),
    "yarn_nulls": ("Llama", {}, {"rope_parameters": YARN | {"truncate": None, "beta_fast": None}}),
    "yarn_integer": ("Llama", {}, {"rope_parameters": YARN | {"attention_factor": 2}}),
    "yarn_zeros": ("Llama", {}, {"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": 1.0, "beta_slow": 0}}),
    "yarn_factor_null": ("Llama", {}, {"rope_parameters": YARN | {"factor": None}}),
    "llama3_original_outside": ("Llama", {}, {"rope_parameters": LLAMA3, "original_max_position_embeddings": 32}),
    "llama3_no_original": ("Llama", {}, {"rope_parameters": LLAMA3}),
    "activation_alias": ("Mistral", {"sliding_window": None}, {"hidden_act": "swish"}),
    "window_of_llama": ("Llama", {}, {"sliding_window": 8}),
    "window_off": ("Qwen2", {"head_dim": None, "hidden_size": 48}, {"sliding_window": 8, "layer_types": None}),
    "bias_unknown_to_family": ("Mistral", {"sliding_window": None}, {"attention_bias": None, "mlp_bias": True}),
    "another_architecture_named": ("Qwen3", {}, {"architectures": ["LlamaForCausalLM"]}),
    "no_architecture": ("Llama", {}, {"architectures": None}),
    "gpt_oss_no_theta": ("GptOss", {}, {"rope_parameters": ..., "rope_scaling": OSS_YARN}),
    "gpt_oss_theta_alone": ("GptOss", {}, {"rope_parameters": ..., "rope_theta": 500.0}),
    "gpt_oss_no_rope": ("GptOss", {}, {"rope_parameters": ...}),
    "gemma_pattern": ("Gemma3", {"head_dim": 24}, {"layer_types": ..., "_sliding_window_pattern": 1}),
    "gpt2_common_names": ("GPT2", GPT2, {"n_embd": ..., "hidden_size": 48, "n_layer": ..., "num_hidden_layers": 1}),
    "gpt2_inner_null": ("GPT2", {"hidden_size": 48}, {"n_inner": None, "n_ctx": 99, "reorder_and_upcast_attn": True}),
    "gpt2_untied": ("GPT2", GPT2 | {"tie_word_embeddings": False}, {}),
}  # fmt: skip


def edit(path, **changes):
    values = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def theirs(path):
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **plain).eval()


def check_same_logits(path):
    """Loads the directory with both libraries; our configuration and parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config, params = load_target_checkpoint(path)
    tokens = random_tokens(60)
    np.testing.assert_allclose(
        jax_outputs(config, params, tokens)[0], torch_outputs(theirs(path), tokens)[0], rtol=0, atol=TOLERANCE
    )
    return config, params


@pytest.mark.parametrize("name", EDITS)
def test_edited_configs(name, tmp_path):
    family, sizes, changes = EDITS[name]
    save(tiny_model(family, num_hidden_layers=1, **sizes), tmp_path)
    edit(tmp_path, **changes)
    check_same_logits(tmp_path)


@pytest.mark.parametrize("case", ["differs", "copy", "in_place_of_the_embedding"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2"])
def test_an_lm_head_in_a_tied_model(family, case, tmp_path):
    """Tied, by config.json; the file holds an lm_head (huggingface/transformers#42612)."""
    sizes = GPT2 if family == "GPT2" else {}
    save(tiny_model(family, tie_word_embeddings=True, num_hidden_layers=1, **sizes), tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    embedding = "transformer.wte.weight" if family == "GPT2" else "model.embed_tokens.weight"
    if case == "in_place_of_the_embedding":
        tensors["lm_head.weight"] = tensors.pop(embedding)
    else:
        tensors["lm_head.weight"] = tensors[embedding].clone() if case == "copy" else tensors[embedding].flip(0)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config, params = check_same_logits(tmp_path)
    assert config.tie_word_embeddings == (case != "differs")
    if case == "differs":
        save_target_checkpoint(config, params, tmp_path, "float32")
        assert check_same_logits(tmp_path)[0] == config


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_any_edit_that_loads_gives_the_same_logits(family, tmp_path):
    """Fuzz over every key of a target's config.json; a config that one of the two cannot load is not compared."""
    sizes = {"head_dim": None, "hidden_size": 48} if family == "Qwen2" else {}
    save(tiny_model(family, num_hidden_layers=1, **sizes), tmp_path)
    original = json.loads((tmp_path / "config.json").read_text())
    compared = []

    @hypothesis.settings(max_examples=120, deadline=None, derandomize=True, database=None)
    @hypothesis.given(st.sampled_from(sorted(COMMON)), values)
    def compare(key, value):
        (tmp_path / "config.json").write_text(json.dumps({**original, key: value}))
        kind = (value if isinstance(value, dict) else {}).get("rope_type", "")
        hypothesis.assume(kind != "dynamic")  # ours stretches from the first token on, see `RopeConfig`
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                load_target_checkpoint(tmp_path)
            except (CheckpointError, ConfigError):
                return
            try:
                theirs(tmp_path)
            except Exception:  # transformers has no error of its own for a bad config
                return
        check_same_logits(tmp_path)
        compared.append(key)

    compare()
    assert len(set(compared)) > 5
