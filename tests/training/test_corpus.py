"""Packing, what is supervised, and the draft vocabulary."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eagle_jax.config import ConfigError
from eagle_jax.data.corpus import Corpus
from eagle_jax.data.vocabulary import count_tokens, draft_vocabulary


@pytest.fixture
def corpus() -> Corpus:
    """Two sources; the tokens of document i are all distinct, 100 i + 0, 1, 2, ..."""
    rows = [[100 * i + j for j in range(length)] for i, length in enumerate([5, 9, 7, 4, 12, 6])]
    return Corpus.from_rows(rows, prompts=[2, 0, 3, 1, 5, 2], source=[2, 0, 2, 2, 0, 2])


def test_round_trip(corpus, tmp_path):
    corpus.save(tmp_path / "deep" / "corpus.npz")
    again = Corpus.load(tmp_path / "deep" / "corpus.npz")
    assert again.document(2).tolist() == [200, 201, 202, 203, 204, 205, 206]
    assert again.prompts.tolist() == corpus.prompts.tolist()


def test_supervised_is_the_reply_and_never_the_first_token(corpus):
    flat = dict(zip(corpus.tokens.tolist(), corpus.supervised.tolist(), strict=True))
    assert [flat[token] for token in range(5)] == [False, False, True, True, True]
    assert [flat[token] for token in range(100, 103)] == [False, True, True]


def test_packed_rows_hold_the_stream_in_order_and_nothing_else(corpus):
    shares = {"gsm8k": 0.5, "code": 0.5}
    rows = list(itertools.islice(corpus.packed(shares, 8, seed=0, pool=1), 6))
    stream = [corpus.document(i) for i in itertools.islice(corpus.stream(shares, seed=0), 20)]
    assert np.concatenate([tokens for tokens, _ in rows]).tolist() == np.concatenate(stream)[:48].tolist()
    flat = dict(zip(corpus.tokens.tolist(), corpus.supervised.tolist(), strict=True))
    for tokens, supervised in rows:
        assert supervised.tolist() == [flat[token] for token in tokens.tolist()]


def test_a_seed_fixes_the_order(corpus):
    def first(seed: int) -> list[int]:
        return np.concatenate([r for r, _ in itertools.islice(corpus.packed({"gsm8k": 1.0}, 4, seed, 4), 8)]).tolist()

    assert first(1) == first(1) != first(2)


def test_shares_are_kept_in_tokens(corpus):
    spent = {0: 0, 2: 0}
    for index in itertools.islice(corpus.stream({"gsm8k": 0.75, "code": 0.25}, seed=3), 400):
        spent[int(corpus.source[index])] += int(corpus.lengths[index])
    assert spent[2] / (spent[0] + spent[2]) == pytest.approx(0.75, abs=0.02)


def test_a_source_without_documents_is_refused(corpus):
    with pytest.raises(ValueError, match="no document of instruct"):
        next(corpus.stream({"gsm8k": 0.5, "instruct": 0.5}, seed=0))


def test_draft_vocabulary_keeps_the_most_frequent_supervised_tokens():
    tokens = np.array([3, 3, 3, 7, 7, 1, 1, 5, 0, 0, 0, 0])
    supervised = np.array([1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0], bool)
    counts = count_tokens(tokens, supervised, 9)
    kept, d2t, coverage = draft_vocabulary(counts, 3)
    assert kept.tolist() == [1, 3, 7]
    assert (np.arange(3) + d2t).tolist() == [1, 3, 7]
    assert coverage == pytest.approx(7 / 8)


@pytest.mark.parametrize("size", [0, 10])
def test_draft_vocabulary_of_an_impossible_size_is_refused(size):
    with pytest.raises(ConfigError, match="between 1 and the target's 9"):
        draft_vocabulary(np.ones(9), size)
