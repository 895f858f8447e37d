"""Reads rows from local files: JSON lines, JSON arrays and Parquet, compressed or not."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CODECS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
"""Compressions by the last suffix of a name."""
KINDS = (".jsonl", ".json", ".parquet")
ENDINGS = (*KINDS, *(kind + codec for kind in KINDS[:2] for codec in CODECS))
"""What the name of a file of rows may end with."""
CHUNK = 1 << 20
"""Characters of a JSON array that are read at once."""
_NEXT = re.compile(r"\S")


def holds_rows(path: Path) -> bool:
    """Returns whether a file holds rows; JSON files of settings, for example, hold no array."""
    if not path.name.endswith(ENDINGS):
        return False
    return not path.name.removesuffix(_codec(path)).endswith(".json") or _is_array(path)


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a file, each with its position, such as "line 3" or "element 3".

    A file is Parquet by its name. Else it holds a JSON object per line, or one JSON array of objects.

    Raises:
      ValueError: naming the file and the place that cannot be read.
    """
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    for place, row in _array(path) if _is_array(path) else _lines(path):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, {place}: {type(row).__name__} instead of an object; every row is a JSON object")
        yield place, row


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with _opened(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                yield place, json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                raise ValueError(f"{path}, {place}: not UTF-8; save the file in that encoding") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}, {place}: not JSON ({_reason(error)}); one object per line, or one array of objects"
                ) from None


def _array(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the elements of a JSON array, with a few chunks in memory at a time."""
    decoder = json.JSONDecoder()
    with _opened(path) as binary, io.TextIOWrapper(binary, "utf-8-sig") as text:
        buffer, at, place, closed = "", 0, "element 0", False
        try:
            buffer, at = _to_element(text, buffer, at, first=True)
            at += len("[")
            for number in itertools.count(1):
                buffer, at = _to_element(text, buffer, at, first=number == 1)
                if closed := buffer.startswith("]", at):
                    break
                place = f"element {number}"
                row, buffer, at = _element(decoder, text, buffer, at)
                yield place, row
            if (buffer[at + 1 :] + text.read(CHUNK)).strip():
                raise ValueError("more text behind the array")
        except UnicodeDecodeError:
            raise ValueError(f"{path}, at {place} or behind it: not UTF-8; save the file in that encoding") from None
        except (ValueError, RecursionError) as error:
            where = f"behind {place}" if closed else place
            raise ValueError(f"{path}, {where}: not JSON ({_reason(error)}); one array of objects") from None


def _to_element(text: io.TextIOBase, buffer: str, at: int, *, first: bool) -> tuple[str, int]:
    """Skips to the next element, or to the end of the array."""
    comma = first
    while True:
        found = _NEXT.search(buffer, at)
        if found is None:
            buffer, at = text.read(CHUNK), 0
            if not buffer:
                raise ValueError("the array is not closed")
        elif comma or found[0] == "]":
            return buffer, found.start()
        elif found[0] == ",":
            comma, at = True, found.end()
        else:
            raise ValueError("Expecting ',' delimiter")


def _element(decoder: json.JSONDecoder, text: io.TextIOBase, buffer: str, at: int) -> tuple[Any, str, int]:
    """Decodes the element at a position, and reads more of one that is cut off."""
    while True:
        try:
            row, end = decoder.raw_decode(buffer, at)
            return row, buffer, end
        except json.JSONDecodeError as error:
            # What a cut leaves open is found at the end of the text, a string at its beginning.
            is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(buffer) - 12
            more = text.read(max(CHUNK, len(buffer) - at)) if is_cut else ""
            if not more:
                raise
            buffer, at = buffer[at:] + more, 0


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _is_array(path: Path) -> bool:
    with _opened(path) as content:
        while start := content.read(64):
            if start := start.removeprefix(b"\xef\xbb\xbf").lstrip():
                return start.startswith(b"[")
    return False


def _codec(path: Path) -> str:
    return path.suffix if path.suffix in CODECS else ""


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens the decompressed bytes of a file as a buffered stream.

    Raises:
      ValueError: they cannot be, or the package that does it is missing.
    """
    codec = _codec(path)
    if not codec:
        with path.open("rb") as content:
            yield content
        return
    try:
        with _decompressed(path, codec) as content:
            yield content
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be decompressed as {CODECS[codec]}: {error}") from error


def _decompressed(path: Path, codec: str) -> Any:
    if codec == ".zst":
        return io.BufferedReader(_zstd(path))
    opened: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[codec]
    return opened(path, "rb")


def _zstd(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ValueError(f"{path} is decompressed with the package pyarrow: pip install -e '.[train]'") from None
    if not pyarrow.Codec.is_available("zstd"):
        raise ValueError(f"{path}: this build of pyarrow has no zstd; decompress the file, or use gzip")
    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path} is read with the package pyarrow: pip install -e '.[train]'") from None
    try:
        numbers = itertools.count(1)
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from ((f"row {next(numbers)}", row) for row in batch.to_pylist())
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error
