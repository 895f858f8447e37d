"""Conversations as training texts: rows of the usual formats to token ids, and which of those an assistant wrote.

The loss mask is exact to the token: it comes from the `generation` spans of a chat template that marks them, and
otherwise from rendering the conversation turn by turn and comparing the texts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from eagle_jax.data.templates import SkippedRow, chat_template, render

Message = dict[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`."""

ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
}  # fmt: skip
"""How the rows of the usual datasets name who speaks."""

NO_THOUGHT = "<think>\n\n</think>\n\n"
"""What templates of reasoning models write before a reply that shows no thoughts."""

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Encoded(NamedTuple):
    """A training text.

    Attributes:
      tokens: [T] int32. supervised: [T], whether an assistant wrote the token (its end-of-turn token included).
    """

    tokens: Int[np.ndarray, " T"]
    supervised: Bool[np.ndarray, " T"]

    @classmethod
    def from_spans(cls, tokens: Any, spans: Any) -> Encoded:
        """From token ids and the [start, end) ranges of those that an assistant wrote.

        Raises:
          SkippedRow: they are none, or nobody wrote any.
        """
        try:
            ids = np.asarray(tokens, np.int32).reshape(len(tokens))
            supervised = np.zeros(len(ids), bool)
            for start, end in spans:
                supervised[start:end] = True
        except (TypeError, ValueError):
            raise SkippedRow("tokens and supervised are no ids and no [start, end) of them") from None
        return _checked(cls(ids, supervised))


def parse_row(row: Mapping[str, Any]) -> list[Message] | str:
    """The messages of a ShareGPT (`conversations`) or OpenAI (`messages`) row, or the text of a plain one (`text`).

    A row with none of the three may hold a `prompt`, a text or messages, which a reply is still to be written to.

    Raises:
      SkippedRow: none of the four, an unknown speaker, or a message without text.
    """
    for key in ("messages", "conversations", "conversation"):
        if row.get(key) is not None:
            return [_message(entry) for entry in _entries(row[key])]
    text, prompt = row.get("text"), row.get("prompt")
    if text is None and prompt is not None:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [_message(entry) for entry in _entries(asked)]
    if not isinstance(text, str):
        keys = ", ".join(sorted(map(str, row))[:8])
        raise SkippedRow("neither messages, conversations, text nor prompt" + f" (found {keys})" * bool(keys))
    if not text.strip():
        raise SkippedRow("empty text")
    return text


def _entries(value: Any) -> Sequence[Any]:
    if isinstance(value, np.ndarray):  # Parquet
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise SkippedRow("the conversation is not a list of messages")
    if not value:
        raise SkippedRow("an empty conversation")
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
    if any("\ud800" <= letter <= "\udfff" for letter in content):  # half a character, as cut JSON has it
        raise SkippedRow("a message that is no Unicode text")
    return {"role": role, "content": content}


def encode(tokenizer: Any, row: list[Message] | str) -> Encoded:
    """Token ids and loss mask of what `parse_row` returned, untruncated.

    Of a plain text every token but the first is supervised.

    Raises:
      SkippedRow: no assistant turn; the template refuses the order of the turns, drops one, changes a reply in a way
        that is not understood; or no token is supervised.
    """
    if isinstance(row, str):
        tokens = np.asarray(tokenizer.encode(row), np.int32)
        return _checked(Encoded(tokens, np.arange(len(tokens)) > 0))
    if not any(message["role"] == "assistant" for message in row):
        raise SkippedRow("no assistant turn")
    template = chat_template(tokenizer)
    if template is None:
        raise ValueError("the tokenizer has no chat template: give one with --chat-template, or use rows of plain text")
    _check_turns(tokenizer, row)
    if _MARKED.search(template):
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        out = render(tokenizer, row, tokenize=True, tokenizer_kwargs={"return_offsets_mapping": True}, **options)
        offsets = np.asarray(out["offset_mapping"], np.int64).reshape(-1, 2)
        # The mask ends at the first token of a span's last character; a character of several bytes has several tokens.
        letters = np.cumsum(np.append(True, offsets[1:, 0] >= offsets[:-1, 1]))[: len(offsets)]
        mask = np.isin(letters, letters[np.asarray(out["assistant_masks"], bool)])
        return _checked(Encoded(np.asarray(out["input_ids"], np.int32), mask))
    text = render(tokenizer, row, tokenize=False)
    spans = assistant_spans(tokenizer, row, text)
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.asarray(out["offset_mapping"], np.int64).reshape(-1, 2)
    supervised = np.zeros(len(offsets), bool)
    for start, end in spans:
        # A token that begins before the span belongs to who spoke before.
        supervised |= (offsets[:, 0] >= start) & (offsets[:, 0] < end) & (offsets[:, 1] > offsets[:, 0])
    return _checked(Encoded(np.asarray(out["input_ids"], np.int32), supervised))


def prompt_ids(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Token ids of a conversation up to where the assistant goes on.

    Raises:
      SkippedRow: the template refuses the order of the turns, or drops one.
      ValueError: there is no template.
    """
    if chat_template(tokenizer) is None:
        raise ValueError("the tokenizer has no chat template, without which nobody can be asked for a reply")
    _check_turns(tokenizer, messages, add_generation_prompt=True)
    text = render(tokenizer, messages, tokenize=False, add_generation_prompt=True)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise SkippedRow("nothing is asked")
    return ids


def _check_turns(tokenizer: Any, messages: list[Message], **options: bool) -> None:
    """Refuses a conversation of whose turns the template would show fewer. Nobody sees whether an empty one is shown.

    Raises:
      SkippedRow: the template drops a turn, or refuses their order.
    """
    turns = tuple((message["role"], bool(message["content"].strip())) for message in messages)
    if not _shows(tokenizer, str(chat_template(tokenizer)), turns, **options):
        raise SkippedRow("the chat template drops a turn")


@functools.lru_cache(maxsize=4096)  # rows are many, orders of speakers few
def _shows(tokenizer: Any, template: str, turns: tuple[tuple[str, bool], ...], **options: bool) -> bool:
    """Whether a mark in place of every turn that has (role, a content) is found in the rendered conversation."""
    marks = [f"TURN{index:05d}MARK" * filled for index, (_, filled) in enumerate(turns)]
    messages = [{"role": role, "content": mark} for (role, _), mark in zip(turns, marks, strict=True)]
    shown = render(tokenizer, messages, tokenize=False, chat_template=template, **options)
    return all(mark in shown for mark in marks)


def assistant_spans(tokenizer: Any, messages: list[Message], text: str) -> list[tuple[int, int]]:
    """Where in the rendered `text` the assistant's turns lie, each with what ends the turn: [start, end) in characters.

    The conversation is rendered once more with a mark in place of every reply: around the marks lies what the template
    adds, and between those pieces of `text` lie the replies, whatever the other turns say.

    Raises:
      SkippedRow: the template drops a turn, or changes it in a way that is not understood.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    marks = {index: f"REPLY{index:05d}MARK" for index in turns}
    marked_messages = [
        message | {"content": marks.get(index, message["content"])} for index, message in enumerate(messages)
    ]
    marked = render(tokenizer, marked_messages, tokenize=False)
    places = [marked.find(marks[index]) for index in turns]
    if -1 in places or places != sorted(places):
        raise SkippedRow("the chat template drops a turn")
    spans, at = [], 0
    for turn, (index, place) in enumerate(zip(turns, places, strict=True)):
        begin = places[turn - 1] + len(marks[turns[turn - 1]]) if turn else 0
        after = marked[place + len(marks[index]) : places[turn + 1] if turn + 1 < len(turns) else len(marked)]
        lead, reply = _reply(text[at:], marked[begin:place], messages[index]["content"], after)
        blank = _generated_blank(tokenizer, marked_messages[:index], marked[:place]) if lead == place - begin else 0
        closing = (
            render(tokenizer, marked_messages[: index + 1], tokenize=False).partition(marks[index])[2].rstrip("\n")
        )
        end = at + lead + len(reply)
        spans.append((at + lead - blank, end + len(closing) * after.startswith(closing)))
        at = end
    return spans


def _reply(text: str, before: str, content: str, after: str) -> tuple[int, str]:
    """How much of `text` the template added before a reply, and the reply as the template gives it back."""
    thoughts, closed, answer = content.partition("</think>")
    variants = [(before, content), (before, content.strip())]
    if closed:
        # Templates of reasoning models drop the thoughts of earlier replies, and set those of the last one apart.
        opened = before.removesuffix(NO_THOUGHT)
        apart = f"<think>\n{thoughts.removeprefix('<think>').strip(chr(10))}\n</think>\n\n{answer.lstrip(chr(10))}"
        answers = (answer.lstrip("\n"), answer.strip(), answer)
        variants += [*((before, said) for said in answers), (opened, apart), (opened, content)]
    for lead, reply in variants:
        if text.startswith(lead + reply + after.removesuffix(NO_THOUGHT)):
            return len(lead), reply
    raise SkippedRow("the chat template rewrites a turn")


def _generated_blank(tokenizer: Any, earlier: list[Message], before: str) -> int:
    """Characters of white space that the template writes before a reply and the model therefore has to write itself."""
    for options in ({"add_generation_prompt": True}, {}):
        prompt = render(tokenizer, earlier, tokenize=False, **options) if earlier else ""
        if before.startswith(prompt) and not before[len(prompt) :].strip():
            return len(before) - len(prompt)
    return 0


def _checked(encoded: Encoded) -> Encoded:
    if not encoded.supervised.any():
        raise SkippedRow("no assistant token after rendering")
    return encoded
