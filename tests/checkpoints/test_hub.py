"""Hub ids: what is asked of `huggingface_hub`, and what its refusals become. No test here uses the network."""

from __future__ import annotations

import errno
import re
import shutil
from types import SimpleNamespace

import huggingface_hub
import jax
import pytest
from huggingface_hub import errors

from eagle_jax.checkpoints import (
    CheckpointError,
    checkpoint_directory,
    load_head_checkpoint,
    load_target_checkpoint,
    tokenizer_directory,
)
from eagle_jax.config import DecoderConfig

TARGET = DecoderConfig(320, 128, 256, 8, 4, 2, 32)


@pytest.fixture
def hub(monkeypatch):
    """Replaces `snapshot_download` by a recorder that answers with `hub.answer`, a directory or an exception."""

    class Hub:
        calls: list = []  # noqa: RUF012
        answer = None

    def snapshot_download(repo_id, **kwargs):
        Hub.calls.append((repo_id, kwargs))
        if isinstance(Hub.answer, Exception):
            raise Hub.answer
        return str(Hub.answer)

    Hub.calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return Hub


def response(status):
    return SimpleNamespace(status_code=status, headers={}, request=None)


def test_target_by_hub_id(hub, golden, tmp_path):
    hub.answer = golden / "target"
    config, params = load_target_checkpoint("some-body/model", revision="v2", token="secret", cache_dir=tmp_path)
    assert config.num_layers == 8
    assert len(jax.tree.leaves(params)) == 8 * 9 + 3
    [(repo, options)] = hub.calls
    assert repo == "some-body/model"
    assert (options["revision"], options["token"], options["cache_dir"]) == ("v2", "secret", str(tmp_path))
    patterns = options["allow_patterns"]
    assert "config.json" in patterns
    assert "model*.safetensors" in patterns
    assert not any("bin" in pattern or pattern == "*" for pattern in patterns)
    assert options.get("tqdm_class") is None  # the progress bars of huggingface_hub stay on


def test_head_by_hub_id(hub, golden):
    hub.answer = golden / "eagle3"
    config, _ = load_head_checkpoint("some-body/head", TARGET, revision="main")
    assert config.kind == "eagle3"
    assert hub.calls[0][1]["revision"] == "main"


def test_bin_is_fetched_only_where_there_are_no_safetensors(hub, golden, tmp_path):
    shutil.copy(golden / "eagle3" / "config.json", tmp_path)
    hub.answer = tmp_path
    assert checkpoint_directory("some-body/old") == tmp_path
    first, second = (options["allow_patterns"] for _, options in hub.calls)
    assert not any("bin" in pattern for pattern in first)
    assert "pytorch_model*.bin" in second
    assert not any("safetensors" in pattern for pattern in second)


def test_a_repository_without_a_configuration_is_named(hub, tmp_path):
    (tmp_path / "model.gguf").touch()
    hub.answer = tmp_path
    with pytest.raises(CheckpointError, match=r"the hub repository 'some-body/gguf' has no config\.json: give one"):
        load_target_checkpoint("some-body/gguf")


def test_tokenizer_files(hub, tmp_path):
    hub.answer = tmp_path
    assert tokenizer_directory("some-body/model", token=True) == tmp_path
    assert "tokenizer*" in hub.calls[0][1]["allow_patterns"]
    assert not any("safetensors" in pattern for pattern in hub.calls[0][1]["allow_patterns"])


def test_a_local_path_needs_no_network(hub, golden, monkeypatch):
    hub.answer = AssertionError("asked the hub")
    assert checkpoint_directory(golden / "target") == golden / "target"
    monkeypatch.chdir(golden)
    assert str(checkpoint_directory("target")) == "target"
    assert not hub.calls


@pytest.mark.parametrize("path", ["/no/such/directory", "./nothing", "../nothing", "a/b/c", "~/nothing", ""])
def test_missing_directory(path, hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory" if path else "the path is empty"):
        checkpoint_directory(path)
    assert not hub.calls


def test_a_file_is_no_checkpoint(golden):
    with pytest.raises(CheckpointError, match=r"config\.json is a file"):
        checkpoint_directory(golden / "target" / "config.json")


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (errors.RepositoryNotFoundError("404", response=response(404)), "neither a local directory nor a repository"),
        (errors.RevisionNotFoundError("404", response=response(404)), "has no revision 'v9'"),
        (
            errors.GatedRepoError("403", response=response(403)),
            "its licence at https://huggingface.co/some/model, then set HF_TOKEN",
        ),
        (errors.HFValidationError("bad"), "valid hub id"),
        (errors.LocalEntryNotFoundError("not cached and no network"), "the download failed"),
        (errors.OfflineModeIsEnabled("offline"), "the download failed"),
        (ConnectionError("unreachable"), r"\(unreachable\): check the spelling and the network, or give the path of a"),
        (errors.HTTPError("broken off"), r"\(broken off\): check the spelling and the network, or give the path of a"),
        (OSError(errno.ENOSPC, "No space left"), r"No space left\): make room on the disk, or set HF_HOME"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_refusals_become_one_clear_error(refusal, message, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    hub.answer = refusal
    with pytest.raises(CheckpointError, match=message) as raised:
        load_target_checkpoint("some/model", revision="v9")
    assert not re.search(r"\. [A-Z]", str(raised.value))  # a sentence


@pytest.mark.parametrize(
    ("status", "cause", "message"),
    [
        (None, "[Errno -2] Name or service not known", r"\(\[Errno -2\] Name or service not known\): check the"),
        (429, "429 Client Error: Too Many Requests for url: x", r"Too Many Requests for url: x\): wait some minutes"),
        (401, "401 Client Error: Unauthorized for url: x", r"url: x\): the hub refuses the token: create one"),
        (403, "403 Forbidden: the token may not", r"may not\): the hub refuses the token: create one .* HF_TOKEN"),
    ],
)
def test_the_reason_is_what_failed_first(status, cause, message, hub, monkeypatch):
    """The client wraps it into advice of its own, in several sentences."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    hub.answer = errors.LocalEntryNotFoundError("An error happened. Please check your connection. And try again.")
    hub.answer.__cause__ = OSError(cause)
    if status:
        hub.answer.__cause__ = errors.HfHubHTTPError(cause, response=response(status))
    with pytest.raises(CheckpointError, match=message) as raised:
        load_target_checkpoint("some/model")
    assert not re.search(r"\. [A-Z]", str(raised.value))


def test_the_real_client_without_network(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"'some/model' is no directory .* unset HF_HUB_OFFLINE to fetch it"):
        load_target_checkpoint("some/model", cache_dir=tmp_path)
