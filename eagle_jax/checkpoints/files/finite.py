"""Finds weights that are NaN or infinite, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from eagle_jax.checkpoints.files.errors import CheckpointError

DIVERGED = "Take weights from before training diverged, or write a dtype of a wider range."
"""Remedy for weights that are not written."""
FETCH_AGAIN = "Fetch the checkpoint again, take one from before training diverged, or load a dtype of a wider range."
"""Remedy for files that hold such values."""
_CHUNK = 1 << 18  # elements: a chunk stays in the CPU cache
_NAMED = 10  # tensors in a message
# dtype -> (integers of its size, the bits of its exponent). All of the exponent's bits are set in NaN and infinity.
_BITS: dict[str, tuple[Any, int]] = {
    "float32": (np.uint32, 0x7F800000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}


def count_not_finite(array: np.ndarray) -> int:
    """Counts NaN and infinite values of an array; 0 for dtypes other than float32, bfloat16, float16.

    By the bits: `np.isfinite` takes six times as long on bfloat16.
    """
    if array.dtype.name not in _BITS:
        return 0
    integer, exponent = _BITS[array.dtype.name]
    flat = np.ascontiguousarray(array).reshape(-1).view(integer)
    return sum(
        int(np.count_nonzero((flat[start : start + _CHUNK] & integer(exponent)) == exponent))
        for start in range(0, flat.size, _CHUNK)
    )


def raise_not_finite(counts: Mapping[str, int], subject: str, remedy: str) -> None:
    """Raises one error that names the tensors with values that are not finite, of {name: count}."""
    named = [
        f"{name} holds {count} {'value that is' if count == 1 else 'values that are'} not finite"
        for name, count in counts.items()
        if count
    ]
    if named:
        rest = len(named) - _NAMED
        more = f", and {rest} more tensors hold such values" if rest > 0 else ""
        raise CheckpointError(f"{subject}: {', '.join(named[:_NAMED])}{more} (NaN or infinity). {remedy}")
