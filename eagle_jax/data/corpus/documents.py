"""Stores tokenised documents in memory-mapped arrays, and packs them into batches with Grain."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from eagle_jax.checkpoints import TEMPORARY, named_errors
from eagle_jax.config import ConfigError
from eagle_jax.data.chat.encoding import Encoded
from eagle_jax.packed import PackedTokens

ARRAYS = ("tokens", "supervised", "starts", "source", "row")
PACKING_BINS = 64
"""Rows that are filled side by side; more waste less padding and mix epochs more."""


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
        """Writes the directory `path` atomically, with further text files by name, `notes`."""
        partial = path.with_name(f"{TEMPORARY}{path.name}.{os.getpid()}")
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

    def starts_within(self, length: int) -> np.ndarray:
        """Returns where each document begins, [documents + 1] int64, with documents cut at `length`."""
        return np.append(0, np.cumsum(np.minimum(self.lengths, length), dtype=np.int64))

    def has_loss_within(self, length: int) -> np.ndarray:
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
                f"{self.tokens[beyond[0]]}. Regenerate the replies with this target."
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
    """Returns the share of the counted tokens, `counts` [V], that the target ids `kept` [Vd] cover."""
    return float(counts[kept].sum() / max(counts.sum(), 1))


class Batches:
    """Yields batches endlessly: `PackedTokens` in NumPy, [rows, length] each.

    The order follows from the seed: every epoch shuffles the documents again, and sources take turns by weight. A
    document longer than a row is cut, and left out if no supervised token is before the cut. Rows are filled with whole
    documents (first fit), each a segment of its own.

    Args:
      weights: share of every source in documents, by its name; None is by their number.
      length: T, tokens of a row. rows: of a batch, of this process.
      process, processes: number of this process, which reads its own share of the documents.

    Attributes:
      documents: [rows, T] int32, the document that each token of the last batch is of; -1 in padding.

    Raises:
      ValueError: fewer documents than processes, or weights that do not fit.
    """

    documents: Int[np.ndarray, "rows T"]

    def __init__(
        self,
        corpus: Corpus,
        weights: Mapping[str, float] | None = None,
        *,
        length: int,
        rows: int,
        seed: int,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        import grain

        usable = corpus.has_loss_within(length)
        parts = {"the corpus": np.arange(len(corpus))} if weights is None else {one: corpus.of(one) for one in weights}
        parts = {name: documents[usable[documents]] for name, documents in parts.items()}
        shares = [1.0] if weights is None else list(weights.values())
        for name, documents in parts.items():
            if len(documents) < processes:
                raise ValueError(
                    f"{name} must have a document for each of {processes} process(es), got {len(documents)} documents "
                    f"with a supervised token in their first {length} tokens. Add data, or raise length."
                )

        def cut(document: int) -> dict[str, np.ndarray]:
            tokens, supervised = corpus[document]
            numbers = np.full(len(tokens), document, np.int32)
            columns = {"tokens": tokens, "supervised": supervised.astype(np.int32), "document": numbers}
            return {name: column[:length] for name, column in columns.items()}

        streams = [
            grain.MapDataset.source(documents.tolist())
            .seed(seed + index)
            .shuffle()[process::processes]
            .repeat()
            .map(cut)
            for index, documents in enumerate(parts.values())
        ]
        mixed = grain.MapDataset.mix(streams, shares) if len(streams) > 1 else streams[0]
        sizes = sum(map(len, parts.values()))
        packed = grain.experimental.FirstFitPackIterDataset(
            mixed.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),  # threads are slower here
            length_struct=dict.fromkeys(("tokens", "supervised", "document"), length),
            num_packing_bins=max(1, min(PACKING_BINS, sizes // (4 * processes))),
            seed=seed,
        )
        self.process, self.processes = process, processes
        self._iterator = iter(packed.batch(rows))

    def __iter__(self) -> Iterator[PackedTokens]:
        return self

    def __next__(self) -> PackedTokens:
        batch = next(self._iterator)
        segments = batch["tokens_segment_ids"]
        self.documents = np.where(segments > 0, batch["document"], -1)
        return PackedTokens(batch["tokens"], batch["supervised"].astype(bool), segments, batch["tokens_positions"])

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the next batch, as plain numbers."""
        return {"process": self.process, "processes": self.processes, "position": self._iterator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to the position that `get_state` returned.

        Raises:
          ValueError: the state is that of another share of the documents.
        """
        if (state["process"], state["processes"]) != (self.process, self.processes):
            raise ValueError(
                f"the data position must be of process {self.process} of {self.processes}, got one of process "
                f"{state['process']} of {state['processes']}. Resume with the same number of processes."
            )
        self._iterator.set_state(state["position"])
