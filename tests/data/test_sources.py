"""Rows from files and datasets to a corpus, and what is said of those that give none."""

from __future__ import annotations

import json
import re

import pyarrow as pa
import pytest
from pyarrow import parquet

from eagle_jax.data.corpus import sources
from eagle_jax.data.corpus.sources import Source, build_corpus, corpus_key, tokenizer_key
from tests.data.test_conversations import TEMPLATES, tokenizer_with

TALK = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]}
SHARE = {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho."}], "id": 1}


@pytest.fixture
def tokenizer():
    return tokenizer_with(TEMPLATES["chatml"])


def lines(path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_every_format_gives_the_same_documents(tokenizer, tmp_path):
    jsonl = lines(tmp_path / "a.jsonl", TALK, SHARE)
    parquet.write_table(pa.Table.from_pylist([TALK, TALK]), tmp_path / "b.parquet")
    (tmp_path / "hub").mkdir()
    lines(tmp_path / "hub" / "train.jsonl", TALK)
    given = [Source(jsonl), Source(str(tmp_path / "*.parquet"), weight=2.0), Source(str(tmp_path / "hub"))]
    corpus, skipped = build_corpus(given, tokenizer, progress=False)
    assert skipped == {}
    assert corpus.source.tolist() == [0, 0, 1, 1, 2]
    texts = {tokenizer.decode(corpus[i].tokens.tolist()) for i in range(5)}
    assert texts == {"<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nHo.<|im_end|>\n"}
    assert {tokenizer.decode(corpus[i].tokens[corpus[i].supervised].tolist()) for i in range(5)} == {"Ho.<|im_end|>"}


def test_the_very_tokens_of_a_regenerated_row_are_kept(tokenizer, tmp_path):
    path = lines(tmp_path / "a.jsonl", {**TALK, "tokens": [5, 6, 7, 8], "supervised": [[1, 2], [3, 4]]})
    corpus, _ = build_corpus([Source(path)], tokenizer, progress=False)
    assert corpus[0].tokens.tolist() == [5, 6, 7, 8]
    assert corpus[0].supervised.tolist() == [False, True, False, True]


def test_rows_that_give_nothing_are_counted(tokenizer, tmp_path):
    path = lines(tmp_path / "a.jsonl", TALK, {"messages": TALK["messages"][:1]}, {"x": 1}, {"x": 2})
    corpus, skipped = build_corpus([Source(path)], tokenizer, progress=False)
    assert len(corpus) == 1
    assert skipped == {"no assistant turn": 1, "neither messages, conversations, text nor prompt (found x)": 2}
    with pytest.raises(ValueError, match=r"b\.jsonl has no row to learn from: 1 x no assistant turn"):
        build_corpus(
            [Source(lines(tmp_path / "b.jsonl", {"messages": TALK["messages"][:1]}))], tokenizer, progress=False
        )
    with pytest.raises(ValueError, match="has no row to learn from: it is empty"):
        build_corpus([Source(lines(tmp_path / "c.jsonl"))], tokenizer, progress=False)


def test_a_built_corpus_is_read_back_and_never_stale(tokenizer, tmp_path, monkeypatch):
    path = lines(tmp_path / "a.jsonl", TALK, {"x": 1})
    cache = tmp_path / "cache"
    first = build_corpus([Source(path)], tokenizer, cache, progress=False)
    monkeypatch.setattr(sources, "encode_row", lambda *_: pytest.fail("tokenised again"))
    again = build_corpus([Source(path)], tokenizer, cache, progress=False)
    assert again[0][0].tokens.tolist() == first[0][0].tokens.tolist()
    assert again[1] == {"neither messages, conversations, text nor prompt (found x)": 1}
    monkeypatch.undo()
    lines(tmp_path / "a.jsonl", TALK, TALK)
    assert len(build_corpus([Source(path)], tokenizer, cache, progress=False)[0]) == 2
    tokenizer.chat_template = TEMPLATES["vicuna"]
    changed = build_corpus([Source(path)], tokenizer, cache, progress=False)[0]
    assert "USER: Hi? ASSISTANT:" in tokenizer.decode(changed[0].tokens.tolist())


def test_splits_of_one_dataset_are_two_sources(tokenizer, monkeypatch):
    count = {"train": 1, "test": 3}
    monkeypatch.setattr(sources, "_dataset", lambda name, split: [TALK] * count[split])
    given = [Source.parse(text) for text in ("hub#train@1", "hub#test@9")]
    corpus, _ = build_corpus(given, tokenizer, progress=False)
    assert corpus.names == tuple(source.name for source in given) == ("hub", "hub#test")
    assert [corpus.of(source.name).tolist() for source in given] == [[0], [1, 2, 3]]


def test_a_source_given_twice_is_refused(tokenizer, tmp_path):
    path = lines(tmp_path / "a.jsonl", TALK)
    given = [Source(path), Source.parse(f"{path}@2")]
    with pytest.raises(ValueError, match=r"the source .*a\.jsonl is given twice: give it once, with a weight"):
        build_corpus(given, tokenizer, tmp_path / "cache", progress=False)
    with pytest.raises(ValueError, match="the source hub is given twice"):
        build_corpus([Source("hub"), Source.parse("hub#train@3")], tokenizer, progress=False)


def test_documents_know_their_rows(tokenizer, tmp_path):
    """Rows that give no document are counted, so that a document is found again in its file."""
    given = [Source(lines(tmp_path / name, *rows)) for name, rows in
             (("a.jsonl", [TALK, {"x": 1}, TALK]), ("b.jsonl", [{"x": 1}, {"x": 2}, SHARE]))]  # fmt: skip
    for _ in range(2):  # built, and read back
        corpus, _ = build_corpus(given, tokenizer, tmp_path / "cache", progress=False)
        assert corpus.source.tolist() == [0, 0, 1]
        assert corpus.row.tolist() == [0, 2, 2]


def test_specifications(tmp_path):
    assert Source.parse("a/*.jsonl") == Source("a/*.jsonl")
    assert Source.parse("a.parquet@2") == Source("a.parquet", weight=2.0)
    assert Source.parse("org/name#train_sft@0.5") == Source("org/name", "train_sft", 0.5)
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ValueError, match=r"#train names a part of a dataset of the hub, and .*a\.jsonl is here"):
        Source.parse(f"{tmp_path / 'a.jsonl'}#train")
    for text, message in (("a@b", "behind @ is 'b'"), ("a@-1", "weight positive"), ("@2", "must read path")):
        with pytest.raises(ValueError, match=message):
            Source.parse(text)


def test_what_cannot_be_read_is_named(tokenizer, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no file .*nowhere\.jsonl"):
        build_corpus([Source(str(tmp_path / "nowhere.jsonl"))], tokenizer, progress=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty is a directory without JSONL or Parquet files"):
        build_corpus([Source(str(tmp_path / "empty"))], tokenizer, progress=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"run is the directory of a training run and no data"):
        build_corpus([Source(str(tmp_path / "run"))], tokenizer, progress=False)
    (tmp_path / "chats.jsonl").touch()
    monkeypatch.setattr(sources, "_dataset", lambda *_: pytest.fail("went to the hub"))
    for name in ("chat.jsonl", "chat*s.json", "a/b/chats"):
        with pytest.raises(ValueError, match=f"no file .*{re.escape(name)}"):
            build_corpus([Source(str(tmp_path / name))], tokenizer, progress=False)
    with pytest.raises(ValueError, match=r"no file .*chat\.jsonl; there is .*chats\.jsonl$"):
        corpus_key([Source(str(tmp_path / "chat.jsonl"))], tokenizer)
    with pytest.raises(ValueError, match=r"no file chats\.jsonl"):
        corpus_key([Source("chats.jsonl")], tokenizer)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"'no/such' is no local file, and no dataset no/such#train could be loaded"):
        build_corpus([Source("no/such")], tokenizer, progress=False)
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n{"messages"', encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not JSON"):
        build_corpus([Source(str(tmp_path / "a.jsonl"))], tokenizer, progress=False)
    (tmp_path / "b.jsonl").write_text("[1]\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"b\.jsonl, element 1: int instead of an object"):
        build_corpus([Source(str(tmp_path / "b.jsonl"))], tokenizer, progress=False)
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"c\.jsonl, line 2: not UTF-8"):
        build_corpus([Source(str(tmp_path / "c.jsonl"))], tokenizer, progress=False)
    (tmp_path / "d.parquet").write_bytes(b"no such thing")
    with pytest.raises(ValueError, match=r"d\.parquet cannot be read as Parquet"):
        build_corpus([Source(str(tmp_path / "d.parquet"))], tokenizer, progress=False)
    (tmp_path / "e.jsonl").write_text('{"tokens": "abc", "supervised": 5}\n{"tokens": [1, 2], "supervised": [5]}\n')
    with pytest.raises(
        ValueError, match=r"e\.jsonl has .*: 1 x tokens that are not token ids; 1 x supervised that is not"
    ):
        build_corpus([Source(str(tmp_path / "e.jsonl"))], tokenizer, progress=False)


def test_replies_of_another_tokenizer_are_refused(tokenizer, tmp_path):
    (tmp_path / "shard-00000.jsonl").write_text('{"tokens": [1, 2, 3], "supervised": [[1, 3]]}\n')
    source = [Source(str(tmp_path / "*.jsonl"))]
    for key in (tokenizer_key(tokenizer), None):
        (tmp_path / "settings.json").write_text(json.dumps({"tokenizer_key": key}))
        assert len(build_corpus(source, tokenizer, progress=False)[0]) == 1
    (tmp_path / "settings.json").write_text(json.dumps({"tokenizer_key": "another"}))
    with pytest.raises(ValueError, match="holds token ids of another tokenizer than this target's: regenerate"):
        build_corpus(source, tokenizer, progress=False)
