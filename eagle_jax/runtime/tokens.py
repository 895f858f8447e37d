"""Checks lists of token ids that a caller gives: prompts, earlier samples, stop tokens."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np


def token_rows(
    given: Any, name: str, vocab: int, *, place: str | None = None, nesting: str, empty: bool = False
) -> list[np.ndarray]:
    """Returns lists of token ids as int32 arrays.

    Args:
      name: of the whole in messages. place: of a row, in which {} stands for its index; None is `name[{}]`.
      vocab: the target's. nesting: the remedy for rows that are nested too much or too little.
      empty: allows no rows, and rows without tokens.

    Raises:
      ValueError: a row is no list of token ids; the message names the first one.
    """
    least = "" if empty else "non-empty "
    is_rows = isinstance(given, Sequence | np.ndarray | jax.Array) and not isinstance(given, str)
    if not is_rows or not (empty or len(given)):
        raise ValueError(f"{name} must be a {least}list of lists of token ids, got {_quoted(given, nesting)}")
    rows = []
    for index, value in enumerate(given):
        row, at = integers(value), (place or f"{name}[{{}}]").format(index)
        if row is None or row.ndim != 1 or not (empty or row.size):
            raise ValueError(f"{at} must be a {least}flat list of token ids, got {_quoted(value, nesting)}")
        if (bad := np.flatnonzero((row < 0) | (row >= vocab))).size:
            raise ValueError(
                f"{at}[{bad[0]}] must be 0 to {vocab - 1}, got {row[bad[0]]}. Use the target's own tokenizer."
            )
        rows.append(row.astype(np.int32))
    return rows


def integers(values: Any) -> np.ndarray | None:
    """Returns `values` as an array of integers, or as an empty array; None for other values."""
    if isinstance(values, bool | str | bytes | set | dict):
        return None
    if isinstance(values, Sequence) and any(isinstance(value, bool) for value in values):
        return None  # NumPy would convert them to 0 and 1
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        return None
    return array if array.size == 0 or np.issubdtype(array.dtype, np.integer) else None


def is_list(value: Any) -> bool:
    """Returns whether a value has items, as a list or an array."""
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0


def _quoted(value: Any, nesting: str) -> str:
    """Returns the beginning of a value that is no row of tokens, and a remedy."""
    remedy = "Pass the ids that the target's tokenizer returns."
    if isinstance(value, Mapping):  # such as BatchEncoding
        remedy = "Pass its ['input_ids']."
    elif isinstance(value, str):
        remedy = "Tokenize the text first: tokenizer.encode(text)."
    elif isinstance(value, numbers.Integral) or (isinstance(value, Sequence) and any(map(is_list, value))):
        remedy = nesting
    return f"{value!r:.40}. {remedy}"
