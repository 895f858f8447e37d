"""Finds weights that are NaN or infinite while they are on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_jax.checkpoints.errors import CheckpointError

DIVERGED = "Take weights from before training diverged."
"""What to do about weights that are not written."""
FETCH_AGAIN = "Fetch or save the checkpoint again, or take one from before training diverged."
"""What to do about files that hold such values."""
_CHUNK = 1 << 18  # elements; a copy of so many stays in the cache
_NAMED = 10  # tensors in a message
# dtype -> (integer of its size, bits without the sign, least of them that is no finite number)
_BITS: dict[str, tuple[Any, int, int]] = {
    "float32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float16": (np.uint16, 0x7FFF, 0x7C00),
}


def count_not_finite(array: np.ndarray) -> int:
    """How many values of a float32, bfloat16 or float16 array are NaN or infinite; 0 for other dtypes.

    The bits are compared: `np.isfinite` takes six times as long on bfloat16.
    """
    if array.dtype.name not in _BITS:
        return 0
    integer, magnitude, limit = _BITS[array.dtype.name]
    bits = np.ascontiguousarray(array).reshape(-1).view(integer)
    buffer = np.empty(min(_CHUNK, bits.size), integer)
    count = 0
    for start in range(0, bits.size, _CHUNK):
        part = bits[start : start + _CHUNK]
        found = np.bitwise_and(part, integer(magnitude), out=buffer[: part.size])
        if found.max() >= limit:
            count += int(np.count_nonzero(found >= limit))
    return count


class NotFinite:
    """The tensors of a checkpoint that hold NaN or infinity, reported in one error."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def check(self, name: str, array: np.ndarray) -> bool:
        """Whether all values of the array are finite; the tensor is kept for the report where one is not."""
        count = count_not_finite(array)
        if count:
            self.found[name] = count
        return not count

    def raise_if_any(self, subject: str, remedy: str) -> None:
        """Names the tensors found.

        Raises:
          CheckpointError: there is one.
        """
        if not self.found:
            return
        named = [
            f"{name} holds {count} {'value that is' if count == 1 else 'values that are'} not finite"
            for name, count in self.found.items()
        ]
        rest = len(named) - _NAMED
        more = f", and {rest} more tensors hold such values" if rest > 0 else ""
        raise CheckpointError(f"{subject}: {', '.join(named[:_NAMED])}{more} (NaN or infinity). {remedy}")
