"""Resolves a path or a Hugging Face hub id to a local directory or GGUF file; downloads missing files."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, Unpack

import huggingface_hub
from huggingface_hub import errors as hub_errors

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.checkpoints.files.gguf import SUFFIX, is_gguf

CONFIGS = ("config.json", "generation_config.json")
SAFETENSORS = ("model*.safetensors", "model.safetensors.index.json")
TORCH_BINS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
HEADS = ("medusa_lm_head*", "hydra_lm_head*")
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*")

_WEIGHTS = (".safetensors", ".bin", ".pt")
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


class Hub(TypedDict, total=False):
    """Options of a hub id; a local path ignores them.

    Attributes:
      revision: branch, tag or commit. token: of an account, for private models. cache_dir: where downloads are kept.
    """

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None


def checkpoint_directory(path_or_hub_id: str | os.PathLike[str], **hub: Unpack[Hub]) -> Path:
    """Returns the directory of a checkpoint, or its GGUF file; downloads a hub id.

    Of a hub repository only the configuration and the safetensors weights are fetched, and the `.bin` weights where it
    has no safetensors. An existing directory is taken as it is, without network.

    Raises:
      CheckpointError: no such directory, no such repository or revision, no access, or no network.
    """
    directory = files_directory(path_or_hub_id, CONFIGS + SAFETENSORS, **hub)
    if _existing_place(path_or_hub_id) is not None:
        return directory
    if not any(directory.glob("*.safetensors")):
        directory = files_directory(path_or_hub_id, CONFIGS + TORCH_BINS, **hub)
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"the hub repository {str(path_or_hub_id)!r} must hold config.json and safetensors or .bin files, got no "
            "config.json. Choose one in the format of transformers (no adapter), or download one GGUF file of it and "
            "give its path."
        )
    return directory


def files_directory(
    path_or_hub_id: str | os.PathLike[str],
    patterns: Sequence[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """Returns the directory with files of some patterns, or a GGUF file; downloads them from a hub id.

    Raises:
      CheckpointError: as `checkpoint_directory`.
    """
    local = _existing_place(path_or_hub_id)
    if local is not None:
        return local
    repo_id = str(path_or_hub_id)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id, revision=revision, token=token, cache_dir=cache_dir, allow_patterns=list(patterns)
            )
        )
    except (OSError, hub_errors.HTTPError, hub_errors.HFValidationError) as error:
        raise CheckpointError(_explain(error, repo_id)) from error


config_directory = functools.partial(files_directory, patterns=CONFIGS)
"""Returns the directory of a checkpoint's configuration, without weights."""
tokenizer_directory = functools.partial(files_directory, patterns=TOKENIZER + CONFIGS)
"""Returns the directory of a tokenizer."""
head_directory = functools.partial(files_directory, patterns=CONFIGS + HEADS)
"""Returns the directory of Medusa or Hydra heads."""


def _existing_place(path_or_hub_id: str | os.PathLike[str]) -> Path | None:
    """Returns an existing directory or GGUF file, None for a hub id; raises for anything else."""
    if not isinstance(path_or_hub_id, str | os.PathLike) or not str(path_or_hub_id):
        raise CheckpointError(f"path_or_hub_id must be a directory or a hub id, got {path_or_hub_id!r}. Pass one.")
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return _gguf_in(path) or path
    if is_gguf(path):
        if not path.is_file():
            raise CheckpointError(f"path_or_hub_id must be an existing GGUF file, got {path}. Correct the path.")
        return path
    if path.exists():
        with path.open("rb") as file:
            remedy = "Rename it to end in .gguf." if file.read(4) == b"GGUF" else "Give its directory."
        raise CheckpointError(
            f"path_or_hub_id must be a directory, a GGUF file or a hub id, got the file {path}. {remedy}"
        )
    if isinstance(path_or_hub_id, Path) or not _HUB_ID.fullmatch(str(path_or_hub_id)):
        raise CheckpointError(
            f"path_or_hub_id must be an existing directory or a hub id 'owner/name', got {path}, which does not exist. "
            "Correct the path."
        )
    return None


def _gguf_in(directory: Path) -> Path | None:
    """Returns the GGUF file of a directory without other weights, None if it has none."""
    found = sorted(directory.glob(f"*{SUFFIX}"))
    if not found or any(file.suffix in _WEIGHTS for file in directory.iterdir()):
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{directory} must hold one GGUF file, got {names}. Give the path of one.")
    return found[0]


def _explain(error: Exception, repo_id: str) -> str:
    """Returns the message of a failed download: what failed and its remedy."""
    if isinstance(error, hub_errors.GatedRepoError):
        return (
            f"access to {repo_id!r} is restricted. Accept its licence at https://huggingface.co/{repo_id}, then set "
            "HF_TOKEN (or pass token=...) to a token of that account."
        )
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return (
            f"{repo_id!r} is neither a local directory nor a repository on the hub that this token may read. Check the "
            "spelling, or pass token=... or set HF_TOKEN if it is private."
        )
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    remedy = (
        "Correct the path, or unset HF_HUB_OFFLINE to fetch it."
        if offline
        else "Check the spelling, the network and HF_TOKEN."
    )
    # The client wraps the first error into advice of its own.
    cause = error.__cause__ if isinstance(error, hub_errors.LocalEntryNotFoundError) and error.__cause__ else error
    reason = " ".join(str(cause).split()) or type(cause).__name__
    return f"{repo_id!r} is no directory and is not in the hub's cache, and the download failed ({reason}). {remedy}"
