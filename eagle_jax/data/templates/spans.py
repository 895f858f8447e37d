"""Finds the characters that an assistant wrote in a rendered conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.messages import REASONING, Message

Render = Callable[..., Any]
"""Renders messages; the tokenizer, the tools and the arguments of the template are bound."""

_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


def generation_mask(render: Render, messages: list[Message]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns token ids, their [start, end) in the text, and the mask of `generation` spans."""
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    out = render(messages, tokenize=True, tokenizer_kwargs={"return_offsets_mapping": True}, **options)
    offsets = np.asarray(out["offset_mapping"], np.int64).reshape(-1, 2)
    # The mask ends at the first token of a span's last character; a character of several bytes has several tokens.
    letters = np.cumsum(np.append(True, offsets[1:, 0] >= offsets[:-1, 1]))[: len(offsets)]
    mask = np.isin(letters, letters[np.asarray(out["assistant_masks"], bool)])
    return np.asarray(out["input_ids"], np.int32), offsets, mask


def turn_span(render: Render, messages: list[Message], index: int, text: str) -> tuple[int, int]:
    """Returns the [start, end) characters of an assistant's turn in `text`, with its end marker.

    The conversation is rendered with marks in the turn. The common text before and after the marks delimits the turn,
    from the end of the generation prompt on.

    Raises:
      SkippedRow: the template drops the turn, or changes the text around it.
    """
    before, after = messages[:index], messages[index + 1 :]
    for turn, marks in _marked_turns(messages[index]):
        marked = render([*before, turn, *after], tokenize=False)
        places = [marked.find(mark) for mark in marks]
        if places[-1] < 0:
            continue
        last, begin = places[-1] + len(marks[-1]), min(place for place in places if place >= 0)
        ending = render([*before, turn], tokenize=False).rpartition(marks[-1])[2].rstrip("\n")
        if marked.startswith(ending, last):
            last += len(ending)
        elif "tool_calls" in turn:  # what closes a call is not known
            continue
        for start in _turn_starts(render, before, marked[:begin]):
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


def _turn_starts(render: Render, before: list[Message], marked: str) -> Iterator[int]:
    """Returns the possible starts of a turn: the ends of the template's generation prompt.

    An empty thought is the template's, and comes before the turn if it is there.
    """
    plain = render(before, tokenize=False) if before else ""
    prompt = render(before, tokenize=False, add_generation_prompt=True) if before else ""
    header = prompt.removeprefix(plain)
    if not header.strip():
        mark = "CONTENTMARK"
        alone = render([*before, {"role": "assistant", "content": mark}], tokenize=False).partition(mark)[0]
        start = len(_EMPTY_THOUGHT.sub("", alone))
        yield start if alone[len(plain) : start].strip() else len(plain)
        return
    bare = header.partition("<think>")[0]
    ends = [marked.rfind(each) + len(each) for each in (bare, header) if each in marked]
    if ends and (thought := _EMPTY_THOUGHT.match(marked, ends[0])):
        yield thought.end()
    if ends:
        yield max(ends)
