"""Selects prompts for measuring a head, rendered as in serving."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from eagle_jax.data.chat.dialogues import Dialogue
from eagle_jax.data.chat.encode import stored_text
from eagle_jax.data.corpus.sources import Source
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.parse import parse_row


def first_prompts(
    source: Source, tokenizer: Any, count: int, longest: int, reasons: collections.Counter[str] | None = None
) -> list[list[int]]:
    """Returns the prompts of the first `count` rows of a source, without those over `longest` tokens.

    A conversation is rendered with what the template adds for the reply to begin; rows of `train.regenerate` hold the
    very tokens that the target was given. Rows without a reply, as plain texts, are left out. `reasons` counts
    what was left out and why.
    """
    found: list[list[int]] = []
    reasons = collections.Counter() if reasons is None else reasons
    for row in source.rows():
        if len(found) == count:
            break
        try:
            stored = stored_text(row)
            if stored is not None:
                prompt = stored.tokens[: stored.supervised.argmax()].tolist()
            else:
                prompt = Dialogue.begin(parse_row(row)).prompt(tokenizer)
        except SkippedRow as error:
            reasons[str(error)] += 1
            continue
        if 0 < len(prompt) <= longest:
            found.append(prompt)
        else:
            reasons["a longer prompt" if prompt else "plain text, which asks nothing"] += 1
    return found


def none_of(reasons: collections.Counter[str], longest: int) -> str:
    """Explains why sources gave no prompt."""
    found = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    return f"no prompt of at most {longest} tokens: {found or 'it is empty'}"


def prompts_by_source(texts: Sequence[str], tokenizer: Any, count: int, longest: int) -> dict[str, list[list[int]]]:
    """Returns `first_prompts` of every source `path[#split]`, by name; each file of a glob is one source.

    Raises:
      ValueError: there is not one.
    """
    given = map(Source.parse, texts)
    parts = [[dataclasses.replace(one, path=str(file)) for file in one.files] or [one] for one in given]
    reasons: collections.Counter[str] = collections.Counter()
    found = {one.name: first_prompts(one, tokenizer, count, longest, reasons) for one in itertools.chain(*parts)}
    if not any(found.values()):
        raise ValueError(f"{', '.join(found)}: {none_of(reasons, longest)}")
    return found
