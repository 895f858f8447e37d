"""Makes a random target, rows and a finished run for the training tests."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import train.head
from tests.models import tiny_target
from tests.training.common import VOCAB, args_of, save_target


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Saves a random target with the bundled tokenizer, and rows for it."""
    root = tmp_path_factory.mktemp("head")
    target = tiny_target(VOCAB)
    save_target(dataclasses.replace(target.config, max_position=128), target.params, root / "target")
    rng = np.random.default_rng(0)
    for name, count in (("train", 60), ("held", 4)):
        texts = [rng.integers(5, VOCAB, rng.integers(8, 24)).tolist() for _ in range(count)]
        rows = [json.dumps({"tokens": text, "supervised": [[5, len(text)]]}) for text in texts]
        (root / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return root


@pytest.fixture(scope="session")
def whole(place):
    """Runs `train.head` to its end on one device, without a measurement."""
    assert train.head.main(args_of(place, place / "whole", data_axis=1)) == 0
    return place / "whole"
