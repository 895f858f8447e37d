"""Tests hidden states on disk: round trips, and errors of states that cannot be stored."""

from __future__ import annotations

import errno
import json
import os

import numpy as np
import pytest

from eagle_jax.data.chat.encoding import Encoded
from eagle_jax.data.corpus import Corpus, Features, Layout, shard_bounds, write_shard
from eagle_jax.data.corpus.features import KINDS

LENGTHS, CUT, HIDDEN = [5, 9, 3, 7], 6, 4


@pytest.fixture
def corpus() -> Corpus:
    documents = [Encoded(np.arange(length, dtype=np.int32), np.ones(length, bool)) for length in LENGTHS]
    return Corpus.from_documents(documents, [(0, row) for row in range(len(documents))], ["chat"])


def layout_of(corpus: Corpus, dtype) -> Layout:
    bounds = shard_bounds(corpus, CUT, 10)
    return Layout("key", "target", "whole", "ends", "float32", (1, 2), HIDDEN, dtype, CUT, bounds)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 0), ("float16", 2e-3), ("bfloat16", 8e-3), ("float8", 7e-2)])
def test_states_are_read_as_they_were_written(corpus, dtype, error, tmp_path):
    layout = layout_of(corpus, dtype)
    states = np.random.default_rng(0).normal(size=(20, 3, HIDDEN)).astype(np.float32)  # 5 + 6 + 3 + 6 tokens
    layout.save(tmp_path)
    for shard, rows in enumerate([slice(0, 11), slice(11, 20)]):
        part = states[rows]
        write_shard(layout, tmp_path, shard, len(part), lambda put, part=part: put(slice(0, len(part)), part))
    assert {path.name for path in tmp_path.iterdir()} == {"features-00000.npy", "features-00001.npy", "layout.json"}
    documents, positions = np.array([[1, 1, 3, 0]]), np.array([[0, 5, 2, 0]])
    fields = {"corpus": "key", "target": "target", "taps": (1, 2), "ends": "ends"}
    parts = Features(tmp_path, corpus, fields, CUT).take(documents, positions, np.array([[1, 1, 2, 0]]))
    written = states[[5, 10, 16]]
    found = np.concatenate(parts, axis=-1)[0].astype(np.float32)
    largest = np.abs(written).max(axis=-1)[..., None]
    assert (np.abs(found[:3].reshape(written.shape) - written) <= error * largest).all()
    assert not found[3].any()
    with pytest.raises(ValueError, match=r"fingerprint of the target of .* must be others, .* got whole\. Write"):
        Features(tmp_path, corpus, {**fields, "weights": "others"}, CUT)
    wanted = {"scheme": "int4", "computed": "bfloat16", "ends": "others"}  # the names come before the hashes
    with pytest.raises(ValueError, match=r"quantisation .* must be int4, .* got None\. Give --weights the value of"):
        Features(tmp_path, corpus, wanted, CUT)
    with pytest.raises(ValueError, match=r"dtype of the target .* must be bfloat16, .* got float32\. Give --dtype"):
        Features(tmp_path, corpus, {**wanted, "scheme": None}, CUT)


def test_a_layout_is_written_and_read(corpus, tmp_path):
    first, path = layout_of(corpus, "float32"), tmp_path / "layout.json"
    first.save(tmp_path)
    assert Layout.load(tmp_path) == first
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "ends"}))
    with pytest.raises(ValueError, match=r"layout.json .*missing required field `ends`.*Write them again"):
        Layout.load(tmp_path)
    with pytest.raises(ValueError, match=r"must hold features, got none\. Run python -m train\.features"):
        Layout.load(tmp_path / "nowhere")


NOT_FINITE = r"hidden states must be finite, got NaN or infinity\. Run the target in float32"


@pytest.mark.parametrize(("dtype", "value", "message"), [
    *((dtype, value, NOT_FINITE) for dtype in KINDS for value in (np.inf, np.nan)),
    ("float16", -70000.0, r"states must fit float16, got 70000\. Store bfloat16 in"),
])  # fmt: skip
def test_states_that_cannot_be_stored_are_an_error(corpus, dtype, value, message, tmp_path):
    def fill(put):
        put(slice(0, 1), np.full((1, 3, HIDDEN), -65504.0))
        put(slice(1, 2), np.full((1, 3, HIDDEN), value))

    with pytest.raises(ValueError, match=message):
        write_shard(layout_of(corpus, dtype), tmp_path, 0, 2, fill)
    assert not list(tmp_path.iterdir())
    if np.isfinite(value):
        for shard, wider in enumerate(("bfloat16", "float8", "float32")):
            write_shard(layout_of(corpus, wider), tmp_path, shard, 2, fill)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot reserve room")
def test_a_full_disk_is_an_error(corpus, tmp_path, monkeypatch):
    codes = iter([errno.ENOSPC, errno.EOPNOTSUPP])  # the second is that of a file system that cannot reserve

    def fail(*_):
        raise OSError(code := next(codes), os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    layout = layout_of(corpus, "bfloat16")
    with pytest.raises(ValueError, match=r"must have room for 0\.00 GB more \(No space left on device\)"):
        write_shard(layout, tmp_path, 0, 1, lambda put: pytest.fail("filled"))
    assert not list(tmp_path.iterdir())
    write_shard(layout, tmp_path, 0, 1, lambda put: put(slice(0, 1), np.ones((1, 3, HIDDEN))))
    assert layout.path(tmp_path, 0).is_file()
