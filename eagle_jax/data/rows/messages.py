"""Reads one message of a row strictly: every key is read or is metadata, or the row is skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.data.rows.columns import SkippedRow, check_keys, check_unicode, is_absent, only
from eagle_jax.data.rows.tool_calls import parse_calls

Message = dict[str, Any]
"""A message as chat templates read it: `role` ("system", "user", "assistant" or "tool") and `content`, a text.

An assistant's may hold `reasoning_content` and `tool_calls`, a tool's `tool_call_id`, and any of them a `name`.
"""

ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool", "function_response": "tool",
    "ipython": "tool", "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
"""How the rows of the usual datasets name who speaks; `function_call` and `tool_call` hold a call in JSON."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the thoughts before a reply, in rows and in chat templates."""
TAUGHT = ("weight", "train", "training", "trainable", "loss", "loss_mask")
"""Keys of a message that say by 0 or 1 whether it is trained on."""


class Parsed(NamedTuple):
    """A message, and whether a head learns it."""

    message: Message
    taught: bool


def parse_message(entry: Any) -> Parsed:
    """Reads a message of ShareGPT (`from`, `value`) or OpenAI (`role`, `content`, `tool_calls` and so on).

    Raises:
      SkippedRow: an unknown speaker, no text, or a key that is neither read nor metadata.
    """
    if not isinstance(entry, Mapping):
        raise SkippedRow("a message is not an object")
    given = {str(key): value for key, value in entry.items() if value is not None}
    speaker = only(given, ("role", "from"))
    role = ROLES.get(str(speaker).lower())
    if role is None:
        raise SkippedRow(f"unknown speaker {speaker!r}")
    message: Message = {"role": role, "content": ""}
    read = {"role", "from", "content", "value", "name", "tool_call_id", *TAUGHT}
    if role == "assistant":
        message |= _thoughts_and_calls(given, str(speaker).lower())
        read |= {"tool_calls", "function_call", *REASONING}
    if given.get("type") not in (None, "text", "message"):
        raise SkippedRow(f"a message of the type {given['type']!r}, which is not read")
    check_keys(given, read, "a message has")
    content = "" if str(speaker).lower().endswith("_call") else _text(given)
    if isinstance(content, str):
        message["content"] = content
    elif content is not None or "tool_calls" not in message:
        raise SkippedRow("a message without text")
    for key in ("name", "tool_call_id"):
        if not is_absent(given.get(key)):
            message[key] = str(given[key])
    check_unicode(*message.values())
    return Parsed(message, role == "assistant" and _is_taught(given))


def _thoughts_and_calls(given: Mapping[str, Any], speaker: str) -> Message:
    reasoning = only(given, REASONING)
    if reasoning is not None and not isinstance(reasoning, str):
        raise SkippedRow("reasoning that is not text")
    if reasoning is not None and "</think>" in str(given.get("content", given.get("value"))):
        raise SkippedRow("a reply with thoughts in its text and beside it")
    calls = parse_calls(given, speaker)
    found = {"reasoning_content": reasoning, "tool_calls": calls}
    return {key: value for key, value in found.items() if not is_absent(value)}


def _is_taught(given: Mapping[str, Any]) -> bool:
    flags = [(key, given[key]) for key in TAUGHT if key in given]
    for key, value in flags:
        if isinstance(value, str | Mapping | Sequence | np.ndarray) or value not in (0, 1):
            raise SkippedRow(f"a message has a {key!r} other than 0 and 1")
    return all(value for _, value in flags)


def _text(given: Mapping[str, Any]) -> Any:
    """Returns the text of a message, OpenAI's parts joined; None without text."""
    content = only(given, ("content", "value"))
    if content is None:
        return given.get("content", given.get("value"))  # perhaps an empty text
    if isinstance(content, np.ndarray):
        content = content.tolist()
    if not isinstance(content, list | tuple):
        return content
    texts = []
    for part in content:
        if not isinstance(part, Mapping):
            raise SkippedRow("a part of a message is not an object")
        kind = part.get("type") or "text"
        if kind != "text":
            raise SkippedRow(f"a message has a part of the type {kind!r}, which is not read")
        check_keys(part, {"type", "text"}, "a part of a message has")
        texts.append(part.get("text"))
    if not any(texts):
        return None
    if not all(text is None or isinstance(text, str) for text in texts):
        raise SkippedRow("a message without text")
    return "".join(filter(None, texts))
