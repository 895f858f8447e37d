"""Reads a row of a data set strictly: a conversation in one of the usual forms, or plain text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle_jax.data.rows.columns import (
    SkippedRow,
    check_keys,
    check_unicode,
    from_json,
    is_absent,
    is_metadata,
    is_reference,
    only,
    without_nulls,
)
from eagle_jax.data.rows.messages import REASONING, Message, Parsed, parse_message, parse_tools

MESSAGES = ("messages", "conversations", "conversation")
"""Columns of whole conversations; the first that has a value is read."""
QUESTIONS = ("prompt", "instruction", "question", "query", "problem", "input")
"""Columns of a user's question."""
CONTEXTS = ("input", "context")
"""Columns that are appended to the question."""
REPLIES = ("completion", "response", "output", "chosen", "solution", "answer")
"""Columns of the reply to the question."""
SYSTEMS = ("system", "system_prompt", "system_message")
TOOLS = ("tools", "functions")
ARGUMENTS = "chat_template_kwargs"
"""Column of arguments of the chat template, as of SmolTalk2."""
MODES = ("on", "off", "true", "false", "yes", "no", "none", "enabled", "disabled", "auto", "low", "medium", "high")
"""Values of a reasoning column that name a mode instead of thoughts."""
STORED = ("tokens", "supervised")
"""Columns of `train.regenerate`: token ids of a text, and the [start, end) ranges that the target wrote."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The messages, tools and template arguments of a row.

    Attributes:
      messages: in order. tools: JSON schemas of the functions to call. arguments: of the chat template.
      unsupervised: indices in `messages` of assistant turns that are context only, without loss.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] | None = None
    unsupervised: frozenset[int] = frozenset()


def parse_row(row: Mapping[str, Any]) -> Conversation | str:
    """Reads the conversation of a row, or its plain text (`text`).

    A conversation is a list of messages of ShareGPT (`conversations`) or OpenAI (`messages`), a question with its reply
    (`instruction`, `input` and `output`; `prompt` and `completion`; and others), or a `prompt` without a reply. It
    includes the columns of a system prompt, of tools and of template arguments.

    Raises:
      SkippedRow: no such form, an unknown speaker, a message without text, or a key that is neither read nor metadata.
    """
    parsed, read = _messages(row)
    if parsed is None:
        return _plain(row)
    parsed = _with_system(row, parsed)
    conversation = Conversation(
        [message for message, _ in parsed],
        parse_tools(only(row, TOOLS)),
        _arguments(row),
        frozenset(i for i, (message, loss) in enumerate(parsed) if message["role"] == "assistant" and not loss),
    )
    read |= {*SYSTEMS, *TOOLS, ARGUMENTS}
    if all(row.get(key) is not None for key in STORED):
        read |= set(STORED)
    left = {str(key): value for key, value in row.items() if key not in read}
    described = not read.isdisjoint(MESSAGES)
    repeated = {key for key, value in left.items() if not is_metadata(key) and _repeats(key, value, conversation)}
    check_keys(left, {*read, *repeated, *filter(is_reference, left)}, "the row has", labels=described)
    return conversation


def _messages(row: Mapping[str, Any]) -> tuple[list[Parsed] | None, set[str]]:
    """Returns the messages of a row (None for plain text) and their columns."""
    for key in MESSAGES:
        if row.get(key) is not None:
            return _parse_all(row[key]), {key}
    question_key = next((key for key in QUESTIONS if not is_absent(row.get(key))), None)
    replied = next((key for key in REPLIES if _is_reply(row.get(key))), None)
    if (
        replied == "chosen"
        and not isinstance(row["chosen"], str)
        and (question_key is None or isinstance(row[question_key], str))
    ):
        return _parse_all(row["chosen"]), {"chosen"}  # holds the whole conversation, the prompt included
    if question_key is None and row.get("prompt") is not None:
        question_key = "prompt"  # an empty prompt: `_parse_all` raises
    if question_key is None or (replied is None and row.get("text") is not None):
        return None, set()
    read = {question_key}
    question = row[question_key]
    context = next((key for key in CONTEXTS if key != question_key and not is_absent(row.get(key))), None)
    if context is not None and isinstance(question, str) and isinstance(row[context], str):
        question, read = f"{question}\n\n{row[context]}", {question_key, context}
    parsed = _parse_all([{"role": "user", "content": question}] if isinstance(question, str) else question)
    if replied is None:
        return parsed, read
    reply = row[replied]
    if isinstance(reply, str):
        given = {key: row[key] for key in REASONING if not is_absent(row.get(key))}
        thoughts = {key: value for key, value in given.items() if not _is_mode(value)}  # as in Nemotron
        reply, read = [{"role": "assistant", "content": reply, **thoughts}], read | set(given)
    return [*parsed, *_parse_all(reply)], read | {replied}


def _is_mode(value: Any) -> bool:
    """Returns whether the value of a reasoning column names a mode: "on", "low", true."""
    return isinstance(value, bool | int | float) or (isinstance(value, str) and value.strip().lower() in MODES)


def _is_reply(value: Any) -> bool:
    """Returns whether a column holds a reply. A list of texts is not a reply: it holds reference answers."""
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], Mapping)
    return isinstance(value, str) and bool(value)


def _parse_all(value: Any) -> list[Parsed]:
    if not isinstance(value, list | tuple):
        raise SkippedRow("the conversation is not a list of messages")
    if not value:
        raise SkippedRow("an empty conversation")
    return [parse_message(entry) for entry in value]


def _plain(row: Mapping[str, Any]) -> str:
    text = row.get("text")
    if not isinstance(text, str):
        keys = ", ".join(sorted(map(str, row))[:8])
        raise SkippedRow("neither messages, conversations, text nor prompt" + f" (found {keys})" * bool(keys))
    if not text.strip():
        raise SkippedRow("empty text")
    check_unicode(text)
    others = {str(k): v for k, v in row.items() if not (isinstance(v, str) and v.strip() in text)}
    check_keys(others, ("text",), "the row has")
    return text


def _with_system(row: Mapping[str, Any], parsed: list[Parsed]) -> list[Parsed]:
    system = only(row, SYSTEMS)
    if system is None:
        return parsed
    first = parse_message({"role": "system", "content": system})
    if parsed[0].message["role"] != "system":
        return [first, *parsed]
    if parsed[0].message["content"].strip() != first.message["content"].strip():
        raise SkippedRow("a system column and another system message")
    return parsed


def _arguments(row: Mapping[str, Any]) -> dict[str, Any] | None:
    found = without_nulls(from_json(row.get(ARGUMENTS), ARGUMENTS))
    if is_absent(found):
        return None
    if not isinstance(found, dict):
        raise SkippedRow(f"{ARGUMENTS} is not an object")
    return {key: value for key, value in found.items() if not is_absent(value)} or None


def _repeats(key: str, value: Any, conversation: Conversation) -> bool:
    """Returns whether a column repeats the conversation, as `prompt` does next to `messages`."""
    messages = conversation.messages
    if isinstance(value, str):
        if key == "text":  # the whole conversation, rendered
            return all(part.strip() in value for message in messages for part in message["content"].split("\n\n"))
        return any(message["content"].strip() == value.strip() for message in messages)
    if key not in (*MESSAGES, *QUESTIONS, *REPLIES) or is_absent(value):
        return False
    repeated = [message for message, _ in _parse_all(value)]
    return repeated in (messages[: len(repeated)], messages[-len(repeated) :])
