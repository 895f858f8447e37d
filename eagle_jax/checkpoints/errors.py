"""The one exception of the file layer."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file or tensor and the remedy."""
