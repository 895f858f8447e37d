"""The `speculators` package loads what is exported for it, drafts the same logits, and writes what is read here."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import eagle_jax
from eagle_jax.checkpoints import (
    export_head,
    load_head_checkpoint,
    read_target_config,
    read_target_embedding,
    save_target_checkpoint,
)
from eagle_jax.config import DecoderConfig, HeadConfig, RopeConfig
from eagle_jax.models.decoder import init_params
from eagle_jax.models.heads import EagleHead, init_head_params
from eagle_jax.packed import PackedTokens
from eagle_jax.training.unroll import unroll

DEMO = Path(eagle_jax.__file__).parent / "assets" / "demo"
LENGTH, STEPS = 12, 3
TARGET = DecoderConfig(
    vocab_size=53, hidden_size=24, intermediate_size=32, num_layers=9, num_heads=4, num_kv_heads=2, head_dim=6,
    max_position=128, rope=RopeConfig(5e3, "llama3", 8.0, 16, 1.0, 4.0),
)  # fmt: skip
LAYER = dataclasses.replace(
    TARGET, num_layers=1, num_heads=6, num_kv_heads=3, head_dim=8, rope=RopeConfig(3e3, "yarn", 4.0, 32)
)
HEAD = HeadConfig("eagle3", LAYER, 17, 24, (2, 4, 6))
VARIANTS = {
    "residual": dataclasses.replace(
        HEAD, norm_before_residual=True, norm_before_fc=True,
        layer=dataclasses.replace(LAYER, rope=TARGET.rope, qkv_bias=True, out_bias=True, mlp_bias=True),
    ),
    "eagle3.1": dataclasses.replace(HEAD, fc_norm=True, norm_output=True, taps=(1, 3, 5, 8), own_embedding=True),
    "qwen3": dataclasses.replace(HEAD, draft_vocab_size=53, layer=dataclasses.replace(LAYER, qk_norm=True)),
}  # fmt: skip


@pytest.fixture(scope="module")
def package():
    """`speculators`; its dependencies are pinned below the versions that this project is tested with."""
    pytest.importorskip(
        "speculators.models.eagle3",
        reason="needs `pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0` and `pip install "
        "pydantic-settings loguru openai datasets typer`",
    )
    import speculators

    return speculators


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def random_tree(init, config):
    """Random weights, of a size that keeps the logits of several steps near 1."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))

    def fill(path, leaf):
        centre = 1.0 if "scale" in str(path[-1]) else 0.0
        return jnp.asarray(centre + 0.2 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def random_head(config):
    params = random_tree(init_head_params, config)
    kept = np.sort(np.random.default_rng(1).choice(53, config.draft_vocab_size, replace=False))
    return params | {"d2t": jnp.asarray(kept - np.arange(config.draft_vocab_size), jnp.int32)}


@functools.partial(jax.jit, static_argnums=0)
def our_logits(config, head, embedding, features, tokens):
    """[STEPS, LENGTH, Vd] of the head on its own outputs, over the tokens that are there."""
    segments, positions = jnp.ones((1, LENGTH), jnp.int32), jnp.arange(LENGTH)[None]
    texts = PackedTokens(tokens=tokens[None], supervised=segments > 0, segments=segments, positions=positions)
    states = unroll(config, head, features[None], embedding[tokens][None], texts, STEPS)
    module = EagleHead(config)
    return jnp.stack([module.apply({"params": head}, state, method="logits")[0] for state in states])


def their_logits(model, features, tokens):
    """The same of the package: of every step of its training-time test."""
    import torch

    found = []
    hook = model.lm_head.register_forward_hook(lambda module, given, result: found.append(result[0].numpy()))
    following = np.append(tokens[1:], 0)  # the package pairs a feature with the token behind it
    with torch.no_grad():
        model(
            torch.from_numpy(features)[None],
            torch.from_numpy(following)[None],
            torch.zeros((1, LENGTH), dtype=torch.long),
            ttt_steps=STEPS,
        )
    hook.remove()
    return np.stack(found)


def load(package, directory):
    config = package.SpeculatorModelConfig.from_pretrained(str(directory))
    config.transformer_layer_config._attn_implementation = "eager"  # the other one wants multiples of 128 tokens
    return package.SpeculatorModel.from_pretrained(str(directory), config=config)


def inputs(config, vocab):
    rng = np.random.default_rng(2)
    features = rng.standard_normal((LENGTH, len(config.taps) * config.target_hidden_size)).astype(np.float32)
    return features, rng.integers(0, vocab, LENGTH)


def assert_same_logits(config, params, embedding, model):
    features, tokens = inputs(config, config.layer.vocab_size)
    head = params["head"]
    table = head["embed_tokens"]["embedding"] if config.own_embedding else embedding
    ours = our_logits(config, head, jnp.asarray(table), jnp.asarray(features), jnp.asarray(tokens))
    theirs = their_logits(model, features, tokens)
    # Row p of step k reads token p+1+k.
    for step, (our, their) in enumerate(zip(np.asarray(ours), theirs, strict=True)):
        rows = LENGTH - 1 - step
        assert np.abs(our[:rows]).max() > 0.5
        np.testing.assert_allclose(our[:rows], their[:rows], atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_same_logits(name, package, tmp_path):
    config = VARIANTS[name]
    params, target = random_head(config), random_tree(init_params, TARGET)
    save_target_checkpoint(TARGET, target, tmp_path / "target", "float32")
    embedding = target["embed_tokens"]["embedding"]
    options = {"verifier": str(tmp_path / "target"), "rope": "head", "embedding": embedding}
    export_head(config, params, TARGET, tmp_path / "head", "speculators", "float32", **options)
    model = load(package, tmp_path / "head")
    assert_same_logits(config, params, embedding, model)

    # What the package writes itself has the same tensors, and comes back as it went.
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (safetensors.numpy.load_file(tmp_path / who / "model.safetensors") for who in ("head", "theirs"))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert theirs[key].dtype == value.dtype
        np.testing.assert_array_equal(theirs[key], value)
    loaded, back = load_head_checkpoint(tmp_path / "theirs", TARGET, embedding=embedding)
    assert loaded == config
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_the_bundled_head(package, tmp_path):
    target = read_target_config(DEMO / "target")
    config, params = load_head_checkpoint(DEMO / "eagle3", target)
    embedding = read_target_embedding(DEMO / "target")
    options = {"verifier": str(DEMO / "target"), "embedding": embedding}
    export_head(config, params, target, tmp_path, "speculators", "float32", **options)
    model = load(package, tmp_path)
    assert model.config.eagle_aux_hidden_state_layer_ids == list(config.taps)
    assert_same_logits(config, params, embedding, model)
    np.testing.assert_array_equal(model.d2t.numpy(), params["d2t"])
