"""Tests weights that are NaN or infinite: they are named when read, and never written."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoints import CheckpointError, load_target_checkpoint, save_target_checkpoint, training
from eagle_jax.checkpoints.files.weights import count_not_finite
from eagle_jax.checkpoints.training import TrainingCheckpoints
from tests.checkpoints.common import CONFIG, edit_tensors, random_params

NAN, INF = np.nan, np.inf


def spoil(path, **values):
    """Puts values at the front of tensors of a file."""

    def edit(tensors):
        for name, bad in values.items():
            tensors[name].reshape(-1)[: len(bad)] = bad

    edit_tensors(path, edit)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [0, 1, 7, (1 << 18) - 1, (1 << 18) + 3])
def test_count_not_finite_agrees_with_numpy(dtype, size):
    rng = np.random.default_rng(0)
    integer = np.uint32 if dtype == "float32" else np.uint16
    bits = rng.integers(0, np.iinfo(integer).max, size, integer, endpoint=True)  # every kind of value
    array = bits.view(np.float32 if dtype == "float32" else jnp.dtype(dtype))
    assert count_not_finite(array) == np.count_nonzero(~np.isfinite(array.astype(np.float32)))
    assert count_not_finite(np.nan_to_num(array.astype(np.float32), posinf=1, neginf=-1)) == 0


def test_count_not_finite_reads_strided_arrays_and_skips_integers():
    matrix = np.full((6, 8), np.float32(NAN)).T
    assert [count_not_finite(array) for array in (matrix, matrix[::2], np.full(3, -1))] == [48, 24, 0]


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [True, False])
def test_loading_a_target_names_every_tensor_with_nan(stored, layers, tmp_path):
    save_target_checkpoint(CONFIG, random_params(), tmp_path, stored)
    bad = {"model.norm.weight": [NAN], "lm_head.weight": [INF, NAN, -INF], "model.layers.1.mlp.up_proj.weight": [NAN]}
    spoil(tmp_path / "model.safetensors", **bad)
    with pytest.raises(CheckpointError) as caught:
        load_target_checkpoint(tmp_path, layers=layers)
    message = str(caught.value)
    assert str(tmp_path) in message and "\n" not in message
    assert "model.norm.weight holds 1 value that is not finite" in message
    assert "lm_head.weight holds 3 values that are not finite" in message
    assert ("model.layers.1.mlp.up_proj.weight" in message) == layers


@pytest.mark.parametrize(("dtype", "value"), [("bfloat16", 3.4e38), ("float16", 1e6)])
def test_a_value_beyond_the_range_of_a_dtype_is_an_error(dtype, value, tmp_path):
    params = random_params()
    params["norm"]["scale"] = params["norm"]["scale"].at[2].set(value)
    message = r"model\.norm\.weight holds 1 value that is not finite .*a dtype of a wider range"
    with pytest.raises(CheckpointError, match=message):
        save_target_checkpoint(CONFIG, params, tmp_path / "narrow", dtype)
    save_target_checkpoint(CONFIG, params, tmp_path / "wide", "float32")
    load_target_checkpoint(tmp_path / "wide")
    with pytest.raises(CheckpointError, match=message):
        load_target_checkpoint(tmp_path / "wide", dtype)


def test_an_error_names_ten_tensors_and_counts_the_rest(tmp_path):
    config = dataclasses.replace(CONFIG, num_layers=6)
    save_target_checkpoint(config, random_params(config), tmp_path, "float32")
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: [t.fill(NAN) for t in tensors.values()])
    with pytest.raises(CheckpointError, match="and 47 more tensors hold such values"):
        load_target_checkpoint(tmp_path)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1500])
def test_a_target_with_nan_is_not_written(shard_bytes, tmp_path):
    params = random_params()
    for part in ("norm", "embed_tokens"):
        params[part] = jax.tree.map(lambda leaf: leaf.at[0].set(NAN), params[part])
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight holds 12 values .*norm\.weight holds 1 value"):
        save_target_checkpoint(CONFIG, params, tmp_path / "bad", "float32", max_shard_bytes=shard_bytes)
    assert not list(tmp_path.iterdir())


def test_a_run_does_not_save_nan(tmp_path):
    def state(value=1.0):
        return {"head": {"kernel": jnp.ones((3, 4)).at[1].set(value), "d2t": jnp.arange(3)}, "key": jax.random.key(0)}

    with contextlib.closing(TrainingCheckpoints(tmp_path)) as opened:
        opened.save(1, state(), {})
        with pytest.raises(CheckpointError, match=r"step 2 is not saved .*head/kernel holds 4 values"):
            opened.save(2, state(NAN), {})
        with pytest.raises(CheckpointError, match=r"step 2 is not saved .*kernel holds 4 values"):
            opened.save_best(2, state(NAN)["head"], {}, 1.5)
        assert (opened.step, opened.best_tau) == (1, None)


def test_a_run_does_not_restore_nan(tmp_path, monkeypatch):
    """A failing disk or an older version leaves such a checkpoint."""
    state = {"kernel": jnp.ones(4).at[1].set(NAN)}
    with contextlib.closing(TrainingCheckpoints(tmp_path)) as opened:
        with monkeypatch.context() as patch:
            patch.setattr(training, "_check_finite", lambda *_: None)
            opened.save(1, state, {})
        with pytest.raises(CheckpointError, match=r"latest/1: kernel holds 1 value that is not finite.*Remove this"):
            opened.restore(state)
