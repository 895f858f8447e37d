"""Directories that one run has alone, checkpoints by name, and errors that name their option."""

from __future__ import annotations

import re

import pytest

from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.config import ConfigError
from train.loop.options import TargetArgs
from train.loop.places import (
    LOCK,
    alone_in,
    head_path,
    note_run,
    sources_of,
    target_config,
    target_of_head,
    target_path,
    tokenizer_of,
)

OWN = (("mark",), "a run")


def test_a_second_run_is_kept_out_until_the_first_ends(tmp_path):
    out = tmp_path / "new" / "run"
    for _ in range(2):  # the lock file of an ended run does not count
        with alone_in(out, *OWN):
            (out / "mark").touch()
            with pytest.raises(ConfigError, match=r"no other run writes, got .*run\. Wait"), alone_in(out, *OWN):
                pytest.fail("two runs in one directory")


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").touch()
    for out, message in (
        (tmp_path, r"--out must be empty or a run, got .* with other files"),
        (tmp_path / "notes.txt", r"--out must be a directory, got the file .*notes.txt"),
    ):
        with pytest.raises(ConfigError, match=message), alone_in(out, *OWN):
            pytest.fail("not our directory")
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):  # a new directory is removed if nothing was written
        with pytest.raises(ValueError, match="refused"), alone_in(tmp_path / name, *OWN):
            raise ValueError("refused")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "notes.txt"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [LOCK]


def test_checkpoints_by_name(tmp_path):
    assert target_path("demo") == str(bundled("target")) and target_path("a/b") == "a/b"
    assert head_path("demo") == str(bundled("hass")) and head_path("demo", part="eagle3") == str(bundled("eagle3"))
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(ValueError, match=r"--init must be a run that has written a head, got "):
        head_path(str(tmp_path), "--init")
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").touch()
    assert head_path(str(tmp_path)) == head_path(str(tmp_path / "head")) == str(tmp_path / "head")
    assert target_of_head(str(tmp_path / "head")) is None
    note_run(tmp_path, "some/model")
    assert target_of_head(str(tmp_path / "head")) == "some/model"


def test_sources_and_tokenizers_name_their_option(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    assert [one.path for one in sources_of([str(tmp_path / "rows.jsonl"), "a/b"])] == [f"{tmp_path}/rows.jsonl", "a/b"]
    with pytest.raises(ValueError, match=r"^--heldout \./no\.jsonl: no file \./no\.jsonl"):
        sources_of(["./no.jsonl"], "--heldout")
    config = target_config("demo")
    for options, message in (
        ({"tokenizer": str(tmp_path)}, f"^--tokenizer {re.escape(str(tmp_path))}: no tokenizer in"),
        ({"chat_template": str(tmp_path / "no.jinja")}, r"^--chat-template .* must be a Jinja file, got .*no\.jinja"),
        ({"template_args": ("a=1",)}, r"^--template-args a=1: template arguments must be .* reads \(none\), got a"),
        ({"template_args": ("a",)}, "^--template-args must be NAME=VALUE, got 'a'"),
        ({"target": "/nope"}, r"^--target /nope: no such directory: /nope"),
    ):
        with pytest.raises((ValueError, CheckpointError), match=message):
            tokenizer_of(TargetArgs(**{"target": "demo", **options}), config)
