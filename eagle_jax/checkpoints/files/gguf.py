"""Reads the header and the tensors of GGUF files, the format of llama.cpp."""

from __future__ import annotations

import functools
import math
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.checkpoints.files.fields import CheckpointError

SUFFIX = ".gguf"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a metadata value -> its format in `struct`."""


def is_gguf(place: str | os.PathLike[str]) -> bool:
    """Returns whether a path names a GGUF file."""
    return Path(place).suffix == SUFFIX


class StoredTensor(NamedTuple):
    """A tensor as the header lists it.

    Attributes:
      shape: in PyTorch's order. quantisation: its number in GGML. offset: of its bytes in the data.
    """

    shape: tuple[int, ...]
    quantisation: int
    offset: int


class GgufFile:
    """Parses the header of a GGUF file, and dequantises its tensors.

    The header is parsed here: `gguf.GGUFReader` takes seconds for the tokens of a vocabulary.

    Attributes:
      path: of the file. metadata: key -> number, string or list. tensors: name in the file -> `StoredTensor`.

    Raises:
      CheckpointError: the file is no GGUF file, is truncated or corrupt, or holds a part of a model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            self._data = np.memmap(path, np.uint8, "r").data
            if (magic := struct.unpack_from("<4sI", self._data)) not in ((b"GGUF", 2), (b"GGUF", 3)):
                raise ValueError(f"magic and version are {magic}")
            self._parse()
        except Exception as error:
            raise CheckpointError(
                f"{path} must be a whole GGUF file of version 2 or 3, got one that is truncated or of another kind "
                f"({error}). Download it again."
            ) from error
        if (parts := self.metadata.get("split.count", 1)) not in (0, 1):
            raise CheckpointError(
                f"{path} must hold a whole model, got one of {parts} parts. Join them with llama-gguf-split --merge."
            )

    def check_tensors(self) -> None:
        """Checks that every tensor is complete and can be dequantised; reads no weights.

        Raises:
          CheckpointError: the package gguf is missing, the file is truncated, or a quantisation cannot be read.
        """
        for name in self.tensors:
            self._rows(name)

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor in float32."""
        shape, quantisation, _ = self.tensors[name]
        return _dequantise(self._rows(name), quantisation).reshape(shape)

    def _rows(self, name: str) -> np.ndarray:
        """Returns a tensor as bytes [..., bytes of a row], a view of the file."""
        shape, quantisation, offset = self.tensors[name]
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise CheckpointError(
                f"the package gguf must be installed to read {self.path}. Run pip install -e '.[gguf]'."
            ) from error
        try:
            block, block_bytes = _block_sizes(quantisation)
        except (ValueError, NotImplementedError) as error:
            raise CheckpointError(
                f"{self.path}: {name} must have a quantisation that the package gguf reads, got type {quantisation} "
                f"({error}). Upgrade gguf, or load another file."
            ) from error
        width, rest = divmod(shape[-1] if shape else 1, block)
        start, size = self._start + offset, math.prod(shape[:-1]) * width * block_bytes
        if rest or start + size > len(self._data):
            raise CheckpointError(
                f"{self.path} must be a whole file, got {len(self._data)} bytes ({name} does not fit). Download it "
                "again."
            )
        return np.frombuffer(self._data, np.uint8, size, start).reshape(*shape[:-1], width * block_bytes)

    def _parse(self) -> None:
        self._at = 8
        tensors, pairs = self._take("QQ")
        for _ in range(pairs):
            key = self._text()
            self.metadata[key] = self._value(self._take("I")[0])
        for _ in range(tensors):
            name = self._text()
            shape = self._take(f"{self._take('I')[0]}Q")[::-1]
            self.tensors[name] = StoredTensor(shape, *self._take("IQ"))
        alignment = self.metadata.get("general.alignment", 32)
        self._start = -(-self._at // alignment) * alignment

    def _take(self, codes: str) -> tuple[Any, ...]:
        start, self._at = self._at, self._at + struct.calcsize(f"<{codes}")
        if self._at > len(self._data):
            raise ValueError(f"its header does not end within {len(self._data)} bytes")
        return struct.unpack_from(f"<{codes}", self._data, start)

    def _text(self) -> str:
        (size,) = self._take("Q")
        self._at += size  # of a truncated file this is beyond its end, and the number that follows cannot be taken
        return str(self._data[self._at - size : self._at], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._take(_SCALARS[kind])[0]
        kind, count = self._take("IQ")
        if kind in _SCALARS:
            return list(self._take(f"{count}{_SCALARS[kind]}"))
        return [self._value(kind) for _ in range(count)]


@functools.cache
def _block_sizes(number: int) -> tuple[int, int]:
    """Returns how many values and bytes a block of a quantisation has; raises if it cannot be dequantised."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    values, size = GGML_QUANT_SIZES[GGMLQuantizationType(number)]
    _dequantise(np.zeros((1, size), np.uint8), number)
    return values, size


def _dequantise(rows: np.ndarray, number: int) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants

    return quants.dequantize(rows, GGMLQuantizationType(number))
