"""Writes files and checkpoint directories atomically: complete, or nothing changes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.checkpoints.files.hub import CONFIGS

TEMPORARY = ".eagle_jax-tmp-"
"""First part of the names of temporary files and directories; `sweep` removes only these."""
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON object, indented, as `write_whole`."""
    write_whole(path, json.dumps(values, indent=2) + "\n")


def write_whole(path: Path, content: bytes | str) -> None:
    """Replaces a file atomically, and makes its directory; several processes may write the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{TEMPORARY}{path.name}.{os.urandom(4).hex()}")
    try:
        with named_errors(path), partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Sets the filename of an OSError that has none, such as that of a full disk; a context manager.

    Raises:
      OSError: the block raised it.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@contextlib.contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Yields a temporary directory that replaces `directory` if the block succeeds; a context manager.

    Files of an existing directory that are no part of a checkpoint are copied; weights of an older one are not.

    Raises:
      CheckpointError: `directory` is a file, or has subdirectories.
    """
    directory = directory.expanduser().resolve()  # a link stays, its target is replaced
    kept: list[Path] = []
    if directory.exists():
        inside = sorted(directory.iterdir()) if directory.is_dir() else []
        if not directory.is_dir() or any(not path.is_file() for path in inside):
            raise CheckpointError(f"{directory} must be a directory without subdirectories. Save to another path.")
        kept = [path for path in inside if path.name not in CONFIGS and not path.name.endswith(_WEIGHTS)]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}{directory.name}.", dir=directory.parent) as temporary:
        staging, old = Path(temporary) / "new", Path(temporary) / "old"
        staging.mkdir()
        yield staging
        for path in kept:
            shutil.copy2(path, staging / path.name)
        for weights in staging.glob("*.safetensors"):  # safetensors writes files with mode 0600
            weights.chmod(staging.stat().st_mode & 0o666)
        try:
            if directory.exists():
                directory.replace(old)
            staging.replace(directory)
        except BaseException:
            if old.exists():
                old.replace(directory)
            raise


def sweep(*folders: Path) -> None:
    """Removes temporary files of killed processes from directories that no other process writes to."""
    for folder in folders:
        for path in folder.glob(f"{TEMPORARY}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
