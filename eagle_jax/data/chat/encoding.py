"""Encodes conversations as training texts: token ids, and a loss mask of the assistant's tokens.

The loss mask is exact to the token. It comes from the `generation` blocks of the chat template. Without them, it comes
from rendering the conversation turn by turn and comparing the texts.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Bool, Int

from eagle_jax.data.chat.fitting import fit
from eagle_jax.data.chat.tokenize import GENERATION, Render, chat_template, generation_mask, render
from eagle_jax.data.rows.columns import SkippedRow, check_keys
from eagle_jax.data.rows.messages import REASONING, Message
from eagle_jax.data.rows.parse import ARGUMENTS, MESSAGES, STORED, TOOLS, Conversation, parse_row

NOT_STORED = "tokens that are not token ids, or supervised that is not [start, end) ranges of them in order"
_LOAD_TEMPLATE = "Load it with chat_template= (--chat-template of programs)"
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


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


def encode(tokenizer: Any, row: Conversation | str) -> Encoded:
    """Encodes a result of `parse_row` to token ids and loss mask, untruncated.

    In a plain text, every token but the first is supervised. In a conversation, the assistant's thoughts, text, tool
    calls and ends of turns are supervised.

    Raises:
      SkippedRow: no assistant turn or token is supervised; or the template raises an error, drops a part of the
        conversation, or changes the text around a reply.
      ValueError: the row is a conversation and the tokenizer has no chat template.
    """
    if isinstance(row, str):
        tokens = np.asarray(tokenizer.encode(row), np.int32)
        return _checked(Encoded(tokens, np.arange(len(tokens)) > 0))
    turns = [index for index, message in enumerate(row.messages) if message["role"] == "assistant"]
    if row.unsupervised.issuperset(turns):
        raise SkippedRow("no assistant turn to train on" if turns else "no assistant turn")
    template = chat_template(tokenizer, tools=row.tools is not None)
    if template is None:
        raise ValueError(f"the tokenizer must have a chat template, got none. {_LOAD_TEMPLATE}, or give plain texts.")
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
    if row.unsupervised or not has_mask:
        written = np.zeros(len(ids), bool)
        for index in sorted({*turns} - row.unsupervised):
            start, end = _turn_span(draw, messages, index, text)
            # A token that begins before the span belongs to the turn before.
            written |= (offsets[:, 0] >= start) & (offsets[:, 0] < end) & (offsets[:, 1] > offsets[:, 0])
        supervised &= written
    return _checked(Encoded(ids, supervised))


def prompt_ids(tokenizer: Any, row: Conversation) -> list[int]:
    """Returns the token ids of a conversation up to the assistant's next reply.

    Raises:
      SkippedRow: the template raises an error, or drops a part of the conversation.
      ValueError: there is no template.
    """
    if chat_template(tokenizer, tools=row.tools is not None) is None:
        raise ValueError(f"the tokenizer must have a chat template to generate replies, got none. {_LOAD_TEMPLATE}.")
    messages = fit(tokenizer, row, add_generation_prompt=True)
    text = _render_of(tokenizer, row)(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _render_of(tokenizer: Any, row: Conversation) -> Render:
    return functools.partial(render, tokenizer, tools=row.tools, **(row.arguments or {}))


def _checked(encoded: Encoded) -> Encoded:
    if not encoded.supervised.any():
        raise SkippedRow("no assistant token after rendering")
    return encoded


def _turn_span(draw: Render, messages: list[Message], index: int, text: str) -> tuple[int, int]:
    """Returns the [start, end) characters of an assistant's turn in `text`, with its end marker.

    The conversation is rendered with marks in the turn. The common text before and after the marks delimits the turn,
    from the end of the generation prompt on.

    Raises:
      SkippedRow: the template drops the turn, or changes the text around it.
    """
    before, after = messages[:index], messages[index + 1 :]
    for turn, marks in _marked_turns(messages[index]):
        marked = draw([*before, turn, *after], tokenize=False)
        places = [marked.find(mark) for mark in marks]
        if places[-1] < 0:
            continue
        last, begin = places[-1] + len(marks[-1]), min(place for place in places if place >= 0)
        ending = draw([*before, turn], tokenize=False).rpartition(marks[-1])[2].rstrip("\n")
        if marked.startswith(ending, last):
            last += len(ending)
        elif "tool_calls" in turn:  # the end of a call is unknown
            continue
        for start in _turn_starts(draw, before, marked[:begin]):
            if text.endswith(marked[last:]) and text.startswith(marked[:start]):
                return start, len(text) - len(marked) + last
    raise SkippedRow("the chat template rewrites a turn")


def _marked_turns(message: Message) -> Iterator[tuple[Message, list[str]]]:
    """Returns a turn with marks for its texts, and the marks in order; of calls, arguments or names.

    Templates repeat the name of a function before its result, and others show no arguments.
    """
    turn, marks = dict(message), []
    for key in REASONING:
        if key in message:
            turn[key] = "THOUGHTMARK"
            marks.append(turn[key])
    calls = message.get("tool_calls", [])
    if not calls or (message["content"] or "").strip():
        turn["content"] = "CONTENTMARK"
        marks.append(turn["content"])
    if not calls:
        yield turn, marks
        return
    named = [f"CALL{place:05d}MARK" for place in range(len(calls))]
    for part in ("arguments", "name"):
        turn["tool_calls"] = [
            {**call, "function": {**call["function"], part: _like(call["function"][part], mark)}}
            for call, mark in zip(calls, named, strict=True)
        ]
        yield dict(turn), [*marks, *named]


def _like(value: Any, mark: str) -> Any:
    """Returns the mark as a name, or as arguments (an object or its JSON)."""
    if isinstance(value, dict):
        return {"argument": mark}
    return json.dumps({"argument": mark}) if value.startswith("{") else mark


def _turn_starts(draw: Render, before: list[Message], marked: str) -> Iterator[int]:
    """Returns the possible starts of a turn: the ends of the template's generation prompt.

    An empty thought is the template's, and comes before the turn if it is there.
    """
    plain = draw(before, tokenize=False) if before else ""
    prompt = draw(before, tokenize=False, add_generation_prompt=True) if before else ""
    header = prompt.removeprefix(plain)
    if not header.strip():
        mark = "CONTENTMARK"
        alone = draw([*before, {"role": "assistant", "content": mark}], tokenize=False).partition(mark)[0]
        start = len(_EMPTY_THOUGHT.sub("", alone))
        yield start if alone[len(plain) : start].strip() else len(plain)
        return
    bare = header.partition("<think>")[0]
    ends = [marked.rfind(each) + len(each) for each in (bare, header) if each in marked]
    if ends and (thought := _EMPTY_THOUGHT.match(marked, ends[0])):
        yield thought.end()
    if ends:
        yield max(ends)
