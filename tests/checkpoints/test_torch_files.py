"""Tests PyTorch `.bin` files: `torch.load(weights_only=True)` reads them and runs no code."""

from __future__ import annotations

import json
import os
import sys

import pytest
import safetensors.numpy

torch = pytest.importorskip("torch", reason="needs torch: pip install eagle-jax[test]")

from eagle_jax.checkpoints import CheckpointError, load_target_checkpoint, save_target_checkpoint  # noqa: E402
from tests.checkpoints.common import CONFIG, assert_same, random_params  # noqa: E402


@pytest.fixture
def saved(tmp_path):
    """A directory with config.json alone, and the tensors that belong to it."""
    save_target_checkpoint(CONFIG, random_params(), tmp_path, "float32")
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    return tmp_path, {name: torch.tensor(tensor) for name, tensor in tensors.items()}


def assert_loads(directory, dtype="float32"):
    assert_same(load_target_checkpoint(directory, dtype)[1], random_params(dtype=dtype))


@pytest.mark.parametrize(("zipped", "dtype"), [(True, "float32"), (False, "float32"), (True, "bfloat16")])
def test_single_file(zipped, dtype, saved):
    directory, state = saved
    state = {name: value.to(getattr(torch, dtype)) for name, value in state.items()}
    torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert_loads(directory, dtype)


def test_shards_and_that_safetensors_win(saved):
    directory, state = saved
    weight_map = {name: f"pytorch_model-{1 + i % 2:05d}-of-00002.bin" for i, name in enumerate(sorted(state))}
    for file in set(weight_map.values()):
        torch.save({name: state[name] for name in state if weight_map[name] == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_loads(directory)
    save_target_checkpoint(CONFIG, random_params(), directory, "float32")
    (directory / "pytorch_model.bin").write_bytes(b"never read")
    assert_loads(directory)


class Payload:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_is_never_executed(saved):
    directory, state = saved
    trace = directory / "executed"
    torch.save(state | {"model.norm.weight": Payload(str(trace))}, directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: torch\.load.*failed .*No code in it"):
        load_target_checkpoint(directory)
    assert not trace.exists()


def test_a_file_that_is_no_state_dict(saved):
    directory, state = saved
    path = directory / "pytorch_model.bin"
    torch.save({"state_dict": state}, path)
    with pytest.raises(CheckpointError, match="must hold a flat dict of tensors, got other"):
        load_target_checkpoint(directory)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load_target_checkpoint(directory)


def test_without_torch(saved, monkeypatch):
    directory, state = saved
    torch.save(state, directory / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=r"torch must be installed to read .*\. Run pip install torch"):
        load_target_checkpoint(directory)
