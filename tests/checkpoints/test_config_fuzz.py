"""Tests random values of every key of config.json: it loads, or one error names the file."""

from __future__ import annotations

import warnings
from typing import Any

import hypothesis.strategies as st
from hypothesis import example, given, settings

from eagle_jax import ConfigError
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.checkpoints.files.kinds import MODELS, check_kind
from eagle_jax.checkpoints.files.mapping import canonical_name
from eagle_jax.checkpoints.files.tensors import TensorInfo
from eagle_jax.checkpoints.files.weights import TensorProblems
from eagle_jax.checkpoints.heads.config import flat_config, head_config
from eagle_jax.checkpoints.targets.config import decoder_config
from eagle_jax.config import DecoderConfig, HeadConfig
from tests.checkpoints.common import FAMILY, LLAMA, MISTRAL, QWEN2, QWEN3
from tests.checkpoints.random_heads import TARGET, eagle1, eagle3

INF = float("inf")
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
    "eagle_aux_hidden_state_layer_ids": [2, 4, 6], "aux_hidden_state_layer_ids": [2, 4, 6],
    "speculators_model_type": None, "transformer_layer_config": {"hidden_size": 24}, "parallel_draft_step": 1,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 53, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64,
    "n_inner": None, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "bos_token_id": 1,
    "eos_token_id": 1, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False, "tie_word_embeddings": True, "hidden_size": 24, "num_hidden_layers": 2,
}  # fmt: skip

PHI3 = FAMILY | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": None, "rope_scaling": {
    "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2] * 8,
}}  # fmt: skip
SMOLLM3 = FAMILY | {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 1, 0],
    "no_rope_layer_interval": 4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 2, "mlp_only_layers": [1], "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
    "experts_per_token": 2,
}  # fmt: skip
QWEN3_MOE = QWEN3 | EXPERTS | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
GPT_OSS = QWEN3 | EXPERTS | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
TARGETS = [LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, GPT_OSS, PHI3, SMOLLM3, GPT2]

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([0, -1, 1, 2**31, 2**63, 10**400, -(10**400)]),
    st.floats(), st.sampled_from([float("nan"), INF, -INF, 0.0, 1e-320, 1e308, 4096.0]), st.text(max_size=4),
    st.sampled_from(["silu", "linear", "yarn", "llama", "full_attention", "LlamaForCausalLM"]),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(ROPE)), inner, max_size=3),
    max_leaves=4,
)
FUZZ = settings(max_examples=400, deadline=None, database=None, derandomize=True)


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


def read(function, *args):
    """Returns the result, None after an error; the error must name the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refusal, found = None, None
        try:
            found = function(*args)
        except (CheckpointError, ConfigError) as error:
            refusal = str(error)
    assert refusal is None or (refusal.startswith("config.json") and len(refusal) < 1000)
    assert hash(found) == hash(found)  # a static argument of jit
    return found


@FUZZ
@given(st.sampled_from(TARGETS).flatmap(lambda family: mutated(COMMON | family)))
@example(LLAMA | {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}})
@example(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 1e38}, "max_position_embeddings": 2**31 - 1})
def test_a_random_target_config_loads_or_names_its_file(config):
    found = read(decoder_config, config, "config.json")
    assert isinstance(found, DecoderConfig | None)
    read(check_kind, "config.json", MODELS, config)


@FUZZ
@given(st.sampled_from([(HEAD, eagle3()[1]), (COMMON | eagle1()[0], eagle1()[1])]), st.data())
def test_a_random_head_config_loads_or_names_its_file(head, data):
    config = data.draw(mutated(head[0]))
    stored = {canonical_name(name): TensorInfo(t.shape, t.dtype.name, "f") for name, t in head[1].items()}
    found = read(
        lambda: head_config(flat_config(config, "config.json"), stored, TARGET, "config.json", TensorProblems())
    )
    assert isinstance(found, HeadConfig | None)
