"""PyTorch `.bin` files: read through `torch.load(weights_only=True)`, never executed."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import shutil

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install eagle-jax[test]")

import safetensors.torch  # noqa: E402

from eagle_jax.checkpoints import CheckpointError, load_head_checkpoint, load_target_checkpoint  # noqa: E402


def state_of(directory):
    state = {}
    for path in sorted(directory.glob("*.safetensors")):
        state |= safetensors.torch.load_file(path)
    return state


@pytest.fixture
def old_target(golden, tmp_path):
    """The golden target's configuration without its weights, and its state dict."""
    shutil.copy(golden / "target" / "config.json", tmp_path)
    return tmp_path, state_of(golden / "target")


def assert_golden(directory, golden, dtype="float32"):
    _, expected = load_target_checkpoint(golden / "target", dtype)
    _, params = load_target_checkpoint(directory, dtype)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("zipped", [True, False])
def test_single_file(zipped, old_target, golden):
    directory, state = old_target
    torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert_golden(directory, golden)


def test_shards(old_target, golden):
    directory, state = old_target
    names = sorted(state)
    weight_map = {name: f"pytorch_model-{1 + i % 2:05d}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        torch.save({name: state[name] for name in names if weight_map[name] == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_golden(directory, golden)


def test_bfloat16(old_target, golden):
    directory, state = old_target
    torch.save({name: value.to(torch.bfloat16) for name, value in state.items()}, directory / "pytorch_model.bin")
    assert_golden(directory, golden, "bfloat16")


def test_a_head(golden, tmp_path):
    shutil.copy(golden / "eagle3" / "config.json", tmp_path)
    torch.save(state_of(golden / "eagle3"), tmp_path / "pytorch_model.bin")
    target, _ = load_target_checkpoint(golden / "target")
    expected_config, expected = load_head_checkpoint(golden / "eagle3", target)
    config, params = load_head_checkpoint(tmp_path, target)
    assert config == expected_config
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_safetensors_win(old_target, golden):
    directory, _ = old_target
    for path in (golden / "target").glob("*.safetensors*"):
        shutil.copy(path, directory)
    (directory / "pytorch_model.bin").write_bytes(b"never looked at")
    assert_golden(directory, golden)


class Payload:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_a_pickle_is_never_executed(how, old_target):
    directory, state = old_target
    trace = directory / "executed"
    evil = {**state, "model.norm.weight": Payload(str(trace))}
    path = directory / "pytorch_model.bin"
    if how == "torch.save":
        torch.save(evil, path)
    else:
        path.write_bytes(pickle.dumps({"x": Payload(str(trace))}, protocol=2))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: torch\.load.*failed.*No code in it"):
        load_target_checkpoint(directory)
    assert not trace.exists()


def test_truncated(old_target):
    directory, state = old_target
    path = directory / "pytorch_model.bin"
    torch.save(state, path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load_target_checkpoint(directory)


def test_not_a_state_dict(old_target):
    directory, state = old_target
    torch.save({"state_dict": state}, directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="expected a flat dict of tensors"):
        load_target_checkpoint(directory)


def test_without_torch(old_target, monkeypatch):
    directory, state = old_target
    torch.save(state, directory / "pytorch_model.bin")
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(CheckpointError, match="torch is not installed: `pip install torch`, or convert it"):
        load_target_checkpoint(directory)
