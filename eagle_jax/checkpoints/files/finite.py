"""Finds weights that are NaN or infinite, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_jax.checkpoints.files.errors import CheckpointError

DIVERGED = "Take weights from before training diverged."
"""Remedy for weights that are not written."""
FETCH_AGAIN = "Fetch or save the checkpoint again, or take one from before training diverged."
"""Remedy for files that hold such values."""
_CHUNK = 1 << 18  # elements: a chunk stays in the CPU cache for the second pass
_NAMED = 10  # tensors in a message
# dtype -> (integers of its size, bits of positive infinity, and of negative infinity). NaN has larger ones than either.
_BITS: dict[str, tuple[Any, Any, int, int]] = {
    "float32": (np.int32, np.uint32, 0x7F800000, 0xFF800000),
    "bfloat16": (np.int16, np.uint16, 0x7F80, 0xFF80),
    "float16": (np.int16, np.uint16, 0x7C00, 0xFC00),
}


def count_not_finite(array: np.ndarray) -> int:
    """Counts the values of a float32, bfloat16 or float16 array that are NaN or infinite; 0 for other dtypes.

    Maxima of the bits as integers: `np.isfinite` takes eight times as long on bfloat16, and memory for a mask.
    """
    if array.dtype.name not in _BITS:
        return 0
    signed, unsigned, positive, negative = _BITS[array.dtype.name]
    flat = np.ascontiguousarray(array).reshape(-1)
    count = 0
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        # Below the sign bit the signed integers are in the order of the positive floats, and negative floats are less;
        # the unsigned ones are in the order of the negative floats, and positive floats are less.
        if part.view(signed).max() >= positive or part.view(unsigned).max() >= negative:
            exponents = part.view(unsigned) & unsigned(positive)
            count += int(np.count_nonzero(exponents == positive))
    return count


class NotFinite:
    """Collects the tensors of a checkpoint that hold NaN or infinity, for one error."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def check(self, name: str, array: np.ndarray) -> bool:
        """Returns whether all values of the array are finite; otherwise records the tensor."""
        count = count_not_finite(array)
        if count:
            self.found[name] = count
        return not count

    def raise_if_any(self, subject: str, remedy: str) -> None:
        """Raises one error that names the recorded tensors.

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
