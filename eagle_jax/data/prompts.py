"""Prompts to measure a head on: what the target is asked, rendered as whoever serves it would."""

from __future__ import annotations

from typing import Any

from eagle_jax.data.conversations import SkippedRow, parse_row
from eagle_jax.data.replies import Dialogue
from eagle_jax.data.sources import Source


def first_prompts(source: Source, tokenizer: Any, count: int, longest: int) -> list[list[int]]:
    """The first `count` rows of a source up to their first reply, those of over `longest` tokens left out.

    A conversation is rendered with what the template adds for the reply to begin; rows of `train.regenerate` hold the
    very tokens that the target was given. Rows without a reply, as plain texts, are left out.
    """
    found: list[list[int]] = []
    for row in source.rows():
        if len(found) == count:
            break
        try:
            if "tokens" in row and row.get("supervised"):
                prompt = list(row["tokens"][: row["supervised"][0][0]])
            else:
                prompt = Dialogue.begin(parse_row(row)).prompt(tokenizer)
        except SkippedRow:
            continue
        if 0 < len(prompt) <= longest:
            found.append(prompt)
    return found
