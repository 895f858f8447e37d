"""Documents on disk, batches of them, and the draft vocabulary."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from eagle_jax.config import ConfigError
from eagle_jax.data.chat.encode import Encoded
from eagle_jax.data.corpus import vocabulary
from eagle_jax.data.corpus.batches import Batches
from eagle_jax.data.corpus.documents import Corpus
from eagle_jax.data.corpus.vocabulary import cached_vocabulary, count_tokens, draft_vocabulary

LENGTHS = [5, 9, 7, 4, 12, 6, 3, 8]


@pytest.fixture
def corpus() -> Corpus:
    """Token j of document i is 100 i + j; the prompts have 0 (plain text) to 5 tokens."""
    documents = []
    for i, (length, prompt) in enumerate(zip(LENGTHS, [2, 0, 3, 2, 5, 2, 0, 4], strict=True)):
        supervised = np.arange(length) >= max(prompt, 1)
        documents.append(Encoded(100 * i + np.arange(length, dtype=np.int32), supervised))
    return Corpus.from_documents(documents, [0, 1, 0, 0, 1, 0, 1, 1], ["chat", "code"])


def test_round_trip(corpus, tmp_path):
    corpus.save(tmp_path / "deep" / "corpus", {"notes.txt": "x"})
    again = Corpus.load(tmp_path / "deep" / "corpus")
    assert again[2].tokens.tolist() == list(range(200, 207))
    assert again[2].supervised.tolist() == [False] * 3 + [True] * 4
    assert again.names == ("chat", "code")
    assert again.of("code").tolist() == [1, 4, 6, 7]
    assert again.row.dtype == np.int32 and again.row.tolist() == [0, 0, 1, 2, 1, 3, 2, 3]  # each in its own source
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["corpus"]
    again.save(tmp_path / "deep" / "corpus")  # over itself
    assert Corpus.load(tmp_path / "deep" / "corpus").lengths.tolist() == LENGTHS


def test_prompts_end_where_the_assistant_begins(corpus):
    assert corpus.prompts.tolist() == [2, 0, 3, 2, 5, 2, 0, 4]
    nothing = Corpus.from_documents([Encoded(np.arange(3, dtype=np.int32), np.zeros(3, bool))], [0], ["x"])
    assert nothing.prompts.tolist() == [3]


def test_what_is_no_corpus_is_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"no corpus at .*nowhere: `python -m train"):
        Corpus.load(tmp_path / "nowhere")
    (tmp_path / "tokens.npy").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"is not a corpus, a directory with tokens.npy, "):
        Corpus.load(tmp_path)
    with pytest.raises(ValueError, match="no source books, only chat, code"):
        corpus.of("books")


def test_splits_of_a_dataset_are_sources_of_their_own():
    document = Encoded(np.arange(3, dtype=np.int32), np.ones(3, bool))
    corpus = Corpus.from_documents([document] * 4, [0, 1, 2, 1], ["hub", "hub#test", "other#test"])
    assert [corpus.of(name).tolist() for name in corpus.names] == [[0], [1, 3], [2]]
    with pytest.raises(ValueError, match="no source other, only hub, hub#test, other#test"):
        corpus.of("other")


def take(batches: Batches, count: int) -> list:
    return list(itertools.islice(batches, count))


def documents_of(batches) -> list[int]:
    """Numbers of the documents of some batches, in order of rows and segments."""
    found = []
    for texts in batches:
        for tokens, segments in zip(texts.tokens, texts.segments, strict=True):
            found += [int(tokens[segments == s][0]) // 100 for s in range(1, segments.max() + 1)]
    return found


def test_rows_hold_whole_documents_with_their_masks(corpus):
    batches = Batches(corpus, length=12, rows=2, seed=0)
    for texts in itertools.islice(batches, 6):
        assert texts.tokens.shape == (2, 12)
        for tokens, supervised, segments, positions, documents in zip(*texts, batches.documents, strict=True):
            for segment in range(1, segments.max() + 1):
                where = segments == segment
                document = corpus[int(tokens[where][0]) // 100]
                assert set(documents[where]) == {int(tokens[where][0]) // 100}
                assert tokens[where].tolist() == document.tokens.tolist()
                assert supervised[where].tolist() == document.supervised.tolist()
                assert positions[where].tolist() == list(range(len(document.tokens)))
            assert not supervised[segments == 0].any()


def test_longer_documents_are_cut(corpus):
    for texts in take(Batches(corpus, length=4, rows=2, seed=0), 8):
        assert set(texts.positions[texts.segments > 0].tolist()) <= set(range(4))


def test_an_epoch_has_every_document_once_and_the_next_another_order(corpus):
    seen = documents_of(take(Batches(corpus, length=12, rows=1, seed=3), 40))
    first, second = seen[:8], seen[8:16]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert documents_of(take(Batches(corpus, length=12, rows=1, seed=3), 40)) == seen
    assert documents_of(take(Batches(corpus, length=12, rows=1, seed=4), 40)) != seen


def test_processes_share_the_documents(corpus):
    shares = []
    for process in (0, 1):
        reader = Batches(corpus, length=12, rows=1, seed=3, process=process, processes=2)
        shares.append(set(documents_of(take(reader, 4))[:4]))  # an epoch; the next is shuffled, and dealt out, anew
    assert shares[0] | shares[1] == set(range(8))
    assert not shares[0] & shares[1]


def test_a_position_is_resumed_exactly(corpus):
    """At every batch, by a fresh reader, through JSON."""
    options = dict(length=12, rows=2, seed=5)
    whole = take(Batches(corpus, {"chat": 2.0, "code": 1.0}, **options), 12)
    reader = Batches(corpus, {"chat": 2.0, "code": 1.0}, **options)
    for count in range(1, 9):
        next(reader)
        again = Batches(corpus, {"chat": 2.0, "code": 1.0}, **options)
        again.set_state(json.loads(json.dumps(reader.get_state())))
        for texts, wanted in zip(take(again, 4), whole[count : count + 4], strict=True):
            for got, want in zip(texts, wanted, strict=True):
                np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="saved by process 0 of 1 and this is process 1 of 2"):
        Batches(corpus, length=12, rows=1, seed=0, process=1, processes=2).set_state(reader.get_state())


def test_weights_are_shares_of_the_documents(corpus):
    seen = documents_of(take(Batches(corpus, {"chat": 1.0, "code": 3.0}, length=12, rows=2, seed=0), 60))
    assert np.isin(seen, corpus.of("code")).mean() == pytest.approx(0.75, abs=0.05)


def test_impossible_mixes_are_refused(corpus):
    with pytest.raises(ValueError, match=r"the corpus has 8 documents with .* first 8 tokens, too few for 9 process"):
        Batches(corpus, length=8, rows=1, seed=0, processes=9)
    with pytest.raises(ValueError, match="must be positive"):
        Batches(corpus, {"chat": 1.0, "code": 0.0}, length=8, rows=1, seed=0)
    with pytest.raises(ValueError, match="no source books"):
        Batches(corpus, {"books": 1.0}, length=8, rows=1, seed=0)


def test_what_teaches_only_beyond_the_cut_is_left_out():
    documents = [
        Encoded(np.full(9, number, np.int32), np.arange(9) >= first) for number, first in enumerate((1, 7, 8, 9))
    ]
    corpus = Corpus.from_documents(documents, [0] * 4, ["chat"])
    assert corpus.teaches_within(8).tolist() == [True, True, False, False]
    assert corpus.teaches_within(100).tolist() == [True, True, True, False]
    seen = {int(number) for texts in take(Batches(corpus, length=8, rows=1, seed=0), 8) for number in texts.tokens[0]}
    assert seen == {0, 1}


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


def test_a_draft_vocabulary_is_counted_once(corpus, tmp_path, monkeypatch):
    counted = []

    def count(*args):
        counted.append(args[-1])
        return count_tokens(*args)

    monkeypatch.setattr(vocabulary, "count_tokens", count)
    cache = tmp_path / "deep" / "cache"
    first = cached_vocabulary(corpus, "abc", 20, 800, cache)
    again = cached_vocabulary(corpus, "abc", 20, 800, cache)
    assert counted == [800]
    wanted = draft_vocabulary(count_tokens(corpus.tokens, corpus.supervised, 800), 20)
    for found in (first, again):
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(got, want)
            assert np.asarray(got).dtype == np.asarray(want).dtype
    cached_vocabulary(corpus, "other", 20, 800, cache)
    assert len(cached_vocabulary(corpus, "abc", 21, 800, cache)[0]) == 21
    cached_vocabulary(corpus, "abc", 20, 900, cache)
    assert counted == [800, 800, 800, 900]
    assert sorted(path.name for path in cache.iterdir()) == [
        "vocabulary-abc-20.npz", "vocabulary-abc-21.npz", "vocabulary-other-20.npz"
    ]  # fmt: skip


def test_a_damaged_draft_vocabulary_is_counted_again(corpus, tmp_path):
    wanted = cached_vocabulary(corpus, "abc", 20, 800, tmp_path)
    path = tmp_path / "vocabulary-abc-20.npz"
    whole = path.read_bytes()
    other = tmp_path / "other.npz"
    np.savez(other, kept=wanted[0])
    for damaged in (*(whole[:cut] for cut in range(0, len(whole), 50)), bytes(len(whole)), other.read_bytes()):
        path.write_bytes(damaged)
        np.testing.assert_array_equal(cached_vocabulary(corpus, "abc", 20, 800, tmp_path)[0], wanted[0])
        assert path.read_bytes() == whole
    with pytest.raises(ConfigError, match="between 1 and the target's 800"):
        cached_vocabulary(corpus, "abc", 801, 800, tmp_path)
