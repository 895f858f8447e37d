"""Values of JSON files that are null, of another type or extreme: one error names file, key and what is expected."""

from __future__ import annotations

import contextlib
import json
import warnings
from typing import Any

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import example, given, settings

from eagle_jax import ConfigError
from eagle_jax.checkpoints import (
    CheckpointError,
    check_same_tokens,
    load_medusa_checkpoint,
    read_target_config,
    save_medusa_checkpoint,
)
from eagle_jax.checkpoints.files.kinds import MODELS, check_kind
from eagle_jax.checkpoints.files.mapping import canonical_name
from eagle_jax.checkpoints.files.tensors import TensorInfo
from eagle_jax.checkpoints.files.weights import TensorProblems
from eagle_jax.checkpoints.heads.config import flat_config, head_config
from eagle_jax.checkpoints.targets.config import decoder_config
from eagle_jax.checkpoints.targets.gpt2 import gpt2_config
from eagle_jax.config import DecoderConfig, HeadConfig, MedusaConfig
from eagle_jax.models.medusa import init_medusa_params
from tests.checkpoints.random_heads import TARGET, eagle1, eagle3
from tests.checkpoints.test_hf_config import LLAMA, MISTRAL, QWEN2, QWEN3
from tests.models import tiny_target

NAN, INF = float("nan"), float("inf")
ROPE = {
    "rope_type": "llama3", "type": "yarn", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1, "truncate": True,
    "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "partial_rotary_factor": 1.0,
}  # fmt: skip
COMMON: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "head_dim": 16, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": [2], "rope_theta": 1e4, "rope_scaling": ROPE, "rope_parameters": ROPE, "sliding_window": 64,
    "use_sliding_window": False, "max_window_layers": 2, "layer_types": ["full_attention"] * 3,
    "quantization_config": None, "compression_config": None, "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 64, "embedding_multiplier": 1, "attention_sinks": None, "use_fancy_gate": None,
}  # fmt: skip
HEAD = COMMON | eagle3()[0] | {
    "draft_vocab_size": 17, "target_hidden_size": 24, "fc_norm": False, "norm_before_fc": False, "norm_output": False,
    "norm_before_residual": False, "qkv_bias": False, "bias": True, "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True, "norm_output": False,
        "parallel_draft_step": 1,
    },
    "eagle_aux_hidden_state_layer_ids": [2, 4, 6], "aux_hidden_state_layer_ids": [2, 4, 6], "num_aux_hidden_states": 3,
    "speculators_model_type": None, "speculators_config": {"verifier": {"name_or_path": "a/b", "architectures": []}},
    "transformer_layer_config": {"hidden_size": 24}, "target_model_type": "llama", "parallel_draft_step": 1,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 53, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64,
    "n_inner": None, "n_ctx": 64, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "bos_token_id": 1,
    "eos_token_id": 1, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False, "tie_word_embeddings": True, "hidden_size": 24, "num_hidden_layers": 2,
}  # fmt: skip
STORED = {canonical_name(name): TensorInfo(t.shape, t.dtype.name, "f") for name, t in eagle3()[1].items()}
STORED1 = {canonical_name(name): TensorInfo(t.shape, t.dtype.name, "f") for name, t in eagle1()[1].items()}

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([0, -1, 1, 2**31, 2**63, 10**400, -(10**400)]),
    st.floats(), st.sampled_from([NAN, INF, -INF, 0.0, 1e-320, 1e308, 4096.0]), st.text(max_size=4),
    st.sampled_from(["silu", "linear", "yarn", "llama", "full_attention", "LlamaForCausalLM"]),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(ROPE)), inner, max_size=3),
    max_leaves=4,
)


def mutated(base: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """`base` with up to three keys of other values, or without them, at the top or in a nested object."""

    def nested(key: str) -> st.SearchStrategy[Any]:
        held = base[key]
        if not isinstance(held, dict):
            return values
        changed = st.dictionaries(st.sampled_from(sorted(held)), values, max_size=2).map(lambda new: held | new)
        return values | changed

    key = st.sampled_from(sorted(base))
    change = key.flatmap(lambda name: st.tuples(st.just(name), nested(name) | st.just(...)))
    return st.lists(change, min_size=1, max_size=3).map(
        lambda changes: {k: v for k, v in (base | dict(changes)).items() if v is not ...}
    )


def reads(read, *args, **kwargs):
    """The result, None where the file is refused by one error that names it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return read(*args, **kwargs)
        except (CheckpointError, ConfigError) as error:
            refusal = str(error)
    assert refusal.startswith("config.json") and len(refusal) < 1000
    return None


def read_head(config, stored):
    return head_config(flat_config(config, "config.json"), stored, TARGET, "config.json", TensorProblems())


FUZZ = settings(max_examples=400, deadline=None, database=None, derandomize=True)


class TestNoOtherException:
    """Every key of every config; what loads has the types that the dataclasses declare."""

    @FUZZ
    @given(st.sampled_from([LLAMA, MISTRAL, QWEN2, QWEN3]).flatmap(lambda family: mutated(COMMON | family)))
    @example(LLAMA | {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}})
    @example(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 1e38}, "max_position_embeddings": 2**31 - 1})
    def test_targets(self, config):
        found = reads(decoder_config, config, "config.json")
        assert found is None or isinstance(found, DecoderConfig)
        if found is not None:
            sizes = (found.vocab_size, found.hidden_size, found.num_layers, found.head_dim, found.max_position)
            assert all(type(size) is int for size in sizes)
            assert 0 < found.rms_norm_eps < INF and 0 < found.rope.theta < INF and 0 < found.rope.factor < INF
            assert hash(found) == hash(found)  # a static argument of jit
        reads(check_kind, "config.json", MODELS, config)

    @FUZZ
    @given(mutated(HEAD))
    def test_eagle3_heads(self, config):
        found = reads(read_head, config, STORED)
        assert found is None or isinstance(found, HeadConfig)
        assert found is None or hash(found) == hash(found)

    @FUZZ
    @given(mutated(COMMON | eagle1()[0]))
    def test_eagle1_heads(self, config):
        reads(read_head, config, STORED1)

    @FUZZ
    @given(mutated(GPT2))
    def test_gpt2(self, config):
        assert isinstance(reads(gpt2_config, config, "config.json"), DecoderConfig | None)


TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    "added_tokens": [{"id": 2, "content": "</s>", "special": True}],
}


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(mutated(TOKENIZER))
@example(TOKENIZER | {"model": {"type": "Unigram", "vocab": [["a", 0.0], 3]}})
@example(TOKENIZER | {"added_tokens": [{"id": 2}]})
@example(TOKENIZER | {"added_tokens": 3})
def test_tokenizer_files(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, held in (("draft", content), ("target", TOKENIZER)):
        (folder / name).mkdir()
        (folder / name / "tokenizer.json").write_text(json.dumps(held))
    with contextlib.suppress(CheckpointError):
        check_same_tokens(folder / "draft", folder / "target", (3, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": None}, r"rms_norm_eps must be a positive number, got None\. "),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number, got '1e-5'"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a positive number, got True"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps must be a positive number, got nan"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be a positive number, got -1e-05"),
        ({"max_position_embeddings": None}, "max_position_embeddings must be a positive integer, got None"),
        ({"max_position_embeddings": 4096.0}, r"max_position_embeddings must be a positive integer, got 4096\.0"),
        ({"hidden_size": True}, "hidden_size must be a positive integer, got True"),
        ({"vocab_size": -1}, "vocab_size must be a positive integer, got -1"),
        ({"vocab_size": 10**400}, "vocab_size must be an integer from 1 to 2147483647, got an integer of more than 80"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be an integer from 1 to 1024, got 1000000"),
        ({"hidden_size": 66}, "hidden_size must be a multiple of num_attention_heads=4 where there is no head_dim"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an integer or a list of integers, got '</s>'"),
        ({"eos_token_id": [2, "</s>"]}, "eos_token_id must be an integer or a list of integers"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object of keys and values, got 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, r"rope_scaling\.factor must be a positive number, got"),
        ({"rope_scaling": {"type": None, "factor": 2.0}}, r"rope_scaling\.type must be a string, got None"),
        ({"rope_scaling": {"type": "linear", "factor": INF}}, r"rope_scaling\.factor must be a positive number"),
        ({"rope_theta": None}, "rope_theta must be a positive number, got None"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings, got 'LlamaForCausalLM'"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings must be true or false, got 'true'"),
        ({"attention_bias": None}, "attention_bias must be true or false, got None"),
        ({"hidden_act": ["silu"]}, r"hidden_act must be a string, got \['silu'\]"),
        ({"hidden_act": None}, "hidden_act must be a string, got None"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of strings"),
        ({"vocab_size": [1] * 200}, r"vocab_size must be a positive integer, got \[1, 1, .{60,80}\.\.\.\. "),
    ],
)  # fmt: skip
def test_one_sentence_names_file_key_and_what_is_expected(changes, message):
    with pytest.raises(CheckpointError, match=f"^/models/m/config.json: {message}") as caught:
        decoder_config(LLAMA | changes, "/models/m/config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters", "eos_token_id",
                                 "bos_token_id", "layer_types", "sliding_window", "model_type"])  # fmt: skip
def test_null_where_transformers_has_a_default_for_it(key):
    assert decoder_config(LLAMA | {key: None}, "config.json") == decoder_config(
        {name: value for name, value in LLAMA.items() if name != key}, "config.json"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"medusa_num_heads": None}, "medusa_num_heads must be a positive integer, got None"),
        ({"medusa_num_heads": True}, "medusa_num_heads must be a positive integer, got True"),
        ({"medusa_num_layers": 1.0}, r"medusa_num_layers must be a positive integer, got 1\.0"),
        ({"medusa_num_layers": 10**6}, "medusa_num_layers must be an integer from 1 to 64, got 1000000"),
        (
            {"hydra_num_heads": 3, "hydra_num_layers": 1, "grounded_heads": "yes"},
            "grounded_heads must be true or false",
        ),
    ],
)
def test_medusa(changes, message, tmp_path):
    config = MedusaConfig("medusa", 16, 12, num_heads=2)
    save_medusa_checkpoint(config, init_medusa_params(config, jax.random.key(0)), tmp_path, "float32")
    values = json.loads((tmp_path / "config.json").read_text())
    values = changes if "hydra_num_heads" in changes else values | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        load_medusa_checkpoint(tmp_path, tiny_target().config)


@pytest.mark.parametrize("value", ["</s>", 2.0, [2, None], {"id": 2}, True])
def test_stop_tokens_of_a_generation_config(value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"/generation_config\.json: eos_token_id must be an integer or a list"):
        read_target_config(tmp_path)
