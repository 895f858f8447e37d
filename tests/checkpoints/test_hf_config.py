"""config.json to DecoderConfig: the keys of old and new files, and everything that is refused."""

from __future__ import annotations

import pytest

from eagle_jax.checkpoints import CheckpointError
from eagle_jax.checkpoints.targets.config import decoder_config, hf_config
from eagle_jax.checkpoints.targets.rope import rope_config
from eagle_jax.config import RopeConfig

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], **SIZES}
MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": None, **SIZES}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], **SIZES}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], **SIZES}


def read(values, **kwargs):
    return decoder_config(values, "config.json", **kwargs)


def test_vicuna_style_config():
    """Old files name neither head_dim nor kv heads nor rope_theta."""
    config = read({key: value for key, value in LLAMA.items() if key != "num_key_value_heads"})
    assert (config.num_kv_heads, config.head_dim, config.rope.theta, config.rms_norm_eps) == (4, 16, 10000.0, 1e-6)


@pytest.mark.parametrize(
    ("values", "qkv", "out", "mlp", "norm"),
    [
        (LLAMA, False, False, False, False),
        (LLAMA | {"attention_bias": True}, True, True, False, False),
        (LLAMA | {"mlp_bias": True}, False, False, True, False),
        (MISTRAL, False, False, False, False),
        (QWEN2, True, False, False, False),
        (QWEN3, False, False, False, True),
        (QWEN3 | {"attention_bias": True}, True, True, False, True),
    ],
)
def test_biases_and_norms_per_family(values, qkv, out, mlp, norm):
    config = read(values)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm) == (qkv, out, mlp, norm)


def test_qwen3_head_dim_defaults_to_128():
    assert read(QWEN3).head_dim == 128
    assert read(QWEN3 | {"head_dim": 32}).head_dim == 32


def test_architecture_from_model_type():
    assert read(SIZES | {"model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize("values", [{"architectures": ["GemmaForCausalLM"]}, {"model_type": "phi3"}, {}])
def test_unknown_architecture_is_refused_with_the_known_ones(values):
    with pytest.raises(CheckpointError, match=r"unknown architecture .*LlamaForCausalLM, Mistral.*, Qwen2.*, Qwen3"):
        read(SIZES | values)


class TestRope:
    def test_plain(self):
        assert rope_config({"rope_theta": 5e5}, "c") == RopeConfig(5e5)
        assert rope_config({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "c") == RopeConfig(5e5)

    def test_llama3_in_both_spellings(self):
        scaling = {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        expected = RopeConfig(5e5, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
        outer = {"max_position_embeddings": 131072}
        old = outer | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
        new = outer | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
        assert rope_config(old, "c") == rope_config(new, "c") == expected

    def test_oldest_spelling(self):
        values = {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}
        assert rope_config(values, "c") == RopeConfig(1e4, "linear", 4.0)

    def test_dynamic_stretches_the_configured_context(self):
        values = {"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
        assert rope_config(values, "c") == RopeConfig(1e4, "dynamic", 2.0, 2048)

    def test_yarn(self):
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        values = {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_scaling": scaling}
        assert rope_config(values, "c") == RopeConfig(1e6, "yarn", 4.0, 32768)

    def test_null_scaling(self):
        assert rope_config({"rope_scaling": None, "rope_theta": 1e6}, "c") == RopeConfig(1e6)

    @pytest.mark.parametrize(
        ("scaling", "message"),
        [
            ({"rope_type": "longrope", "factor": 2.0}, "RoPE 'longrope'.*known types: default, linear"),
            ({"rope_type": "llama3", "factor": 8.0}, "'llama3' needs low_freq_factor, high_freq_factor"),
            ({"type": "linear"}, "'linear' needs factor"),
            ({"full_attention": {"rope_type": "default"}}, "not supported"),
            ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ],
    )
    def test_refused(self, scaling, message):
        with pytest.raises(CheckpointError, match=message):
            rope_config({"rope_scaling": scaling}, "config.json")


class TestSlidingWindow:
    def test_active_in_mistral(self):
        with pytest.raises(CheckpointError, match=r"sliding_window=4096 is active.*max_position=4096"):
            read(MISTRAL | {"sliding_window": 4096})

    def test_mistral_without_the_key_has_one(self):
        """`transformers` then assumes 4096."""
        values = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
        with pytest.raises(CheckpointError, match="sliding_window=4096"):
            read(values)

    def test_capped_length_stays_inside(self):
        assert read(MISTRAL | {"sliding_window": 4096}, max_position=4096).max_position == 4096

    def test_window_as_long_as_the_context(self):
        assert read(MISTRAL | {"sliding_window": 8192}).max_position == 8192

    @pytest.mark.parametrize("base", [QWEN2, QWEN3])
    def test_qwen(self, base):
        assert read(base | {"use_sliding_window": False, "sliding_window": 4096}).num_layers == 3
        windowed = base | {"use_sliding_window": True, "sliding_window": 4096}
        assert read(windowed | {"max_window_layers": 3}).num_layers == 3  # no layer has it
        with pytest.raises(CheckpointError, match="sliding_window=4096"):
            read(windowed | {"max_window_layers": 2})
        with pytest.raises(CheckpointError, match="sliding_window=4096"):
            read(windowed | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]})

    def test_cap_does_not_change_dynamic_rope(self):
        values = LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
        assert read(values, max_position=100).rope == read(values).rope

    @pytest.mark.parametrize("cap", [0, 8193])
    def test_impossible_cap(self, cap):
        with pytest.raises(CheckpointError, match=f"max_position={cap} must be 1 to 8192"):
            read(LLAMA, max_position=cap)


@pytest.mark.parametrize(
    ("rope", "base", "length"),
    [
        ({"type": "linear", "factor": 4.0}, 4096, 16384),  # Vicuna-16k
        ({"type": "dynamic", "factor": 4.0}, 2048, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072),  # Qwen2.5
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072, 131072),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}, 131072, 131072),
    ],
)  # fmt: skip
def test_scaled_context_lengths(rope, base, length):
    """What the scaling stretches the context to, whether or not the config counts it in; and back."""
    config = read(LLAMA | {"max_position_embeddings": base, "rope_scaling": rope})
    assert config.max_position == length
    again = decoder_config(hf_config(config, "float32"), "again")
    assert (again.max_position, again.rope) == (config.max_position, config.rope)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised .*gptq"),
        ({"vocab_size": ...}, "vocab_size must be a positive integer, got no value"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads=3, got 4"),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
    ],
)
def test_refused(changes, message):
    values = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    with pytest.raises(CheckpointError, match=f"config.json: .*{message}"):
        read(values)
