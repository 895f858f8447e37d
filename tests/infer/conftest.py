"""Fixtures of tests/programs."""

from tests.programs.conftest import ByteTokenizer, pair

__all__ = ["ByteTokenizer", "pair"]
