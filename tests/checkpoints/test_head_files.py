"""Tests EAGLE heads on disk: keys of config.json in every project, tensors, draft vocabularies, errors."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax.checkpoints import CheckpointError, load_head_checkpoint, load_target_checkpoint, save_head_checkpoint
from tests.checkpoints.common import assert_same, quiet, random_params
from tests.checkpoints.random_heads import EAGLE1, TARGET, eagle1, eagle3, write

IDS = {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}
SLIDING = {"sliding_window": 64, "layer_types": ["sliding_attention"]}
MIXED = ["full_attention", "sliding_attention"]


def load(directory, config, tensors, target=TARGET, **kwargs):
    return load_head_checkpoint(write(directory, config, tensors), target, **kwargs)


def config_of(directory, head, target=TARGET, **kwargs):
    return load(directory, *head, target, **kwargs)[0]


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_a_saved_head_equals_the_official_file(name, golden, tmp_path):
    target, params = load_target_checkpoint(golden / "target")
    embedding = params["embed_tokens"]["embedding"]
    config, head = load_head_checkpoint(golden / name, target, embedding=embedding)
    copy = embedding if name == "eagle1" else None  # the head shares the target's
    assert not config.own_embedding and "embed_tokens" not in head["head"]
    save_head_checkpoint(config, head, tmp_path, "float32", embedding=copy)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # weights are as readable as their config
    ours, theirs = (safetensors.numpy.load_file(path / "model.safetensors") for path in (tmp_path, golden / name))
    assert_same(ours, theirs)
    assert {key: value.dtype for key, value in ours.items()} == {key: value.dtype for key, value in theirs.items()}
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (tmp_path, golden / name))
    same = set(theirs) - {"architectures", "pad_token_id"}
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}


def test_an_embedding_of_another_size_is_not_saved(tmp_path):
    with pytest.raises(CheckpointError, match=r"embedding is \[50, 24\], expected \[53"):
        save_head_checkpoint(EAGLE1, random_params(EAGLE1), tmp_path / "head", embedding=jnp.zeros((50, 24)))
    assert not list(tmp_path.iterdir())


def test_every_prefix_of_tensor_names_loads(tmp_path):
    config, tensors = eagle3()
    _, expected = load(tmp_path / "official", config, tensors)
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    for place, stored in (("layers", renamed), ("model", {f"model.{name}": renamed[name] for name in renamed})):
        assert_same(load(tmp_path / place, config, stored)[1], expected)


def test_an_eagle1_head_drafts_through_the_embedding_and_lm_head_of_its_target(tmp_path):
    config, tensors = eagle1()
    _, expected = load(tmp_path, config, tensors)
    own = np.random.default_rng(3).standard_normal((53, 24)).astype(np.float32)
    tensors["lm_head.weight"] = own
    with quiet():
        assert_same(load(tmp_path, config, tensors, lm_head=own)[1], expected)
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from the target's lm_head, and EAGLE-1/2 drafts"):
        assert_same(load(tmp_path, config, tensors, lm_head=own + 1)[1], expected)
    del tensors["embed_tokens.weight"]
    assert not load(tmp_path, config, tensors)[0].own_embedding


def test_the_draft_vocabulary_loads_with_and_without_t2d_and_its_size(tmp_path):
    config, tensors = eagle3()
    _, params = load(tmp_path, config, {name: value for name, value in tensors.items() if name != "t2d"})
    assert params["d2t"].dtype == jnp.int32  # the difference, as stored
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), params["d2t"] + np.arange(17))
    del config["draft_vocab_size"]  # counted
    assert load(tmp_path, config, tensors)[0].draft_vocab_size == 17
    np.testing.assert_array_equal(load(tmp_path, *eagle3(draft_vocab_size=53))[1]["d2t"], np.zeros(53))


D2T, T2D = (eagle3()[1][name] for name in ("d2t", "t2d"))
ZEROS = np.zeros(24, np.float32)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"d2t": ...}, ("missing (1): d2t", "Load a head of this target, or")),
        ({"d2t": np.append(D2T, 0)}, ("misshaped (1): d2t is int64 [18], expected integers [17]",)),
        ({"d2t": D2T + np.arange(17)}, ("d2t",)),  # target ids instead of differences
        ({"d2t": D2T.astype(np.float32)}, ("d2t is float32 [17], expected integers [17]",)),
        ({"t2d": np.append(T2D, True)}, ("misshaped (1): t2d is bool [54], expected integers [53]",)),
        ({"t2d": T2D.astype(np.float32)}, ("t2d is float32 [53], expected integers [53]",)),
        ({"t2d": np.roll(T2D, 1)}, ("t2d marks other target ids than d2t reaches",)),
        ({"model.norm.weight": ZEROS}, ("norm.weight are the same tensor under two names",)),
        ({"layers.1.mlp.down_proj.weight": ZEROS}, ("unexpected (1): layers.1.mlp.down_proj.weight",)),
        ({"midlayer.mlp.down_proj.weight": ...}, ("missing (1): midlayer.mlp.down_proj.weight",)),
    ],
)  # fmt: skip
def test_an_error_names_every_tensor_that_does_not_fit(changes, parts, tmp_path):
    config, tensors = eagle3()
    tensors = {name: value for name, value in (tensors | changes).items() if value is not ...}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, config, tensors)
    for part in (str(tmp_path), *parts):
        assert part in str(caught.value)


def test_a_head_of_another_width_needs_an_embedding(tmp_path):
    config, tensors = eagle3(hidden_size=36, target_hidden_size=24)
    del tensors["embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"missing \(1\): embed_tokens\.weight \(the head's hidden_size"):
        load(tmp_path, config, tensors)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (eagle1, {"hidden_act": "relu"}, "hidden_act must be silu or absent, got 'relu'"),
        (eagle3, SLIDING | {"sliding_window": 0}, "sliding_window must be an integer from 1 to .*, got 0"),
        (eagle3, {"layer_types": ["linear_attention"]}, "layer_types must be full_attention or sliding_attention"),
        (eagle3, SLIDING | {"layer_types": MIXED}, "layer_types must be .*, the type of the head's one layer, got"),
        (eagle3, {"sliding_window": 64}, "use_sliding_window must be true or false where sliding_window is 64, got no"),
        (eagle3, SLIDING | {"use_sliding_window": False}, "use_sliding_window must be true where layer_types is slidi"),
        (eagle3, SLIDING | {"sliding_window": None}, "sliding_window must be a size where .* layer_types turns it on"),
        (eagle3, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 28},
         "max_window_layers must be 0 or absent where use_sliding_window is true, got 28"),
        (eagle3, {"rope_scaling": {"factor": 8.0}}, r"rope_scaling.factor must be absent where rope_type is default"),
        (eagle3, {"use_sliding_window": True}, "sliding_window must be a size where use_sliding_window or .*, got no"),
        (eagle3, {"embedding_multiplier": 12.0}, r"embedding_multiplier must be 1 or absent, got 12\.0"),
        (eagle3, {"eagle_config": {"use_last_layernorm": False}}, r"eagle_config\.use_last_layernorm must be true or"),
        (eagle3, {"eagle_config": {"use_aux_hidden_state": False}}, r"use_aux_hidden_state must be true or absent"),
        (eagle3, {"eagle_config": {"block_size": 16}}, "must be an EAGLE head .*, got block_size: a DFlash or DSpark"),
        (eagle3, {"ptd_token_id": 0}, "ptd_token_id must be absent, got 0"),
        (eagle3, {"num_hidden_layers": "1"}, "num_hidden_layers must be an integer from 1 to .*, got '1'"),
        (eagle3, {"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4, and there are 3 taps"),
        (eagle3, {"architectures": ["GemmaForCausalLM"]}, "architectures must be an EAGLE head .*, got .*GemmaFor"),
        (eagle3, {"use_fancy_gate": True}, "use_fancy_gate must be absent, got True. Remove it from config.json if"),
        (eagle3, {"eagle_config": {"logit_scaling": 0.5}}, r"eagle_config\.logit_scaling must be absent, got 0\.5"),
        (eagle3, {"fc_norm": True, "norm_before_fc": True}, "norm_before_fc must be false where fc_norm is on"),
        (eagle3, {"parallel_draft_step": 4}, "parallel_draft_step must be 1 or absent, got 4"),
        (eagle3, {"speculators_model_type": "eagle"}, "speculators_model_type must be 'eagle3', got 'eagle'. Load"),
        (eagle3, {"draft_vocab_size": 60}, "draft_vocab_size must be at most the target.s vocabulary of 53"),
        (
            eagle3,
            {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types must be sliding_attention where use_sliding_window is true",
        ),
        (eagle3, {"softmax_power": 2}, "softmax_power must be absent"),
        (eagle1, {"is_causal": False}, "is_causal must be true or absent, got False"),
    ],
)  # fmt: skip
def test_an_option_that_changes_the_drafts_is_an_error(make, changes, message, tmp_path):
    config, tensors = make()
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path, (config | changes, tensors))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 64, "use_sliding_window": True}, (64,)),
        (SLIDING, (64,)),
        (SLIDING | {"layer_types": ["sliding_attention"] * 36}, (64,)),  # those of the target's layers
        ({"sliding_window": 64, "model_type": "mistral"}, (64,)),
        ({"sliding_window": 128}, ()),  # as long as the context
        (SLIDING | {"sliding_window": 128}, ()),
    ],
)
def test_a_window_that_is_on_is_the_heads(changes, windows, tmp_path):
    config, tensors = eagle3()
    with quiet():
        assert config_of(tmp_path, (config | changes, tensors)).layer.windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 32}, "num_hidden_layers is 32, but an EAGLE head has 1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, but the file has 'an lm_head of its own'"),
        ({"target_model_type": "gemma3_text"}, "target_model_type is 'gemma3_text', but the target is a 'Llama"),
        (
            {"speculators_config": {"verifier": {"architectures": ["X"]}}},
            r"verifier\.architectures is \['X'\], but",
        ),
        (
            {"license": "mit", "eagle_config": {"trained_by": "us"}},
            "license='mit', eagle_config.trained_by='us': unknown",
        ),
        ({"has_final_norm": False}, "has_final_norm=False: unknown"),
    ],
)
def test_an_option_without_effect_causes_a_warning(changes, message, tmp_path):
    with pytest.warns(UserWarning, match=message):
        config_of(tmp_path, eagle3(**changes))


def test_the_keys_of_published_heads_cause_no_warning(tmp_path):
    """Keys of the heads of SpecForge, NVIDIA and RedHat, at the values of a plain head."""
    changes = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0,
        "head_dim": None, "initializer_range": 0.02, "pretraining_tp": 1, "tie_word_embeddings": False,
        "rope_scaling": None, "sliding_window": 32, "use_sliding_window": False, "max_window_layers": 48,
        "torch_dtype": "bfloat16", "transformers_version": "4.53.2", "use_cache": True, "target_model_type": "llama",
        "norm_before_residual": False, "norm_output": None, "embed_requires_grad": False, "is_causal": True,
        "eagle_aux_hidden_state_layer_ids": None, "num_aux_hidden_states": 3, "layer_types": ["full_attention"],
        "parallel_drafting": False, "block_size": None,
        "eagle_config": {
            "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [], "use_mtp_layernorm": False,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "next_layer_regular": True,
            "parallel_draft_step": 1,
        },
    }  # fmt: skip
    config, tensors = eagle3(**changes)
    with quiet():
        assert config_of(tmp_path, (config | {"target_hidden_size": None}, tensors)).taps == (2, 4, 6)


def test_switches_come_from_eagle_config_or_from_tensors(tmp_path):
    loaded = config_of(tmp_path, eagle3(eagle_config={"norm_output": True, "norm_before_residual": True}))
    assert loaded.norm_output and loaded.norm_before_residual
    config, tensors = eagle3(fc_norm=True, attention_bias=True, qk_norm_tensors=True)
    for key in ("fc_norm", "attention_bias"):
        del config[key]
    loaded = config_of(tmp_path, (config, tensors))
    layer = loaded.layer
    assert loaded.fc_norm and layer.qkv_bias and layer.out_bias and layer.qk_norm
    config, tensors = eagle3(norm_before_fc=True)
    del config["norm_before_fc"]
    assert config_of(tmp_path, (config, tensors)).norm_before_fc


def test_norm_before_residual_is_on_by_default_in_speculators_files(tmp_path):
    config, tensors = eagle3()
    values = {"speculators_model_type": "eagle3", "transformer_layer_config": config, "draft_vocab_size": 17}
    assert config_of(tmp_path, (values, tensors)).norm_before_residual


@pytest.mark.parametrize(
    ("head", "options", "taps"),
    [
        (eagle3(), {}, (2, 4, 6)),  # 2, L // 2, L - 3 of 9 layers
        (eagle3(eagle_config=IDS), {}, (1, 4, 8)),  # layers whose OUTPUT is taken: hidden_states[i + 1] of transformers
        (eagle3(**IDS), {}, (0, 3, 7)),  # layers that the state ENTERS: hidden_states[i]
        (eagle3(**IDS, eagle_config=IDS), {"taps": (1, 4, 7)}, (1, 4, 7)),
        (eagle3(taps=4), {"taps": (1, 2, 3, 4)}, (1, 2, 3, 4)),
        (eagle1(), {}, (9,)),
    ],
)
def test_taps_are_numbered_as_in_transformers(head, options, taps, tmp_path):
    assert config_of(tmp_path, head, **options).taps == taps


SHALLOW, OTHER_VOCAB, OTHER_WIDTH = (
    dataclasses.replace(TARGET, **change) for change in ({"num_layers": 2}, {"vocab_size": 64}, {"hidden_size": 32})
)


@pytest.mark.parametrize(
    ("head", "target", "options", "message"),
    [
        (eagle3(**IDS, eagle_config=IDS), TARGET, {}, r"the same hidden states, got \(1, 4, 8\) and \(0, 3, 7\)"),
        (eagle3(taps=4), TARGET, {}, "fc reads 96 features, which is 4 taps of hidden size 24, not 3 .*; taps=..."),
        (eagle3(), SHALLOW, {}, r"taps \[-1\] do not exist, the target has hidden states 0 to 2"),
        (eagle1(), TARGET, {"taps": (2, 4, 6)}, r"taps must be \(9,\), the final state, for an EAGLE-1/2 head"),
        (eagle1(), OTHER_VOCAB, {}, "vocab_size is 53, the target's 64"),
        (eagle3(), OTHER_WIDTH, {}, "hidden size is 24, the target's 32"),
        (eagle1(target_hidden_size=24, hidden_size=36), TARGET, {}, "hidden size is 24 and 36, the target's 24"),
        (eagle3(), TARGET, {"rope_theta": float("nan")}, "rope_theta must be a positive number, got nan"),
    ],
)
def test_a_head_of_another_target_is_an_error(head, target, options, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path, head, target, **options)


def test_an_argument_replaces_rope_theta(tmp_path):
    assert config_of(tmp_path, eagle3(), rope_theta=10000).layer.rope.theta == 10000.0
