"""Stores tokenised documents in flat, memory-mapped arrays."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from eagle_jax.checkpoints.files.staging import named_errors
from eagle_jax.data.chat.encode import Encoded

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
        cls,
        documents: Sequence[Encoded],
        source: Sequence[int],
        names: Sequence[str],
        row: Sequence[int] | None = None,
    ) -> Corpus:
        """Concatenates documents; without `row` they are all rows of their sources."""
        if row is None:
            counts = [itertools.count() for _ in names]
            row = [next(counts[index]) for index in source]
        lengths = np.array([len(document.tokens) for document in documents], np.int64)
        nothing = [np.zeros(0, np.int32)]
        return cls(
            np.concatenate([*nothing, *(document.tokens for document in documents)]).astype(np.int32),
            np.concatenate([*nothing, *(document.supervised for document in documents)]).astype(bool),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array(source, np.int32),
            np.array(row, np.int32),
            tuple(names),
        )

    def save(self, path: Path, notes: Mapping[str, str] | None = None) -> None:
        """Writes the directory `path` atomically, with further text files `notes`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            with named_errors(path):
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
        """Memory-maps a directory that `save` wrote.

        Raises:
          ValueError: no such directory, or something else in it.
        """
        path = Path(path)
        if not path.is_dir():
            raise ValueError(
                f"no corpus at {path}: `python -m train.demo.data` or `python -m train.regenerate` writes one"
            )
        try:
            arrays = {name: np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS}
            return cls(**arrays, names=tuple(json.loads((path / "names.json").read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            files = ", ".join(f"{name}.npy" for name in ARRAYS)
            raise ValueError(f"{path} is not a corpus, a directory with {files} and names.json ({error})") from error

    def __len__(self) -> int:
        return len(self.source)

    @property
    def lengths(self) -> np.ndarray:
        """Returns the tokens of each document, [documents]."""
        return np.diff(self.starts)

    @property
    def prompts(self) -> np.ndarray:
        """Returns the tokens before an assistant's first, [documents]; 0 for plain text, all without an assistant."""
        tokens = np.minimum(self._first_supervised, self.starts[1:]) - self.starts[:-1]
        return np.where(tokens == 1, 0, tokens)

    def teaches_within(self, length: int) -> np.ndarray:
        """Returns whether an assistant wrote any of the first `length` tokens, [documents] bool."""
        return self._first_supervised < np.minimum(self.starts[1:], self.starts[:-1] + length)

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
                f"{name}, row {self.row[document]} (from 0): token id {self.tokens[beyond[0]]}, and the target's "
                f"vocabulary has {size}: "
                "these are tokens of another model; regenerate the replies with the target that the head is for"
            )

    @property
    def _first_supervised(self) -> np.ndarray:
        """Returns the index in `tokens` of each document's first supervised token, [documents]."""
        written = np.flatnonzero(self.supervised)
        return np.append(written, len(self.tokens))[np.searchsorted(written, self.starts[:-1])]

    def __getitem__(self, index: int) -> Encoded:
        """Returns document `index`."""
        span = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return Encoded(np.asarray(self.tokens[span]), np.asarray(self.supervised[span]))

    def of(self, *names: str) -> np.ndarray:
        """Returns the indices of the documents of some sources.

        Raises:
          ValueError: a source that the corpus does not have.
        """
        if unknown := [name for name in names if name not in self.names]:
            raise ValueError(f"the corpus has no source {', '.join(unknown)}, only {', '.join(self.names)}")
        return np.flatnonzero(np.isin(self.source, [self.names.index(name) for name in names]))
