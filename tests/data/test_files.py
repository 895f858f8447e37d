"""Files of rows: JSON arrays and compressed files give what JSON lines give; malformed ones are named by the place."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys

import pyarrow
import pytest

from eagle_jax.data.corpus import files
from eagle_jax.data.corpus.sources import Source, build_corpus, corpus_key
from tests.data.test_conversations import TEMPLATES, tokenizer_with

ROWS = [
    {"id": i, "conversations": [{"from": "human", "value": f'"]{{ {i}é'}, {"from": "gpt", "value": "Ho." * i + "\n"}]}
    for i in range(1, 9)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS, indent=1, ensure_ascii=False).encode()
PACK = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}  # fmt: skip


def rows_of(path) -> list[dict]:
    return list(Source(str(path)).rows())


@pytest.mark.parametrize("codec", PACK)
@pytest.mark.parametrize(("kind", "content"), [(".jsonl", LINES), (".json", ARRAY), (".json", LINES)])
def test_every_kind_of_file_holds_the_same_rows(tmp_path, kind, content, codec):
    path = tmp_path / f"chat{kind}{codec}"
    path.write_bytes(PACK[codec](content))
    assert rows_of(path) == rows_of(tmp_path / "c*") == ROWS
    if kind == ".jsonl" or content is ARRAY:
        assert rows_of(tmp_path) == ROWS


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_an_array_is_read_in_chunks(tmp_path, monkeypatch, chunk):
    """Wherever a chunk ends, within a letter's escape or a number."""
    monkeypatch.setattr(files, "CHUNK", chunk)
    rows = [{"text": "é\n😀", "n": [-1.5e3, True, None]}, {"a": {}}, {}]
    for text in (json.dumps(rows), json.dumps(rows, ensure_ascii=False, indent=3), "\ufeff [ ] "):
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
        assert rows_of(tmp_path / "a.json") == ([] if "]" in text[:5] else rows)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1}, {"a": }]', r"a\.json, element 2: not JSON \(Expecting value\); one array of objects"),
        (b'[{"a": 1} {"a": 2}]', r"element 1: not JSON \(Expecting ',' delimiter\)"),
        (b'[{"a": 1}, {"a": 2}', r"element 2: not JSON \(the array is not closed\)"),
        (b'[{"a": 1}, {"a": "2', r"element 2: not JSON \(Unterminated string"),
        (b'[{"a": 1}, 5]', r"element 2: int instead of an object; every row is a JSON object"),
        (b'[{"a": 1}]\n[{"a": 1}]', r"behind element 1: not JSON \(more text behind the array\)"),
        (b'[{"a": 1}, {"a": "\xe9"}]', r"at element 0 or behind it: not UTF-8"),
        (b'[{"a": ' + b"[" * 100_000, r"element 1: not JSON \(nested too deeply\)"),
        (b'{"a": 1}\n{"a": ' + b"1" * 5000 + b"}", r"line 2: not JSON \(Exceeds the limit"),
    ],
)
def test_malformed_files_are_named_by_the_place(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / "a.json")


@pytest.mark.parametrize("codec", [codec for codec in PACK if codec])
def test_damaged_compression_is_named(tmp_path, codec):
    path = tmp_path / f"a.jsonl{codec}"
    for content in (LINES, PACK[codec](LINES * 50)[:-20]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"a\.jsonl\{codec} cannot be decompressed as (gzip|bzip2|xz|zstd): \w"):
            rows_of(path)


def test_a_missing_codec_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(PACK[".zst"](LINES))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst is decompressed with the package pyarrow: pip install"):
        rows_of(tmp_path / "a.jsonl.zst")


def test_other_json_files_of_a_folder_hold_no_rows(tmp_path):
    """As those that `train.regenerate` writes beside its shards."""
    (tmp_path / "shard-00000.jsonl").write_bytes(LINES)
    for name in ("shard-00000.json", "settings.json"):
        (tmp_path / name).write_text('{"rows": 8}\n')
    assert rows_of(tmp_path) == ROWS


def test_a_corpus_of_an_array_is_that_of_lines(tmp_path):
    tokenizer = tokenizer_with(TEMPLATES["chatml"])
    (tmp_path / "a.json").write_bytes(ARRAY)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    given = [Source(str(tmp_path / name)) for name in ("a.json", "a.jsonl")]
    one, two = (build_corpus([source], tokenizer, progress=False)[0] for source in given)
    assert one.tokens.tolist() == two.tokens.tolist()
    assert corpus_key(given[:1], tokenizer) != corpus_key(given[1:], tokenizer)
    with pytest.raises(ValueError, match=r"no file .*b\.jsonl\.gz; there is"):
        Source(str(tmp_path / "b.jsonl.gz")).check()
    with pytest.raises(ValueError, match=r"no file owner/b\.jsonl\.gz"):
        Source("owner/b.jsonl.gz").check()
