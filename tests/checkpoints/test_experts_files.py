"""Tests files of mixtures of experts: stacks of single experts, MXFP4, config.json, errors."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax import ConfigError, ExpertsConfig, RopeConfig
from eagle_jax.checkpoints import CheckpointError, load_target_checkpoint, save_target_checkpoint
from eagle_jax.checkpoints.targets.config import config_values, decoder_config
from eagle_jax.checkpoints.targets.gpt_oss import dequantise_mxfp4
from eagle_jax.models.quantised import quantise_params
from tests.checkpoints.common import CONFIG, FAMILY, assert_same, edit_json, edit_tensors, quiet, random_params

QWEN3_MOE = dataclasses.replace(
    CONFIG, qk_norm=True, architecture="Qwen3MoeForCausalLM",
    experts=ExpertsConfig(num_experts=5, top_k=2, intermediate_size=10, normalise=False, dense_layers=(0,)),
)  # fmt: skip
GPT_OSS = dataclasses.replace(
    CONFIG, hidden_size=64, intermediate_size=32, qkv_bias=True, out_bias=True, sinks=True, wide_norms=True,
    experts=ExpertsConfig(num_experts=3, top_k=2, intermediate_size=32, bias=True, limit=7.0), windows=(8, 0),
    rope=RopeConfig(150000.0, "yarn", 4.0, 16, truncate=False), architecture="GptOssForCausalLM",
)  # fmt: skip
QWEN = {"architectures": ["Qwen3MoeForCausalLM"], **FAMILY, "num_experts": 6, "num_experts_per_tok": 2}
OSS = {"architectures": ["GptOssForCausalLM"], **FAMILY, "num_local_experts": 6}


def read(values):
    return decoder_config({key: value for key, value in values.items() if value is not ...}, "config.json")


@pytest.mark.parametrize("config", [QWEN3_MOE, GPT_OSS], ids=["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 4000])
def test_a_saved_target_loads_as_the_same_target(config, shard_bytes, tmp_path):
    params = random_params(config)
    save_target_checkpoint(config, params, tmp_path, "float32", max_shard_bytes=shard_bytes)
    with quiet():
        loaded_config, loaded = load_target_checkpoint(tmp_path)
    assert loaded_config == config
    assert_same(loaded, params)


@pytest.mark.parametrize("config", [QWEN3_MOE, GPT_OSS], ids=["qwen3_moe", "gpt_oss"])
def test_stacks_of_experts_are_quantised_when_they_are_loaded(config, tmp_path):
    params = random_params(config)
    save_target_checkpoint(config, params, tmp_path, "float32")
    with quiet():
        _, loaded = load_target_checkpoint(tmp_path, weights="int8")
    # JAX divides in another way than NumPy, and the ends of the range are ties.
    assert_same(loaded, quantise_params(jax.tree.map(np.asarray, params), "int8", "float32"))
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}: weights must be int8 or fp8 for a model with experts, "):
        load_target_checkpoint(tmp_path, weights="int4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
         r"model\.layers\.1\.mlp\.experts\.up_proj\.weight must have experts 0 to 4 .*, got 4 of 1 shapes"),
        (lambda t: t.update({"model.layers.1.mlp.experts.3.up_proj.weight": np.zeros((11, 12), np.float32)}),
         "experts 0 to 4 of one shape and dtype, got 5 of 2 shapes"),
        (lambda t: t.pop("model.layers.1.mlp.experts.4.up_proj.weight"),
         r"experts\.up_proj\.weight is \[4, 10, 12\], expected \[5, 10, 12\]"),
        (lambda t: t.update({"model.layers.0.mlp.experts.0.up_proj.weight": np.zeros((10, 12), np.float32)}),
         r"unexpected \(1\): model\.layers\.0\.mlp\.experts\.up_proj\.weight"),
        (lambda t: t.pop("model.layers.1.mlp.gate.weight"), r"missing \(1\): model\.layers\.1\.mlp\.gate\.weight"),
    ],
)  # fmt: skip
def test_experts_that_do_not_fit_are_an_error(change, message, tmp_path):
    save_target_checkpoint(QWEN3_MOE, random_params(QWEN3_MOE), tmp_path, "float32")
    edit_tensors(tmp_path / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=message):
        load_target_checkpoint(tmp_path)


def quantise(tmp_path, seed=0):
    """Replaces the projections of the experts by random MXFP4 tensors, as published; returns the stored tensors."""
    save_target_checkpoint(GPT_OSS, random_params(GPT_OSS), tmp_path, "bfloat16")
    rng = np.random.default_rng(seed)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        tensors[f"{name}_scales"] = rng.integers(118, 131, (experts, outputs, inputs // 32)).astype(np.uint8)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["x"]})
    return tensors


def test_mxfp4_is_dequantised_as_in_transformers(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch: pip install eagle-jax[test]")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = quantise(tmp_path)
    _, params = load_target_checkpoint(tmp_path, "bfloat16")
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        stored = {
            name.removeprefix(prefix): torch.tensor(tensors[name])
            for name in tensors
            if name.endswith(("blocks", "scales"))
        }
        gate_up, down = (
            convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
            .float()
            .numpy()
            .swapaxes(1, 2)
            for name in ("gate_up_proj", "down_proj")
        )
        found = params[f"layers_{layer}"]["mlp"]["experts"]
        for name, wanted in (("gate", gate_up[:, ::2]), ("up", gate_up[:, 1::2]), ("down", down)):
            np.testing.assert_array_equal(np.asarray(found[f"{name}_proj"]["weight"], np.float32), wanted)


def test_every_byte_of_mxfp4_is_two_values():
    """By the table of the OCP specification of microscaling formats, version 1.0, and a scale of 2."""
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    found = dequantise_mxfp4(blocks, np.full((1, 1, 16), 128, np.uint8))
    assert found.dtype == jnp.bfloat16 and found.shape == (1, 1, 512)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = magnitudes + [-value for value in magnitudes]
    wanted = [2 * values[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    np.testing.assert_array_equal(found.astype(np.float32).ravel(), np.array(wanted, np.float32))


def test_mxfp4_tensors_that_do_not_fit_are_an_error(tmp_path):
    quantise(tmp_path)
    edit_tensors(tmp_path / "model.safetensors", lambda t: t.pop("model.layers.0.mlp.experts.down_proj_scales"))
    with pytest.raises(CheckpointError) as caught:
        load_target_checkpoint(tmp_path)
    for part in ("missing (1): model.layers.0.mlp.experts.down_proj.weight", "unexpected (1): ", "down_proj_blocks"):
        assert part in str(caught.value)


def test_a_missing_key_takes_the_default_of_transformers():
    config = read(OSS)
    assert (config.windows, config.experts.top_k, config.experts.limit) == ((128, 0, 128), 4, 7.0)
    assert config.rope == RopeConfig(150000.0, "yarn", 32.0, 4096, truncate=False)
    assert (config.sinks, config.qkv_bias, config.out_bias, config.max_position) == (True, True, True, 131072)
    own = read(OSS | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 7.0})
    assert own.rope == RopeConfig(7.0, "linear", 2.0)
    config = read(QWEN | {"num_experts": ..., "num_experts_per_tok": ...})
    assert config.experts == ExpertsConfig(128, 8, 768, normalise=False)


def test_either_name_of_the_number_of_experts_is_read():
    assert read(QWEN | {"num_experts": ..., "num_local_experts": 6}) == read(QWEN)
    with pytest.raises(CheckpointError, match="num_experts must be num_local_experts=5, which is the same size, got 6"):
        read(QWEN | {"num_local_experts": 5})


def test_dense_layers_are_those_of_both_keys():
    values = QWEN | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    assert read(values).experts.dense_layers == (0, 1, 2, 4)
    assert read(config_values(read(values), "float32")) == read(values)


def test_a_layer_for_a_head_has_no_experts():
    layer = GPT_OSS.one_layer()
    assert (layer.experts, layer.sinks, layer.wide_norms, layer.windows) == (None, False, False, ())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (QWEN | {"num_experts_per_tok": 7}, "num_experts_per_tok must be at most num_local_experts=6, got 7"),
        (QWEN | {"num_experts": 0}, "num_local_experts must be an integer from 1 .*, got 0"),
        (QWEN | {"use_sliding_window": True}, "use_sliding_window must be false or absent, got True"),
        (QWEN | {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        (
            QWEN | {"quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config.quant_method must be one of awq, .*, got 'mxfp4'.*with weights= to quantise it",
        ),
        (
            OSS | {"quantization_config": {"quant_method": "gptq"}},
            "quantised weights must not be of .* with weights=.int8. or .fp8.",
        ),
        (OSS | {"swiglu_limit": -1.0}, r"swiglu_limit must be a positive number, got -1\.0"),
        (OSS | {"layer_types": ["sliding_attention"]}, "layer_types must be a list of .* for each of the 3 layers"),
        (OSS | {"hidden_act": "gelu"}, "hidden_act must be silu or absent"),
    ],
)
def test_an_unsupported_value_is_an_error(values, message):
    with pytest.raises(CheckpointError, match=f"^config.json: {message}"):
        read(values)


def test_a_second_name_that_differs_causes_a_warning():
    with pytest.warns(UserWarning, match="experts_per_token is 3, but num_experts_per_tok is 4: uses the latter"):
        assert read(OSS | {"experts_per_token": 3}).experts.top_k == 4


def test_more_chosen_experts_than_there_are_is_an_error():
    with pytest.raises(ConfigError, match=r"ExpertsConfig\.top_k must be at most num_experts=2, got 3\. Lower it"):
        ExpertsConfig(2, 3, 8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dataclasses.replace(QWEN3_MOE, architecture="Qwen3ForCausalLM"), "must express experts=ExpertsConfig"),
        (dataclasses.replace(GPT_OSS, experts=dataclasses.replace(GPT_OSS.experts, normalise=False)), "must express"),
        (dataclasses.replace(GPT_OSS, sinks=False), "must express sinks=False, got GptOssForCausalLM"),
    ],
)  # fmt: skip
def test_a_config_that_its_architecture_cannot_express_is_an_error(config, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        save_target_checkpoint(config, random_params(config), tmp_path / "model")
    assert not list(tmp_path.iterdir())
