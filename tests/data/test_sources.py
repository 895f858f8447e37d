"""Tests that rows of files and datasets become a corpus, and errors of sources without rows."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys

import pyarrow
import pytest
from pyarrow import parquet

from eagle_jax.data.chat.tokenizers import tokenizer_key
from eagle_jax.data.corpus import Source, build_corpus, corpus_key, sources
from tests.data.chats import TEMPLATES, tokenizer_with

TALK = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]}
SHARE = {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho."}], "id": 1}
ROWS = [{"n": [-1.5e3, i, None], "text": f'"]{{ {i}é😀\n'} for i in range(1, 9)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
BOM = "\ufeff".encode()
ARRAY = json.dumps(ROWS, indent=1, ensure_ascii=False).encode()
PACK = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}  # fmt: skip


@pytest.fixture
def tokenizer():
    return tokenizer_with(TEMPLATES["chatml"])


def lines(path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows_of(path) -> list[dict]:
    return list(Source(str(path)).rows())


@pytest.mark.parametrize("codec", PACK)
@pytest.mark.parametrize(
    ("kind", "content"), [(".jsonl", BOM + LINES), (".json", BOM + b" " + ARRAY), (".json", LINES)]
)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind, content, codec):
    path = tmp_path / f"chat{kind}{codec}"
    path.write_bytes(PACK[codec](content))
    assert rows_of(path) == rows_of(tmp_path / "c*") == ROWS
    (tmp_path / "settings.json").write_text('{"rows": 8}\n')  # as `train.regenerate` writes beside its shards
    if content is not LINES:
        assert rows_of(tmp_path) == ROWS
    if codec:
        for damaged in (content, PACK[codec](content * 50)[:-20]):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=rf"chat\{kind}\{codec} cannot be decompressed: \w"):
                rows_of(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1}, {"a": }]', r"a\.json: not JSON \(Expecting value: line 1 column 18 .*\)\. Write one object"),
        (b'[{"a": 1}, {"a": 2}', r"a\.json: not JSON \(Expecting ',' delimiter: line 1"),
        (b'[{"a": 1}, 5]', r"element 2: a row must be a JSON object, got int\. Write an object, such as"),
        (b'[{"a": 1}]\n[{"a": 1}]', r"not JSON \(Extra data: line 2 column 1"),
        (b'[{"a": 1}, {"a": "\xe9"}]', r"a\.json: the text must be UTF-8"),
        (b'[{"a": ' + b"[" * 100_000, r"a\.json: not JSON \(maximum recursion depth"),
        (b'{"a": 1}\n{"a": ' + b"1" * 5000 + b"}", r"line 2: not JSON \(Exceeds the limit"),
        (b'{"messages": []}\n{"messages"', r"a\.json, line 2: not JSON"),
        (b'{"text": "a"}\n{"text": "\xe9"}\n', r"a\.json, line 2: the text must be UTF-8"),
    ],
)
def test_errors_of_damaged_files_name_the_place(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / "a.json")
    (tmp_path / "d.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"d\.parquet cannot be read as Parquet"):
        rows_of(tmp_path / "d.parquet")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(PACK[".zst"](LINES))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pyarrow must be installed to read .*a\.jsonl\.zst\. Run pip install"):
        rows_of(tmp_path / "a.jsonl.zst")


def test_every_form_of_row_gives_the_same_document(tokenizer, tmp_path):
    jsonl = lines(tmp_path / "a.jsonl", TALK, SHARE)
    parquet.write_table(pyarrow.Table.from_pylist([TALK, TALK]), tmp_path / "b.parquet")
    (tmp_path / "hub").mkdir()
    lines(tmp_path / "hub" / "train.jsonl", TALK)
    given = [Source(jsonl), Source(str(tmp_path / "*.parquet"), weight=2.0), Source(str(tmp_path / "hub"))]
    corpus, skipped = build_corpus(given, tokenizer)
    assert skipped == {}
    assert corpus.source.tolist() == [0, 0, 1, 1, 2]
    for tokens, supervised in (corpus[i] for i in range(5)):
        assert tokenizer.decode(tokens) == "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nHo.<|im_end|>\n"
        assert tokenizer.decode(tokens[supervised]) == "Ho.<|im_end|>"


def test_skipped_rows_are_counted(tokenizer, tmp_path):
    """Skipped rows have numbers too, so that a row number is a place in the file."""
    question = {"messages": TALK["messages"][:1]}
    given = [Source(lines(tmp_path / "a.jsonl", TALK, question, {"x": 1}, TALK)),
             Source(lines(tmp_path / "b.jsonl", {"x": 1}, SHARE))]  # fmt: skip
    for _ in range(2):  # built, and read back
        corpus, skipped = build_corpus(given, tokenizer, tmp_path / "cache")
        assert skipped == {"no assistant turn": 1, "neither messages, conversations, text nor prompt (found x)": 2}
        assert (corpus.source.tolist(), corpus.row.tolist()) == ([0, 0, 1], [0, 3, 1])
    for rows, reason in (([question, {"x": 1}], "1 x no assistant turn; 1 x neither"), ([], "it is empty")):
        with pytest.raises(ValueError, match=rf"c\.jsonl must have a row to learn from, got none: {reason}"):
            build_corpus([Source(lines(tmp_path / "c.jsonl", *rows))], tokenizer)


def test_a_cached_corpus_is_read_until_rows_or_template_change(tokenizer, tmp_path, monkeypatch):
    source = Source(lines(tmp_path / "a.jsonl", TALK))
    build = lambda: build_corpus([source], tokenizer, tmp_path / "cache")[0]  # noqa: E731
    first = build()
    with monkeypatch.context() as patch:
        patch.setattr(sources, "encode_row", lambda *_: pytest.fail("tokenised again"))
        assert build()[0].tokens.tolist() == first[0].tokens.tolist()
    lines(tmp_path / "a.jsonl", TALK, TALK)
    assert len(build()) == 2
    tokenizer.chat_template = TEMPLATES["vicuna"]
    assert "USER: Hi? ASSISTANT:" in tokenizer.decode(build()[0].tokens)


def test_splits_of_one_dataset_are_two_sources(tokenizer, monkeypatch):
    count = {"train": 1, "test": 3}
    monkeypatch.setattr(sources, "hub_rows", lambda name, split: [TALK] * count[split])
    given = [Source.parse(text) for text in ("hub#train@1", "hub#test@9")]
    corpus, _ = build_corpus(given, tokenizer)
    assert corpus.names == tuple(source.name for source in given) == ("hub", "hub#test")
    assert [corpus.of(source.name).tolist() for source in given] == [[0], [1, 2, 3]]
    with pytest.raises(ValueError, match=r"sources must be distinct, got hub twice\. Give it once; @weight"):
        build_corpus([Source("hub"), Source.parse("hub#train@3")], tokenizer)


def test_a_source_is_parsed(tmp_path):
    assert Source.parse("a/*.jsonl") == Source("a/*.jsonl")
    assert Source.parse("a.parquet@2") == Source("a.parquet", weight=2.0)
    assert Source.parse("org/name#train_sft@0.5") == Source("org/name", "train_sft", 0.5)
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ValueError, match=r"source must have no #split for local files, got '.*a\.jsonl#train'"):
        Source.parse(f"{tmp_path / 'a.jsonl'}#train")
    for text in ("a@b", "a@-1", "@2"):
        with pytest.raises(ValueError, match=f"must be path.* with a positive weight, got '{text}'"):
            Source.parse(text)


def test_a_missing_source_is_an_error(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="source must be a local file or a dataset of the hub, got no/such:train"):
        build_corpus([Source("no/such")], tokenizer)
    monkeypatch.setattr(sources, "hub_rows", lambda *_: pytest.fail("went to the hub"))
    for name in ("chat.jsonl", "chat*s.json", "a/b/chats", "owner/b.jsonl.gz"):
        with pytest.raises(ValueError, match="got no file ") as caught:
            build_corpus([Source(name)], tokenizer)
        assert str(caught.value).endswith(f"{name}. Correct it.")
    with pytest.raises(ValueError, match=r"got no file empty/\*\.jsonl, \.json or \.parquet"):
        corpus_key([Source("empty")], tokenizer)


def test_replies_of_another_tokenizer_are_an_error(tokenizer, tmp_path):
    (tmp_path / "shard-00000.jsonl").write_text('{"tokens": [1, 2, 3], "supervised": [[1, 3]]}\n')
    source = [Source(str(tmp_path / "*.jsonl"))]
    for key in (tokenizer_key(tokenizer), None):
        (tmp_path / "settings.json").write_text(json.dumps({"tokenizer_key": key}))
        assert build_corpus(source, tokenizer)[0][0].tokens.tolist() == [1, 2, 3]
    (tmp_path / "settings.json").write_text(json.dumps({"tokenizer_key": "another"}))
    with pytest.raises(ValueError, match="must hold token ids of this target's tokenizer, got another"):
        build_corpus(source, tokenizer)
