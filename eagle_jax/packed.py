"""Holds packed documents: what data loading makes and training reads."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Int


class PackedTokens(NamedTuple):
    """Packed documents.

    Attributes:
      tokens: [B, T] int32. supervised: [B, T], whether token t itself is one to learn.
      segments: [B, T] int32, the document of a row that token t belongs to, from 1; 0 is padding.
      positions: [B, T] int32, position within the document.
    """

    tokens: Int[Array, "B T"]
    supervised: Bool[Array, "B T"]
    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]
