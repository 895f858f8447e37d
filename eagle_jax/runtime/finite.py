"""The error for logits and drafts that are not finite, raised after a run from what its state recorded."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_jax.core.types import FINITE

_LISTED = 8  # rows


class NotFiniteError(ValueError):
    """The target's logits, or the drafts of a drafter, were NaN or infinite.

    Attributes:
      positions: {row: generated position} of the target's logits. A row ends before that position.
      drafts: {row: generated position} from which the drafter's scores were NaN. The text of such a row is complete.
      output: the `GenerateOutput` of all rows, where the call returns one: rows that are not in `positions` are as they
        would be without the others.
    """

    def __init__(self, positions: dict[int, int], drafts: dict[int, int], output: Any = None) -> None:
        self.positions, self.drafts, self.output = positions, drafts, output
        parts = []
        if positions:
            parts.append(
                f"the target has no finite logits for {_listed(positions)}. Load it in float32 or bfloat16 (float16 "
                "overflows at 65504), and look for NaN in its weights."
            )
        if drafts:
            parts.append(
                f"the drafter's scores are NaN from {_listed(drafts)} on. The text is right; load or train the drafter "
                "anew, or pass drafter=None."
            )
        if output is not None:
            parts.append("The tokens of all rows are in .output of this error.")
        super().__init__(" ".join(parts))


def check_finite(not_finite: np.ndarray, bad_drafts: np.ndarray, *, output: Any = None, ended: bool = True) -> None:
    """Raises if a row met logits or drafts that are not finite.

    Args:
      not_finite, bad_drafts: [B] int32, as in `GenerateState`, on the host.
      output: what the error carries.
      ended: whether the run is over. Before that bad drafts alone raise nothing: the text goes on and is right.

    Raises:
      NotFiniteError: naming rows and positions.
    """
    positions, drafts = _rows(not_finite), _rows(bad_drafts)
    if positions or (drafts and ended):
        raise NotFiniteError(positions, drafts, output)


def _rows(found: np.ndarray) -> dict[int, int]:
    return {int(row): int(found[row]) for row in np.flatnonzero(np.asarray(found) != FINITE)}


def _listed(rows: dict[int, int]) -> str:
    named = [f"row {row}, generated token {position}" for row, position in list(rows.items())[:_LISTED]]
    return "; ".join(named) + f" and {len(rows) - _LISTED} more rows" * (len(rows) > _LISTED)
