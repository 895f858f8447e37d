"""Tokenised documents in one flat array, and how they are packed into rows. NumPy only."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

SOURCES = ("code", "completion", "gsm8k", "instruct")
"""Kinds of documents; `Corpus.source` holds indices into it."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents end to end.

    Attributes:
      tokens: [sum of lengths] uint16. starts, lengths: [documents] where each lies.
      prompts: [documents] tokens of the prompt, up to the point where the assistant writes; 0 for plain text.
      source: [documents] index into `SOURCES`.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray
    source: np.ndarray

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], prompts: Sequence[int], source: Sequence[int]) -> Corpus:
        """Flattens token lists."""
        lengths = np.array([len(row) for row in rows], np.int64)
        tokens = np.concatenate([np.asarray(row, np.uint16) for row in rows])
        return cls(
            tokens, np.cumsum(lengths) - lengths, lengths, np.array(prompts, np.int64), np.array(source, np.int8)
        )

    def save(self, path: Path) -> None:
        """Writes a compressed .npz."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp.npz")  # a reader never sees half of it
        np.savez_compressed(partial, **dataclasses.asdict(self))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Reads what `save` wrote.

        Raises:
          ValueError: no such file, or something else in it.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if not Path(path).is_file():
            raise ValueError(f"no corpus at {path}: `python -m train.data` or `python -m train.regenerate` writes one")
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return cls(**{name: arrays[name] for name in names})
        except (KeyError, ValueError, AttributeError, TypeError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is not a corpus of `train.data`: an .npz with {', '.join(names)}") from error

    @property
    def supervised(self) -> np.ndarray:
        """Which of `tokens` are to be learnt: what an assistant wrote, or all of a plain text but its first token."""
        offsets = np.arange(len(self.tokens)) - np.repeat(self.starts, self.lengths)
        return offsets >= np.repeat(np.maximum(self.prompts, 1), self.lengths)

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document, int32."""
        start = self.starts[index]
        return self.tokens[start : start + self.lengths[index]].astype(np.int32)

    def stream(self, shares: Mapping[str, float], seed: int) -> Iterator[int]:
        """Document indices without end: each source in its own reshuffled order, at its share of the tokens."""
        rng = np.random.default_rng(seed)
        members = {name: np.flatnonzero(self.source == SOURCES.index(name)) for name in shares}
        empty = [name for name, rows in members.items() if not len(rows)]
        if empty:
            raise ValueError(f"the corpus has no document of {', '.join(empty)}; its share must be left out")
        orders: dict[str, list[int]] = {name: [] for name in shares}
        spent = dict.fromkeys(shares, 0.0)
        while True:
            name = min(shares, key=lambda source: spent[source] / shares[source])
            if not orders[name]:
                orders[name] = rng.permutation(members[name]).tolist()
            index = orders[name].pop()
            spent[name] += float(self.lengths[index])
            yield index

    def packed(
        self, shares: Mapping[str, float], length: int, seed: int, pool: int = 512
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows without end: documents end to end, cut at `length`, shuffled within a pool of rows.

        Yields:
          tokens [length] int32, and which of them are `supervised` [length] bool.
        """
        rng = np.random.default_rng(seed + 1)
        buffer = np.zeros((2, 0), np.int32)
        parts: list[np.ndarray] = []
        size = 0
        for index in self.stream(shares, seed):
            tokens = self.document(index)
            written = np.arange(len(tokens)) >= max(1, self.prompts[index])
            parts.append(np.stack([tokens, written.astype(np.int32)]))
            size += len(tokens)
            if size >= pool * length:
                buffer = np.concatenate([buffer, *parts], axis=1)
                whole = buffer[:, : pool * length].reshape(2, pool, length)
                buffer, parts = buffer[:, pool * length :], []
                size = buffer.shape[1]
                for row in rng.permutation(pool):
                    yield whole[0, row], whole[1, row].astype(bool)
