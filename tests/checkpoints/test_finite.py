"""Weights that are NaN or infinite: named when they are read, and never written."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import eagle_jax
from eagle_jax.checkpoints import (
    CheckpointError,
    load_head_checkpoint,
    load_medusa_checkpoint,
    load_target_checkpoint,
    read_target_embedding,
    save_head_checkpoint,
    save_medusa_checkpoint,
    save_target_checkpoint,
)
from eagle_jax.checkpoints.training import TrainingCheckpoints
from eagle_jax.config import MedusaConfig
from eagle_jax.models.medusa import init_medusa_params
from tests.checkpoints.random_heads import TARGET, eagle3, write
from tests.checkpoints.test_target_files import CONFIG, random_params
from tests.models import tiny_target

NAN, INF = np.nan, np.inf


def spoil(path, **values):
    """Puts values at the front of tensors of a file."""
    tensors = safetensors.numpy.load_file(path)
    for name, bad in values.items():
        tensors[name].reshape(-1)[: len(bad)] = bad
    safetensors.numpy.save_file(tensors, path)


def counted(array):
    from eagle_jax.checkpoints.files.finite import count_not_finite

    return count_not_finite(array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [0, 1, 7, (1 << 18) - 1, (1 << 18) + 3])
def test_values_are_counted_by_their_bits(dtype, size):
    rng = np.random.default_rng(0)
    integer = np.uint32 if dtype == "float32" else np.uint16
    bits = rng.integers(0, np.iinfo(integer).max, size, integer, endpoint=True)  # every kind of value
    array = bits.view(np.float32 if dtype == "float32" else jnp.dtype(dtype))
    assert counted(array) == np.count_nonzero(~np.isfinite(array.astype(np.float32)))
    assert counted(np.nan_to_num(array.astype(np.float32), posinf=1, neginf=-1)) == 0


def test_of_a_matrix_that_is_not_contiguous_and_of_integers():
    matrix = np.zeros((6, 8), np.float32)
    matrix[1, 3], matrix[5, 7] = NAN, -INF
    assert (counted(matrix.T), counted(matrix[::2]), counted(np.array(NAN, np.float32))) == (2, 0, 1)
    assert counted(np.full(3, -1)) == 0


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [True, False])
def test_a_target_names_every_tensor(stored, layers, tmp_path):
    save_target_checkpoint(CONFIG, random_params(), tmp_path, stored)
    bad = {"model.norm.weight": [NAN], "lm_head.weight": [INF, NAN, -INF], "model.layers.1.mlp.up_proj.weight": [NAN]}
    spoil(tmp_path / "model.safetensors", **bad)
    placed = []
    with pytest.raises(CheckpointError) as caught:
        load_target_checkpoint(tmp_path, layers=layers, place=lambda path, host: placed.append(path))
    message = str(caught.value)
    assert str(tmp_path) in message and "\n" not in message
    assert "model.norm.weight holds 1 value that is not finite" in message
    assert "lm_head.weight holds 3 values that are not finite" in message
    assert ("model.layers.1.mlp.up_proj.weight" in message) == layers
    if layers:
        with pytest.raises(CheckpointError, match="not finite"):
            eagle_jax.load_target(tmp_path)


def test_a_value_that_the_wanted_dtype_does_not_hold(tmp_path):
    params = random_params()
    params["norm"]["scale"] = params["norm"]["scale"].at[2].set(3.4e38)
    save_target_checkpoint(CONFIG, params, tmp_path, "float32")
    load_target_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds 1 value that is not finite"):
        load_target_checkpoint(tmp_path, "bfloat16")


def test_an_embedding_alone(tmp_path):
    save_target_checkpoint(CONFIG, random_params(), tmp_path, "float32")
    spoil(tmp_path / "model.safetensors", **{"model.embed_tokens.weight": [NAN, NAN]})
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight holds 2 values that are not finite"):
        read_target_embedding(tmp_path)


def test_many_tensors_are_counted_not_listed(tmp_path):
    config = dataclasses.replace(CONFIG, num_layers=6)
    save_target_checkpoint(config, random_params(config), tmp_path, "float32")
    names = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    spoil(tmp_path / "model.safetensors", **{name: [NAN] for name in names})
    with pytest.raises(CheckpointError, match=rf"and {len(names) - 10} more tensors hold such values"):
        load_target_checkpoint(tmp_path)


def test_a_head(tmp_path):
    write(tmp_path, *eagle3())
    spoil(tmp_path / "model.safetensors", **{"fc.weight": [NAN], "midlayer.mlp.up_proj.weight": [INF, INF]})
    with pytest.raises(CheckpointError, match=r"fc\.weight holds 1 value .*midlayer\.mlp\.up_proj\.weight holds 2"):
        load_head_checkpoint(tmp_path, TARGET)


def test_medusa_heads(tmp_path):
    config = MedusaConfig("medusa", 16, 12, num_heads=2)
    params = init_medusa_params(config, jax.random.key(0))
    save_medusa_checkpoint(config, params, tmp_path / "good", "float32")
    spoil(tmp_path / "good" / "medusa_lm_head.safetensors", **{"1.0.linear.weight": [NAN]})
    with pytest.raises(CheckpointError, match=r"1\.0\.linear\.weight holds 1 value that is not finite"):
        load_medusa_checkpoint(tmp_path / "good", tiny_target().config)
    params["heads"]["heads_0_lm_head"]["kernel"] *= NAN
    with pytest.raises(CheckpointError, match=r"0\.1\.weight holds 192 values that are not finite"):
        save_medusa_checkpoint(config, params, tmp_path / "bad", "float32")
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1500])
def test_a_target_is_not_written(shard_bytes, tmp_path):
    params = random_params()
    for part in ("norm", "embed_tokens"):
        params[part] = jax.tree.map(lambda leaf: leaf.at[0].set(NAN), params[part])
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight holds 12 values .*norm\.weight holds 1 value"):
        save_target_checkpoint(CONFIG, params, tmp_path / "bad", "float32", max_shard_bytes=shard_bytes)
    assert not list(tmp_path.iterdir())


def test_a_head_is_not_written(tmp_path):
    config, params = load_head_checkpoint(write(tmp_path / "good", *eagle3()), TARGET)
    params["head"]["fc"]["kernel"] = params["head"]["fc"]["kernel"].at[3, 3].set(INF)
    with pytest.raises(CheckpointError, match=r"fc\.weight holds 1 value that is not finite"):
        save_head_checkpoint(config, params, tmp_path / "bad", "float32")
    assert not (tmp_path / "bad").exists()


class TestTraining:
    """Checkpoints of a run."""

    def state(self, value=1.0):
        return {"head": {"kernel": jnp.ones((3, 4)).at[1].set(value), "d2t": jnp.arange(3)}, "key": jax.random.key(0)}

    def test_are_not_saved(self, tmp_path):
        with contextlib.closing(TrainingCheckpoints(tmp_path)) as opened:
            opened.save(1, self.state(), {})
            with pytest.raises(CheckpointError, match=r"step 2 is not saved .*head/kernel holds 4 values"):
                opened.save(2, self.state(NAN), {})
            with pytest.raises(CheckpointError, match=r"step 2 is not saved .*kernel holds 4 values"):
                opened.save_best(2, self.state(NAN)["head"], {}, 1.5)
            assert (opened.step, opened.best_tau) == (1, None)

    def test_are_not_restored(self, tmp_path):
        with contextlib.closing(TrainingCheckpoints(tmp_path)) as opened:
            items = ocp.args.Composite(state=ocp.args.StandardSave(self.state(NAN)), notes=ocp.args.JsonSave({}))
            opened._latest.save(3, args=items, force=True)  # as an earlier version of this library did
            opened.wait()
            with pytest.raises(CheckpointError, match=r"latest/3: head/kernel holds 4 values that are not finite"):
                opened.restore(self.state())
