"""Runs conversations with the target as the assistant, and makes training texts of its replies."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from eagle_jax.data.chat.encoding import prompt_ids
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.messages import Message
from eagle_jax.data.rows.parse import Conversation

AFTER_TOOLS = "later turns depend on tool calls of the row"
"""Reason why a conversation ends early: the target may make other calls, whose results are unknown."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """A training text: the tokens that the target read and wrote.

    Attributes:
      messages: the conversation up to its last reply. tokens: its ids.
      supervised: [start, end) of every reply in `tokens`, with its end token, except replies that an earlier text of
        the same conversation holds.
      tools, chat_template_kwargs: of the row; None without.
    """

    messages: list[Message]
    tokens: list[int]
    supervised: list[list[int]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def as_row(self) -> dict[str, Any]:
        """Returns the columns that have a value."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A conversation in progress.

    Attributes:
      pending: per reply still to generate, the messages that precede it. history: messages so far.
      texts: training texts so far. ended: why it ended early, else None. rest: why later turns of the row are unused.
      tools, arguments: as in `Conversation`.
    """

    pending: tuple[tuple[Message, ...], ...]
    history: tuple[Message, ...] = ()
    texts: tuple[Reply, ...] = ()
    ended: str | None = None
    rest: str | None = None
    tools: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] | None = None

    @classmethod
    def begin(cls, row: Conversation | str) -> Dialogue:
        """Starts a conversation from a result of `parse_row`: user and system turns, places of replies.

        A last user turn without a reply gets one. Replies that follow no user turn, such as greetings, are dropped. The
        conversation ends before the result of a tool, and after one reply where the row has tools.

        Raises:
          SkippedRow: the row is plain text, or has no user turn.
        """
        if isinstance(row, str):
            raise SkippedRow("plain text, which has no replies")
        results = [index for index, message in enumerate(row.messages) if message["role"] == "tool"]
        pending: list[tuple[Message, ...]] = []
        turns: list[Message] = []
        for message in [*row.messages[: results[0] if results else None], {"role": "assistant"}]:
            if message["role"] != "assistant":
                turns.append(message)
            elif any(turn["role"] == "user" and turn["content"].strip() for turn in turns):
                pending.append(tuple(turns))
                turns = []
        if not pending:
            raise SkippedRow("no turn of a user to answer")
        kept = pending if row.tools is None else pending[:1]
        rest = AFTER_TOOLS if results or len(kept) < len(pending) else None
        return cls(tuple(kept), rest=rest, tools=row.tools, arguments=row.arguments)

    @property
    def open(self) -> bool:
        """Returns whether a reply is still to be generated."""
        return self.ended is None and bool(self.pending)

    def end(self, reason: str) -> Dialogue:
        """Returns the conversation without its pending replies."""
        return dataclasses.replace(self, ended=reason)

    def prompt(self, tokenizer: Any) -> list[int]:
        """Returns the token ids before the next reply.

        Raises:
          SkippedRow: as `prompt_ids`.
        """
        return prompt_ids(tokenizer, Conversation([*self.history, *self.pending[0]], self.tools, self.arguments))

    def answered(self, tokenizer: Any, prompt: Sequence[int], reply: Sequence[int], stops: Collection[int]) -> Dialogue:
        """Returns the conversation with the target's reply to `prompt`.

        A prompt that begins with the last training text extends that text. Any other begins a new text, because a head
        must learn what the target read: templates drop thoughts, and decoded text may tokenise differently.
        """
        content = tokenizer.decode(list(reply[:-1] if reply[-1] in stops else reply))
        history = (*self.history, *self.pending[0], {"role": "assistant", "content": content})
        tokens, span = [*prompt, *reply], [len(prompt), len(prompt) + len(reply)]
        texts, spans = self.texts, [span]
        if texts and list(prompt[: len(texts[-1].tokens)]) == texts[-1].tokens:
            texts, spans = texts[:-1], [*texts[-1].supervised, span]
        new = Reply(list(history), tokens, spans, self.tools, self.arguments)
        left = self.pending[1:]
        ended = self.ended or (None if left else self.rest)
        return dataclasses.replace(self, pending=left, history=history, texts=(*texts, new), ended=ended)
