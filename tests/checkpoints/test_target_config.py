"""Tests config.json to DecoderConfig: keys of every family, old and new, errors and warnings."""

from __future__ import annotations

import dataclasses
import json

import pytest
import transformers

from eagle_jax.checkpoints import CheckpointError, read_target_config
from eagle_jax.checkpoints.targets.config import config_values, decoder_config
from eagle_jax.config import RopeConfig
from eagle_jax.models import presets
from tests.checkpoints.common import FAMILY, LLAMA, MISTRAL, QWEN2, QWEN3, quiet

PHI3 = {"architectures": ["Phi3ForCausalLM"], **FAMILY, "sliding_window": 262144}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], **FAMILY}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], **FAMILY}
SU = {"type": "su", "short_factor": [1.0] * 6, "long_factor": [2] * 6}  # of the first files of Phi-3
NAN, INF = float("nan"), float("inf")
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 53, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0}
SCALED = {"factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
HALF = RopeConfig(kind="linear", factor=2.0)
TYPES = ["full_attention", "sliding_attention", "full_attention"]


def read(values, **kwargs):
    values = {key: value for key, value in values.items() if value is not ...}
    return decoder_config(values, "config.json", **kwargs)


def test_a_missing_key_takes_the_default_of_its_family():
    old = read(LLAMA | {"num_key_value_heads": ...})  # as Vicuna's
    assert (old.num_kv_heads, old.head_dim, old.rope.theta, old.rms_norm_eps) == (4, 16, 10000.0, 1e-6)
    assert (read(QWEN3).head_dim, read(QWEN3 | {"head_dim": 32}).head_dim) == (128, 32)
    assert read(FAMILY | {"model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"
    assert (read(GPT2).intermediate_size, read(GPT2).rms_norm_eps, read(GPT2).tie_word_embeddings) == (96, 1e-5, True)


def test_layers_without_rope_are_those_with_zero_or_every_fourth():
    assert read(SMOLLM3 | {"no_rope_layers": [0, 1, 0, 1]}).nope_layers == (0, 2)  # one more than layers
    assert read(SMOLLM3 | {"num_hidden_layers": 9}).nope_layers == (3, 7)
    assert read(SMOLLM3 | {"no_rope_layers": [], "no_rope_layer_interval": 2}).nope_layers == (1,)
    assert (read(SMOLLM3).rope.theta, read(SMOLLM3 | {"rope_theta": 5e6}).rope.theta) == (2e6, 5e6)
    with quiet():
        assert read(SMOLLM3 | {"rope_parameters": {"rope_theta": 5e6}}).rope.theta == 5e6


def test_layers_without_rope_have_the_window():
    """`max_window_layers` has no effect, as in `transformers`."""
    windowed = SMOLLM3 | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    for rotates in ([1, 1, 1], [0, 1, 0], [1, 0, 1]):
        ours = read(windowed | {"no_rope_layers": rotates})
        named = transformers.SmolLM3Config(**windowed | {"no_rope_layers": rotates}).layer_types[: ours.num_layers]
        slides = [kind == "sliding_attention" for kind in named]
        assert [window > 0 for window in ours.windows] == (slides if any(slides) else [])
        assert read(config_values(ours, "float32")) == ours
    assert read(SMOLLM3 | {"sliding_window": 16, "no_rope_layers": [0, 0, 0]}).windows == ()


def test_phi_rotates_a_part_by_factors_of_the_context_length():
    phi = PHI3 | {"partial_rotary_factor": 0.75, "rope_scaling": SU}
    with pytest.warns(UserWarning, match="the context length is 4096, .* Pass max_position=8192"):
        short = read(phi)
    assert (short.max_position, short.rope.is_long, short.rope.rotated(16)) == (4096, False, 12)
    with quiet():
        for cap in (8192, 4097, 4096, 100):
            long = read(phi, max_position=cap)
            assert (long.max_position, long.rope.is_long) == (cap, cap > 4096)
            assert read(config_values(long, "float32"), max_position=cap) == long
    assert list(config_values(short, "float32")["rope_scaling"]) == ["type", "short_factor", "long_factor"]


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "rope_parameters", "eos_token_id", "layer_types"])
def test_null_takes_the_default_of_transformers(key):
    assert read(LLAMA | {key: None}) == read(LLAMA | {key: ...})


@pytest.mark.parametrize(
    ("rope", "base", "length"),
    [
        ({"type": "linear", "factor": 4.0}, 4096, 16384),  # Vicuna-16k
        ({"type": "dynamic", "factor": 4.0}, 2048, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072),  # Qwen2.5
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072, 131072),
        (LLAMA3, 131072, 131072),
    ],
)
def test_rope_scaling_stretches_the_context_length(rope, base, length):
    """Some files have the length before scaling, others after; the written config gives the same length."""
    config = read(LLAMA | {"max_position_embeddings": base, "rope_scaling": rope})
    assert config.max_position == length
    again = read(config_values(config, "float32"))
    assert (again.max_position, again.rope) == (config.max_position, config.rope)
    assert read(LLAMA | {"rope_scaling": rope}, max_position=100).rope == read(LLAMA | {"rope_scaling": rope}).rope


@pytest.mark.parametrize(
    "values",
    [
        MISTRAL | {"sliding_window": 8192},  # as long as the context
        *(base | {"use_sliding_window": False, "sliding_window": 4096} for base in (QWEN2, QWEN3)),
        *(base | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3} for base in (QWEN2, QWEN3)),
        LLAMA | {"embedding_multiplier": 1.0, "residual_multiplier": 1, "rope_interleaved": False, "is_causal": True},
        LLAMA | {"attention_sinks": None, "no_rope_layers": []},
        LLAMA | {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"type": "linear", "rope_theta": 1e4}},
        LLAMA | {"model_type": "llama", "rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}},
        LLAMA | {"sliding_window": 0, "layer_types": ["full_attention"] * 3},
        MISTRAL | {"layer_types": ["full_attention"] * 3},
        MISTRAL | {"sliding_window": 64, "layer_types": ["sliding_attention"] * 3},
        *(QWEN3_MOE | {"use_sliding_window": switch, "sliding_window": 64} for switch in (..., False)),
        GPT2 | {"hidden_size": 24, "n_inner": None, "num_hidden_layers": 2},
    ],
)
def test_neutral_values_cause_no_warning(values):
    with quiet():
        read(values)


WINDOW = {"use_sliding_window": True, "sliding_window": 4096}


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        (MISTRAL | {"sliding_window": 4096}, (4096,) * 3),
        (MISTRAL | {"sliding_window": ...}, (4096,) * 3),  # as transformers assumes
        *((base | WINDOW | {"max_window_layers": 2}, (0, 0, 4096)) for base in (QWEN2, QWEN3)),
        *((base | WINDOW | {"layer_types": TYPES}, (0, 4096, 0)) for base in (QWEN2, QWEN3)),
        (QWEN2 | WINDOW | {"sliding_window": None}, ()),
    ],
)
def test_windows_of_the_layers(values, windows):
    config = read(values)
    assert config.windows == windows
    assert read(config_values(config, "float32")) == config
    assert read(values, max_position=4096).windows == ()  # no window hides a token


GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
    "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "vocab_size": 262144, "attention_bias": False, "cache_implementation": "hybrid",
}  # fmt: skip
"""config.json of google/gemma-3-1b-it, without the keys of training."""
GEMMA_12B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "image_token_index": 262144,
    "mm_tokens_per_image": 256, "model_type": "gemma3", "vision_config": {"hidden_size": 1152},
    "text_config": {
        "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text", "num_attention_heads": 16,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}  # fmt: skip
"""config.json of google/gemma-3-12b-it: the text model's keys are nested, and defaults are left out."""


MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
"""config.json of mistralai/Mistral-7B-v0.1."""
QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
    "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
"""config.json of Qwen/Qwen2.5-7B-Instruct."""


@pytest.mark.parametrize(
    ("values", "name", "stops"),
    [
        (GEMMA, "gemma-3-1b", (1, 106)),
        (GEMMA_12B, "gemma-3-12b", (1, 106)),
        (MISTRAL_7B, "mistral-7b-v0.1", (2,)),
        (QWEN2_7B, "qwen2.5-7b", (151645,)),
    ],
)
def test_published_configs_are_the_presets(values, name, stops):
    with quiet():
        config = read(values)
    assert config == dataclasses.replace(presets.model(name), eos_ids=stops, bos_id=values.get("bos_token_id", 2))
    assert read(config_values(config, "float32")) == config


def test_layers_of_gemma_keep_their_rotary_embedding_within_the_window():
    assert read(GEMMA, max_position=512).windows == read(GEMMA).windows


def test_layer_types_or_the_pattern_of_gemma_say_which_layers_slide():
    """`transformers` writes the name with an underscore beside the types of the layers, and does not read it."""
    plain = GEMMA | {"num_hidden_layers": 6, "sliding_window_pattern": ...}
    types = ["full_attention", *["sliding_attention"] * 5]
    assert read(plain | {"sliding_window_pattern": 3}).windows == (512, 512, 0) * 2
    with pytest.warns(UserWarning, match=r"_sliding_window_pattern is 3, but the period of windows is 6: uses the"):
        assert read(plain | {"_sliding_window_pattern": 3}).windows == (*(512,) * 5, 0)
    with quiet():
        assert read(plain | {"sliding_window_pattern": 2, "_sliding_window_pattern": 2}).windows == (512, 0) * 3
        assert read(plain | {"_sliding_window_pattern": 6, "layer_types": types}).windows == (0, *(512,) * 5)
    with pytest.warns(UserWarning, match=r"sliding_window_pattern is 3, but layer_types is .*: uses the latter"):
        assert read(plain | {"sliding_window_pattern": 3, "layer_types": types}).windows == (0, *(512,) * 5)


def test_a_context_length_must_be_within_the_models():
    for cap in (0, 8193, True):
        with pytest.raises(CheckpointError, match=rf"max_position must be an integer from 1 to 8192, .* got {cap}\."):
            read(LLAMA, max_position=cap)
    with pytest.raises(CheckpointError, match=r"max_position must be an integer from 64 to 64, .* got 20"):
        read(GPT2, max_position=20)


REFUSED = [
    (
        GEMMA,
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e5}},
        "rope_parameters must be nested by full_attention and sliding_attention, got",
    ),
    (LLAMA, {"architectures": ["GemmaForCausalLM"]}, "architectures must name one of .*LlamaForCausalLM.*, got Gemma"),
    (FAMILY, {"model_type": "gemma"}, "architectures must name one of .*, got gemma"),
    (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number, got '1e-5'"),
    (LLAMA, {"rms_norm_eps": NAN}, "rms_norm_eps must be a positive number, got nan"),
    (LLAMA, {"max_position_embeddings": 4096.0}, r"max_position_embeddings must be an integer .*, got 4096\.0"),
    (LLAMA, {"hidden_size": True}, "hidden_size must be an integer from 1 to 2147483647, got True"),
    (LLAMA, {"vocab_size": ...}, "vocab_size must be an integer from 1 to 2147483647, got no value"),
    (LLAMA, {"num_hidden_layers": 10**6}, "num_hidden_layers must be an integer from 1 to 1024, got 1000000"),
    (LLAMA, {"hidden_size": 66}, "hidden_size must be a multiple of num_attention_heads=4, got 66"),
    (LLAMA, {"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads=3, got 4"),
    (LLAMA, {"eos_token_id": [2, "</s>"]}, "eos_token_id must be an integer or a list of integers"),
    (LLAMA, {"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings, got 'LlamaForCausalLM'"),
    (LLAMA, {"tie_word_embeddings": "true"}, "tie_word_embeddings must be true or false, got 'true'"),
    (LLAMA, {"attention_bias": None}, "attention_bias must be true or false, got None"),
    (LLAMA, {"hidden_act": ["silu"]}, r"hidden_act must be a string, got \['silu'\]"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act must be silu or absent, got 'gelu'"),
    (LLAMA, {"quantization_config": {"quant_method": "hqq"}}, r"quant_method must be one of awq, .*, got .hqq"),
    (LLAMA, {"rope_scaling": "linear"}, "rope_scaling must be an object of keys and values, got 'linear'"),
    (LLAMA, {"rope_scaling": LINEAR | {"factor": "2"}}, r"rope_scaling\.factor must be a positive number, got '2'"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor must be a positive number, got no value"),
    (
        LLAMA,
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 0]}},
        r"rope_scaling\.short_factor must be a list of positive numbers, got \[1, 0\]",
    ),
    (LLAMA, {"rope_scaling": {"rope_type": "proportional"}}, "rope_type must be one of default, .*, got 'propor"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 or absent, got 0.5"),
    (PHI3, {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1, got 1.5"),
    (PHI3, {"partial_rotary_factor": 0.2}, r"head_dim \* rope.partial \(0.2\) must be even, got 3"),
    (PHI3, {"rope_scaling": SU}, r"must hold 8 numbers each, one per rotated pair, got 6 and 6"),
    (PHI3, {"rope_scaling": SU, "original_max_position_embeddings": 1}, "original_max_position_embeddings must be an"),
    (LLAMA, {"no_rope_layers": [1, 1, 1]}, r"no_rope_layers must be absent, got \[1, 1, 1\]"),
    (SMOLLM3, {"no_rope_layers": [1, 0]}, r"no_rope_layers must be a list of 0 \(no RoPE\) or 1 for each of the 3"),
    (SMOLLM3, {"no_rope_layers": [1, 2, 0]}, r"no_rope_layers must be a list of 0 .*, got \[1, 2, 0\]"),
    (SMOLLM3, {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be an integer from 1"),
    (LLAMA, {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor must be a positive number"),
    (LLAMA, {"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "rope_type must be one of"),
    (LLAMA, {"rope_scaling": LINEAR | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1 or absent"),
    (LLAMA, {"logits_scaling": 8.0}, r"logits_scaling must be 1 or absent, got 8\.0"),
    (LLAMA, {"attention_multiplier": 0.015625}, "attention_multiplier must be absent, got 0.015625"),
    # `transformers` attends in both directions where `is_causal` is false, null or zero.
    *(
        (base, {"is_causal": off}, f"is_causal must be true or absent, got {off!r}")
        for base, off in ((MISTRAL, False), (GPT2, False), (LLAMA, None), (LLAMA, 0))
    ),
    (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false or absent, got True"),
    (GEMMA, {"final_logit_softcapping": 30.0}, r"final_logit_softcapping must be absent, got 30\.0"),
    (GEMMA, {"hidden_activation": "silu"}, "hidden_activation must be gelu_pytorch_tanh or absent, got 'silu'"),
    (GEMMA, {"rope_parameters": {"sliding_attention": LINEAR}}, r"sliding_attention\.rope_type must be default or abs"),
    (GEMMA, {"sliding_window_pattern": 0}, "sliding_window_pattern must be an integer from 1"),
    (LLAMA, {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar must be absent, got 256"),
    (MISTRAL, {"sliding_window": 0}, "sliding_window must be an integer from 1 to .*, got 0"),
    (QWEN2, {"layer_types": ["linear_attention"]}, "layer_types must be a list of full_attention or sliding_attention"),
    (QWEN2, {"layer_types": ["full_attention"]}, "layer_types must be a list of .* for each of the 3 layers"),
    (LLAMA, {"layer_types": TYPES}, "layer_types must be without sliding_attention where a Llama.* has no w"),
    (MISTRAL, {"layer_types": TYPES}, "sliding_window must be a size where layer_types has sliding_attention, got"),
    *(
        (base, {"sliding_window": 64, "layer_types": TYPES}, "layer_types must be without full_attention in a .*,")
        for base in (MISTRAL, PHI3)
    ),
    (QWEN2, {"layer_types": TYPES}, "layer_types must be without sliding_attention where use_sliding_window is false"),
    (GPT2, {"hidden_size": 18}, "hidden_size must be n_embd=24, which is the same size, got 18"),
    (GPT2, {"activation_function": "relu"}, "activation_function must be gelu_new or absent, got 'relu'"),
    (GPT2, {"n_head": 5}, "n_embd must be a multiple of n_head=5, got 24"),
]


@pytest.mark.parametrize(("base", "changes", "message"), REFUSED)
def test_an_error_names_file_key_and_rule_in_one_line(base, changes, message):
    with pytest.raises(CheckpointError, match=f"^config.json: .*{message}") as caught:
        read(base | changes)
    assert "\n" not in str(caught.value)


def test_an_unknown_option_causes_a_warning():
    with pytest.warns(UserWarning, match="use_fancy_gate=True: unknown and ignored"):
        read(LLAMA | {"use_fancy_gate": True})


@pytest.mark.parametrize(
    ("changes", "message", "used"),
    [
        ({"model_type": "qwen3"}, "architectures is 'Llama.*', but model_type=qwen3 means 'Qwen3", ("qk_norm", True)),
        ({"sliding_window": 64}, "sliding_window is 64, but LlamaForCausalLM has 'no window'", ("max_position", 8192)),
        (
            {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 5.0}},
            r"rope_theta is 7\.0, but rope_parameters\.rope_theta is 5\.0", ("rope", RopeConfig(theta=5.0)),
        ),
        *(
            ({key: LINEAR | {"type": "yarn"}}, f"{key}.type is 'yarn', but rope_type is 'linear'", ("rope", HALF))
            for key in ("rope_scaling", "rope_parameters")
        ),
        *(
            ({"rope_scaling": LINEAR, "rope_parameters": other}, "rope_parameters is {.*, but rope_scaling is {.*",
             ("rope", HALF))
            for other in (LINEAR | {"factor": 4.0}, {"rope_type": "default"}, LINEAR | {"rope_theta": 500.0})
        ),
    ],
)  # fmt: skip
def test_contradicting_keys_are_read_as_in_transformers_with_a_warning(changes, message, used):
    with pytest.warns(UserWarning, match=f"^config.json: {message}.*: uses the latter"):
        config = read(LLAMA | changes)
    assert getattr(config, used[0]) == used[1]


@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
def test_wrong_stop_tokens_cause_a_warning_or_an_error(place, tmp_path):
    for name, values in (("config.json", LLAMA), (place, LLAMA | {"eos_token_id": [2, 128, -1]})):
        (tmp_path / name).write_text(json.dumps(values))
    with pytest.warns(UserWarning, match=rf"/{place}: eos_token_id is \(2, 128, -1\), but the .* \(2,"):
        assert read_target_config(tmp_path).eos_ids == (2,)
    (tmp_path / place).write_text(json.dumps(LLAMA | {"eos_token_id": [2, None]}))
    with pytest.raises(CheckpointError, match=rf"/{place}: eos_token_id must be an integer or a list of integers"):
        read_target_config(tmp_path)
