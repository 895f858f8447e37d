"""Tests exports with the `speculators` package: it loads them and drafts the same logits."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax.checkpoints import export_head, load_head_checkpoint, save_target_checkpoint
from eagle_jax.config import RopeConfig
from eagle_jax.models import EagleHead
from eagle_jax.packed import PackedTokens
from eagle_jax.training.unrolling import unroll
from tests.checkpoints import random_heads
from tests.checkpoints.common import assert_same, random_params

LENGTH, STEPS = 12, 3
TARGET = dataclasses.replace(random_heads.TARGET, rope=RopeConfig(5e3, "llama3", 8.0, 16, 1.0, 4.0))
YARN = {"rope": RopeConfig(3e3, "yarn", 4.0, 32)}
BIASES = {"rope": TARGET.rope, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
VARIANTS = {
    "residual": random_heads.head(BIASES, norm_before_residual=True, norm_before_fc=True),
    "eagle3.1": random_heads.head(YARN, fc_norm=True, norm_output=True, taps=(1, 3, 5, 8), own_embedding=True),
    "qwen3": random_heads.head(YARN | {"qk_norm": True}, draft_vocab_size=53),
}


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


def random_weights(config):
    """Random weights, of a size that keeps the logits of several steps near 1."""

    def fill(path, leaf):
        return leaf if leaf.dtype == jnp.int32 else 0.2 * leaf + (1.0 if "scale" in str(path[-1]) else 0.0)

    return jax.tree_util.tree_map_with_path(fill, random_params(config))


@functools.partial(jax.jit, static_argnums=0)
def our_logits(config, weights, embedding, features, tokens):
    """[STEPS, LENGTH, Vd] of the head on its own outputs, over given tokens."""
    segments, positions = jnp.ones((1, LENGTH), jnp.int32), jnp.arange(LENGTH)[None]
    texts = PackedTokens(tokens=tokens[None], supervised=segments > 0, segments=segments, positions=positions)
    states = unroll(config, weights, features[None], embedding[tokens][None], texts, STEPS)
    module = EagleHead(config)
    return jnp.stack([module.apply({"params": weights}, state, method="logits")[0] for state in states])


def their_logits(model, features, tokens):
    """[STEPS, LENGTH, Vd] of the package, of every step of its training-time test."""
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


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "residual")) for n in VARIANTS])
def test_the_package_computes_the_same_logits(name, package, tmp_path):
    config = VARIANTS[name]
    params, target = random_weights(config), random_weights(TARGET)
    save_target_checkpoint(TARGET, target, tmp_path / "target", "float32")
    embedding = target["embed_tokens"]["embedding"]
    options = {"verifier": str(tmp_path / "target"), "rope": "head", "embedding": embedding}
    export_head(config, params, TARGET, tmp_path / "head", "speculators", "float32", **options)
    model = load(package, tmp_path / "head")
    rng = np.random.default_rng(2)
    features = rng.standard_normal((LENGTH, len(config.taps) * config.target_hidden_size)).astype(np.float32)
    tokens = rng.integers(0, config.layer.vocab_size, LENGTH)
    weights = params["head"]
    table = weights["embed_tokens"]["embedding"] if config.own_embedding else embedding
    ours = our_logits(config, weights, table, jnp.asarray(features), jnp.asarray(tokens))
    # Row p of step k reads token p+1+k.
    for step, (our, their) in enumerate(zip(np.asarray(ours), their_logits(model, features, tokens), strict=True)):
        rows = LENGTH - 1 - step
        assert np.abs(our[:rows]).max() > 0.5
        np.testing.assert_allclose(our[:rows], their[:rows], atol=1e-4)

    # The package writes the same tensors, and they load as the same head.
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (safetensors.numpy.load_file(tmp_path / who / "model.safetensors") for who in ("head", "theirs"))
    assert_same(ours, theirs)
    assert {key: value.dtype for key, value in ours.items()} == {key: value.dtype for key, value in theirs.items()}
    loaded, back = load_head_checkpoint(tmp_path / "theirs", TARGET, embedding=embedding)
    assert loaded == config
    assert_same(back, params)
