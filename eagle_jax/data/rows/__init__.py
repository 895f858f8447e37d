"""Reads rows of data sets strictly: the conversation or the text of each."""

from eagle_jax.data.rows.columns import SkippedRow, is_absent, is_metadata, is_reference
from eagle_jax.data.rows.parse import REPLIES, parse_row

__all__ = ["REPLIES", "SkippedRow", "is_absent", "is_metadata", "is_reference", "parse_row"]
