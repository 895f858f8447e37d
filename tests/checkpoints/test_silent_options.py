"""Options of a config.json that would change logits or drafts: refused by name, or reported with what is used."""

from __future__ import annotations

import contextlib
import json
import warnings

import jax
import pytest

from eagle_jax.checkpoints import (
    CheckpointError,
    load_head_checkpoint,
    load_medusa_checkpoint,
    load_target_checkpoint,
    save_medusa_checkpoint,
    save_target_checkpoint,
)
from eagle_jax.checkpoints.targets.config import decoder_config
from eagle_jax.checkpoints.targets.gpt2 import gpt2_config
from eagle_jax.config import MedusaConfig
from eagle_jax.models.medusa import init_medusa_params
from tests.checkpoints.random_heads import TARGET, eagle1, eagle3, write
from tests.checkpoints.test_config_values import GPT2
from tests.checkpoints.test_hf_config import LLAMA, MISTRAL, QWEN2, QWEN3
from tests.checkpoints.test_target_files import CONFIG, edit_json, random_params


@contextlib.contextmanager
def quiet():
    """Turns every warning into an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class TestSwitchesThatActByBeingOff:
    """`transformers` attends in both directions where `is_causal` is false, null or zero."""

    @pytest.mark.parametrize("value", [False, None, 0, "false"])
    @pytest.mark.parametrize("family", [LLAMA, MISTRAL | {"sliding_window": None}, QWEN2, QWEN3])
    def test_targets(self, family, value):
        with pytest.raises(CheckpointError, match=f"^config.json: is_causal must be true or absent, got {value!r}"):
            decoder_config(family | {"is_causal": value}, "config.json")
        with quiet():
            decoder_config(family | {"is_causal": True}, "config.json")

    def test_gpt2(self):
        with pytest.raises(CheckpointError, match="is_causal must be true or absent, got False"):
            gpt2_config(GPT2 | {"is_causal": False}, "config.json")

    @pytest.mark.parametrize("make", [eagle1, eagle3])
    @pytest.mark.parametrize("key", ["is_causal", "use_rope"])
    def test_heads(self, make, key, tmp_path):
        with pytest.raises(CheckpointError, match=f"{key} must be true or absent, got False"):
            load_head_checkpoint(write(tmp_path, *make(**{key: False})), TARGET)

    def test_medusa(self, tmp_path):
        with pytest.raises(CheckpointError, match="is_causal must be true or absent, got False"):
            load_medusa(tmp_path, "medusa", is_causal=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1.0}, r"num_hidden_layers must be a positive integer, got 1\.0"),
        ({"num_hidden_layers": "1"}, "num_hidden_layers must be a positive integer, got '1'"),
        ({"parallel_drafting": True}, "parallel_drafting must be false or absent, got True"),
        ({"ptd_token_id": 0}, "ptd_token_id must be null or absent, got 0"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers must be 0 or absent, got 1"),
        ({"block_size": 16}, "block_size must be null or absent, got 16"),
        ({"eagle_config": {"block_size": 16}}, r"eagle_config\.block_size must be null or absent, got 16"),
    ],
)
def test_an_option_of_another_kind_of_head_is_refused(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load_head_checkpoint(write(tmp_path, *eagle3(**changes)), TARGET)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (eagle3, {"tie_word_embeddings": True}, r"tie_word_embeddings is true and .* an lm_head of its own.*uses the"),
        (eagle3, {"num_hidden_layers": 32}, "num_hidden_layers is 32 and the file holds one layer: uses the one"),
        (eagle1, {"num_hidden_layers": 2}, "num_hidden_layers is 2 and the file holds one layer: uses the one"),
    ],
)
def test_a_head_that_contradicts_its_file_is_reported(make, changes, message, tmp_path):
    with pytest.warns(UserWarning, match=message):
        load_head_checkpoint(write(tmp_path, *make(**changes)), TARGET)


def load_medusa(path, kind, *, prefixed=False, **changes):
    """Saves random heads, edits their config.json, and loads them."""
    prefix = TARGET.one_layer(tie_word_embeddings=False) if prefixed else None
    config = MedusaConfig(kind, TARGET.hidden_size, TARGET.vocab_size, 2, 1, prefix)
    save_medusa_checkpoint(config, init_medusa_params(config, jax.random.key(0)), path, "float32")
    edit_json(path / "config.json", **changes)
    return load_medusa_checkpoint(path, TARGET)[0]


@pytest.mark.parametrize(("prefixed", "stated"), [(True, "mlp"), (False, "prefix-mlp")])
def test_the_file_decides_on_hydras_prefix_layer(prefixed, stated, tmp_path):
    with pytest.warns(UserWarning, match=f"hydra_head_arch is '{stated}' and .*holds .*prefix layer: uses the file's"):
        config = load_medusa(tmp_path, "hydra", prefixed=prefixed, hydra_head_arch=stated)
    assert (config.prefix is not None) == prefixed


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("hydra", {"hydra_head_arch": "eagle-attn"}, "hydra_head_arch must be mlp or prefix-mlp, got 'eagle-attn'"),
        ("hydra", {"hydra_head_arch": 3}, "hydra_head_arch must be a string, got 3"),
        ("medusa", {"vocab_size": 54}, "vocab_size must be 53, as the target's, got 54"),
        ("medusa", {"hidden_size": 32}, "hidden_size must be 24, as the target's, got 32"),
        ("hydra", {"hidden_size": "24"}, "hidden_size must be a positive integer, got '24'"),
    ],
)
def test_medusa_options_that_contradict_are_refused(kind, changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        load_medusa(tmp_path, kind, **changes)


def test_medusa_sizes_of_the_target_are_read_without_a_word(tmp_path):
    with quiet():
        load_medusa(tmp_path / "1", "medusa", vocab_size=53, hidden_size=24)
        load_medusa(tmp_path / "2", "hydra", hydra_head_arch=None)
        load_medusa(tmp_path / "3", "hydra", prefixed=True)


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"rope_scaling": LINEAR | {"type": "dynamic"}}, "linear", r"type='dynamic' and rope_type=.linear.: uses"),
        ({"rope_parameters": LINEAR | {"type": "yarn"}}, "linear", r"type='yarn' and rope_type=.linear.: uses"),
        (
            {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 4.0}}, "linear",
            "rope_scaling and rope_parameters differ: uses rope_scaling, as transformers does",
        ),
        (
            {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "linear",
            "rope_scaling and rope_parameters differ: uses rope_scaling",
        ),
    ],
)  # fmt: skip
def test_contradictions_of_rope(changes, kind, message):
    with pytest.warns(UserWarning, match=message):
        assert decoder_config(LLAMA | changes, "config.json").rope.kind == kind


def test_rope_under_two_names_is_read_without_a_word():
    with quiet():
        parameters = LINEAR | {"type": "linear", "rope_theta": 1e4}
        decoder_config(LLAMA | {"rope_scaling": LINEAR, "rope_parameters": parameters}, "config.json")
        decoder_config(LLAMA | {"rope_scaling": None, "rope_parameters": parameters}, "config.json")


@pytest.mark.parametrize("value", [None, ...])
def test_key_value_heads_that_are_null_are_named(value, tmp_path):
    save_target_checkpoint(CONFIG, random_params(), tmp_path / "target", "float32")
    edit_json(tmp_path / "target" / "config.json", num_key_value_heads=value)
    assert CONFIG.num_kv_heads != CONFIG.num_heads
    message = "num_key_value_heads is {}, which means {}, and the tensors hold {}"
    stated = "null" if value is None else "absent"
    with pytest.raises(CheckpointError, match=message.format(stated, CONFIG.num_heads, CONFIG.num_kv_heads)):
        load_target_checkpoint(tmp_path / "target")
    head = write(tmp_path / "head", *eagle3())
    edit_json(head / "config.json", num_key_value_heads=value)
    with pytest.raises(CheckpointError, match=message.format(stated, 6, 3)):
        load_head_checkpoint(head, TARGET)


def test_what_the_bundled_heads_say_is_read_without_a_word(tmp_path):
    config, tensors = eagle3(parallel_drafting=False, block_size=None, tie_word_embeddings=False, is_causal=True)
    with quiet():
        load_head_checkpoint(write(tmp_path, json.loads(json.dumps(config)), tensors), TARGET)
