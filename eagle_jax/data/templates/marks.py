"""Builds conversations of marks instead of texts, to see what a chat template shows."""

from __future__ import annotations

from typing import Any, NamedTuple

from eagle_jax.data.rows.messages import Message


class Shape(NamedTuple):
    """Which parts a message has, without its texts.

    Attributes:
      calls: per tool call, whether it has arguments. is_named: whether a speaker that is no tool has a name.
    """

    role: str
    has_content: bool
    calls: tuple[bool, ...] = ()
    is_named: bool = False

    @classmethod
    def of(cls, message: Message) -> Shape:
        """Returns the shape of a message."""
        has_content = bool(message["content"].strip())
        if len(message) == 2:
            return cls(message["role"], has_content)
        calls = tuple(bool(call["function"]["arguments"]) for call in message.get("tool_calls", ()))
        return cls(message["role"], has_content, calls, "name" in message and message["role"] != "tool")


class Marked(NamedTuple):
    """A conversation of marks.

    Attributes:
      marks: what each stands for, in words. generated: those that an assistant writes.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    marks: dict[str, str]
    generated: frozenset[str] = frozenset()


def marked_conversation(shapes: tuple[Shape, ...], tools: tuple[bool, ...]) -> Marked:
    """Builds a conversation of these shapes, with a mark for every text that a template must show.

    An empty turn has none: nobody sees whether it is shown.

    Args:
      tools: none, or whether they have parameters.
    """
    messages: list[Message] = []
    marks: dict[str, str] = {}
    generated: set[str] = set()
    for index, shape in enumerate(shapes):
        message: Message = {"role": shape.role, "content": f"TURN{index:05d}MARK" * shape.has_content}
        if shape.has_content:
            marks[message["content"]] = "a turn"
        if shape.is_named:
            message["name"] = f"NAME{index:05d}MARK"
            marks[message["name"]] = "name"
        if shape.calls:
            names = [f"CALL{index:05d}N{place:05d}MARK" for place in range(len(shape.calls))]
            given = [f"GIVEN{name}" for name, has_arguments in zip(names, shape.calls, strict=True) if has_arguments]
            calls = zip(names, shape.calls, strict=True)
            message["tool_calls"] = [
                marked_call(name, {"argument": f"GIVEN{name}"} if has_arguments else {})
                for name, has_arguments in calls
            ]
            marks |= dict.fromkeys([*names, *given], "tool_calls")
            generated |= {*names, *given}
        messages.append(message)
    if not tools:
        return Marked(messages, None, marks, frozenset(generated))
    marks |= dict.fromkeys(["TOOLMARK", *["PARAMETERMARK"] * tools[0]], "tools")
    return Marked(messages, [_marked_tool()], marks, frozenset(generated))


def marked_call(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    """Builds a tool call; its id has nine letters, as Mistral's templates require."""
    return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}


def _marked_tool() -> dict[str, Any]:
    properties = {"PARAMETERMARK": {"type": "string", "description": "A text."}}
    parameters = {"type": "object", "properties": properties, "required": ["PARAMETERMARK"]}
    return {"type": "function", "function": {"name": "TOOLMARK", "description": "A tool.", "parameters": parameters}}
