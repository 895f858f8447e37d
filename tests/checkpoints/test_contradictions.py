"""Facts that stand in two places of a checkpoint: compared, and settled as `transformers` does or refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import eagle_jax
from eagle_jax.checkpoints import (
    CheckpointError,
    load_head_checkpoint,
    load_medusa_checkpoint,
    load_target_checkpoint,
    read_target_embedding,
    save_medusa_checkpoint,
    save_target_checkpoint,
)
from eagle_jax.checkpoints.targets.config import decoder_config
from eagle_jax.config import MedusaConfig
from eagle_jax.models.medusa import init_medusa_params
from tests.checkpoints.random_heads import TARGET, eagle1, eagle3, write
from tests.checkpoints.test_gpt2 import CONFIG as GPT2
from tests.checkpoints.test_gpt2 import params as gpt2_params
from tests.checkpoints.test_hf_config import LLAMA, QWEN2
from tests.checkpoints.test_target_files import CONFIG, assert_same, edit_json, edit_tensors, random_params
from tests.models import tiny_target

UNTIED = r"tie_word_embeddings is true and model\.safetensors holds an lm_head\.weight that differs"


@contextlib.contextmanager
def quiet():
    """Turns every warning into an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class TestTied:
    """`tie_word_embeddings` of config.json against the tensors of the file."""

    @pytest.fixture(params=["llama", "gpt2"])
    def model(self, request, tmp_path):
        """A directory whose config.json says tied, its embedding's name and its parameters."""
        config, params = (GPT2, gpt2_params()) if request.param == "gpt2" else (CONFIG, random_params())
        tied = dataclasses.replace(config, tie_word_embeddings=True)
        params = {name: value for name, value in params.items() if name != "lm_head"}
        save_target_checkpoint(tied, params, tmp_path, "float32")
        name = "transformer.wte.weight" if request.param == "gpt2" else "model.embed_tokens.weight"
        return tmp_path, name, params

    def test_a_trained_lm_head_is_used(self, model):
        path, embedding, params = model
        own = np.random.default_rng(1).standard_normal(params["embed_tokens"]["embedding"].shape).astype(np.float32)
        edit_tensors(path / "model.safetensors", lambda t: t.update({"lm_head.weight": own}))
        for layers in (True, False):
            with pytest.warns(UserWarning, match=UNTIED):
                config, loaded = load_target_checkpoint(path, layers=layers)
            assert not config.tie_word_embeddings
            np.testing.assert_array_equal(loaded["lm_head"]["kernel"], own.T)
        with pytest.warns(UserWarning, match=UNTIED):
            _, loaded = load_target_checkpoint(path, place=lambda _, host: jnp.asarray(host))
        np.testing.assert_array_equal(loaded["lm_head"]["kernel"], own.T)
        np.testing.assert_array_equal(read_target_embedding(path), params["embed_tokens"]["embedding"])
        save_target_checkpoint(config, loaded, path.parent / "again", "float32")
        with quiet():
            again, reloaded = load_target_checkpoint(path.parent / "again")
        assert again == config
        assert_same(reloaded, loaded)
        assert embedding in safetensors.numpy.load_file(path.parent / "again" / "model.safetensors")

    def test_a_copy_is_tied_without_a_word(self, model):
        path, embedding, params = model
        edit_tensors(path / "model.safetensors", lambda t: t.update({"lm_head.weight": t[embedding]}))
        with quiet():
            config, loaded = load_target_checkpoint(path)
        assert config.tie_word_embeddings
        assert_same(loaded, params)

    def test_one_last_row_that_differs(self, model):
        path, embedding, _ = model

        def edit(tensors):
            tensors["lm_head.weight"] = tensors[embedding].copy()
            tensors["lm_head.weight"][-1, -1] += 1

        edit_tensors(path / "model.safetensors", edit)
        with pytest.warns(UserWarning, match=UNTIED):
            assert not load_target_checkpoint(path)[0].tie_word_embeddings

    def test_an_lm_head_in_place_of_the_embedding(self, model):
        """`transformers` ties in either direction."""
        path, embedding, params = model
        edit_tensors(path / "model.safetensors", lambda t: t.update({"lm_head.weight": t.pop(embedding)}))
        with quiet():
            assert_same(load_target_checkpoint(path)[1], params)
        np.testing.assert_array_equal(read_target_embedding(path), params["embed_tokens"]["embedding"])

    def test_neither_is_named(self, model):
        path, embedding, _ = model
        edit_tensors(path / "model.safetensors", lambda t: t.pop(embedding))
        with pytest.raises(CheckpointError, match=rf"missing \(1\): {embedding}"):
            load_target_checkpoint(path)

    def test_untied_without_an_lm_head_is_named(self, model):
        path, _, _ = model
        edit_json(path / "config.json", tie_word_embeddings=False)
        with pytest.raises(CheckpointError, match=r"missing \(1\): lm_head\.weight"):
            load_target_checkpoint(path)

    def test_an_lm_head_of_another_size(self, model):
        path, embedding, _ = model
        edit_tensors(path / "model.safetensors", lambda t: t.update({"lm_head.weight": t[embedding][:-1]}))
        with (
            pytest.warns(UserWarning, match=UNTIED),
            pytest.raises(CheckpointError, match=r"lm_head\.weight is \[\d+, \d+\], expected"),
        ):
            load_target_checkpoint(path)

    def test_in_a_torch_file(self, model):
        torch = pytest.importorskip("torch", reason="needs torch: pip install eagle-jax[test]")
        path, embedding, params = model
        tensors = {name: torch.tensor(t) for name, t in safetensors.numpy.load_file(path / "model.safetensors").items()}
        (path / "model.safetensors").unlink()
        torch.save(tensors | {"lm_head.weight": tensors[embedding]}, path / "pytorch_model.bin")
        with quiet():
            assert_same(load_target_checkpoint(path)[1], params)
        torch.save(tensors | {"lm_head.weight": tensors[embedding] + 1}, path / "pytorch_model.bin")
        with pytest.warns(UserWarning, match=UNTIED.replace(r"model\.safetensors", r"pytorch_model\.bin")):
            assert "lm_head" in load_target_checkpoint(path)[1]

    def test_the_comparison_is_in_the_dtype_of_the_model(self, model):
        """As in `transformers`, which compares what it has loaded: rounding alone does not untie."""
        path, embedding, _ = model
        edit_tensors(
            path / "model.safetensors", lambda t: t.update({"lm_head.weight": t[embedding] * np.float32(1 + 1e-6)})
        )
        with pytest.warns(UserWarning, match=UNTIED):
            load_target_checkpoint(path)
        with quiet():
            load_target_checkpoint(path, "bfloat16")


class TestMedusa:
    """`medusa_num_heads` and `hydra_num_heads` against the file."""

    @pytest.mark.parametrize("kind", ["medusa", "hydra"])
    @pytest.mark.parametrize(("part", "stored"), [("heads", 3), ("layers", 2)])
    @pytest.mark.parametrize("named", [1, 5])
    def test_the_file_is_counted(self, kind, part, stored, named, tmp_path):
        config = MedusaConfig(kind, 16, 12, num_heads=3, num_layers=2)
        params = init_medusa_params(config, jax.random.key(0))
        save_medusa_checkpoint(config, params, tmp_path, "float32")
        edit_json(tmp_path / "config.json", **{f"{kind}_num_{part}": named})
        message = rf"{kind}_num_{part} is {named}, and {kind}_lm_head\.safetensors holds {stored}: uses the file's"
        with pytest.warns(UserWarning, match=message):
            again, loaded = load_medusa_checkpoint(tmp_path, tiny_target().config)
        assert again == config
        assert_same(loaded, params)

    def test_the_public_function(self, tmp_path):
        config = MedusaConfig("medusa", 16, 12, num_heads=3)
        save_medusa_checkpoint(config, init_medusa_params(config, jax.random.key(0)), tmp_path, "float32")
        edit_json(tmp_path / "config.json", medusa_num_heads=2)
        with pytest.warns(UserWarning, match="medusa_num_heads is 2"):
            assert eagle_jax.load_medusa(tmp_path, tiny_target()).tree.depth == 3


def load(tmp_path, head, target=TARGET, **kwargs):
    return load_head_checkpoint(write(tmp_path, *head), target, **kwargs)


LAYER_TYPES = {"sliding_window": 64, "layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 64, "use_sliding_window": True}, "sliding_window=64 is active"),
        (LAYER_TYPES, "sliding_window=64 is active"),
        ({"layer_types": ["linear_attention"]}, "layer_types must be full_attention or sliding_attention"),
        ({"embedding_multiplier": 12.0}, r"embedding_multiplier must be 1 or absent, got 12\.0"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping must be absent, got 50\.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
        ({"eagle_config": {"use_last_layernorm": False}}, r"eagle_config\.use_last_layernorm must be true or absent"),
        ({"parallel_draft_step": 4}, "parallel_draft_step must be 1 or absent, got 4"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state must be true or absent, got False"),
        ({"architectures": ["PEagleDraftModel"]}, "PEagleDraftModel drafts all tokens in one pass"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4, and there are 3 taps"),
    ],
)
def test_an_option_that_changes_the_drafts_is_refused(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, eagle3(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 64}, "sliding_window=64 has no effect here"),
        ({"use_fancy_gate": True, "logit_scaling": 0.5}, r"use_fancy_gate=True, logit_scaling=0\.5: unknown"),
        ({"eagle_config": {"use_fancy_gate": 1}}, r"eagle_config\.use_fancy_gate=1: unknown"),
        (
            {"speculators_config": {"verifier": {"name_or_path": "a/b", "architectures": ["Qwen3ForCausalLM"]}}},
            "trained for Qwen3ForCausalLM a/b, and this target is a LlamaForCausalLM",
        ),
        ({"target_model_type": "gemma3_text"}, "trained for a target of type gemma3_text"),
    ],
)
def test_an_option_of_unknown_effect_is_reported(changes, message, tmp_path):
    with pytest.warns(UserWarning, match=message):
        load(tmp_path, eagle3(**changes))


def test_what_published_heads_say_is_read_without_a_word(tmp_path):
    """Keys of the heads of SpecForge, NVIDIA and RedHat, at the values of a plain head."""
    changes = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0,
        "head_dim": None, "initializer_range": 0.02, "pretraining_tp": 1, "tie_word_embeddings": False,
        "rope_scaling": None, "sliding_window": 32, "use_sliding_window": False, "max_window_layers": 48,
        "torch_dtype": "bfloat16", "transformers_version": "4.53.2", "use_cache": True, "target_model_type": "llama",
        "norm_before_residual": False, "norm_output": None, "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": None, "num_aux_hidden_states": 3, "layer_types": ["full_attention"],
        "eagle_config": {
            "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [], "use_mtp_layernorm": False,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "next_layer_regular": True,
            "parallel_draft_step": 1,
        },
    }  # fmt: skip
    config, tensors = eagle3(**changes)
    with quiet():
        assert load(tmp_path, (config | {"target_hidden_size": None}, tensors))[0].taps == (2, 4, 6)


def test_the_draft_vocabulary_is_counted_where_the_config_has_none(tmp_path):
    config, tensors = eagle3()
    del config["draft_vocab_size"]
    assert load(tmp_path, (config, tensors))[0].draft_vocab_size == 17
    with pytest.raises(CheckpointError, match=r"d2t is \[17\], expected \[18\]"):
        load(tmp_path, (config | {"draft_vocab_size": 18}, tensors))


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_a_vocabulary_table_of_floats_is_named(name, tmp_path):
    config, tensors = eagle3()
    tensors[name] = tensors[name].astype(np.float32)
    with pytest.raises(CheckpointError, match=f"{name} is stored as float32, expected integers"):
        load(tmp_path, (config, tensors))


def test_an_lm_head_beside_an_eagle1_head(tmp_path):
    """It drafts through its target's: another one is reported, a copy is not."""
    config, tensors = eagle1()
    own = np.random.default_rng(3).standard_normal((53, 24)).astype(np.float32)
    head = (config, tensors | {"lm_head.weight": own})
    with quiet():
        load(tmp_path, head, lm_head=jnp.asarray(own.T))
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from the target's lm_head and is not used"):
        load(tmp_path, head, lm_head=jnp.asarray(own.T + 1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (LLAMA | {"logits_scaling": 8.0}, r"logits_scaling must be 1 or absent, got 8\.0"),
        (LLAMA | {"attention_multiplier": 0.015625}, "attention_multiplier must be absent, got 0.015625"),
        (LLAMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping must be absent"),
        (LLAMA | {"attention_sinks": True}, "attention_sinks must be absent, got True"),
        (LLAMA | {"rope_interleaved": True}, "rope_interleaved must be absent, got True"),
        (
            QWEN2 | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types must be",
        ),
        (QWEN2 | {"layer_types": ["full_attention"]}, ".*for each of the 3 layers"),
    ],
)
def test_a_target_with_features_that_no_decoder_has(values, message):
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        decoder_config(values, "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_fancy_gate": True}, "use_fancy_gate=True: unknown and ignored"),
        ({"sliding_window": 64}, "sliding_window=64 has no effect on a LlamaForCausalLM"),
        ({"model_type": "mistral", "sliding_window": None}, "architectures names LlamaForCausalLM and model_type='mi"),
        (
            {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 5.0}},
            "rope_theta=7.0 and 5 inside the RoPE",
        ),
    ],
)
def test_a_contradiction_that_transformers_settles(changes, message):
    with pytest.warns(UserWarning, match=message):
        decoder_config(LLAMA | changes, "config.json")


def test_neutral_values_are_read_without_a_word():
    neutral = {"embedding_multiplier": 1.0, "residual_multiplier": 1, "logits_scaling": 1.0, "rope_interleaved": False}
    with quiet():
        decoder_config(LLAMA | neutral | {"attention_sinks": None, "no_rope_layers": []}, "config.json")


def test_sizes_of_gpt2_under_two_names(tmp_path):
    save_target_checkpoint(GPT2, gpt2_params(), tmp_path, "float32")
    edit_json(tmp_path / "config.json", n_embd=..., hidden_size=16)
    assert load_target_checkpoint(tmp_path)[0] == GPT2
    edit_json(tmp_path / "config.json", n_embd=16, hidden_size=18)
    with pytest.raises(CheckpointError, match="hidden_size must be n_embd=16, which is the same size, got 18"):
        load_target_checkpoint(tmp_path)


@pytest.mark.parametrize("file", [None, 3, ["model.safetensors"]])
def test_an_index_that_names_no_files(file, tmp_path):
    save_target_checkpoint(CONFIG, random_params(), tmp_path, "float32", max_shard_bytes=3000)
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="no 'weight_map' of tensors to files"):
        load_target_checkpoint(tmp_path)
