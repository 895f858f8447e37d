"""Reads messages, tool calls and tools of a row; an unknown key skips the row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from eagle_jax.data.rows.columns import (
    SkippedRow,
    check_keys,
    check_unicode,
    from_json,
    is_absent,
    only,
    without_nulls,
)

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
"""Names of speakers in the usual datasets; `function_call` and `tool_call` hold a call in JSON."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys that hold the reasoning before a reply."""
LOSS_KEYS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
"""Keys of a message whose value, 0 or 1, decides whether the loss includes it."""


class Parsed(NamedTuple):
    """A message, and whether the loss includes it."""

    message: Message
    supervised: bool


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
    read = {"role", "from", "content", "value", "name", "tool_call_id", *LOSS_KEYS}
    if role == "assistant":
        message |= _thoughts_and_calls(given, str(speaker).lower())
        read |= {"tool_calls", "function_call", *REASONING}
    if given.get("type") not in (None, "text", "message"):
        raise SkippedRow(f"unsupported message type {given['type']!r}")
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
    return Parsed(message, role == "assistant" and _is_supervised(given))


def _thoughts_and_calls(given: Mapping[str, Any], speaker: str) -> Message:
    reasoning = only(given, REASONING)
    if reasoning is not None and not isinstance(reasoning, str):
        raise SkippedRow("reasoning that is not text")
    if reasoning is not None and "</think>" in str(given.get("content", given.get("value"))):
        raise SkippedRow("a reply with thoughts both in its text and in another column")
    found = {"reasoning_content": reasoning, "tool_calls": _calls(given, speaker)}
    return {key: value for key, value in found.items() if not is_absent(value)}


def _is_supervised(given: Mapping[str, Any]) -> bool:
    flags = {key: given[key] for key in LOSS_KEYS if key in given}
    for key, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise SkippedRow(f"a message has a {key!r} other than 0 and 1")
    return all(flags.values())


def _text(given: Mapping[str, Any]) -> Any:
    """Returns the text of a message, joining OpenAI's content parts; None without text."""
    content = only(given, ("content", "value"))
    if content is None:
        return given.get("content", given.get("value"))  # perhaps an empty text
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
        text = part.get("text")
        if not isinstance(text, str | None):
            raise SkippedRow("a message without text")
        texts.append(text or "")
    return "".join(texts) or None


def _calls(given: Mapping[str, Any], speaker: str) -> list[dict[str, Any]]:
    """Reads the tool calls of a message: `tool_calls`, `function_call`, or a speaker who only calls."""
    found = without_nulls(from_json(given.get("tool_calls"), "tool_calls")) or []
    if not isinstance(found, list):
        raise SkippedRow("tool_calls is not a list")
    single = without_nulls(given.get("function_call"))
    if speaker.endswith("_call"):
        single = from_json(only(given, ("content", "value")), "a tool call")
    if not is_absent(single):
        found = [*found, *(single if isinstance(single, list) else [single])]
    return [_call(call) for call in found]


def _call(call: Any) -> dict[str, Any]:
    inner = _function(call, "a tool call")
    own = {"name", "arguments"} if inner is call else set()
    check_keys(call, {"id", "type", "index", "function", *own}, "a tool call has")
    check_keys(inner, {"name", "arguments", "id", "type", "index"}, "a tool call has")
    arguments = inner.get("arguments")
    arguments = {} if is_absent(arguments) else from_json(arguments, "a tool call with arguments")
    if not isinstance(arguments, dict):
        raise SkippedRow("a tool call whose arguments are not an object")
    named = {} if is_absent(call.get("id")) else {"id": str(call["id"])}
    return {**named, "type": "function", "function": {"name": inner["name"], "arguments": arguments}}


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """Returns the tools of a row in OpenAI's form, from a list or its JSON; None without tools.

    Raises:
      SkippedRow: the value is not a list of functions with names.
    """
    found = without_nulls(from_json(value, "tools"))
    if is_absent(found):
        return None
    tools = [from_json(tool, "a tool") for tool in (found if isinstance(found, list) else [found])]
    functions = [_function(tool, "a tool") for tool in tools]
    check_unicode(tools)
    return [
        tool if "function" in tool else {"type": "function", "function": inner}
        for tool, inner in zip(tools, functions, strict=True)
    ]


def _function(entry: Any, what: str) -> Mapping[str, Any]:
    """Returns the object that holds the function's name, from a tool or a tool call."""
    inner = entry.get("function", entry) if isinstance(entry, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise SkippedRow(f"{what} without the name of a function")
    if entry.get("type", "function") != "function":
        raise SkippedRow(f"{what} of the type {entry['type']!r}, which is not read")
    return inner
