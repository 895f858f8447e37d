"""Fits a conversation to a chat template, and checks that the template shows all of it.

The check renders the conversation with a unique placeholder (a mark) in place of every text, and looks for the marks.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from eagle_jax.data.chat.tokenize import GENERATION, Render, chat_template, generation_mask, render, template_arguments
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.messages import REASONING, Message
from eagle_jax.data.rows.parse import Conversation

CALLS = "tool_calls"
_PROPERTIES = {"PARAMETERMARK": {"type": "string", "description": "A text."}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["PARAMETERMARK"]}
_FUNCTION = {"name": "TOOLMARK", "description": "A tool.", "parameters": _PARAMETERS}
FORMS = ((True, False), (True, True), (False, False), (False, True))
"""Forms of tool calls in the order of trial: whether empty text is null, and whether arguments are JSON text.

Null is first, since some templates write an empty text as a separate turn.
"""


def fit(tokenizer: Any, row: Conversation, **options: bool) -> list[Message]:
    """Converts messages to the keys and forms that the template reads.

    The template may drop thoughts of earlier turns, as those of reasoning models do.

    Args:
      options: `add_generation_prompt`.

    Raises:
      SkippedRow: the template drops a turn, its thoughts, a name, tool calls or tools, does not read an argument, or
        raises an error for the conversation.
    """
    template = str(chat_template(tokenizer, tools=row.tools is not None))
    arguments = row.arguments or {}
    if arguments and (unread := arguments.keys() - set(template_arguments(tokenizer))):
        raise SkippedRow(f"the chat template has no argument {min(unread)!r}")
    draw = functools.partial(render, tokenizer, chat_template=template, **arguments)
    messages = row.messages
    if any("reasoning_content" in message for message in messages):
        key = _reasoning_key(draw, template)
        messages = [
            {(key if name == "reasoning_content" else name): value for name, value in message.items()}
            for message in messages
        ]
    marks: dict[str, str] = {}
    marked = [_marked_message(index, message, marks) for index, message in enumerate(messages)]
    tools = None if row.tools is None else [{"type": "function", "function": _FUNCTION}]
    if row.tools:
        marks["TOOLMARK"] = "tools"
        if any("parameters" in tool["function"] for tool in row.tools):
            marks["PARAMETERMARK"] = "parameters of tools"
    draw = functools.partial(draw, tools=tools, **options)
    has_mask = GENERATION.search(template) is not None
    reason: SkippedRow | None = None
    for form in FORMS if any(CALLS in message for message in messages) else FORMS[:1]:
        try:
            formed = [_formed(message, *form) for message in marked]
            dropped = _dropped(draw, formed, marks, has_mask)
        except SkippedRow as error:
            reason = reason or error
            continue
        if dropped is None:
            return [_formed(message, *form) for message in messages]
        reason = SkippedRow(f"the chat template drops {dropped}")
    assert reason is not None
    raise reason


def _formed(message: Message, has_null: bool, has_json: bool) -> Message:
    if CALLS not in message:
        return message
    calls = []
    for call in message[CALLS]:
        function = dict(call["function"])
        if has_json:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": function})
    content = None if has_null and not message["content"].strip() else message["content"]
    return {**message, "content": content, CALLS: calls}


def _reasoning_key(draw: Render, template: str) -> str:
    """Returns the key under which a template shows the thoughts of the last reply.

    Raises:
      SkippedRow: it shows no thoughts.
    """
    thought, question = "THOUGHTMARK", {"role": "user", "content": "QUESTION"}
    for key in REASONING:
        if re.search(rf"(\.|['\"]){key}\b", template):
            talk = [question, {"role": "assistant", "content": "REPLY", key: thought}]
            if _dropped(draw, talk, {thought: key}) is None:
                return key
    raise SkippedRow("the chat template drops reasoning_content")


def _dropped(draw: Render, messages: list[Message], marks: dict[str, str], has_mask: bool = False) -> str | None:
    """Names the first part that the template drops; None if there is none.

    Args:
      marks: mark -> name of the part of `messages` that holds it.
      has_mask: whether the template has `generation` blocks, which must hold all tool calls.
    """
    shown = draw(messages, tokenize=False)
    for mark, what in marks.items():
        if mark not in shown:
            return what
    if "None" in shown and any(message["content"] is None for message in messages):
        return "the null of an empty text"
    calls = [(shown.find(mark), len(mark)) for mark, what in marks.items() if what == CALLS and has_mask]
    if calls:
        _, offsets, mask = generation_mask(draw, messages)
        inside = (mask[(offsets[:, 1] > at) & (offsets[:, 0] < at + size)].all() for at, size in calls)
        return None if all(inside) else f"{CALLS} from its generation blocks"
    return None


def _marked_message(index: int, message: Message, marks: dict[str, str]) -> Message:
    """Returns a message with marks instead of texts, and adds them to `marks`.

    An empty turn has no mark, since a template cannot show it. Thoughts have no mark either.
    """
    marked: Message = {"role": message["role"], "content": f"TURN{index:05d}MARK" * bool(message["content"].strip())}
    if marked["content"]:
        marks[marked["content"]] = "a turn"
    if "name" in message and message["role"] != "tool":
        marked["name"] = f"NAME{index:05d}MARK"
        marks[marked["name"]] = "name"
    for place, call in enumerate(message.get(CALLS, ())):
        name = f"CALL{index:05d}N{place:05d}MARK"
        arguments = {"argument": f"GIVEN{name}"} if call["function"]["arguments"] else {}
        called = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
        marked.setdefault(CALLS, []).append(called)  # the id has nine letters, as Mistral's templates require
        marks |= dict.fromkeys([name, *arguments.values()], CALLS)
    return marked
