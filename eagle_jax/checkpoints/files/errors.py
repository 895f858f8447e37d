"""Defines the exception and the warning of checkpoints."""

from __future__ import annotations

import warnings


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file or tensor and the remedy."""


def notice(message: str) -> None:
    """Warns that two facts of a checkpoint contradict, and which of them is used."""
    warnings.warn(message, UserWarning, stacklevel=3)
