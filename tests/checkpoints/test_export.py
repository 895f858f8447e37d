"""Tests heads written for other engines: names, shapes, dtypes, round trips, limits of a layout."""

from __future__ import annotations

import dataclasses
import json
import resource

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax.checkpoints import CheckpointError, export_head, load_head_checkpoint, stored_dtype
from eagle_jax.config import RopeConfig
from tests.checkpoints.common import assert_same, edit_tensors, random_params
from tests.checkpoints.random_heads import (
    EAGLE1,
    EMBEDDING,
    HEAD,
    LLAMA3,
    TARGET,
    VARIANTS,
    eagle3,
    export,
    head,
    write,
)

LAYER_TENSORS = {
    "self_attn.k_proj": [24, 48], "self_attn.q_proj": [48, 48], "self_attn.v_proj": [24, 48],
    "self_attn.o_proj": [24, 48], "mlp.gate_proj": [20, 24], "mlp.up_proj": [20, 24], "mlp.down_proj": [24, 20],
    "post_attention_layernorm": [24],
}  # fmt: skip
EAGLE3_LAYER = LAYER_TENSORS | {"input_layernorm": [24], "hidden_norm": [24]}
EAGLE1_LAYER = LAYER_TENSORS | {
    f"self_attn.{name}_proj": [size, 24] for name, size in (("q", 48), ("k", 24), ("v", 24))
}
EAGLE3 = {"fc": [24, 72], "norm": [24], "lm_head": [17, 24]}
EMBEDS = {"embed_tokens": [53, 24]}
LAYER_VALUES = {
    "model_type": "llama", "vocab_size": 53, "hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 128, "rope_scaling": None, "bos_token_id": 1, "eos_token_id": 3,
    "torch_dtype": "bfloat16", "num_hidden_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip
RAW_VALUES = LAYER_VALUES | {
    "architectures": ["LlamaForCausalLM"],
    "draft_vocab_size": 17,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},  # layers whose output is taken (SGLang)
    "eagle_aux_hidden_state_layer_ids": [2, 4, 6],  # layers that it enters (vLLM)
}
PROPOSAL = {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
SPECULATORS_VALUES = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [PROPOSAL],
        "verifier": {"name_or_path": "somebody/model", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": LAYER_VALUES | {"attention_bias": False, "mlp_bias": False},
    "draft_vocab_size": 17, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
    "fc_norm": False, "norm_before_fc": False, "norm_output": False, "norm_before_residual": False,
    "embed_requires_grad": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layout", "options", "tensors", "prefix", "layer", "values"),
    [
        (HEAD, "official", {}, EAGLE3, "midlayer", EAGLE3_LAYER, RAW_VALUES),
        (HEAD, "sglang", {}, EAGLE3, "midlayer", EAGLE3_LAYER,
         RAW_VALUES | {"architectures": ["LlamaForCausalLMEagle3"]}),
        (HEAD, "speculators", {"speculative_tokens": 4}, EAGLE3 | EMBEDS, "layers.0", EAGLE3_LAYER, SPECULATORS_VALUES),
        (EAGLE1, "official", {"embedding": EMBEDDING}, EMBEDS | {"fc": [24, 48]}, "layers.0", EAGLE1_LAYER,
         LAYER_VALUES | {"architectures": ["LlamaForCausalLM"], "bias": True}),
    ],
    ids=["official", "sglang", "speculators", "official-eagle1"],
)  # fmt: skip
def test_every_layout_has_its_names_shapes_and_keys(config, layout, options, tensors, prefix, layer, values, tmp_path):
    export(config, tmp_path, layout, "bfloat16", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text()) == values
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="np") as stored:
        parts = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        found = {name: (part.get_shape(), part.get_dtype()) for name, part in parts.items()}
        assert stored.metadata() == {"format": "pt"}
    named = tensors | {f"{prefix}.{name}": shape for name, shape in layer.items()}
    expected = {f"{name}.weight": (shape, "BF16") for name, shape in named.items()}
    if config is EAGLE1:
        expected["fc.bias"] = ([24], "BF16")
    else:
        expected |= {"d2t": ([17], "I64"), "t2d": ([53], "BOOL")}
    assert found == expected


NOT_FOR = {
    "sglang": ("residual", "own embedding", "qwen3", "biases", "fc bias", "eagle1", "eagle1 biases"),
    "speculators": ("fc bias", "eagle1", "eagle1 biases"),
    "official": (),
}


@pytest.mark.parametrize(
    ("layout", "name"), [(layout, name) for layout in NOT_FOR for name in VARIANTS if name not in NOT_FOR[layout]]
)
def test_an_export_loads_as_the_same_head(layout, name, tmp_path):
    config = VARIANTS[name]
    target = dataclasses.replace(TARGET, rope=config.layer.rope)
    dtype = "bfloat16" if len(name) % 2 else "float32"  # either, over the variants
    assert export(config, tmp_path, layout, dtype, target) == config
    loaded, params = load_head_checkpoint(tmp_path, target, dtype, embedding=jnp.asarray(EMBEDDING))
    assert loaded == config
    assert_same(params, random_params(config, dtype=dtype))
    assert stored_dtype(tmp_path) == dtype


def test_a_rounded_copy_of_the_embedding_is_not_loaded(tmp_path):
    """A head in bfloat16 of a target in float32 drafts from the target's embedding."""
    exact = np.random.default_rng(0).standard_normal((53, 24)).astype(np.float32)
    export(HEAD, tmp_path, "speculators", "bfloat16", embedding=exact)
    config, params = load_head_checkpoint(tmp_path, TARGET, embedding=jnp.asarray(exact))
    assert config == HEAD
    assert "embed_tokens" not in params["head"]
    assert load_head_checkpoint(tmp_path, TARGET, embedding=jnp.asarray(exact + 0.1))[0].own_embedding


@pytest.mark.parametrize(("rope", "written"), [("head", RopeConfig()), ("target", LLAMA3)])
def test_export_writes_the_chosen_rope_and_the_context_length_of_the_target(rope, written, tmp_path):
    """Engines draft only as far as the head's config says; published heads say 2048."""
    target = dataclasses.replace(TARGET, rope=LLAMA3)
    export(head({"max_position": 64}), tmp_path, "sglang", target=target, rope=rope)
    layer = load_head_checkpoint(tmp_path, target)[0].layer
    assert (layer.rope, layer.max_position) == (written, TARGET.max_position)


def test_only_sglang_files_hold_tables_of_a_full_vocabulary(tmp_path):
    """SGLang reads d2t and t2d even where draft ids are target ids."""
    for layout in ("official", "sglang", "speculators"):
        export(VARIANTS["full vocabulary"], tmp_path, layout)
        tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
        assert ({"d2t", "t2d"} <= tensors.keys()) == (layout == "sglang")
        assert not tensors.get("d2t", np.zeros(1)).any() and tensors.get("t2d", np.ones(1)).all()


def test_stored_dtype_is_the_widest(tmp_path):
    config, tensors = eagle3()
    halves = {name: value.astype(jnp.bfloat16) if value.ndim == 2 else value for name, value in tensors.items()}
    assert stored_dtype(write(tmp_path, config, halves)) == "float32"
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.update({"norm.weight": np.ones(24)}))
    with pytest.raises(CheckpointError, match=r"dtype must be one of float32.* holds bfloat16, float32, float64"):
        stored_dtype(tmp_path)


WITH_LLAMA3 = {"target": dataclasses.replace(TARGET, rope=LLAMA3)}


@pytest.mark.parametrize(
    ("layout", "config", "options", "message"),
    [
        ("sglang", head(norm_before_residual=True), {}, "cannot hold norm_before_residual"),
        ("sglang", head(own_embedding=True), {}, "an embedding that is not the target's"),
        ("sglang", head({"qk_norm": True}), {}, "norms of queries and keys"),
        ("sglang", head({"mlp_bias": True}), {}, "biases of the layer"),
        ("speculators", head(fc_bias=True), {}, "a bias of fc"),
        ("speculators", head({"qkv_bias": True}), {}, "only some attention projections"),
        ("sglang", head(taps=(4, 2, 6)), {}, r"taps \(4, 2, 6\) \(they must ascend, from 1 to 8\)"),
        ("speculators", head(taps=(2, 4, 9)), {}, r"taps \(2, 4, 9\)"),  # 9 is behind the final norm
        ("sglang", EAGLE1, {}, "layout must be 'official' for an EAGLE-1/2 head, got 'sglang'"),
        ("official", EAGLE1, {}, "embedding must be the target's for the official layout, got none"),
        ("speculators", HEAD, {"embedding": None}, "embedding must be the target's for the spec"),
        ("sglang", HEAD, WITH_LLAMA3, "got none for a head of default theta=10000 factor=1 and a target of llama3 the"),
    ],
)
def test_a_head_that_a_layout_cannot_hold_is_not_written(layout, config, options, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        export(config, tmp_path / "head", layout, **options)
    assert not list(tmp_path.iterdir())


def test_only_the_official_layout_holds_a_permuted_vocabulary(tmp_path):
    config = VARIANTS["full vocabulary"]
    params = random_params(config) | {"d2t": jnp.asarray([1, -1] + [0] * 51, jnp.int32)}
    with pytest.raises(CheckpointError, match="a d2t that permutes the whole vocabulary"):
        export_head(config, params, TARGET, tmp_path, "speculators", verifier="a/b", embedding=EMBEDDING)
    export_head(config, params, TARGET, tmp_path, "official", "float32")
    assert_same(load_head_checkpoint(tmp_path, TARGET)[1], params)


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path):
    export(HEAD, tmp_path / "head", "sglang")
    before = {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # config.json fits, the weights do not
    try:
        with pytest.raises(CheckpointError, match=r"could not be written \(.*\)\. Make room and save again"):
            export(HEAD, tmp_path / "head", "official")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
