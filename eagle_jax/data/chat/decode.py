"""Decodes a stream of tokens to text, piece by piece, without losing blanks or splitting letters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

REPLACEMENT = "\ufffd"
"""Character that decoders write for bytes that are not UTF-8, such as half a letter."""
TAIL = 8
"""Tokens that decide whether a text ends in half a letter: a letter has at most four bytes, a token at least one."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class TextStream:
    """Decodes tokens as they come; the pieces join to what `tokenizer.decode` gives of all tokens.

    A piece is returned as soon as no later token can change it. Letters of several tokens and runs of SentencePiece's
    byte tokens wait until they are complete. The work per token does not grow with the text.

    Args:
      tokenizer: of `transformers` or `tokenizers`. Its clean-up of spaces (`clean_up_tokenization_spaces`), which
        rewrites text already shown, is left off.
      skip_special_tokens: leaves out special tokens, as in `tokenizer.decode`.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._options: dict[str, Any] = {"skip_special_tokens": skip_special_tokens}
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self._options["clean_up_tokenization_spaces"] = False
        self._skipped = _special_ids(tokenizer) if skip_special_tokens else frozenset[int]()
        names: Any = getattr(tokenizer, "convert_ids_to_tokens", None) or getattr(tokenizer, "id_to_token", str)
        self._name: Callable[[int], str | None] = names
        self._reset()

    def push(self, tokens: Iterable[int]) -> str:
        """Returns the text that `tokens` complete; may be empty."""
        begin = len(self._waiting)
        for token in map(int, tokens):
            # A skipped token and an id without a token have no text, and do not end a letter.
            if token not in self._skipped and self._name(token) is not None:
                self._waiting.append(token)
        for end in range(len(self._waiting), begin, -1):
            if self._is_whole(end):
                return self._take(end)
        return ""

    def end(self) -> str:
        """Returns the text that was held back, and begins a new text."""
        text = self._decode(self._context + self._waiting)[len(self._shown) :] if self._waiting else ""
        self._reset()
        return text

    def _reset(self) -> None:
        # Decoders treat the first token of a text differently, so new tokens are decoded after returned ones.
        self._context: list[int] = []
        self._shown = ""  # text of the context
        self._waiting: list[int] = []

    def _is_whole(self, end: int) -> bool:
        """Returns whether the first `end` waiting tokens end with a whole letter, for any next tokens."""
        if _BYTE.fullmatch(self._name(self._waiting[end - 1]) or ""):
            return False
        before = self._waiting[max(0, end - TAIL) : end]
        tail = [*self._context[len(self._context) - max(0, TAIL - len(before)) :], *before]
        return not self._decode(tail).endswith(REPLACEMENT)

    def _take(self, end: int) -> str:
        taken = self._waiting[:end]
        text = self._decode(self._context + taken)
        if not text.startswith(self._shown):
            return ""
        new = text[len(self._shown) :]
        del self._waiting[:end]
        # A context without text would leave the next token to be treated as the first one.
        alone = self._decode(taken)
        self._context, self._shown = (taken, alone) if alone else (self._context + taken, text)
        return new

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, **self._options))


def decode_stream(tokenizer: Any, chunks: Iterable[Any], *, skip_special_tokens: bool = True) -> Iterator[str]:
    """Yields the text of a stream as it becomes complete.

    Args:
      tokenizer: of `transformers` or `tokenizers`. skip_special_tokens: as in `tokenizer.decode`.
      chunks: results of `eagle_jax.stream`, or lists of token ids.

    Raises:
      ValueError: `chunks` holds anything else.
    """
    text = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
    for chunk in chunks if isinstance(chunks, Iterable) else [chunks]:
        try:
            tokens = np.atleast_1d(getattr(chunk, "tokens", chunk))
        except ValueError:  # lists of different lengths
            tokens = np.array([None])
        if tokens.ndim > 1 or (tokens.size and (tokens.dtype.kind not in "iu" or tokens.min() < 0)):
            raise ValueError(
                f"chunks must be an iterable of StreamChunk or of lists of token ids, got {chunk!r:.60} in it. "
                "Pass eagle_jax.stream(...) or lists of token ids."
            )
        if piece := text.push(tokens.tolist()):
            yield piece
    if piece := text.end():
        yield piece


def _special_ids(tokenizer: Any) -> frozenset[int]:
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "get_added_tokens_decoder"):
        return frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)
    return frozenset(getattr(tokenizer, "all_special_ids", ()))
