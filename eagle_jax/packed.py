"""Defines packed documents, the interface between data loading and training."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Int


class PackedTokens(NamedTuple):
    """Rows of packed documents.

    Attributes:
      supervised: True for tokens to learn.
      segments: number of the token's document in its row, from 1; 0 is padding.
      positions: position within the document.
    """

    tokens: Int[Array, "B T"]
    supervised: Bool[Array, "B T"]
    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]
