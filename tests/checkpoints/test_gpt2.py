"""GPT-2's files: both spellings of their names, what is refused, and text up to the last learned position."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import eagle_jax
from eagle_jax import ConfigError, DecoderConfig, HeadConfig, RopeConfig, Target, TreeConfig
from eagle_jax.checkpoints import CheckpointError, load_target_checkpoint, read_target_embedding, save_target_checkpoint
from eagle_jax.models.decoder import init_params
from eagle_jax.models.heads import init_head_params
from tests.models import random_prompts

CONFIG = DecoderConfig(
    vocab_size=12, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=4,
    rope=RopeConfig(kind="none"), max_position=48, block="gpt2", qkv_bias=True, out_bias=True, mlp_bias=True,
    tie_word_embeddings=True, eos_ids=(3,), bos_id=3, architecture="GPT2LMHeadModel",
)  # fmt: skip


def params(seed=0, config=CONFIG):
    leaves, form = jax.tree.flatten(init_params(config, jax.random.key(seed)))
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    return jax.tree.unflatten(
        form, [3 * leaf + 0.3 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    )


def test_what_is_saved_is_loaded_again(tmp_path):
    saved = params()
    save_target_checkpoint(CONFIG, saved, tmp_path, "float32")
    config, loaded = load_target_checkpoint(tmp_path)
    assert config == CONFIG
    assert jax.tree.structure(loaded) == jax.tree.structure(saved)
    jax.tree.map(np.testing.assert_array_equal, loaded, saved)
    np.testing.assert_array_equal(read_target_embedding(tmp_path), saved["embed_tokens"]["embedding"])


def test_files_without_prefix_and_with_masks(tmp_path):
    """Those that OpenAI published."""
    save_target_checkpoint(CONFIG, params(), tmp_path, "float32")
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert "transformer.h.1.attn.c_attn.weight" in tensors
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {"h.0.attn.bias": np.ones((1, 1, 48, 48), bool), "lm_head.weight": bare["wte.weight"]}
    safetensors.numpy.save_file(bare, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_target_checkpoint(tmp_path)[1], params())
    np.testing.assert_array_equal(read_target_embedding(tmp_path), bare["wte.weight"])
    del bare["h.1.attn.c_attn.weight"]
    safetensors.numpy.save_file(bare, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing \(3\): transformer\.h\.1\.attn\.c_attn\.weight/"):
        load_target_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "relu"}, "activation_function='relu' is not supported, only 'gelu_new'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        ({"n_head": 5}, "n_embd=16 is not a multiple of n_head=5"),
        ({"n_layer": None}, "n_layer must be a positive integer, got None"),
        ({"n_head": 16}, "head_dim must be even, got 1"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, change, message):
    save_target_checkpoint(CONFIG, params(), tmp_path, "float32")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(CheckpointError, match=message):
        load_target_checkpoint(tmp_path)


def test_shapes_that_gpt2_does_not_have(tmp_path):
    save_target_checkpoint(CONFIG, params(), tmp_path / "model", "float32")
    with pytest.raises(CheckpointError, match=r"the 48 learned positions of .* cannot be cut"):
        load_target_checkpoint(tmp_path / "model", max_position=20)
    bare = dataclasses.replace(CONFIG, mlp_bias=False)
    with pytest.raises(CheckpointError, match="must have biases in every projection"):
        save_target_checkpoint(bare, params(config=bare), tmp_path / "other", "float32")
    with pytest.raises(ConfigError, match="rope.kind must be 'none' for block 'gpt2' only"):
        dataclasses.replace(CONFIG, rope=RopeConfig())


@pytest.mark.parametrize("kind", ["small", "eagle3", "lookahead"])
def test_text_is_that_of_plain_decoding_up_to_the_last_position(kind):
    """Drafted rows there stand beyond the learned positions; they must change nothing."""
    target = Target.from_params(CONFIG, params())
    if kind == "small":
        small = dataclasses.replace(CONFIG, num_layers=1)
        model = Target.from_params(small, params(5, small))
        drafter = eagle_jax.SmallModel.bind(target, model, TreeConfig(depth=4, top_k=3, num_nodes=12))
    elif kind == "lookahead":
        drafter = eagle_jax.lookahead(target, ngram=3, window=4, guesses=3)
    else:
        config = HeadConfig("eagle3", CONFIG.one_layer(tie_word_embeddings=False), 12, 16, (0, 1, 2))
        head = init_head_params(config, jax.random.key(7))
        head["head"] = jax.tree.map(lambda leaf: 4 * leaf, head["head"])
        drafter = eagle_jax.DraftHead.from_params(config, head, target, TreeConfig(depth=4, top_k=3, num_nodes=12))
    prompts = random_prompts([5, 20, 1], 12)
    run = {"max_new_tokens": [43, 28, 47], "eos_ids": ()}
    for temperature in (0.0, 1.0):
        plain = eagle_jax.generate(target, None, prompts, temperature=temperature, key=1, **run)
        out = eagle_jax.generate(target, drafter, prompts, temperature=temperature, key=1, **run)
        assert out.tokens == plain.tokens
        assert out.tau > 1 or temperature > 0
        assert all(np.isfinite(row).all() for row in out.accepted)
    width = 48
    text = jnp.asarray([prompts[2] + plain.tokens[2]])
    causal = jnp.tril(jnp.ones((width, width), bool))
    logits = target.fn.logits(
        target.params, target.fn.forward(target.params, text, jnp.arange(width)[None], causal, None).hidden
    )
    assert np.isfinite(np.asarray(logits)).all()
