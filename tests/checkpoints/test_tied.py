"""Tests `tie_word_embeddings` against the tensors of the file, which decide as in `transformers`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from eagle_jax.checkpoints import CheckpointError, load_target_checkpoint, save_target_checkpoint
from tests.checkpoints.common import CONFIG, GPT2, assert_same, edit_json, edit_tensors, quiet, random_params

UNTIED = r"tie_word_embeddings is true and model\.safetensors holds an lm_head\.weight that differs"


@pytest.fixture(params=[CONFIG, GPT2], ids=["llama", "gpt2"])
def model(request, tmp_path):
    """A directory whose config.json says tied, its embedding's name and its parameters."""
    config = dataclasses.replace(request.param, tie_word_embeddings=True)
    params = random_params(config)
    save_target_checkpoint(config, params, tmp_path / "model", "float32")
    name = "transformer.wte.weight" if config.block == "gpt2" else "model.embed_tokens.weight"
    return tmp_path / "model", name, params


def add_lm_head(path, change):
    edit_tensors(path / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": change(tensors)}))


def test_an_lm_head_that_differs_is_loaded(model):
    path, _, params = model
    own = np.random.default_rng(1).standard_normal(params["embed_tokens"]["embedding"].shape).astype(np.float32)
    add_lm_head(path, lambda tensors: own)
    for layers in (True, False):
        with pytest.warns(UserWarning, match=UNTIED):
            config, loaded = load_target_checkpoint(path, layers=layers)
        assert not config.tie_word_embeddings and ("layers_0" in loaded) == layers
        np.testing.assert_array_equal(loaded["lm_head"]["kernel"], own.T)


def test_an_lm_head_that_is_equal_in_the_loaded_dtype_is_tied(model):
    """`transformers` compares loaded weights: rounding alone does not untie."""
    path, embedding, params = model
    add_lm_head(path, lambda tensors: tensors[embedding])
    with quiet():
        assert_same(load_target_checkpoint(path)[1], params)
    add_lm_head(path, lambda tensors: tensors[embedding] * np.float32(1 + 1e-6))
    with pytest.warns(UserWarning, match=UNTIED):
        load_target_checkpoint(path)
    with quiet():
        load_target_checkpoint(path, "bfloat16")


def test_an_lm_head_that_is_missing_or_of_another_size_is_an_error(model):
    path, embedding, _ = model
    add_lm_head(path, lambda tensors: tensors[embedding][:-1])
    with (
        pytest.warns(UserWarning, match=UNTIED),
        pytest.raises(CheckpointError, match=r"lm_head\.weight is \[\d+, \d+\], expected"),
    ):
        load_target_checkpoint(path)
    edit_tensors(path / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    edit_json(path / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing \(1\): lm_head\.weight"):
        load_target_checkpoint(path)
