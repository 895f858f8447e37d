"""Reads tool calls and tools of rows into the form that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_jax.data.rows.columns import SkippedRow, check_keys, check_unicode, from_json, is_absent, only, without_nulls

ToolCall = dict[str, Any]
"""`{"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}`, the id where there is one."""
_CALL = "a tool call has"


def parse_calls(given: Mapping[str, Any], speaker: str) -> list[dict[str, Any]]:
    """Reads the tool calls of an assistant's message: `tool_calls`, `function_call`, or a speaker who only calls.

    Raises:
      SkippedRow: something in it is no call of a function.
    """
    found = without_nulls(from_json(given.get("tool_calls"), "tool_calls"))
    found = [] if is_absent(found) else found
    single = without_nulls(given.get("function_call"))
    if speaker.endswith("_call"):
        single = from_json(only(given, ("content", "value")), "a tool call")
    if not is_absent(single):
        found = [*found, *(single if isinstance(single, list) else [single])]
    if not isinstance(found, list):
        raise SkippedRow("tool_calls is not a list")
    return [_call(call) for call in found]


def _call(call: Any) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise SkippedRow("a tool call without the name of a function")
    if call.get("type", "function") != "function":
        raise SkippedRow(f"a tool call of the type {call['type']!r}, which is not read")
    check_keys(call, {"id", "type", "index", "function"} | ({"name", "arguments"} if inner is call else set()), _CALL)
    check_keys(inner, {"name", "arguments", "id", "type", "index"}, _CALL)
    arguments = inner.get("arguments")
    arguments = {} if is_absent(arguments) else from_json(arguments, "a tool call with arguments")
    if not isinstance(arguments, dict):
        raise SkippedRow("a tool call whose arguments are not an object")
    named = {"id": str(call["id"])} if not is_absent(call.get("id")) else {}
    return {**named, "type": "function", "function": {"name": inner["name"], "arguments": arguments}}


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """Returns the tools of a row in OpenAI's form, from a list or its JSON; None without tools.

    Raises:
      SkippedRow: they are no list of functions with names.
    """
    found = without_nulls(from_json(value, "tools"))
    if is_absent(found):
        return None
    tools = [from_json(tool, "a tool") for tool in (found if isinstance(found, list) else [found])]
    for tool in tools:
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
            raise SkippedRow("a tool without the name of a function")
        if tool.get("type", "function") != "function":
            raise SkippedRow(f"a tool of the type {tool['type']!r}, which is not read")
    check_unicode(tools)
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
