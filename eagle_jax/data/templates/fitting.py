"""Fits a conversation to a chat template, and checks that the template shows all of it."""

from __future__ import annotations

import functools
import json
import re
from typing import Any, NamedTuple

from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.messages import REASONING, Message
from eagle_jax.data.rows.parse import Conversation
from eagle_jax.data.templates.marks import Marked, Shape, marked_conversation
from eagle_jax.data.templates.render import chat_template, render, template_arguments
from eagle_jax.data.templates.spans import Render, generation_mask

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Form(NamedTuple):
    """How a template reads tool calls: empty text as null, arguments as JSON."""

    has_null: bool
    has_json: bool


FORMS = tuple(Form(has_null, has_json) for has_null in (True, False) for has_json in (False, True))
"""In the order in which they are tried. Some templates write an empty text as a turn of its own."""
PLAIN = Form(has_null=False, has_json=False)


def is_marked(template: str) -> bool:
    """Returns whether a template marks what an assistant generates."""
    return _MARKED.search(template) is not None


def fit(tokenizer: Any, row: Conversation, **options: bool) -> list[Message]:
    """Renames and reshapes messages to what the template reads.

    Thoughts of earlier turns may be dropped, as the templates of reasoning models do.

    Args:
      options: `add_generation_prompt`.

    Raises:
      SkippedRow: the template drops a turn, its thoughts, a name, tool calls or tools, does not read an argument, or
        refuses the conversation.
    """
    template = str(chat_template(tokenizer, tools=row.tools is not None))
    arguments = ""
    if row.arguments:
        if unread := [name for name in row.arguments if name not in template_arguments(tokenizer)]:
            raise SkippedRow(f"the chat template has no argument {unread[0]!r}")
        arguments = json.dumps(row.arguments, sort_keys=True)
    messages = row.messages
    if any("reasoning_content" in message for message in messages):
        messages = _renamed(messages, _reasoning_key(tokenizer, template, arguments))
    shapes = tuple(map(Shape.of, messages))
    tools = () if row.tools is None else (any("parameters" in tool["function"] for tool in row.tools),)
    form = _form(tokenizer, template, shapes, tools, arguments, **options)
    return [_formed(message, form) for message in messages]


def _renamed(messages: list[Message], key: str) -> list[Message]:
    return [
        {(key if name == "reasoning_content" else name): value for name, value in message.items()}
        for message in messages
    ]


def _formed(message: Message, form: Form) -> Message:
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if form.has_json:
        functions = [call["function"] for call in calls]
        texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
        functions = [{**function, "arguments": text} for function, text in zip(functions, texts, strict=True)]
        calls = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    content = None if form.has_null and not message["content"].strip() else message["content"]
    return {**message, "content": content, "tool_calls": calls}


@functools.lru_cache(maxsize=64)
def _reasoning_key(tokenizer: Any, template: str, arguments: str) -> str:
    """Returns the key under which a template shows the thoughts of the last reply.

    Raises:
      SkippedRow: it shows none.
    """
    thought, question = "THOUGHTMARK", {"role": "user", "content": "QUESTION"}
    for key in REASONING:
        if re.search(rf"(\.|['\"]){key}\b", template):
            talk = [question, {"role": "assistant", "content": "REPLY", key: thought}]
            marked = Marked(talk, None, {thought: key}, frozenset({thought}))
            if _dropped(tokenizer, template, marked, arguments) is None:
                return key
    raise SkippedRow("the chat template drops reasoning_content")


@functools.lru_cache(maxsize=4096)  # rows are many, orders of speakers few
def _form(
    tokenizer: Any, template: str, shapes: tuple[Shape, ...], tools: tuple[bool, ...], arguments: str, **options: bool
) -> Form:
    """Returns the form of tool calls that a template reads.

    Raises:
      SkippedRow: it shows a conversation of these shapes in none.
    """
    marked = marked_conversation(shapes, tools)
    reasons = []
    for form in FORMS if any(shape.calls for shape in shapes) else (PLAIN,):
        formed = marked._replace(messages=[_formed(message, form) for message in marked.messages])
        try:
            dropped = _dropped(tokenizer, template, formed, arguments, **options)
        except SkippedRow as error:
            reasons.append(error)
            continue
        if dropped is None:
            return form
        reasons.insert(0, SkippedRow(f"the chat template drops {dropped}"))
    raise reasons[0]


def _dropped(tokenizer: Any, template: str, marked: Marked, arguments: str, **options: bool) -> str | None:
    """Returns what the template drops, or does not mark as generated, by the first missing mark."""
    given = {
        **(json.loads(arguments) if arguments else {}),
        **options,
        "tools": marked.tools,
        "chat_template": template,
    }
    draw: Render = functools.partial(render, tokenizer, **given)
    shown = draw(marked.messages, tokenize=False)
    for mark, what in marked.marks.items():
        if mark not in shown:
            return what
    if "None" in shown and any(message["content"] is None for message in marked.messages):
        return "that a content is null"
    if marked.generated and is_marked(template):
        _, offsets, mask = generation_mask(draw, marked.messages)
        for mark in sorted(marked.generated):
            place = shown.find(mark)
            within = (offsets[:, 1] > place) & (offsets[:, 0] < place + len(mark))
            if not mask[within].all():
                return f"{marked.marks[mark]} from what it marks as generated"
    return None
