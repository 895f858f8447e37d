"""Tests documents on disk, batches of them, and the draft vocabulary."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from eagle_jax.config import ConfigError
from eagle_jax.data.chat.encoding import Encoded
from eagle_jax.data.corpus import Batches, Corpus, coverage, draft_vocabulary

LENGTHS = [5, 9, 7, 4, 12, 6, 3, 8]
PLACES = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3), (1, 2), (1, 3)]


@pytest.fixture
def corpus() -> Corpus:
    """Token j of document i is 100 i + j; the prompts have 1 to 5 tokens."""
    texts = [
        Encoded(100 * i + np.arange(length, dtype=np.int32), np.arange(length) >= prompt)
        for i, (length, prompt) in enumerate(zip(LENGTHS, [2, 1, 3, 2, 5, 2, 1, 4], strict=True))
    ]
    return Corpus.from_documents(texts, PLACES, ["chat", "code"])


def test_a_corpus_is_written_and_read(corpus, tmp_path):
    corpus.save(tmp_path / "deep" / "corpus", {"notes.txt": "x"})
    again = Corpus.load(tmp_path / "deep" / "corpus")
    assert again[2].tokens.tolist() == list(range(200, 207))
    assert again[2].supervised.tolist() == [False] * 3 + [True] * 4
    assert again.names == ("chat", "code")
    assert again.of("code").tolist() == [1, 4, 6, 7]
    assert again.row.tolist() == [0, 0, 1, 2, 1, 3, 2, 3]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["corpus"]
    again.save(tmp_path / "deep" / "corpus")  # over itself
    assert Corpus.load(tmp_path / "deep" / "corpus").lengths.tolist() == LENGTHS


def take(batches: Batches, count: int) -> list:
    return list(itertools.islice(batches, count))


def documents_of(batches) -> list[int]:
    """Returns the numbers of the documents of some batches, in order of rows and segments."""
    rows = [row for texts in batches for row in zip(texts.tokens, texts.segments, strict=True)]
    return [int(tokens[segments == s][0]) // 100 for tokens, segments in rows for s in range(1, segments.max() + 1)]


def test_rows_hold_whole_documents_with_their_masks(corpus):
    batches = Batches(corpus, length=12, rows=2, seed=0)
    for texts in itertools.islice(batches, 6):
        assert texts.tokens.shape == (2, 12)
        for tokens, supervised, segments, positions, numbers in zip(*texts, batches.documents, strict=True):
            for segment in range(1, segments.max() + 1):
                where = segments == segment
                document = corpus[int(tokens[where][0]) // 100]
                assert set(numbers[where]) == {int(tokens[where][0]) // 100}
                assert tokens[where].tolist() == document.tokens.tolist()
                assert supervised[where].tolist() == document.supervised.tolist()
                assert positions[where].tolist() == list(range(len(document.tokens)))
            assert not supervised[segments == 0].any()


def test_longer_documents_are_cut_or_left_out_without_supervised_tokens(corpus):
    for texts in take(Batches(corpus, length=4, rows=2, seed=0), 8):
        assert set(texts.positions[texts.segments > 0].tolist()) <= set(range(4))
    texts = [Encoded(np.full(9, number, np.int32), np.arange(9) >= first) for number, first in enumerate((1, 7, 8, 9))]
    late = Corpus.from_documents(texts, [(0, row) for row in range(4)], ["chat"])
    assert late.has_loss_within(8).tolist() == [True, True, False, False]
    assert late.has_loss_within(100).tolist() == [True, True, True, False]
    seen = {int(number) for texts in take(Batches(late, length=8, rows=1, seed=0), 8) for number in texts.tokens[0]}
    assert seen == {0, 1}


def test_an_epoch_has_every_document_once_and_the_next_another_order(corpus):
    seen = documents_of(take(Batches(corpus, length=12, rows=1, seed=3), 16))
    first, second = seen[:8], seen[8:16]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert documents_of(take(Batches(corpus, length=12, rows=1, seed=3), 16)) == seen
    assert documents_of(take(Batches(corpus, length=12, rows=1, seed=4), 16)) != seen


def test_processes_share_the_documents(corpus):
    shares = []
    for process in (0, 1):
        reader = Batches(corpus, length=12, rows=1, seed=3, process=process, processes=2)
        shares.append(set(documents_of(take(reader, 4))[:4]))  # an epoch; the next is shuffled, and dealt out, anew
    assert shares[0] | shares[1] == set(range(8))
    assert not shares[0] & shares[1]
    with pytest.raises(ValueError, match=r"a document for each of 9 process.*, got 8 documents with .* first 8 tokens"):
        Batches(corpus, length=8, rows=1, seed=0, processes=9)


def test_a_position_is_resumed_exactly(corpus):
    """Tests every batch with a new reader; the state goes through JSON."""
    options = dict(weights={"chat": 2.0, "code": 1.0}, length=12, rows=2, seed=5)
    whole = take(Batches(corpus, **options), 12)
    reader = Batches(corpus, **options)
    for count in range(1, 9):
        next(reader)
        again = Batches(corpus, **options)
        again.set_state(json.loads(json.dumps(reader.get_state())))
        for texts, expected in zip(take(again, 4), whole[count : count + 4], strict=True):
            np.testing.assert_array_equal(np.stack(texts), np.stack(expected))
    with pytest.raises(ValueError, match="must be of process 1 of 2, got one of process 0 of 1"):
        Batches(corpus, length=12, rows=1, seed=0, process=1, processes=2).set_state(reader.get_state())


def test_weights_are_shares_of_the_documents(corpus):
    seen = documents_of(take(Batches(corpus, {"chat": 1.0, "code": 3.0}, length=12, rows=2, seed=0), 60))
    assert np.isin(seen, corpus.of("code")).mean() == pytest.approx(0.75, abs=0.05)


def test_draft_vocabulary_keeps_the_most_frequent_supervised_tokens():
    tokens = np.array([3, 3, 3, 7, 7, 1, 1, 5, 0, 0, 0, 0], np.int32)
    corpus = Corpus.from_documents([Encoded(tokens, np.arange(12) < 8)], [(0, 0)], ["chat"])
    counts = corpus.token_counts(9)
    assert counts.tolist() == [0, 2, 0, 3, 0, 1, 0, 2, 0]
    kept = draft_vocabulary(counts, 2)
    assert kept.tolist() == [1, 3]  # of 1 and 7, which are as frequent, the lower
    assert coverage(counts, kept) == pytest.approx(5 / 8)
    for size in (0, 10):
        with pytest.raises(ConfigError, match="from 1 to the target's 9"):
            draft_vocabulary(counts, size)
