"""Reads rows from local files: JSON lines, JSON arrays and Parquet, compressed or not."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CODECS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": None}
"""Functions that open a compressed file, by the last suffix of its name; pyarrow opens `.zst`."""
KINDS = (".jsonl", ".json", ".parquet")
ENDINGS = (*KINDS, *(kind + codec for kind in KINDS[:2] for codec in CODECS))
"""File suffixes of row files."""


def holds_rows(path: Path) -> bool:
    """Returns whether a file holds rows: by its suffix, and for `.json` by starting with an array.

    Settings files do not start with an array.
    """
    if not path.name.endswith(ENDINGS):
        return False
    kind = path.with_suffix("").suffix if path.suffix in CODECS else path.suffix
    return kind != ".json" or _is_array(path)


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a file, each with its position, such as "line 3" or "element 3".

    A file named *.parquet is Parquet. Any other holds a JSON object per line, or one JSON array of objects.

    Raises:
      ValueError: a part of the file cannot be read; the message names its place.
    """
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    is_array = _is_array(path)
    with _opened(path) as content:
        if is_array:
            rows = enumerate(_parsed(content.read(), str(path)), 1)
            entries = ((f"element {number}", row) for number, row in rows)
        else:
            lines = ((number, line) for number, line in enumerate(content, 1) if line.strip())
            entries = ((f"line {number}", _parsed(line, f"{path}, line {number}")) for number, line in lines)
        for place, row in entries:
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}, {place}: a row must be a JSON object, got {type(row).__name__}. "
                    'Write an object, such as {"messages": [...]}.'
                )
            yield place, row


def _parsed(content: bytes, place: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError(f"{place}: the text must be UTF-8, got other bytes. Save the file as UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON ({error}). Write one object per line, or one array of objects.") from None


def _is_array(path: Path) -> bool:
    with _opened(path) as content:
        return bool(content.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens the decompressed bytes of a file as a buffered stream.

    Raises:
      ValueError: the file is damaged, or the package that reads it is missing.
    """
    opener = _zstd if path.suffix == ".zst" else CODECS.get(path.suffix, open)
    try:
        with opener(path, "rb") as content:
            yield content
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if opener is open:
            raise
        raise ValueError(f"{path} cannot be decompressed: {error}. Download the file again.") from error


def _zstd(path: Path, _: str) -> Any:
    pyarrow = _pyarrow(path)
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    pyarrow = _pyarrow(path)
    from pyarrow import parquet

    try:
        rows = (row for batch in parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist())
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}. Download the file again.") from error


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ValueError(f"pyarrow must be installed to read {path}. Run pip install -e '.[train]'.") from None
    return pyarrow
