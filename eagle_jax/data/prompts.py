"""Prompts to measure a head on: what the target is asked, rendered as whoever serves it would."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
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


def prompts_by_source(texts: Sequence[str], tokenizer: Any, count: int, longest: int) -> dict[str, list[list[int]]]:
    """`first_prompts` of every source `path[#split]`, by its name; every file of a glob is a source of its own.

    Raises:
      ValueError: there is not one.
    """
    given = map(Source.parse, texts)
    parts = [[dataclasses.replace(one, path=str(file)) for file in one.files] or [one] for one in given]
    found = {one.name: first_prompts(one, tokenizer, count, longest) for one in itertools.chain(*parts)}
    if not any(found.values()):
        raise ValueError(f"{', '.join(found)}: no prompt of at most {longest} tokens")
    return found
