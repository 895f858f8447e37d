"""Provides heads of every variant in memory, and exports them to the layouts of other engines."""

from __future__ import annotations

import dataclasses

import numpy as np

from eagle_jax.checkpoints import export_head
from eagle_jax.config import HeadConfig, RopeConfig
from tests.checkpoints.common import random_params
from tests.checkpoints.random_heads import TARGET

LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 64, 1.0, 4.0)
LAYER = dataclasses.replace(
    TARGET, num_layers=1, intermediate_size=20, num_heads=6, num_kv_heads=3, head_dim=8, eos_ids=(3,), bos_id=1
)
HEAD = HeadConfig("eagle3", LAYER, 17, 24, (2, 4, 6))
EAGLE1 = HeadConfig("eagle1", LAYER, 53, 24, (9,), fc_bias=True)
EMBEDDING = np.arange(53 * 24, dtype=np.float32).reshape(53, 24) % 7


def head(layer=None, **changes):
    """`HEAD` with changes of its layer and its own."""
    return dataclasses.replace(HEAD, layer=dataclasses.replace(LAYER, **(layer or {})), **changes)


VARIANTS = {
    "plain": HEAD,
    "norms": head(fc_norm=True, norm_output=True, taps=(1, 3, 5, 8)),
    "full vocabulary": head(draft_vocab_size=53),
    "llama3": head({"rope": LLAMA3}),
    "another width": head({"hidden_size": 36}, own_embedding=True),
    "residual": head(norm_before_residual=True, norm_before_fc=True),
    "own embedding": head(own_embedding=True),
    "qwen3": head({"qk_norm": True}),
    "biases": head({"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
    "fc bias": head(fc_bias=True),
    "eagle1": dataclasses.replace(EAGLE1, own_embedding=True, fc_bias=False),
    "eagle1 biases": dataclasses.replace(
        EAGLE1, own_embedding=True, layer=dataclasses.replace(LAYER, qkv_bias=True, eos_ids=(3, 4))
    ),
}


def export(config, directory, layout, dtype="float32", target=TARGET, **options):
    if layout == "speculators":
        options = {"verifier": "somebody/model", "embedding": EMBEDDING} | options
    return export_head(config, random_params(config, dtype=dtype), target, directory, layout, dtype, **options)
