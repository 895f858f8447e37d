"""Encodes conversations as training texts: token ids, and a loss mask of the assistant's tokens.

The loss mask is exact to the token. It comes from the `generation` blocks of the chat template. Without them, it comes
from rendering the conversation turn by turn and comparing the texts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Bool, Int

from eagle_jax.data.rows.columns import SkippedRow, check_keys
from eagle_jax.data.rows.messages import Message
from eagle_jax.data.rows.parse import ARGUMENTS, MESSAGES, STORED, TOOLS, Conversation, as_conversation, parse_row
from eagle_jax.data.templates.fitting import fit
from eagle_jax.data.templates.rendering import GENERATION, chat_template, render
from eagle_jax.data.templates.spans import Render, generation_mask, turn_span

NOT_STORED = "tokens that are not token ids, or supervised that is not [start, end) ranges of them in order"
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Encoded(NamedTuple):
    """Token ids of a training text with their loss mask.

    Attributes:
      tokens: [T] int32. supervised: [T], whether an assistant wrote the token (its end-of-turn token included).
    """

    tokens: Int[np.ndarray, " T"]
    supervised: Bool[np.ndarray, " T"]


def stored_text(row: Mapping[str, Any]) -> Encoded | None:
    """Reads the token ids of a row of `train.regenerate`; None for any other row.

    Raises:
      SkippedRow: tokens are not ids, ranges do not fit them, or the row has an unknown key.
    """
    if any(row.get(key) is None for key in STORED):
        return None
    check_keys(row, (*STORED, *MESSAGES, *TOOLS, ARGUMENTS), "the row has")
    try:
        tokens = np.asarray(msgspec.convert(row["tokens"], list[_TokenId]), np.int32)
        ranges = msgspec.convert(row["supervised"], list[tuple[int, int]])
    except msgspec.ValidationError:
        raise SkippedRow(NOT_STORED) from None
    supervised, last = np.zeros(len(tokens), bool), 0
    for start, end in ranges:
        if not last <= start < end <= len(tokens):
            raise SkippedRow(NOT_STORED)
        supervised[start:end], last = True, end
    return _checked(Encoded(tokens, supervised))


def encode_row(tokenizer: Any, row: Mapping[str, Any]) -> Encoded:
    """Encodes a row of any form to token ids and loss mask.

    Raises:
      SkippedRow: as `stored_text`, `parse_row` and `encode`.
    """
    return stored_text(row) or encode(tokenizer, parse_row(row))


def encode(tokenizer: Any, row: Conversation | list[Message] | str) -> Encoded:
    """Encodes a result of `parse_row` to token ids and loss mask, untruncated.

    In a plain text, every token but the first is supervised. In a conversation, the assistant's thoughts, text, tool
    calls and ends of turns are supervised.

    Raises:
      SkippedRow: no assistant turn or token is supervised; or the template raises an error, drops a part of the
        conversation, or changes the text around a reply.
    """
    if isinstance(row, str):
        tokens = np.asarray(tokenizer.encode(row), np.int32)
        return _checked(Encoded(tokens, np.arange(len(tokens)) > 0))
    row = as_conversation(row)
    turns = [index for index, message in enumerate(row.messages) if message["role"] == "assistant"]
    if row.untaught.issuperset(turns):
        raise SkippedRow("no assistant turn to train on" if turns else "no assistant turn")
    template = chat_template(tokenizer, tools=row.tools is not None)
    if template is None:
        raise ValueError(
            "the tokenizer must have a chat template, got none. Pass --chat-template, or use rows of plain text."
        )
    messages, draw = fit(tokenizer, row), _render_of(tokenizer, row)
    text = draw(messages, tokenize=False)
    has_mask = GENERATION.search(template) is not None
    if has_mask:
        ids, offsets, supervised = generation_mask(draw, messages)
    else:
        out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(out["input_ids"], np.int32)
        offsets = np.asarray(out["offset_mapping"], np.int64).reshape(-1, 2)
        supervised = np.ones(len(ids), bool)
    if row.untaught or not has_mask:
        taught = np.zeros(len(ids), bool)
        for index in sorted({*turns} - row.untaught):
            start, end = turn_span(draw, messages, index, text)
            # A token that begins before the span belongs to the turn before.
            taught |= (offsets[:, 0] >= start) & (offsets[:, 0] < end) & (offsets[:, 1] > offsets[:, 0])
        supervised &= taught
    return _checked(Encoded(ids, supervised))


def prompt_ids(tokenizer: Any, row: Conversation | list[Message]) -> list[int]:
    """Returns the token ids of a conversation up to the assistant's next reply.

    Raises:
      SkippedRow: the template raises an error, or drops a part of the conversation.
      ValueError: there is no template.
    """
    row = as_conversation(row)
    if chat_template(tokenizer, tools=row.tools is not None) is None:
        raise ValueError("the tokenizer must have a chat template to generate replies, got none. Pass --chat-template.")
    messages = fit(tokenizer, row, add_generation_prompt=True)
    text = _render_of(tokenizer, row)(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _render_of(tokenizer: Any, row: Conversation) -> Render:
    return functools.partial(render, tokenizer, tools=row.tools, **(row.arguments or {}))


def _checked(encoded: Encoded) -> Encoded:
    if not encoded.supervised.any():
        raise SkippedRow("no assistant token after rendering")
    return encoded
