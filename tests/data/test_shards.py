"""Tests shards: a process killed at any call that touches the disk neither loses nor repeats a row."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from pathlib import Path

import pytest

from eagle_jax.data.corpus import Shard, add_reports, remember


class Killed(BaseException):
    """Replaces the end of the process: the code under test does not catch it."""


ROWS = [[3, 5], [8], [13, 21]]


def texts_of(batch: list[int]) -> list[dict]:
    return [{"row": row, "text": "é" * row} for row in batch if row != 8]


def fill(directory: Path) -> Shard:
    """Opens a shard, appends the missing batches and finishes it, as a run does."""
    directory.mkdir(exist_ok=True)
    shard = Shard(directory, 7)
    if not shard.whole:
        for batch in ROWS:
            if not set(batch) <= shard.done:
                shard.append(batch, texts_of(batch), {"rows": len(batch), "skipped": {"no": 1} if 8 in batch else {}})
        shard.finish()
    return shard


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture
def whole(tmp_path):
    """Returns the files of an uninterrupted shard."""
    assert fill(tmp_path / "whole").report() == {"rows": 5, "skipped": {"no": 1}}
    return content(tmp_path / "whole")


def test_a_finished_shard_has_every_text_in_order(whole):
    assert sorted(whole) == ["shard-00007.json", "shard-00007.jsonl"]
    rows = [json.loads(line) for line in whole["shard-00007.jsonl"].splitlines()]
    assert rows == [text for batch in ROWS for text in texts_of(batch)]


@pytest.mark.parametrize("name", ["fsync", "replace", "unlink", "open"])
def test_a_killed_run_continues_to_the_same_shard(whole, name, tmp_path, monkeypatch):
    """The process ends before or after the n-th call of `name`, for every n."""
    owner = os if name == "fsync" else Path
    original = getattr(owner, name)
    for count, after in itertools.product(range(1, 100), (False, True)):
        directory = tmp_path / f"{name}-{count}-{after}"
        calls = itertools.count(1)

        def killing(*args, calls=calls, count=count, after=after, **options):
            last = next(calls) == count
            if last and not after:
                raise Killed
            result = original(*args, **options)
            if last:
                raise Killed
            return result

        ended = False
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(owner, name, killing)
            fill(directory)
            ended = True
        fill(directory)
        assert content(directory) == whole
        if ended:
            break
    assert count > 1  # the run makes the call


def test_a_torn_line_is_written_again(whole, tmp_path):
    directory = tmp_path / "torn"
    directory.mkdir()
    shard = Shard(directory, 7)
    shard.append(ROWS[0], texts_of(ROWS[0]), {"rows": 2, "skipped": {}})
    journal = directory / "shard-00007.jsonl.partial"
    first = journal.read_bytes()
    shard.append(ROWS[1], [], {"rows": 1, "skipped": {"no": 1}})
    second = journal.read_bytes()
    for size in range(len(first), len(second)):
        journal.write_bytes(second[:size])
        assert Shard(directory, 7).done == set(ROWS[0])
        assert journal.read_bytes() == first
    fill(directory)
    assert content(directory) == whole


def test_reports_add_up():
    parts = [{"rows": 2, "why": {"a": 1}}, {"rows": 3, "why": {"a": 2, "b": 1}}, {"why": {}}, {"shards": 1}]
    assert add_reports(*parts) == {"rows": 5, "why": {"a": 3, "b": 1}, "shards": 1}


def test_other_settings_of_a_directory_are_an_error(tmp_path):
    out = tmp_path / "out"
    remember(out, {"seed": 1, "data": ("a", "b")})
    remember(out, {"seed": 1, "data": ("a", "b")})
    with pytest.raises(ValueError, match=r"must be those of .*out, got others \(seed was 1 and is now 2\)\. Choose"):
        remember(out, {"seed": 2, "data": ("a", "b")})
    with pytest.raises(ValueError, match=r"data was \['a', 'b'\] and is now \['a'\]; new was None and is now 0"):
        remember(out, {"seed": 1, "data": ("a",), "new": 0})


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*shard-00003\.jsonl\.partial'"):
        Shard(tmp_path, 3).append([0], [], {})
    with pytest.raises(OSError, match=r"No space left on device: '.*settings\.json'"):
        remember(tmp_path / "new", {"a": 1})
