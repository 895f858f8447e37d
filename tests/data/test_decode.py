"""Tests that streamed text equals the text of all tokens at once, for all chunks and tokenizers."""

from __future__ import annotations

import functools
import inspect
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_jax import GenerateOutput, StreamChunk, TextStream, decode_stream
from tests.data.chats import SPECIAL, metaspace_tokenizer_with, tokenizer_with

LETTERS = "a ▁ é ✓ 𝄞 👩‍👩‍👧 ü 한 \n don't."


def word_piece() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "do": 3, "n't": 4, ".": 5, "'": 6, "s": 7}))
    core.normalizer, core.decoder = normalizers.Lowercase(), decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", clean_up_tokenization_spaces=True)


def metaspace() -> Tokenizer:
    """Returns a tokenizer as T5's: the decoder removes the blank of the first piece."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁a", -1.0), ("b", -1.0), ("▁▁", -2.0), ("✓", -1.0)]
    core = Tokenizer(models.Unigram(pieces, 0))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return core


KINDS = {
    "word pieces": word_piece, "metaspace": metaspace,
    "bytes": lambda: tokenizer_with(""), "sentencepiece": lambda: metaspace_tokenizer_with("", "first"),
}  # fmt: skip
made = functools.cache(lambda kind: KINDS[kind]())


def at_once(tokenizer, tokens, skip: bool) -> str:
    keeps = {} if isinstance(tokenizer, Tokenizer) else {"clean_up_tokenization_spaces": False}
    return tokenizer.decode(tokens, skip_special_tokens=skip, **keeps)


def ids_of(tokenizer, text) -> list[int]:
    found = tokenizer.encode(text, add_special_tokens=False)
    return found.ids if isinstance(tokenizer, Tokenizer) else found


@st.composite
def streams(draw):
    """Draws a tokenizer, chunks of tokens (of a text, and random ones), and whether special tokens are skipped."""
    tokenizer = made(draw(st.sampled_from(sorted(KINDS))))
    beyond = max(tokenizer.get_vocab().values()) + 3  # ids of a padded vocabulary are no text
    tokens = [
        *ids_of(tokenizer, draw(st.text(st.sampled_from(LETTERS), max_size=12))),
        *draw(st.lists(st.integers(0, beyond), max_size=12)),
    ]
    tokens = draw(st.permutations(tokens)) if draw(st.booleans()) else tokens
    edges = [0, *sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=len(tokens)))), len(tokens)]
    return tokenizer, [tokens[a:b] for a, b in itertools.pairwise(edges)], draw(st.booleans())


@given(streams())
@settings(max_examples=300, deadline=None)
def test_the_pieces_join_to_the_text_of_all_tokens(stream):
    tokenizer, chunks, skip = stream
    tokens = [token for chunk in chunks for token in chunk]
    assert "".join(decode_stream(tokenizer, chunks, skip_special_tokens=skip)) == at_once(tokenizer, tokens, skip)


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
def test_no_piece_has_half_a_letter(kind):
    tokenizer = made(kind)
    text = TextStream(tokenizer)
    pieces = [text.push([token]) for token in ids_of(tokenizer, "Two of course ✓ 𝄞.")]
    assert len(pieces) > 5 and not any("\ufffd" in piece for piece in pieces)


def test_a_complete_letter_is_returned_at_once():
    tokenizer = made("bytes")
    text, ids = TextStream(tokenizer), ids_of(tokenizer, "café!")
    assert [text.push(ids[:4]), text.push(ids[4:5]), text.push(ids[5:])] == ["caf", "é", "!"]
    assert text.push(ids_of(tokenizer, "é")[:1]) == ""
    assert text.end() == "\ufffd"
    assert text.push(ids_of(tokenizer, "a")) == "a"  # a new text


def test_special_tokens_are_skipped_or_decoded():
    tokenizer = made("bytes")
    stop = tokenizer.convert_tokens_to_ids(SPECIAL[1])
    chunks = [StreamChunk(ids_of(tokenizer, "a"), 0), StreamChunk([stop], 0)]
    assert list(decode_stream(tokenizer, iter(chunks))) == ["a"]
    assert list(decode_stream(tokenizer, chunks, skip_special_tokens=False)) == ["a", SPECIAL[1]]
    assert list(decode_stream(tokenizer, np.array(ids_of(tokenizer, "ab")))) == ["a", "b"]


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
@pytest.mark.parametrize("letter", ["a", "\ufffd", "✓"])
def test_the_work_per_token_does_not_grow(kind, letter, monkeypatch):
    """Tests words, letters of several tokens, and bytes that never become a letter."""
    tokenizer, sizes = made(kind), []
    ids = ids_of(tokenizer, letter)[: 2 if letter == "\ufffd" else None] * 400
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: sizes.append(len(ids)) or decode(ids, **options))
    list(decode_stream(tokenizer, [[token] for token in ids]))
    assert len(ids) <= sum(sizes) < 24 * len(ids)


OUTPUT = GenerateOutput([[1, 2], [3]], np.zeros(2), np.zeros((2, 3)))


@pytest.mark.parametrize(
    "chunks", ["hello", OUTPUT, [OUTPUT], ["a"], [[0.5]], [[[1]]], [None], {"a": 1}, [True], [[-1]]]
)
def test_chunks_of_another_type_are_an_error(chunks):
    message = r"^chunks must be .*, got .*\. Pass eagle_jax\.stream\(\.\.\.\) or lists of token ids\.$"
    with pytest.raises(ValueError, match=message):
        list(inspect.unwrap(decode_stream)(tokenizer_with(""), chunks))  # without the annotations
