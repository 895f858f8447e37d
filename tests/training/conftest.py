"""Fixtures of the training tests."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest

import train.head
from eagle_jax.assets import bundled
from eagle_jax.checkpoints import save_target_checkpoint
from eagle_jax.config import DecoderConfig
from eagle_jax.models.decoder import init_params
from tests.training.runs import VOCAB, args_of


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A saved random target with the bundled tokenizer, and rows for it."""
    root = tmp_path_factory.mktemp("head")
    config = DecoderConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
        max_position=128,
    )  # fmt: skip
    params = jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, init_params(config, jax.random.key(0)))
    save_target_checkpoint(config, params, root / "target", "float32")
    for path in bundled("target").glob("tokenizer*"):
        shutil.copy(path, root / "target")
    rng = np.random.default_rng(0)
    for name, count in (("train", 60), ("held", 4)):
        texts = [rng.integers(5, VOCAB, rng.integers(8, 24)).tolist() for _ in range(count)]
        rows = [json.dumps({"tokens": text, "supervised": [[5, len(text)]]}) for text in texts]
        (root / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return root


@pytest.fixture(scope="session")
def whole(place):
    """A run of `train.head` to its end on one device, without a measurement."""
    assert train.head.main(args_of(place, place / "whole", data_axis=1)) == 0
    return place / "whole"
