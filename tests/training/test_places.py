"""Directories that one run has alone, checkpoints by name, and errors that name their option."""

from __future__ import annotations

import re
import subprocess
import sys
import types

import pytest

from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.config import ConfigError
from train.loop.places import (
    LOCK,
    alone_in,
    check_own,
    head_path,
    note_run,
    sources_of,
    target_config,
    target_of_head,
    target_path,
    tokenizer_of,
)

HOLDING = """
import sys, time
from pathlib import Path
from train.loop.places import alone_in
with alone_in(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(600)
"""


def test_a_second_run_is_kept_out_until_the_first_ends_in_whatever_way(tmp_path):
    out = tmp_path / "new" / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDING, str(out)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "in\n"
        with pytest.raises(ConfigError, match=r"--out .*run: another run is writing there"), alone_in(out):
            pytest.fail("two runs in one directory")
        with alone_in(out, leads=False):
            pass
    finally:
        holder.kill()
        holder.wait()
    with alone_in(out):  # what a killed run left does not count
        (out / "file").touch()
        with pytest.raises(ConfigError, match="another run"), alone_in(out):
            pytest.fail("two runs in one directory")
    assert [path.name for path in out.iterdir()] == ["file"]


def test_a_directory_in_which_nothing_was_written_goes(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):
        with pytest.raises(ValueError, match="refused"), alone_in(tmp_path / name):
            raise ValueError("refused")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_whose_directory_it_is(tmp_path):
    check_own(tmp_path / "new", ("mark",), "a run")
    (tmp_path / LOCK).touch()
    check_own(tmp_path, ("mark",), "a run")
    (tmp_path / "other").touch()
    with pytest.raises(ConfigError, match=r"--out must be empty or a run, got .* with other files"):
        check_own(tmp_path, ("mark",), "a run")
    with pytest.raises(ConfigError, match=r"--out must be a directory, got the file .*other"):
        check_own(tmp_path / "other", ("mark",), "a run")
    (tmp_path / "mark").touch()
    check_own(tmp_path, ("mark",), "a run")


def test_checkpoints_by_name(tmp_path):
    assert target_path("demo") == str(bundled("target")) and target_path("a/b") == "a/b"
    assert head_path("demo") == str(bundled("hass")) and head_path("demo", part="eagle3") == str(bundled("eagle3"))
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(ValueError, match=r"--init .* is a training run without a head"):
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

    def given(tokenizer=None, chat_template=None, template_args=()):
        return types.SimpleNamespace(tokenizer=tokenizer, chat_template=chat_template, template_args=template_args)

    for options, message in (
        ({"tokenizer": str(tmp_path)}, f"^--tokenizer {re.escape(str(tmp_path))}: no tokenizer in"),
        ({"chat_template": str(tmp_path / "no.jinja")}, r"^--chat-template .*no\.jinja: no such chat template"),
    ):
        with pytest.raises(CheckpointError, match=message):
            tokenizer_of("demo", config, given(**options))
    for argument, message in (
        ("a=1", r"^--template-args a=1: template arguments must be .* reads \(none\), got a"),
        ("a", "^--template-args must be NAME=VALUE, got 'a'"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenizer_of("demo", config, given(template_args=(argument,)))
    with pytest.raises(CheckpointError, match=r"^--target /nope: no such directory: /nope"):
        tokenizer_of("/nope", config)
