"""Tests draft heads on disk: official files, round trips, prefixes, draft vocabularies, misfits."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax.checkpoints import CheckpointError, load_head_checkpoint, load_target_checkpoint, save_head_checkpoint
from eagle_jax.config import HeadConfig
from tests.checkpoints.common import assert_same, quiet, random_params
from tests.checkpoints.random_heads import TARGET, eagle1, eagle3, write

LAYER = dataclasses.replace(TARGET, num_layers=1, head_dim=8, intermediate_size=20, qkv_bias=False)
EAGLE1 = HeadConfig("eagle1", LAYER, 53, 24, (9,), fc_bias=True)
EAGLE3 = HeadConfig("eagle3", LAYER, 17, 24, (2, 4, 6))


def load(directory, config, tensors, target=TARGET, **kwargs):
    return load_head_checkpoint(write(directory, config, tensors), target, **kwargs)


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_what_we_save_is_the_official_file(name, golden, tmp_path):
    target, params = load_target_checkpoint(golden / "target")
    embedding = params["embed_tokens"]["embedding"]
    config, head = load_head_checkpoint(golden / name, target, embedding=embedding)
    copy = embedding if name == "eagle1" else None  # the head shares the target's
    assert not config.own_embedding and "embed_tokens" not in head["head"]
    save_head_checkpoint(config, head, tmp_path, "float32", embedding=copy)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # weights are as readable as their config
    ours, theirs = (safetensors.numpy.load_file(path / "model.safetensors") for path in (tmp_path, golden / name))
    assert_same(ours, theirs)
    assert {key: value.dtype for key, value in ours.items()} == {key: value.dtype for key, value in theirs.items()}
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (tmp_path, golden / name))
    same = set(theirs) - {"architectures", "pad_token_id"}
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}


def test_what_is_not_saved(tmp_path):
    for config, held, options, message in (
        (EAGLE1, random_params(EAGLE1), {"embedding": jnp.zeros((50, 24))}, r"embedding is \[50, 24\], expected \[53"),
        (EAGLE3, random_params(EAGLE1), {}, "missing .*hidden_norm/scale"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_head_checkpoint(config, held, tmp_path / "head", **options)
        assert not list(tmp_path.iterdir())


def test_prefixes(tmp_path):
    config, tensors = eagle3()
    _, expected = load(tmp_path / "official", config, tensors)
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    for place, stored in (("layers", renamed), ("model", {f"model.{name}": renamed[name] for name in renamed})):
        assert_same(load(tmp_path / place, config, stored)[1], expected)


def test_an_eagle1_head_without_embedding_and_with_an_lm_head(tmp_path):
    """It drafts through its target's lm_head, whatever the file holds."""
    config, tensors = eagle1()
    _, expected = load(tmp_path, config, tensors)
    own = np.random.default_rng(3).standard_normal((53, 24)).astype(np.float32)
    tensors["lm_head.weight"] = own
    with quiet():
        assert_same(load(tmp_path, config, tensors, lm_head=own.T)[1], expected)
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from the target's lm_head, and EAGLE-1/2 drafts"):
        assert_same(load(tmp_path, config, tensors, lm_head=own.T + 1)[1], expected)
    del tensors["embed_tokens.weight"]
    assert not load(tmp_path, config, tensors)[0].own_embedding


def test_the_draft_vocabulary(tmp_path):
    config, tensors = eagle3()
    _, params = load(tmp_path, config, {name: value for name, value in tensors.items() if name != "t2d"})
    assert params["d2t"].dtype == jnp.int32  # the difference, as stored
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), params["d2t"] + np.arange(17))
    del config["draft_vocab_size"]  # counted
    assert load(tmp_path, config, tensors)[0].draft_vocab_size == 17
    np.testing.assert_array_equal(load(tmp_path, *eagle3(draft_vocab_size=53))[1]["d2t"], np.zeros(53))


D2T, T2D = (eagle3()[1][name] for name in ("d2t", "t2d"))
ZEROS = np.zeros(24, np.float32)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"d2t": ...}, ("missing (1): d2t",)),
        ({"d2t": np.append(D2T, 0)}, ("misshaped (1): d2t is int64 [18], expected integers [17]",)),
        ({"d2t": D2T + np.arange(17)}, ("d2t",)),  # target ids instead of differences
        ({"d2t": D2T.astype(np.float32)}, ("d2t is float32 [17], expected integers [17]",)),
        ({"t2d": np.append(T2D, True)}, ("misshaped (1): t2d is bool [54], expected integers [53]",)),
        ({"t2d": T2D.astype(np.float32)}, ("t2d is float32 [53], expected integers [53]",)),
        ({"t2d": np.roll(T2D, 1)}, ("t2d marks other target ids than d2t reaches",)),
        ({"model.norm.weight": ZEROS}, ("norm.weight are the same tensor under two names",)),
        ({"layers.1.mlp.down_proj.weight": ZEROS}, ("unexpected (1): layers.1.mlp.down_proj.weight",)),
        (
            {"midlayer.mlp.down_proj.weight": ..., "midlayer.input_layernorm.bias": ZEROS, "norm.weight": ZEROS[1:],
             "fc.weight": np.zeros((24, 96), np.float32)},
            ("missing (1): midlayer.mlp.down_proj.weight", "unexpected (1): midlayer.input_layernorm.bias",
             "norm.weight is [23], expected [24]", "4 taps"),
        ),
    ],
)  # fmt: skip
def test_everything_that_does_not_fit_is_named(changes, parts, tmp_path):
    config, tensors = eagle3()
    tensors = {name: value for name, value in (tensors | changes).items() if value is not ...}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, config, tensors)
    for part in (str(tmp_path), *parts):
        assert part in str(caught.value)


def test_an_own_width_needs_an_own_embedding(tmp_path):
    config, tensors = eagle3(hidden_size=36, target_hidden_size=24)
    del tensors["embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"missing \(1\): embed_tokens\.weight \(the head's hidden_size"):
        load(tmp_path, config, tensors)
