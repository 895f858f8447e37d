"""The one exception of the file layer, and its warnings."""

from __future__ import annotations

import warnings


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file or tensor and the remedy."""


def notice(message: str) -> None:
    """Warns of a checkpoint that loads although two of its facts contradict, saying which of them is used."""
    warnings.warn(message, UserWarning, stacklevel=3)
