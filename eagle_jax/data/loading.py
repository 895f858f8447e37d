"""Batches of packed documents, by Grain: the order follows from the seed, every process has its own share, and the
position in it is a small dict that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from eagle_jax.data.corpus import Corpus
from eagle_jax.types import Texts

PACKING_BINS = 64
"""Rows that are filled side by side; more waste less padding and mix epochs more."""


class Batches:
    """Batches without end; an iterator of `Texts` in NumPy, [rows, length] each.

    Documents are drawn without replacement, reshuffled every epoch; several corpora take turns by weight. A document
    longer than a row is cut; rows are filled with whole documents (first fit), each a segment of its own.

    Args:
      corpora: what is mixed. weights: share of each in documents; None is by their number.
      length: T, tokens of a row. rows: of a batch, of this process.
      process, processes: which share of the documents is read.

    Raises:
      ValueError: no documents, fewer than processes, or weights that do not fit.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        weights: Sequence[float] | None = None,
        *,
        length: int,
        rows: int,
        seed: int,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        import grain

        sizes = [len(corpus) for corpus in corpora]
        if not sizes or min(sizes) < processes:
            raise ValueError(
                f"corpora of {sizes} documents cannot feed {processes} process(es): each needs at least one"
            )
        weights = list(map(float, sizes)) if weights is None else list(weights)
        if len(weights) != len(sizes) or min(weights) <= 0:
            raise ValueError(f"{len(sizes)} corpora need as many positive weights, got {weights}")
        parts = [
            grain.MapDataset.source(_Documents(corpus, length))
            .seed(seed + index)
            .shuffle()[process::processes]
            .repeat()
            for index, corpus in enumerate(corpora)
        ]
        mixed = grain.MapDataset.mix(parts, weights) if len(parts) > 1 else parts[0]
        packed = grain.experimental.FirstFitPackIterDataset(
            mixed.to_iter_dataset(),
            length_struct={"tokens": length, "supervised": length},
            num_packing_bins=max(1, min(PACKING_BINS, sum(sizes) // (4 * processes))),
            seed=seed,
        )
        self.process, self.processes = process, processes
        self._iterator = iter(packed.batch(rows))

    def __iter__(self) -> Iterator[Texts]:
        return self

    def __next__(self) -> Texts:
        batch = next(self._iterator)
        segments = batch["tokens_segment_ids"]
        return Texts(batch["tokens"], batch["supervised"].astype(bool), segments, batch["tokens_positions"])

    def get_state(self) -> dict[str, Any]:
        """Where the next batch begins, as plain numbers."""
        return {"process": self.process, "processes": self.processes, "position": self._iterator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes back, or ahead, to where `get_state` was called.

        Raises:
          ValueError: the state is that of another share of the documents.
        """
        if (state["process"], state["processes"]) != (self.process, self.processes):
            raise ValueError(
                f"the data position was saved by process {state['process']} of {state['processes']} and this is process "
                f"{self.process} of {self.processes}: resume with as many processes"
            )
        self._iterator.set_state(state["position"])


class _Documents:
    """A corpus as Grain reads it; documents are cut at `length`."""

    def __init__(self, corpus: Corpus, length: int) -> None:
        self.corpus, self.length = corpus, length

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens, supervised = self.corpus[index]
        return {"tokens": tokens[: self.length], "supervised": supervised[: self.length].astype(np.int32)}
