"""Packs documents into batches, with Grain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from eagle_jax.data.corpus.documents import Corpus
from eagle_jax.packed import PackedTokens

PACKING_BINS = 64
"""Rows that are filled side by side; more waste less padding and mix epochs more."""


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

        teaches = corpus.teaches_within(length)
        parts = {"the corpus": np.arange(len(corpus))} if weights is None else {one: corpus.of(one) for one in weights}
        parts = {name: documents[teaches[documents]] for name, documents in parts.items()}
        shares = [1.0] if weights is None else list(weights.values())
        for name, documents in parts.items():
            if len(documents) < processes:
                raise ValueError(
                    f"{name} must have a document for each of {processes} process(es), got {len(documents)} documents "
                    f"with a supervised token in their first {length} tokens."
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
