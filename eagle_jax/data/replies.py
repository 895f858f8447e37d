"""Conversations whose assistant is the target: what it is asked, turn by turn, and the training texts that result."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from eagle_jax.data.conversations import Message, SkippedRow, prompt_ids


@dataclasses.dataclass(frozen=True)
class Reply:
    """A training text: the very tokens that the target read and wrote.

    Attributes:
      messages: the conversation up to its last reply. tokens: its ids.
      supervised: [start, end) of every reply in `tokens`, what ended it included. A reply that an earlier text of the
        same conversation teaches is not among them.
    """

    messages: list[Message]
    tokens: list[int]
    supervised: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A conversation in the making.

    Attributes:
      asked: for every reply to come, what is said before it. history: what has been said.
      texts: so far. ended: why it stops early, if it does.
    """

    asked: tuple[tuple[Message, ...], ...]
    history: tuple[Message, ...] = ()
    texts: tuple[Reply, ...] = ()
    ended: str | None = None

    @classmethod
    def begin(cls, row: list[Message] | str) -> Dialogue:
        """From what `parse_row` returned: the user's and the system's turns; of the assistant's, only where they are.

        A user's last turn is answered whether the row has a reply to it or not. Replies that answer no user, as
        greetings do, are left out.

        Raises:
          SkippedRow: a plain text, or nobody asks.
        """
        if isinstance(row, str):
            raise SkippedRow("plain text, which has no replies")
        asked: list[tuple[Message, ...]] = []
        said: list[Message] = []

        def asks() -> bool:
            return any(turn["role"] == "user" and turn["content"].strip() for turn in said)

        for message in row:
            if message["role"] != "assistant":
                said.append(message)
            elif asks():
                asked.append(tuple(said))
                said = []
        if asks():
            asked.append(tuple(said))
        if not asked:
            raise SkippedRow("no turn of a user to answer")
        return cls(tuple(asked))

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
        return prompt_ids(tokenizer, [*self.history, *self.asked[0]])

    def answered(self, tokenizer: Any, prompt: Sequence[int], reply: Sequence[int], stops: Collection[int]) -> Dialogue:
        """The conversation with the next reply, that of the target to `prompt`.

        The text so far goes on with it where the prompt begins with that very text. Where it does not (a template that
        drops thoughts, a text that is tokenised otherwise when it is read back) a new text begins: what the target saw
        is what a head is trained on.
        """
        content = reply[:-1] if reply[-1] in stops else reply
        message = {"role": "assistant", "content": tokenizer.decode(list(content))}
        history = (*self.history, *self.asked[0], message)
        tokens, span = [*prompt, *reply], [len(prompt), len(prompt) + len(reply)]
        texts, spans = self.texts, [span]
        if texts and list(prompt[: len(texts[-1].tokens)]) == texts[-1].tokens:
            texts, spans = texts[:-1], [*texts[-1].supervised, span]
        new = Reply(list(history), tokens, spans)
        return Dialogue(self.asked[1:], history, (*texts, new), self.ended)
