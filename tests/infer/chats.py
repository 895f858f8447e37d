"""What the tests of the chat share."""

from __future__ import annotations

from tests.infer.conftest import ByteTokenizer


class Templated(ByteTokenizer):
    """Turns between marks, as chat templates write them."""

    chat_template = "marks"

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        marks = {"system": "<s>", "user": "<u>", "assistant": "<a>"}
        text = "".join(marks[message["role"]] + message["content"] + "\n" for message in messages)
        return text + "<a>" * add_generation_prompt


class TextOnly(Templated):
    """Whatever the model says can be read back: tokens are letters."""

    def decode(self, tokens, *, skip_special_tokens=True):
        return "".join(chr(token) for token in tokens)

    def encode(self, text, **options):
        return [ord(letter) for letter in text]


def last(talk) -> str:
    return talk.written[-1]
