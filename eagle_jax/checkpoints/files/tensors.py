"""Reads named tensors of a checkpoint one at a time, from safetensors or PyTorch files."""

from __future__ import annotations

import contextlib
import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from eagle_jax.checkpoints.files.fields import CheckpointError, shown

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Dtypes a weight may be stored in; anything else is a quantised checkpoint."""

QUANTISED = "quantised"
"""Dtype of a `TensorInfo` for a layer of several tensors, which a reader of quantised checkpoints shows as one."""

_SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
}  # fmt: skip


class TensorInfo(NamedTuple):
    """Shape and dtype of a stored tensor, and the file that holds it."""

    shape: tuple[int, ...]
    dtype: str
    file: str


class TensorReader:
    """Reads the tensors of one checkpoint directory; a context manager.

    Names, shapes and dtypes are read first, so that a checkpoint that does not fit fails before any weight is read.

    Args:
      stem: file name without suffix; None: a model's usual names.

    Attributes:
      directory: the checkpoint directory. infos: name -> `TensorInfo` of every stored tensor.

    Raises:
      CheckpointError: no weights, a missing shard, or a truncated or corrupt file.
    """

    def __init__(self, directory: Path, stem: str | None = None) -> None:
        self.directory = directory
        self.infos: dict[str, TensorInfo] = {}
        self._sources: dict[str, Any] = {}  # tensor name -> the open file that holds it
        self._paths: dict[str, Path] = {}
        self._stack = contextlib.ExitStack()
        try:
            self._open_all(stem)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor as stored; bfloat16 becomes `jnp.bfloat16`."""
        source = self._sources[name]
        if isinstance(source, dict):
            return _torch_to_numpy(source[name])
        if _describe(source, name)[1] == "float8_e4m3fn":
            return _read_fp8(self._paths[name], name)
        return source.get_tensor(name)

    def own_name(self, name: str) -> str:
        """Returns the name of a tensor, stored or not, as the file gives it, for messages."""
        return name

    def _open_all(self, stem: str | None) -> None:
        for file in _weight_files(self.directory, stem):
            path = self.directory / file
            if not path.is_file():
                raise CheckpointError(f"{path} must exist because the index names it, but is missing. Download it.")
            with path.open("rb") as start:
                if start.read(32).startswith(b"version https://git-lfs"):
                    raise CheckpointError(f"{path} must hold weights, got a Git LFS pointer. Run `git lfs pull` there.")
            is_torch = path.suffix in (".bin", ".pt")
            opened = _read_torch(path) if is_torch else self._stack.enter_context(_open_safetensors(path))
            for name in opened.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                if name in self.infos:
                    raise CheckpointError(
                        f"{path}: every tensor must be in one file, got {name!r}, also in {self.infos[name].file}. "
                        "Save the model again."
                    )
                self.infos[name] = TensorInfo(*_describe(opened, name), file)
                self._sources[name], self._paths[name] = opened, path


class TensorView(TensorReader):
    """Shows the tensors of a reader under other names or in other parts; a subclass changes `infos` and `read`."""

    def __init__(self, inner: TensorReader) -> None:
        self.inner, self.directory, self.infos = inner, inner.directory, dict(inner.infos)

    def __exit__(self, *exc: object) -> None:
        self.inner.__exit__(*exc)

    def read(self, name: str) -> Any:
        """Reads a tensor as the reader does."""
        return self.inner.read(name)

    def own_name(self, name: str) -> str:
        """Returns the name of a tensor as the reader does."""
        return self.inner.own_name(name)


def _weight_files(directory: Path, stem: str | None) -> list[str]:
    """Returns the names of the weight files; prefers safetensors."""
    names = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"]
    if stem is not None:
        names = [f"{stem}.safetensors", f"{stem}.pt"]
    first = next((name for name in names if (directory / name).is_file()), None)
    if first is None:
        raise CheckpointError(
            f"{directory} must hold {' or '.join(names)}, got none. Pass the directory that holds one."
        )
    if not first.endswith(".json"):
        return [first]
    weight_map = read_json(directory / first).get("weight_map")
    files: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [weight_map]
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith((".safetensors", ".bin")):
            raise CheckpointError(
                f"{directory / first}: weight_map must map tensors to .safetensors or .bin files of this directory, "
                f"got {shown(file)}. Download the file again."
            )
    return sorted(set(files))


def _open_safetensors(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="np")
    except Exception as error:
        raise CheckpointError(f"{path}: truncated or corrupt ({error}). Download or save it again.") from error


def _read_fp8(path: Path, name: str) -> np.ndarray:
    """Reads a tensor of 8-bit floats, for which safetensors looks in NumPy, which has no such dtype."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        info = json.loads(file.read(length))[name]
    start, end = info["data_offsets"]
    raw = np.fromfile(path, jnp.float8_e4m3fn, end - start, offset=8 + length + start)
    return raw.reshape(info["shape"])


def _describe(opened: Any, name: str) -> tuple[tuple[int, ...], str]:
    if isinstance(opened, dict):
        tensor = opened[name]
        return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    part = opened.get_slice(name)
    dtype = str(part.get_dtype())
    return tuple(part.get_shape()), _SAFETENSORS_DTYPES.get(dtype, dtype)


def _read_torch(path: Path) -> dict[str, Any]:
    """Reads the state dict of a `.bin`; `weights_only=True` runs no code of the file."""
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f"torch must be installed to read {path}. Run pip install torch, or convert the file to safetensors."
        ) from error
    try:
        # Files of torch before 1.6 are no zip archives and cannot be mapped.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), repr(error))
        raise CheckpointError(
            f"{path}: torch.load(weights_only=True) failed ({first}): the file is corrupt or holds more than tensors. "
            "No code in it was run. Convert it to safetensors on a machine you trust."
        ) from error
    if not isinstance(state, dict) or not all(torch.is_tensor(value) for value in state.values()):
        raise CheckpointError(f"{path} must hold a flat dict of tensors, got other objects. Save a state dict.")
    return state


def _torch_to_numpy(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts an array, rounded to nearest even; values beyond the dtype become infinite."""
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
      CheckpointError: the file is missing or is no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        remedy = "Pass the directory that holds it."
        raise CheckpointError(f"{path.parent} must hold {path.name}, got none. {remedy}") from error
    except NotADirectoryError as error:
        remedy = "Load a GGUF file with load_target or load_draft_model."
        raise CheckpointError(f"{path.parent} must be a directory with {path.name}, got a file. {remedy}") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}). Download the file again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(values).__name__}. Download the file again.")
    return values
