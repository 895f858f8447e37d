"""Draft heads on disk: official layouts and variants, other projects' layouts, and heads that do not fit."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax.checkpoints import (
    CheckpointError,
    load_head_checkpoint,
    load_target_checkpoint,
    save_head_checkpoint,
)
from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.models.heads import init_head_params
from tests.checkpoints.random_heads import TARGET, eagle1, eagle3, write


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def load(directory, config, tensors, target=TARGET, **kwargs):
    return load_head_checkpoint(write(directory, config, tensors), target, **kwargs)


def message_of(directory, config, tensors, target=TARGET, **kwargs):
    with pytest.raises(CheckpointError) as caught:
        load(directory, config, tensors, target, **kwargs)
    return str(caught.value)


class TestGolden:
    def test_the_pair_loads(self, golden):
        target, _ = load_target_checkpoint(golden / "target")
        assert (target.num_layers, target.eos_ids, target.bos_id) == (8, (257,), 256)
        config, head = load_head_checkpoint(golden / "eagle3", target)
        assert (config.kind, config.taps, config.draft_vocab_size, config.own_embedding) == (
            "eagle3",
            (2, 4, 5),
            96,
            False,
        )
        assert head["d2t"].shape == (96,)
        config, head = load_head_checkpoint(golden / "eagle1", target)
        assert (config.kind, config.taps, config.fc_bias, config.own_embedding) == ("eagle1", (8,), True, True)
        assert "d2t" not in head

    def test_an_eagle1_head_shares_the_targets_embedding(self, golden):
        target, params = load_target_checkpoint(golden / "target")
        embedding = params["embed_tokens"]["embedding"]
        config, head = load_head_checkpoint(golden / "eagle1", target, embedding=embedding)
        assert not config.own_embedding
        assert "embed_tokens" not in head["head"]
        config, _ = load_head_checkpoint(golden / "eagle1", target, embedding=embedding.at[3, 3].add(1.0))
        assert config.own_embedding

    @pytest.mark.parametrize("name", ["eagle1", "eagle3"])
    def test_what_we_save_is_the_official_file(self, name, golden, tmp_path):
        target, params = load_target_checkpoint(golden / "target")
        embedding = params["embed_tokens"]["embedding"]
        config, head = load_head_checkpoint(golden / name, target, embedding=embedding)
        copy = embedding if name == "eagle1" else None
        save_head_checkpoint(config, head, tmp_path, "float32", embedding=copy)
        ours = safetensors.numpy.load_file(tmp_path / "model.safetensors")
        modes = {oct(path.stat().st_mode) for path in tmp_path.iterdir() if path.is_file()}
        assert len(modes) == 1  # weights are as readable as their config
        theirs = safetensors.numpy.load_file(golden / name / "model.safetensors")
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key].dtype == value.dtype
            np.testing.assert_array_equal(ours[key], value)
        ours, theirs = (json.loads((path / "config.json").read_text()) for path in (tmp_path, golden / name))
        same = set(theirs) - {"architectures", "pad_token_id"}
        assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}


LAYER = dataclasses.replace(TARGET, num_layers=1, head_dim=8, intermediate_size=20, qkv_bias=False)
EAGLE1 = HeadConfig("eagle1", LAYER, 53, 24, (9,), fc_bias=True)
EAGLE3 = HeadConfig("eagle3", LAYER, 17, 24, (2, 4, 6))


@pytest.mark.parametrize(
    "config",
    [
        EAGLE1,
        dataclasses.replace(EAGLE1, own_embedding=True, fc_bias=False),
        dataclasses.replace(EAGLE1, layer=dataclasses.replace(LAYER, qkv_bias=True)),
        EAGLE3,
        dataclasses.replace(EAGLE3, draft_vocab_size=53, taps=(1, 3, 5, 8)),
        dataclasses.replace(
            EAGLE3, fc_norm=True, norm_before_fc=True, norm_output=True, norm_before_residual=True, fc_bias=True
        ),
        dataclasses.replace(
            EAGLE3,
            own_embedding=True,
            layer=dataclasses.replace(
                LAYER,
                hidden_size=36,
                qkv_bias=True,
                out_bias=True,
                mlp_bias=True,
                qk_norm=True,
                eos_ids=(3, 4),
                bos_id=1,
            ),
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_the_identity(config, dtype, tmp_path):
    shapes = jax.eval_shape(lambda: init_head_params(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), dtype), shapes)
    if config.kind == "eagle3":
        kept = np.sort(rng.choice(53, config.draft_vocab_size, replace=False))
        params["d2t"] = jnp.asarray(kept - np.arange(config.draft_vocab_size), jnp.int32)
    save_head_checkpoint(config, params, tmp_path, dtype)
    loaded_config, loaded = load_head_checkpoint(tmp_path, TARGET, dtype)
    assert loaded_config == config
    assert_same(loaded, params)


def fresh(config):
    """Zeros in the shape of the head's parameters."""
    shapes = jax.eval_shape(lambda: init_head_params(config, jax.random.key(0)))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


class TestSavingRefuses:
    def test_a_draft_vocabulary_outside_the_targets(self, tmp_path):
        params = fresh(EAGLE3)
        params["d2t"] = params["d2t"].at[0].set(60)
        with pytest.raises(CheckpointError, match="d2t does not map draft ids to distinct target ids below 53"):
            save_head_checkpoint(EAGLE3, params, tmp_path / "head")
        assert not list(tmp_path.iterdir())

    def test_an_embedding_of_another_size(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"embedding must have shape .*, got \[50, 24\]"):
            save_head_checkpoint(EAGLE1, fresh(EAGLE1), tmp_path / "head", embedding=jnp.zeros((50, 24)))

    def test_parameters_of_another_head(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"missing .*head/hidden_norm/scale"):
            save_head_checkpoint(EAGLE3, fresh(EAGLE1), tmp_path / "head")


class TestOtherLayouts:
    def test_prefixes(self, tmp_path):
        config, tensors = eagle3()
        _, expected = load(tmp_path / "official", config, tensors)
        renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
        _, params = load(tmp_path / "layers", config, renamed)
        assert_same(params, expected)
        _, params = load(tmp_path / "model", config, {"model." + name: value for name, value in renamed.items()})
        assert_same(params, expected)

    def test_speculators(self, tmp_path):
        config, tensors = eagle3(prefix="layers.0.", norm_before_residual=True, own_embedding_tensor=True)
        layer = {key: config[key] for key in config if key not in ("architectures", "draft_vocab_size")}
        layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
        del layer["norm_before_residual"], layer["own_embedding_tensor"]
        values = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "somebody/model"}},
            "transformer_layer_config": layer,
            "draft_vocab_size": 17,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": [1, 4, 7],
            "norm_before_fc": False,
        }
        loaded, params = load(tmp_path, values, tensors)
        assert loaded.norm_before_residual  # the default of this layout
        assert loaded.own_embedding
        assert loaded.taps == (1, 4, 7)
        assert loaded.layer.rope.theta == 300.0
        assert params["head"]["fc"]["kernel"].shape == (72, 24)

    def test_another_speculator(self, tmp_path):
        config, tensors = eagle3(speculators_model_type="eagle", transformer_layer_config={})
        assert "speculators_model_type='eagle' is not supported" in message_of(tmp_path, config, tensors)

    def test_lm_head_of_an_eagle1_head_is_ignored(self, tmp_path):
        config, tensors = eagle1()
        _, expected = load(tmp_path / "plain", config, tensors)
        _, params = load(tmp_path / "with", config, tensors | {"lm_head.weight": np.zeros((53, 24), np.float32)})
        assert_same(params, expected)

    def test_eagle1_without_its_embedding(self, tmp_path):
        config, tensors = eagle1()
        del tensors["embed_tokens.weight"]
        assert not load(tmp_path, config, tensors)[0].own_embedding

    def test_switches_inside_eagle_config(self, tmp_path):
        nested = {"norm_output": True, "norm_before_residual": True}
        loaded, _ = load(tmp_path, *eagle3(eagle_config=nested))
        assert loaded.norm_output
        assert loaded.norm_before_residual

    def test_switches_that_only_the_tensors_tell(self, tmp_path):
        config, tensors = eagle3(fc_norm=True, norm_before_fc=True, attention_bias=True, qk_norm_tensors=True)
        for key in ("fc_norm", "norm_before_fc", "attention_bias"):
            del config[key]
        loaded, _ = load(tmp_path, config, tensors)
        assert loaded.fc_norm
        assert loaded.norm_before_fc
        assert loaded.layer.qkv_bias
        assert loaded.layer.out_bias
        assert loaded.layer.qk_norm


class TestTaps:
    @pytest.mark.parametrize(
        ("changes", "taps"),
        [
            ({}, (2, 4, 6)),  # 2, L // 2, L - 3 of 9 layers
            # Layers whose OUTPUT is taken: hidden_states[i + 1] of transformers.
            ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}}, (1, 4, 8)),
            # Layers that the state ENTERS: hidden_states[i].
            ({"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}, (0, 3, 7)),
            ({"aux_hidden_state_layer_ids": [1, 2, 3]}, (1, 2, 3)),
        ],
    )
    def test_numbering(self, changes, taps, tmp_path):
        assert load(tmp_path, *eagle3(**changes))[0].taps == taps

    def test_override(self, tmp_path):
        assert load(tmp_path, *eagle3(), taps=[3, 5, 8])[0].taps == (3, 5, 8)

    def test_two_lists_that_disagree(self, tmp_path):
        ids = {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}
        changes = {**ids, "eagle_config": ids}
        assert "(2, 5, 8) and (1, 4, 7)" in message_of(tmp_path, *eagle3(**changes))
        assert load(tmp_path, *eagle3(**changes), taps=(1, 4, 7))[0].taps == (1, 4, 7)

    def test_wrong_number(self, tmp_path):
        message = message_of(tmp_path, *eagle3(taps=4))
        assert "fc reads 96 features, which is 4 taps of hidden size 24, not 3" in message
        assert "for another target" in message
        assert load(tmp_path, *eagle3(taps=4), taps=(1, 2, 3, 4))[0].taps == (1, 2, 3, 4)

    def test_layers_the_target_does_not_have(self, tmp_path):
        shallow = dataclasses.replace(TARGET, num_layers=2)
        assert "taps [-1] do not exist, the target has hidden states 0 to 2" in message_of(tmp_path, *eagle3(), shallow)

    def test_eagle1_reads_the_final_state(self, tmp_path):
        assert load(tmp_path, *eagle1())[0].taps == (9,)
        assert "reads the final state (9,)" in message_of(tmp_path, *eagle1(), taps=(2, 4, 6))

    def test_no_fused_features(self, tmp_path):
        config, tensors = eagle3(eagle_config={"use_aux_hidden_state": False})
        assert "use_aux_hidden_state must be true or absent, got False" in message_of(tmp_path, config, tensors)


def test_rope_theta_override(tmp_path):
    assert load(tmp_path, *eagle3())[0].layer.rope.theta == 300.0
    assert load(tmp_path, *eagle3(), rope_theta=10000)[0].layer.rope.theta == 10000.0


@pytest.mark.parametrize("theta", [-1.0, 0, float("nan")])
def test_rope_theta_must_be_positive(theta, tmp_path):
    with pytest.raises(CheckpointError, match=r"rope_theta=.* must be a positive number"):
        load(tmp_path, *eagle3(), rope_theta=theta)


def test_a_head_of_another_method(tmp_path):
    message = message_of(tmp_path, *eagle3(architectures=["MedusaModel"]))
    assert "must name an EAGLE head with a Llama-like layer, got MedusaModel." in message


class TestAnotherTarget:
    @pytest.mark.parametrize("make", [eagle1, eagle3])
    def test_vocabulary(self, make, tmp_path):
        message = message_of(tmp_path, *make(), dataclasses.replace(TARGET, vocab_size=64))
        assert "vocab_size is 53, the target's 64: a head for another target" in message

    @pytest.mark.parametrize("make", [eagle1, eagle3])
    def test_hidden_size(self, make, tmp_path):
        message = message_of(tmp_path, *make(), dataclasses.replace(TARGET, hidden_size=32))
        assert "hidden size is 24, the target's 32: a head for another target" in message

    def test_eagle1_of_another_width_than_it_reads(self, tmp_path):
        message = message_of(tmp_path, *eagle1(target_hidden_size=24, hidden_size=36))
        assert "hidden size is 24 and 36, the target's 24" in message

    def test_own_width_needs_an_own_embedding(self, tmp_path):
        config, tensors = eagle3(hidden_size=36, target_hidden_size=24)
        del tensors["embed_tokens.weight"]
        assert "missing (1): embed_tokens.weight (the head's hidden_size" in message_of(tmp_path, config, tensors)

    def test_everything_at_once(self, tmp_path):
        config, tensors = eagle3(taps=4, own_embedding_tensor=True)
        del tensors["midlayer.mlp.down_proj.weight"]
        tensors["midlayer.input_layernorm.bias"] = np.zeros(24, np.float32)
        tensors["norm.weight"] = np.zeros(25, np.float32)
        target = dataclasses.replace(TARGET, vocab_size=64)
        message = message_of(tmp_path, config, tensors, target)
        for part in (
            str(tmp_path),
            "missing (1): midlayer.mlp.down_proj.weight",
            "unexpected (1): midlayer.input_layernorm.bias",
            "norm.weight is [25], expected [24]",
            "vocab_size is 53",
            "4 taps",
        ):
            assert part in message


class TestDraftVocabulary:
    def test_difference_is_kept_as_stored(self, tmp_path):
        config, tensors = eagle3()
        _, params = load(tmp_path, config, tensors)
        assert params["d2t"].dtype == jnp.int32
        np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), params["d2t"] + np.arange(17))

    def test_absent_for_the_full_vocabulary(self, tmp_path):
        _, params = load(tmp_path, *eagle3(draft_vocab_size=53))
        np.testing.assert_array_equal(params["d2t"], np.zeros(53))

    def test_missing(self, tmp_path):
        config, tensors = eagle3()
        del tensors["d2t"]
        assert "missing (1): d2t" in message_of(tmp_path, config, tensors)

    def test_t2d_is_optional(self, tmp_path):
        config, tensors = eagle3()
        del tensors["t2d"]
        load(tmp_path, config, tensors)

    def test_t2d_of_another_training(self, tmp_path):
        config, tensors = eagle3()
        tensors["t2d"] = np.roll(tensors["t2d"], 1)
        assert "t2d marks other target ids than d2t reaches" in message_of(tmp_path, config, tensors)

    def test_both_tables_of_wrong_shape_are_named(self, tmp_path):
        config, tensors = eagle3()
        tensors["t2d"], tensors["d2t"] = np.append(tensors["t2d"], True), np.append(tensors["d2t"], 0)
        message = message_of(tmp_path, config, tensors)
        assert "misshaped (2): d2t is [18], expected [17], t2d is [54], expected [53]" in message

    def test_t2d_of_another_vocabulary(self, tmp_path):
        config, tensors = eagle3()
        tensors["t2d"] = np.append(tensors["t2d"], True)
        assert "t2d is [54], expected [53]" in message_of(tmp_path, config, tensors)

    def test_target_ids_instead_of_differences(self, tmp_path):
        config, tensors = eagle3()
        tensors["d2t"] = tensors["d2t"] + np.arange(17)
        assert "d2t" in message_of(tmp_path, config, tensors)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (eagle1, {"hidden_act": "relu"}, "hidden_act='relu'"),
        (eagle3, {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        (eagle3, {"sliding_window": 64, "use_sliding_window": True}, "sliding_window=64 is active"),
    ],
)
def test_refused(make, changes, message, tmp_path):
    assert message in message_of(tmp_path, *make(**changes))


def test_more_draft_tokens_than_the_target_has(tmp_path):
    config, tensors = eagle3()
    assert "draft_vocab_size=60 exceeds" in message_of(tmp_path, config | {"draft_vocab_size": 60}, tensors)


def test_a_second_layer_is_unexpected(tmp_path):
    config, tensors = eagle3(num_hidden_layers=2)
    with pytest.warns(UserWarning, match="num_hidden_layers is 2 and the file holds one layer"):
        load(tmp_path, config, tensors)
    tensors["layers.1.mlp.down_proj.weight"] = np.zeros((24, 40), np.float32)
    assert "unexpected (1): layers.1.mlp.down_proj.weight" in message_of(tmp_path, config, tensors)


def test_the_same_tensor_under_two_names(tmp_path):
    config, tensors = eagle3()
    tensors["model.norm.weight"] = tensors["norm.weight"]
    assert "two names" in message_of(tmp_path, config, tensors)


def test_a_target_is_no_head(golden):
    target = DecoderConfig(320, 128, 256, 8, 4, 2, 32)
    with pytest.raises(CheckpointError, match="holds a whole model and no draft head: load it with load_target"):
        load_head_checkpoint(golden / "target", target)
