"""Random heads in memory, and their way into the layouts of other engines."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoints import (
    CheckpointError,
    export_head,
)
from eagle_jax.config import HeadConfig, RopeConfig
from eagle_jax.models.heads import init_head_params
from tests.checkpoints.random_heads import TARGET

LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 64, 1.0, 4.0)
LAYER = dataclasses.replace(
    TARGET, num_layers=1, intermediate_size=20, num_heads=6, num_kv_heads=3, head_dim=8, eos_ids=(3,), bos_id=1
)
HEAD = HeadConfig("eagle3", LAYER, 17, 24, (2, 4, 6))
EMBEDDING = np.arange(53 * 24, dtype=np.float32).reshape(53, 24) % 7
EAGLE1 = HeadConfig("eagle1", LAYER, 53, 24, (9,), fc_bias=True)
VARIANTS = {
    "plain": HEAD,
    "norms": dataclasses.replace(HEAD, fc_norm=True, norm_output=True, taps=(1, 3, 5, 8)),
    "full vocabulary": dataclasses.replace(HEAD, draft_vocab_size=53),
    "llama3": dataclasses.replace(HEAD, layer=dataclasses.replace(LAYER, rope=LLAMA3)),
    "another width": dataclasses.replace(
        HEAD, own_embedding=True, layer=dataclasses.replace(LAYER, hidden_size=36)
    ),
    "residual": dataclasses.replace(HEAD, norm_before_residual=True, norm_before_fc=True),
    "own embedding": dataclasses.replace(HEAD, own_embedding=True),
    "qwen3": dataclasses.replace(HEAD, layer=dataclasses.replace(LAYER, qk_norm=True)),
    "biases": dataclasses.replace(
        HEAD, layer=dataclasses.replace(LAYER, qkv_bias=True, out_bias=True, mlp_bias=True)
    ),
    "fc bias": dataclasses.replace(HEAD, fc_bias=True),
}  # fmt: skip


def random_tree(init, config, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), dtype), shapes)


def random_params(config, dtype="float32"):
    params, rng = random_tree(init_head_params, config, dtype), np.random.default_rng(0)
    if config.kind == "eagle3":
        kept = np.sort(rng.choice(config.layer.vocab_size, config.draft_vocab_size, replace=False))
        params["d2t"] = jnp.asarray(kept - np.arange(config.draft_vocab_size), jnp.int32)
    return params


def export(config, directory, layout, dtype="float32", target=TARGET, **options):
    if layout == "speculators":
        options.setdefault("verifier", "somebody/model")
        options.setdefault("embedding", EMBEDDING)
    return export_head(config, random_params(config, dtype), target, directory, layout, dtype, **options)


def refusal(config, layout, tmp_path, **options):
    with pytest.raises(CheckpointError) as caught:
        export(config, tmp_path / "head", layout, **options)
    assert not list(tmp_path.iterdir())
    return str(caught.value)


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
