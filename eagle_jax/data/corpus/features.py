"""Stores the tapped and final hidden states of a frozen target for every token of a corpus.

Every shard is a flat `.npy` of bytes that is mapped, not read. Row i of the whole is token i of the corpus, whose
documents are cut at `length`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import msgspec
import numpy as np

from eagle_jax.checkpoints import TEMPORARY, write_whole
from eagle_jax.data.corpus.documents import Corpus

Stored = Literal["bfloat16", "float16", "float8", "float32"]
KINDS: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float8": ml_dtypes.float8_e4m3fn, "float32": np.float32
}  # fmt: skip
"""float8 (e4m3) holds three significant bits of a number; every part of a token's row has its own scale."""


class Layout(msgspec.Struct, frozen=True):
    """The contents of `layout.json`, which describes a directory of features.

    Attributes:
      corpus: key of the corpus. target: its name. weights: fingerprint of all weights. ends: fingerprint of the weights
        outside the layers, which training on stored features loads. computed: dtype of the target's pass.
      scheme: quantisation of the target's weights when they were loaded.
      taps: hidden states, side by side. hidden: width of one. dtype: as stored. length: documents are cut there.
      bounds: documents of shard i are bounds[i] to bounds[i + 1].
    """

    corpus: str
    target: str
    weights: str
    ends: str
    computed: str
    taps: tuple[int, ...]
    hidden: int
    dtype: Stored
    length: int
    bounds: tuple[int, ...]
    scheme: str | None = None

    @property
    def parts(self) -> int:
        """Hidden states per token: the taps, and the final one after the norm."""
        return len(self.taps) + 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's row, scales included."""
        size = self.parts * self.hidden * np.dtype(KINDS[self.dtype]).itemsize
        return size + 4 * self.parts * (self.dtype == "float8")

    @property
    def shards(self) -> int:
        """Number of files."""
        return len(self.bounds) - 1

    def path(self, directory: Path, shard: int) -> Path:
        """Returns the file of a shard."""
        return directory / f"features-{shard:05d}.npy"

    def save(self, directory: Path) -> None:
        """Writes `layout.json` atomically."""
        write_whole(directory / "layout.json", msgspec.json.encode(self))

    @classmethod
    def load(cls, directory: Path) -> Layout:
        """Reads `layout.json`.

        Raises:
          ValueError: the file is missing, or of an earlier format.
        """
        path = directory / "layout.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            raise ValueError(f"{directory} must hold features, got none. Run python -m train.features.") from None
        except msgspec.DecodeError as error:
            raise ValueError(
                f"{path} must be a layout of features, got another ({error}). Write them again, to another directory."
            ) from error


def shard_bounds(corpus: Corpus, length: int, tokens: int) -> tuple[int, ...]:
    """Splits documents into shards of about `tokens` tokens; returns the first of each, and the end."""
    starts = corpus.starts_within(length)
    inner = np.searchsorted(starts, np.arange(tokens, starts[-1], tokens))
    return tuple(dict.fromkeys([0, *inner.tolist(), len(corpus)]))


def write_shard(layout: Layout, directory: Path, index: int, rows: int, fill: Callable[[Any], None]) -> None:
    """Writes one shard atomically: `fill(put)` calls `put(row numbers [n], states [n, parts, hidden])`.

    A shard that exists is left alone.

    Raises:
      ValueError: the disk is full, or a state is not finite as it is stored.
    """
    path = layout.path(directory, index)
    if path.exists():
        return
    partial = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        table = np.lib.format.open_memmap(partial, "w+", np.uint8, (rows, layout.token_bytes))
        if hasattr(os, "posix_fallocate"):
            _reserve(partial)
        fill(lambda at, states: table.__setitem__(at, _pack(layout, states)))
        table.flush()
        del table
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _reserve(path: Path) -> None:
    """Reserves disk space for a file: writing a mapped page to a full disk kills the process."""
    size = path.stat().st_size
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ValueError(
                f"{path.parent} must have room for {size / 1e9:.2f} GB more ({error.strerror}). Make room and run "
                "again, or store them as float8, or of fewer texts, in another directory."
            ) from error


def _pack(layout: Layout, states: np.ndarray) -> np.ndarray:
    states = np.asarray(states, np.float32)
    scales: list[np.ndarray] = []
    if layout.dtype == "float8":
        scale = np.maximum(np.abs(states).max(axis=-1, keepdims=True), 1e-30) / 448.0  # the largest number of e4m3
        scales.append(scale.astype(np.float32))
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        stored = (states / scale if scales else states).astype(KINDS[layout.dtype])
    if not np.isfinite(stored).all():
        if not np.isfinite(states).all():
            raise ValueError("hidden states must be finite, got NaN or infinity. Run the target in float32.")
        most = np.abs(states).max()
        raise ValueError(f"states must fit {layout.dtype}, got {most:.6g}. Store bfloat16 in another directory.")
    parts = [part.reshape(len(states), -1).view(np.uint8) for part in (*scales, stored)]
    return np.concatenate(parts, axis=1)


def _unpack(layout: Layout, rows: np.ndarray) -> np.ndarray:
    shape = (len(rows), layout.parts, layout.hidden)
    if layout.dtype != "float8":
        return np.ascontiguousarray(rows).view(KINDS[layout.dtype]).reshape(shape)
    cut = 4 * layout.parts
    scale = np.ascontiguousarray(rows[:, :cut]).view(np.float32)[..., None]
    stored = np.ascontiguousarray(rows[:, cut:]).view(KINDS["float8"]).reshape(shape).astype(np.float32)
    return (stored * scale).astype(ml_dtypes.bfloat16)


_LABELS = {
    "weights": ("fingerprint of the target", ""), "ends": ("fingerprint of embedding, norm and lm_head", ""),
    "scheme": ("quantisation of the target", "--weights"), "computed": ("dtype of the target", "--dtype"),
}  # fmt: skip
"""Fields of a layout in words, and the option that sets them."""


class Features:
    """The memory-mapped features of a corpus.

    Args:
      expected: fields of the layout that this run needs: corpus, target, scheme, computed, weights (or ends, without
        layers), taps. The first that differs is named.

    Raises:
      ValueError: shards are missing, of another corpus, target or head, or of documents cut below `length`.
    """

    def __init__(self, directory: Path, corpus: Corpus, expected: Mapping[str, Any], length: int):
        self.layout = layout = Layout.load(directory)
        for name, ours in expected.items():
            if (theirs := getattr(layout, name)) != ours:
                label, option = _LABELS.get(name, (name, ""))
                remedy = f"Give {option} the value of train.features, or write" if option else "Write"
                raise ValueError(
                    f"the {label} of the features in {directory} must be {ours}, as in this run, got {theirs}. "
                    f"{remedy} them again with train.features."
                )
        if layout.length < length:
            raise ValueError(f"length must be at most {layout.length}, that of {directory}, got {length}. Lower it.")
        if missing := [i for i in range(layout.shards) if not layout.path(directory, i).is_file()]:
            found = f"{layout.shards - len(missing)} of {layout.shards}"
            raise ValueError(f"{directory} must hold all shards, got {found}. Run train.features to its end.")
        self._starts = corpus.starts_within(layout.length)
        self._firsts = self._starts[list(layout.bounds)]
        self._shards = [np.load(layout.path(directory, i), mmap_mode="r") for i in range(layout.shards)]

    def take(self, documents: np.ndarray, positions: np.ndarray, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns features [rows, T, taps * hidden] and final states [rows, T, hidden]; 0 in padding.

        Args:
          documents, positions, segments: [rows, T], of `Batches` and its batch.
        """
        rows = np.where(segments > 0, self._starts[documents] + positions, -1).reshape(-1)
        kind = ml_dtypes.bfloat16 if self.layout.dtype == "float8" else KINDS[self.layout.dtype]
        states = np.zeros((len(rows), self.layout.parts, self.layout.hidden), kind)
        shards = np.where(rows < 0, -1, np.searchsorted(self._firsts, rows, side="right") - 1)
        for shard in np.unique(shards[rows >= 0]).tolist():
            at = np.flatnonzero(shards == shard)
            states[at] = _unpack(self.layout, self._shards[shard][rows[at] - self._firsts[shard]])
        states = states.reshape(*documents.shape, -1)
        cut = self.layout.hidden * len(self.layout.taps)
        return states[..., :cut], states[..., cut:]
