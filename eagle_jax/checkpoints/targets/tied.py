"""Decides whether an lm_head is tied to the embedding, by config.json and tensors, as `transformers` does."""

from __future__ import annotations

import dataclasses

import numpy as np

from eagle_jax.checkpoints.files.errors import notice
from eagle_jax.checkpoints.files.mapping import LM_HEAD
from eagle_jax.checkpoints.files.tensors import FLOAT_DTYPES, TensorReader
from eagle_jax.checkpoints.files.weights import cast
from eagle_jax.config import DecoderConfig

_ROWS = 4096  # compared at a time: no second copy of the matrix is made


def settled_tie(config: DecoderConfig, reader: TensorReader, embedding: str | None, dtype: np.dtype) -> DecoderConfig:
    """Returns the configuration with `tie_word_embeddings` as the tensors have it.

    A tied model whose file holds an lm_head that differs from the embedding is untied, as `transformers` does from 5.
    An untied model without an lm_head stays untied: loading it then names the tensor that is missing.

    Args:
      embedding: name of the input embedding in the files; None where they have none.
      dtype: in which the two are compared, that of the loaded model.

    Warns:
      UserWarning: the model is untied although its config.json says tied.
    """
    head = reader.infos.get(LM_HEAD)
    if not config.tie_word_embeddings or head is None or embedding is None:
        return config
    # The loader reports quantised tensors.
    comparable = head.dtype in FLOAT_DTYPES and reader.infos[embedding].dtype in FLOAT_DTYPES
    if comparable and _equal(reader, embedding, dtype):
        return config
    notice(
        f"{reader.directory / 'config.json'}: tie_word_embeddings is true and {head.file} holds an {LM_HEAD} that "
        f"differs from {embedding}: the two are not tied, as in transformers. Set tie_word_embeddings to false."
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def _equal(reader: TensorReader, embedding: str, dtype: np.dtype) -> bool:
    """Returns whether the lm_head equals the embedding; stops at the first rows that differ."""
    shape = reader.infos[embedding].shape
    if reader.infos[LM_HEAD].shape != shape or len(shape) != 2:
        return False
    for start in range(0, shape[0], _ROWS):
        stop = min(start + _ROWS, shape[0])
        ours, theirs = (cast(reader.rows(name, start, stop), dtype, name) for name in (LM_HEAD, embedding))
        if not np.array_equal(ours, theirs):
            return False
    return True
