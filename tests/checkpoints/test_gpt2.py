"""Tests GPT-2: the first files of OpenAI, and text up to the last learned position."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import eagle_jax
from eagle_jax import HeadConfig, Target, TreeConfig
from eagle_jax.checkpoints import CheckpointError, load_target_checkpoint, save_target_checkpoint
from eagle_jax.models import init_head_params, init_params
from tests.checkpoints.common import GPT2, assert_same, edit_json, edit_tensors, random_params
from tests.models import random_prompts


def test_the_first_files_of_openai_load(tmp_path):
    params = random_params(GPT2)
    save_target_checkpoint(GPT2, params, tmp_path, "float32")

    def bare(tensors):
        assert "transformer.h.1.attn.c_attn.weight" in tensors
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 48, 48), bool)
        tensors["lm_head.weight"] = tensors["wte.weight"]

    edit_tensors(tmp_path / "model.safetensors", bare)
    edit_json(tmp_path / "config.json", n_embd=..., hidden_size=16)
    config, loaded = load_target_checkpoint(tmp_path)
    assert config == GPT2
    assert_same(loaded, params)
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.pop("h.1.attn.c_attn.weight"))
    with pytest.raises(CheckpointError, match=r"missing \(3\): transformer\.h\.1\.attn\.c_attn/k_proj\.weight"):
        load_target_checkpoint(tmp_path)


def model(config, seed):
    """A target with random weights under which the argmax varies."""
    noise, fresh = random_params(config, seed), init_params(config, jax.random.key(seed))
    return Target.from_params(config, jax.tree.map(lambda leaf, more: 3 * leaf + 0.3 * more, fresh, noise))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "temperature"), [("small", 0.0), ("eagle3", 1.0)])
def test_text_equals_plain_decoding_up_to_the_last_position(kind, temperature):
    """Drafted tokens beyond the learned positions do not change the text."""
    short = dataclasses.replace(GPT2, max_position=24, num_layers=1)
    target, tree = model(short, 0), TreeConfig(depth=3, top_k=2, num_nodes=6)
    if kind == "small":
        drafter = eagle_jax.SmallModel.from_model(target, model(short, 5), tree)
    else:
        config = HeadConfig("eagle3", GPT2.one_layer(tie_word_embeddings=False), 12, 16, (0, 1, 1))
        head = init_head_params(config, jax.random.key(7))
        drafter = eagle_jax.DraftHead.from_params(config, head, target, tree)
    prompts = random_prompts([5, 9, 1], 12)
    run = {"max_new_tokens": [19, 15, 23], "eos_ids": (), "temperature": temperature, "key": 1}
    out = eagle_jax.generate(target, drafter, prompts, **run)
    assert out.tokens == eagle_jax.generate(target, None, prompts, **run).tokens
    assert out.tau > 1
