"""Tests hub ids without network: arguments of `huggingface_hub`, and messages of its errors."""

from __future__ import annotations

import errno
import re
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from eagle_jax.checkpoints import CheckpointError, checkpoint_directory, load_target_checkpoint, tokenizer_directory


@pytest.fixture
def hub(monkeypatch):
    """Replaces `snapshot_download` by a recorder that returns or raises `hub.answer`."""
    found = SimpleNamespace(calls=[], answer=None)

    def snapshot_download(repo_id, **kwargs):
        found.calls.append((repo_id, kwargs))
        if isinstance(found.answer, Exception):
            raise found.answer
        return str(found.answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return found


def patterns_of(call):
    return call[1]["allow_patterns"]


def test_a_target_loads_by_hub_id(hub, golden, tmp_path):
    hub.answer = golden / "target"
    config, _ = load_target_checkpoint("some-body/model", revision="v2", token="secret", cache_dir=tmp_path)
    assert config.num_layers == 8
    [(repo, options)] = hub.calls
    assert repo == "some-body/model"
    assert (options["revision"], options["token"], options["cache_dir"]) == ("v2", "secret", tmp_path)
    assert {"config.json", "model*.safetensors"} <= {*patterns_of(hub.calls[0])}


def test_only_needed_files_are_fetched(hub, golden, tmp_path):
    shutil.copy(golden / "eagle3" / "config.json", tmp_path)
    hub.answer = tmp_path
    assert checkpoint_directory("some-body/old") == tmp_path
    first, second = (patterns_of(call) for call in hub.calls)  # .bin only where there are no safetensors
    assert not any("bin" in pattern for pattern in first)
    assert "pytorch_model*.bin" in second and not any("safetensors" in pattern for pattern in second)
    assert tokenizer_directory("some-body/model", token=True) == tmp_path
    assert "tokenizer*" in patterns_of(hub.calls[2])
    assert not any("safetensors" in pattern for pattern in patterns_of(hub.calls[2]))
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"some-body/gguf.* must hold config\.json .* got no config\.json"):
        load_target_checkpoint("some-body/gguf")


def test_a_local_path_needs_no_network(hub, golden, monkeypatch):
    assert checkpoint_directory(golden / "target") == golden / "target"
    monkeypatch.chdir(golden)
    assert str(checkpoint_directory("target")) == "target"
    assert not hub.calls
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_positon'"):
        load_target_checkpoint(golden / "target", max_positon=8)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        *((path, "which does not exist") for path in ("/no/such", "./nothing", "../nothing", "a/b/c", "~/nothing")),
        ("", "path_or_hub_id must be a directory or a hub id, got ''"),
        ("file", "must be a directory, a GGUF file or a hub id, got the file file. Give its directory"),
        ("model.bin", "got the file model.bin. Rename it to end in .gguf"),
    ],
)
def test_a_path_without_a_directory_is_an_error(path, message, hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "model.bin").write_bytes(b"GGUF\x03")
    with pytest.raises(CheckpointError, match=message):
        checkpoint_directory(path)
    assert not hub.calls


def wrapped(text):
    """Error of a client with an empty cache: the failed download is its cause."""
    error = errors.LocalEntryNotFoundError("An error happened. Please check your connection. And try again.")
    error.__cause__ = OSError(text)
    return error


def response(status):
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.RepositoryNotFoundError("404", response=response(404)), "neither a local directory nor a repository"),
        (errors.RevisionNotFoundError("no rev id v9", response=response(404)), r"failed \(no rev id v9\)\. Check"),
        (errors.GatedRepoError("403", response=response(403)), "https://huggingface.co/some/model, then set HF_TOKEN"),
        (errors.HFValidationError("bad"), r"\(bad\)\. Check the spelling"),
        (errors.HTTPError("broken off"), r"\(broken off\)\. Check the spelling, the network and HF_TOKEN"),
        (OSError(errno.ENOSPC, "No space left"), r"the download failed \(\[Errno 28\] No space left\)"),
        (wrapped("[Errno -2] Name not known"), r"\(\[Errno -2\] Name not known\)\. Check the spelling"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_failed_download_is_one_line_without_the_clients_advice(error, message, hub):
    hub.answer = error
    with pytest.raises(CheckpointError, match=message) as raised:
        load_target_checkpoint("some/model", revision="v9")
    assert not re.search(r"\n|Please|try again", str(raised.value))


def test_the_real_client_fails_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError, match=r"'some/model' is no directory .* Correct the path, or unset HF_HUB_OFFLINE to fetch it"
    ):
        load_target_checkpoint("some/model", cache_dir=tmp_path)
