"""Conversations as training texts: rows of the usual formats to token ids, and which of those an assistant wrote.

The loss mask is exact to the token: it comes from the `generation` spans of a chat template that marks them, and
otherwise from rendering the conversation turn by turn and comparing the texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

Message = dict[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`."""

ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
}  # fmt: skip
"""How the rows of the usual datasets name who speaks."""

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class SkippedRow(ValueError):
    """A row that no training text can be made of; the message is the reason, the same for rows of the same kind."""


class Encoded(NamedTuple):
    """A training text.

    Attributes:
      tokens: [T] int32. supervised: [T], whether an assistant wrote the token (its end-of-turn token included).
    """

    tokens: Int[np.ndarray, " T"]
    supervised: Bool[np.ndarray, " T"]

    @classmethod
    def from_spans(cls, tokens: Sequence[int], spans: Sequence[Sequence[int]]) -> Encoded:
        """From token ids and the [start, end) ranges of those that an assistant wrote."""
        supervised = np.zeros(len(tokens), bool)
        for start, end in spans:
            supervised[start:end] = True
        return _checked(cls(np.asarray(tokens, np.int32), supervised))


def parse_row(row: Mapping[str, Any]) -> list[Message] | str:
    """The messages of a ShareGPT (`conversations`) or OpenAI (`messages`) row, or the text of a plain one (`text`).

    Raises:
      SkippedRow: none of the three, an unknown speaker, a message without text, or nobody to learn from.
    """
    for key in ("messages", "conversations", "conversation"):
        if row.get(key) is not None:
            messages = [_message(entry) for entry in _entries(row[key])]
            if not any(message["role"] == "assistant" for message in messages):
                raise SkippedRow("no assistant turn")
            return messages
    text = row.get("text")
    if not isinstance(text, str):
        raise SkippedRow("neither messages, conversations nor text")
    if not text.strip():
        raise SkippedRow("empty text")
    return text


def _entries(value: Any) -> Sequence[Any]:
    if isinstance(value, np.ndarray):  # Parquet
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        raise SkippedRow("the conversation is not a list of messages")
    return value


def _message(entry: Any) -> Message:
    if not isinstance(entry, Mapping):
        raise SkippedRow("a message is not an object")
    speaker = entry.get("role", entry.get("from"))
    role = ROLES.get(str(speaker).lower())
    if role is None:
        raise SkippedRow(f"unknown speaker {speaker!r}")
    content = entry.get("content", entry.get("value"))
    if isinstance(content, list | tuple):  # OpenAI's parts
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise SkippedRow("a message holds something else than text")
        content = "".join(str(part["text"]) for part in content)
    if not isinstance(content, str):
        raise SkippedRow("a message without text")
    return {"role": role, "content": content}


def encode(tokenizer: Any, row: list[Message] | str) -> Encoded:
    """Token ids and loss mask of what `parse_row` returned, untruncated.

    Of a plain text every token but the first is supervised.

    Raises:
      SkippedRow: the template refuses the order of the turns, drops or changes one, or no token is supervised.
    """
    if isinstance(row, str):
        tokens = np.asarray(tokenizer.encode(row), np.int32)
        return _checked(Encoded(tokens, np.arange(len(tokens)) > 0))
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template: pass one, or use rows of plain text")
    if _MARKED.search(tokenizer.chat_template):
        out = _render(tokenizer, row, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        mask = np.asarray(out["assistant_masks"], bool)
        return _checked(Encoded(np.asarray(out["input_ids"], np.int32), mask))
    text = _render(tokenizer, row, tokenize=False)
    spans = assistant_spans(tokenizer, row, text)
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.asarray(out["offset_mapping"], np.int64).reshape(-1, 2)
    supervised = np.zeros(len(offsets), bool)
    for start, end in spans:
        # A token that begins before the span belongs to who spoke before.
        supervised |= (offsets[:, 0] >= start) & (offsets[:, 0] < end) & (offsets[:, 1] > offsets[:, 0])
    return _checked(Encoded(np.asarray(out["input_ids"], np.int32), supervised))


def assistant_spans(tokenizer: Any, messages: list[Message], text: str) -> list[tuple[int, int]]:
    """Where in the rendered `text` the assistant's turns lie, each with what ends the turn: [start, end) in characters.

    A turn is what rendering it adds behind the generation prompt of the conversation before it.

    Raises:
      SkippedRow: the template drops or rewrites a turn once others follow.
    """
    spans, end = [], 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], tokenize=False, add_generation_prompt=True)
        upto = _render(tokenizer, messages[: index + 1], tokenize=False)
        if not upto.startswith(before):
            # No generation prompt, or one that the finished turn does not repeat (Qwen3's empty thoughts).
            before = _render(tokenizer, messages[:index], tokenize=False) if index else ""
        upto = _without_tail(upto, message["content"])
        if not (upto.startswith(before) and text.startswith(upto) and len(before) >= end):
            raise SkippedRow("the chat template drops or rewrites an earlier turn")
        spans.append((len(before), len(upto)))
        end = len(upto)
    return spans


def _without_tail(rendered: str, content: str) -> str:
    """Cuts the line break that ChatML templates put behind the end of a turn: the model stops before it."""
    stripped = rendered.rstrip("\n")
    return stripped if not content.endswith("\n") or len(stripped) < len(rendered) else rendered


def _render(tokenizer: Any, messages: list[Message], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # jinja2's TemplateError and its kin; transformers re-raises them as they are
        raise SkippedRow(f"the chat template refuses the conversation ({str(error).splitlines()[0]})") from error


def _checked(encoded: Encoded) -> Encoded:
    if not encoded.supervised.any():
        raise SkippedRow("no assistant token after rendering")
    return encoded
