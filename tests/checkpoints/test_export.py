"""Heads written for other engines: names, shapes and dtypes spelled out, and the way back."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax.checkpoints import (
    CheckpointError,
    load_head_checkpoint,
    stored_dtype,
)
from eagle_jax.config import RopeConfig
from tests.checkpoints.random_exports import (
    EAGLE1,
    EMBEDDING,
    HEAD,
    LAYER,
    LLAMA3,
    VARIANTS,
    assert_same,
    export,
    random_params,
    refusal,
)
from tests.checkpoints.random_heads import TARGET, eagle3, write

EAGLE3_TENSORS = {
    "fc.weight": ([24, 72], "BF16"),
    "{layer}.self_attn.q_proj.weight": ([48, 48], "BF16"),
    "{layer}.self_attn.k_proj.weight": ([24, 48], "BF16"),
    "{layer}.self_attn.v_proj.weight": ([24, 48], "BF16"),
    "{layer}.self_attn.o_proj.weight": ([24, 48], "BF16"),
    "{layer}.mlp.gate_proj.weight": ([20, 24], "BF16"),
    "{layer}.mlp.up_proj.weight": ([20, 24], "BF16"),
    "{layer}.mlp.down_proj.weight": ([24, 20], "BF16"),
    "{layer}.input_layernorm.weight": ([24], "BF16"),
    "{layer}.hidden_norm.weight": ([24], "BF16"),
    "{layer}.post_attention_layernorm.weight": ([24], "BF16"),
    "norm.weight": ([24], "BF16"),
    "lm_head.weight": ([17, 24], "BF16"),
    "d2t": ([17], "I64"),
    "t2d": ([53], "BOOL"),
}
EAGLE1_TENSORS = {
    "embed_tokens.weight": ([53, 24], "BF16"),
    "fc.weight": ([24, 48], "BF16"),
    "fc.bias": ([24], "BF16"),
    "layers.0.self_attn.q_proj.weight": ([48, 24], "BF16"),
    "layers.0.self_attn.k_proj.weight": ([24, 24], "BF16"),
    "layers.0.self_attn.v_proj.weight": ([24, 24], "BF16"),
    "layers.0.self_attn.o_proj.weight": ([24, 48], "BF16"),
    "layers.0.mlp.gate_proj.weight": ([20, 24], "BF16"),
    "layers.0.mlp.up_proj.weight": ([20, 24], "BF16"),
    "layers.0.mlp.down_proj.weight": ([24, 20], "BF16"),
    "layers.0.post_attention_layernorm.weight": ([24], "BF16"),
}
LAYER_VALUES = {
    "model_type": "llama",
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
}
RAW_VALUES = LAYER_VALUES | {
    "draft_vocab_size": 17,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},  # layers whose output is taken (SGLang)
    "eagle_aux_hidden_state_layer_ids": [2, 4, 6],  # layers that it enters (vLLM)
}
SPECULATORS_VALUES = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": "somebody/model", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": LAYER_VALUES | {"attention_bias": False, "mlp_bias": False},
    "draft_vocab_size": 17,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_output": False,
    "norm_before_residual": False,
    "embed_requires_grad": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "layout", "options", "tensors", "prefix", "values"),
    [
        (HEAD, "official", {}, EAGLE3_TENSORS, "midlayer", RAW_VALUES | {"architectures": ["LlamaForCausalLM"]}),
        (HEAD, "sglang", {}, EAGLE3_TENSORS, "midlayer", RAW_VALUES | {"architectures": ["LlamaForCausalLMEagle3"]}),
        (
            HEAD,
            "speculators",
            {"speculative_tokens": 4},
            EAGLE3_TENSORS | {"embed_tokens.weight": ([53, 24], "BF16")},
            "layers.0",
            SPECULATORS_VALUES,
        ),
        (
            EAGLE1,
            "official",
            {"embedding": EMBEDDING},
            EAGLE1_TENSORS,
            "layers.0",
            LAYER_VALUES | {"architectures": ["LlamaForCausalLM"], "bias": True},
        ),
    ],
    ids=["official", "sglang", "speculators", "official-eagle1"],
)
def test_golden_files(config, layout, options, tensors, prefix, values, tmp_path):
    export(config, tmp_path / "head", layout, "bfloat16", **options)
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "head" / "config.json").read_text()) == values
    with safetensors.safe_open(tmp_path / "head" / "model.safetensors", framework="np") as stored:
        found = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        described = {name: (part.get_shape(), part.get_dtype()) for name, part in found.items()}
        assert stored.metadata() == {"format": "pt"}
    assert described == {name.format(layer=prefix): info for name, info in tensors.items()}


NOT_FOR = {
    "sglang": ("residual", "own embedding", "qwen3", "biases", "fc bias"),
    "speculators": ("fc bias",),
    "official": (),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("layout", "name"), [(layout, name) for layout in NOT_FOR for name in VARIANTS if name not in NOT_FOR[layout]]
)
def test_round_trip_is_the_identity(layout, name, dtype, tmp_path):
    config = VARIANTS[name]
    target = dataclasses.replace(TARGET, rope=config.layer.rope)
    written = export(config, tmp_path / "head", layout, dtype, target)
    assert written == config
    loaded, params = load_head_checkpoint(tmp_path / "head", target, dtype, embedding=jnp.asarray(EMBEDDING))
    assert loaded == config
    assert_same(params, random_params(config, dtype))
    assert stored_dtype(tmp_path / "head") == dtype


def test_a_rounded_copy_of_the_embedding_is_still_the_targets(tmp_path):
    """A head in bfloat16 of a target in float32 drafts from the target's own embedding, as it did before."""
    exact = np.random.default_rng(0).standard_normal((53, 24)).astype(np.float32)
    export(HEAD, tmp_path, "speculators", "bfloat16", embedding=exact)
    config, params = load_head_checkpoint(tmp_path, TARGET, embedding=jnp.asarray(exact))
    assert config == HEAD
    assert "embed_tokens" not in params["head"]
    assert load_head_checkpoint(tmp_path, TARGET, embedding=jnp.asarray(exact + 0.1))[0].own_embedding


@pytest.mark.parametrize("layout", ["official", "sglang", "speculators"])
def test_context_length_is_the_targets(layout, tmp_path):
    """Engines draft only as far as the head's config says; published heads say 2048."""
    short = dataclasses.replace(HEAD, layer=dataclasses.replace(LAYER, max_position=64))
    assert export(short, tmp_path, layout).layer.max_position == TARGET.max_position
    assert load_head_checkpoint(tmp_path, TARGET, embedding=jnp.asarray(EMBEDDING))[0] == HEAD


class TestRope:
    TARGET = dataclasses.replace(TARGET, rope=LLAMA3)

    def test_a_difference_is_not_decided_silently(self, tmp_path):
        message = refusal(HEAD, "sglang", tmp_path, target=self.TARGET)
        assert "the head's RoPE is default theta=10000, its target's llama3 theta=500000 factor=8.0" in message
        assert "choose rope 'head', which drafts as it does here, or rope 'target'" in message

    @pytest.mark.parametrize(("rope", "written"), [("head", RopeConfig()), ("target", LLAMA3)])
    def test_either_may_be_chosen(self, rope, written, tmp_path):
        export(HEAD, tmp_path, "sglang", target=self.TARGET, rope=rope)
        assert load_head_checkpoint(tmp_path, self.TARGET)[0].layer.rope == written


def test_tables_for_engines_that_always_read_them(tmp_path):
    """SGLang's layout has d2t and t2d even where draft ids are target ids; the other two leave them out."""
    names = {}
    for layout in ("official", "sglang", "speculators"):
        export(VARIANTS["full vocabulary"], tmp_path / layout, layout)
        names[layout] = safetensors.numpy.load_file(tmp_path / layout / "model.safetensors")
    np.testing.assert_array_equal(names["sglang"]["d2t"], np.zeros(53, np.int64))
    assert names["sglang"]["t2d"].all()
    assert not {"d2t", "t2d"} & (names["official"].keys() | names["speculators"].keys())


class TestStoredDtype:
    def test_the_widest_wins(self, tmp_path):
        config, tensors = eagle3()
        halves = {name: value.astype(jnp.bfloat16) if value.ndim == 2 else value for name, value in tensors.items()}
        assert stored_dtype(write(tmp_path, config, halves)) == "float32"

    def test_one_that_cannot_be_written(self, tmp_path):
        config, tensors = eagle3()
        with pytest.raises(CheckpointError, match=r"holds float32, float64: choose a dtype, one of float32"):
            stored_dtype(write(tmp_path, config, tensors | {"norm.weight": np.ones(24)}))
