"""Conversations whose assistant is the target: what it is asked, turn by turn, and the training texts that result."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from eagle_jax.data.chat.encode import call_opening, prompt_ids
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.messages import Message
from eagle_jax.data.rows.parse import Conversation, as_conversation

RESULT_FOLLOWS = "the result of a tool follows, which answers the row's own call"
CALLS = "the target called a tool, whose result is not known"
"""Why conversations end early."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """A training text: the very tokens that the target read and wrote.

    Attributes:
      messages: the conversation up to its last reply. tokens: its ids.
      supervised: [start, end) of every reply in `tokens`, what ended it included. A reply that an earlier text of the
        same conversation teaches is not among them.
      tools, chat_template_kwargs: of the row, where it has them.
    """

    messages: list[Message]
    tokens: list[int]
    supervised: list[list[int]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def as_row(self) -> dict[str, Any]:
        """The columns that have a value."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A conversation in the making.

    Attributes:
      asked: for every reply to come, what is said before it. history: what has been said.
      texts: so far. ended: why it stops early, if it does. rest: why there is more in the row than is asked.
      tools, arguments: of the row, as a `Conversation` has them.
    """

    asked: tuple[tuple[Message, ...], ...]
    history: tuple[Message, ...] = ()
    texts: tuple[Reply, ...] = ()
    ended: str | None = None
    rest: str | None = None
    tools: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] | None = None

    @classmethod
    def begin(cls, row: Conversation | list[Message] | str) -> Dialogue:
        """From what `parse_row` returned: the user's and the system's turns; of the assistant's, only where they are.

        A user's last turn is answered whether the row has a reply to it or not. Replies that answer no user, as
        greetings do, are left out. The conversation ends before the result of a tool: it answers a call of the row's,
        which the target may make otherwise, or not at all.

        Raises:
          SkippedRow: a plain text, or nobody asks.
        """
        if isinstance(row, str):
            raise SkippedRow("plain text, which has no replies")
        asked: list[tuple[Message, ...]] = []
        said: list[Message] = []

        def asks() -> bool:
            return any(turn["role"] == "user" and turn["content"].strip() for turn in said)

        row = as_conversation(row)
        rest = None
        for message in row.messages:
            if message["role"] == "tool":
                rest = RESULT_FOLLOWS
                break
            if message["role"] != "assistant":
                said.append(message)
            elif asks():
                asked.append(tuple(said))
                said = []
        if asks():
            asked.append(tuple(said))
        if not asked:
            raise SkippedRow("no turn of a user to answer")
        return cls(tuple(asked), rest=rest, tools=row.tools, arguments=row.arguments)

    @property
    def open(self) -> bool:
        """Whether a reply is to come."""
        return self.ended is None and bool(self.asked)

    def end(self, reason: str) -> Dialogue:
        """The conversation as it is, without the replies to come."""
        return dataclasses.replace(self, ended=reason)

    def prompt(self, tokenizer: Any) -> list[int]:
        """What the target reads before the next reply.

        Raises:
          SkippedRow: as `prompt_ids`.
        """
        return prompt_ids(tokenizer, Conversation([*self.history, *self.asked[0]], self.tools, self.arguments))

    def answered(self, tokenizer: Any, prompt: Sequence[int], reply: Sequence[int], stops: Collection[int]) -> Dialogue:
        """The conversation with the next reply, that of the target to `prompt`.

        The text so far goes on with it where the prompt begins with that very text. Where it does not (a template that
        drops thoughts, a text that is tokenised otherwise when it is read back) a new text begins: what the target saw
        is what a head is trained on.
        """
        content = tokenizer.decode(list(reply[:-1] if reply[-1] in stops else reply))
        history = (*self.history, *self.asked[0], {"role": "assistant", "content": content})
        tokens, span = [*prompt, *reply], [len(prompt), len(prompt) + len(reply)]
        texts, spans = self.texts, [span]
        if texts and list(prompt[: len(texts[-1].tokens)]) == texts[-1].tokens:
            texts, spans = texts[:-1], [*texts[-1].supervised, span]
        new = Reply(list(history), tokens, spans, self.tools, self.arguments)
        left = self.asked[1:]
        ended = CALLS if left and self._calls(tokenizer, content) else self.rest if not left else None
        return dataclasses.replace(self, asked=left, history=history, texts=(*texts, new), ended=self.ended or ended)

    def _calls(self, tokenizer: Any, reply: str) -> bool:
        if self.tools is None:
            return False
        try:
            opening = call_opening(tokenizer, self.tools, self.arguments)
        except SkippedRow:  # the template has no calls, and the target none to learn
            return False
        return bool(opening) and opening in reply
