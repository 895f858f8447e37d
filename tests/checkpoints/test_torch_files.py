"""PyTorch `.bin` files: read through `torch.load(weights_only=True)`, never executed."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import shutil

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install eagle-jax[test]")

import safetensors.torch  # noqa: E402

from eagle_jax.checkpoints import CheckpointError, load_target_checkpoint  # noqa: E402
from tests.checkpoints.common import assert_same  # noqa: E402


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
    assert_same(*(load_target_checkpoint(path, dtype)[1] for path in (directory, golden / "target")))


@pytest.mark.parametrize(("zipped", "dtype"), [(True, "float32"), (False, "float32"), (True, "bfloat16")])
def test_single_file(zipped, dtype, old_target, golden):
    directory, state = old_target
    state = {name: value.to(getattr(torch, dtype)) for name, value in state.items()}
    torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert_golden(directory, golden, dtype)


def test_shards_and_that_safetensors_win(old_target, golden):
    directory, state = old_target
    weight_map = {name: f"pytorch_model-{1 + i % 2:05d}-of-00002.bin" for i, name in enumerate(sorted(state))}
    for file in set(weight_map.values()):
        torch.save({name: state[name] for name in state if weight_map[name] == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_golden(directory, golden)
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


def test_a_file_that_is_no_state_dict(old_target):
    directory, state = old_target
    path = directory / "pytorch_model.bin"
    torch.save({"state_dict": state}, path)
    with pytest.raises(CheckpointError, match="expected a flat dict of tensors"):
        load_target_checkpoint(directory)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
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
