"""Checks earlier samples and their prompts, and packs them for prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eagle_jax.drafters import History, pack_history


def packed_history(samples: Any, vocab: int, prompts: Any = None, ngram: int = 0, name: str = "history") -> History:
    """Returns `pack_history` of samples, each behind the last `ngram` tokens of its prompt if there are prompts.

    Args:
      samples: token ids per sample; empty ones are left out. vocab: the target's. prompts: one per sample, or None.
      name: of the samples in messages.

    Raises:
      ValueError: a sample or prompt is not a list of token ids, or their numbers differ.
    """
    rows = _token_rows(name, samples, vocab)
    owners = None if prompts is None else _token_rows("prompts", prompts, vocab)
    if owners is not None and len(owners) != len(rows):
        raise ValueError(
            f"prompts must have one prompt for each of the {len(rows)} samples, got {len(owners)}. Give as many of "
            "both."
        )
    kept = [index for index, row in enumerate(rows) if row.size]
    if owners is None:
        return pack_history([rows[index] for index in kept])
    joined = [np.concatenate([owners[index][-ngram:], rows[index]]) for index in kept]
    return pack_history(joined, [owners[index] for index in kept])


def _token_rows(name: str, rows: Any, vocab: int) -> list[np.ndarray]:
    """Returns lists of token ids as arrays.

    Raises:
      ValueError: naming the first row that is none, by `name`.
    """
    if not isinstance(rows, Sequence | np.ndarray | jax.Array) or isinstance(rows, str):
        raise ValueError(
            f"{name} must be a list of lists of token ids, got {rows!r:.40}. Pass the tokens of earlier samples."
        )
    found = []
    for index, given in enumerate(rows):
        try:
            row = np.asarray(given)
        except ValueError:  # lists of different lengths
            row = np.asarray(None)
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(
                f"{name}[{index}] must be a flat list of token ids, got {given!r:.40}. Pass a list of such lists."
            )
        if (bad := row[(row < 0) | (row >= vocab)]).size:
            raise ValueError(
                f"{name}[{index}] must be tokens 0 to {vocab - 1}, got {bad[0]}. Use the target's own tokenizer."
            )
        found.append(row)
    return found
