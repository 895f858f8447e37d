"""Selects prompts for measuring a head, rendered as in serving."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_jax.data.chat.dialogues import Dialogue
from eagle_jax.data.chat.encode import stored_text
from eagle_jax.data.corpus.sources import Source
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.parse import parse_row


def prompts_by_source(
    texts: Sequence[str], tokenizer: Any, count: int, longest: int, options: str = ""
) -> dict[str, list[list[int]]]:
    """Returns the first `count` prompts of every source `path[#split]`, by name; each file of a glob is one source.

    A conversation is rendered with the template's generation prompt. Rows of `train.regenerate` hold the exact prompt
    tokens of the target. Prompts of more than `longest` tokens and rows without a reply are left out.

    Args:
      options: the origin of `longest`, for the error.

    Raises:
      ValueError: no source has a prompt; the message has the reasons.
    """
    parts = [
        [dataclasses.replace(one, path=str(file)) for file in one.files] or [one] for one in map(Source.parse, texts)
    ]
    found: dict[str, list[list[int]]] = {}
    reasons: collections.Counter[str] = collections.Counter()
    for source in itertools.chain(*parts):
        prompts = found.setdefault(source.name, [])
        for row in source.rows():
            if len(prompts) == count:
                break
            try:
                prompt = _prompt(row, tokenizer)
            except SkippedRow as error:
                reasons[str(error)] += 1
                continue
            if 0 < len(prompt) <= longest:
                prompts.append(prompt)
            else:
                reasons["a longer prompt" if prompt else "plain text, which asks nothing"] += 1
    if not any(found.values()):
        why = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common()) or "it is empty"
        raise ValueError(f"{', '.join(found)}: no prompt of at most {longest} tokens: {why}{options}")
    return found


def _prompt(row: Mapping[str, Any], tokenizer: Any) -> list[int]:
    stored = stored_text(row)
    if stored is None:
        return Dialogue.begin(parse_row(row)).prompt(tokenizer)
    return list(stored.tokens[: stored.supervised.argmax()].tolist())
