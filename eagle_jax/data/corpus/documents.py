"""Stores tokenised documents in memory-mapped arrays, and chooses a draft vocabulary by them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from eagle_jax.checkpoints.files.staging import named_errors
from eagle_jax.config import ConfigError
from eagle_jax.data.chat.encoding import Encoded

ARRAYS = ("tokens", "supervised", "starts", "source", "row")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Concatenated documents with their loss masks.

    Attributes:
      tokens: [sum of lengths] int32. supervised: [sum of lengths] bool, whether an assistant wrote the token; of a
        plain text, every token but the first.
      starts: [documents + 1] int64, where each begins, and the end of the last.
      source: [documents] int32 index into `names`, the sources that they come from.
      row: [documents] int32, which row of its source, from 0; rows that gave no document are counted.
    """

    tokens: np.ndarray
    supervised: np.ndarray
    starts: np.ndarray
    source: np.ndarray
    row: np.ndarray
    names: tuple[str, ...]

    @classmethod
    def from_documents(
        cls, documents: Sequence[Encoded], places: Sequence[tuple[int, int]], names: Sequence[str]
    ) -> Corpus:
        """Concatenates documents; `places` has the index in `names` and the row of each."""
        lengths = [len(document.tokens) for document in documents]
        return cls(
            np.concatenate([document.tokens for document in documents]),
            np.concatenate([document.supervised for document in documents]),
            np.cumsum([0, *lengths], dtype=np.int64),
            np.array([source for source, _ in places], np.int32),
            np.array([row for _, row in places], np.int32),
            tuple(names),
        )

    def save(self, path: Path, notes: Mapping[str, str] | None = None) -> None:
        """Writes the directory `path` atomically, with further text files `notes`."""
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with named_errors(path):
                partial.mkdir(parents=True, exist_ok=True)
                for name in ARRAYS:
                    np.save(partial / f"{name}.npy", getattr(self, name))
                for name, text in {"names.json": json.dumps(self.names), **(notes or {})}.items():
                    (partial / name).write_text(text, encoding="utf-8")
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Memory-maps a directory that `save` wrote."""
        arrays = {name: np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS}
        return cls(**arrays, names=tuple(json.loads((path / "names.json").read_text(encoding="utf-8"))))

    def __len__(self) -> int:
        return len(self.source)

    @property
    def lengths(self) -> np.ndarray:
        """Returns the tokens of each document, [documents]."""
        return np.diff(self.starts)

    def teaches_within(self, length: int) -> np.ndarray:
        """Returns whether an assistant wrote any of the first `length` tokens, [documents] bool."""
        written = np.append(np.flatnonzero(self.supervised), len(self.tokens))
        first = written[np.searchsorted(written, self.starts[:-1])]
        return first < np.minimum(self.starts[1:], self.starts[:-1] + length)

    def check_vocabulary(self, size: int) -> None:
        """Checks that all token ids are below `size`.

        Raises:
          ValueError: naming the source and the row.
        """
        beyond = np.flatnonzero((self.tokens < 0) | (self.tokens >= size))
        if len(beyond):
            document = int(np.searchsorted(self.starts, beyond[0], side="right")) - 1
            name = self.names[self.source[document]]
            raise ValueError(
                f"{name}, row {self.row[document]} (from 0): token ids must be below the target's {size}, got "
                f"{self.tokens[beyond[0]]}. Regenerate the replies with the target that the head is for."
            )

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """Counts how often every token is supervised, [V] int64."""
        return np.bincount(self.tokens[self.supervised], minlength=vocab_size)

    def __getitem__(self, index: int) -> Encoded:
        """Returns document `index`."""
        span = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return Encoded(np.asarray(self.tokens[span]), np.asarray(self.supervised[span]))

    def of(self, name: str) -> np.ndarray:
        """Returns the indices of the documents of a source."""
        return np.flatnonzero(self.source == self.names.index(name))


def draft_vocabulary(counts: np.ndarray, size: int) -> np.ndarray:
    """Chooses the draft vocabulary of an EAGLE-3 head: the most frequent tokens, the lower id on ties.

    Args:
      counts: [V], as `Corpus.token_counts` returns them.

    Returns:
      target ids in ascending order, [Vd] int32.

    Raises:
      ConfigError: `size` is not between 1 and the vocabulary.
    """
    if not 1 <= size <= len(counts):
        raise ConfigError(f"size must be from 1 to the target's {len(counts)} tokens, got {size}. Correct it.")
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(counts: np.ndarray, kept: np.ndarray) -> float:
    """Returns the share of the counted tokens that the target ids `kept` cover."""
    return float(counts[kept].sum() / max(counts.sum(), 1))
