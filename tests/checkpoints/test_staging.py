"""Tests that half-written files of a killed process are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_jax.checkpoints.files.staging import replacing, sweep, write_whole


def interrupt(*_):
    raise KeyboardInterrupt


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "head").mkdir()
    for name in ("head/config.json", "figure.png", ".lock", ".gitignore"):
        (tmp_path / name).write_text("old")
    whole = sorted(tmp_path.rglob("*"))
    killed = replacing(tmp_path / "head")
    killed.__enter__().joinpath("config.json").touch()  # never left
    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "figure.png", b"new")
    (tmp_path / "corpus-0.17091.partial").mkdir()  # of eagle_jax.data.corpus.documents
    assert len(list(tmp_path.iterdir())) == 4 + 3
    sweep(tmp_path, tmp_path / "nowhere")
    assert sorted(tmp_path.rglob("*")) == whole
    assert (tmp_path / "figure.png").read_text() == (tmp_path / "head" / "config.json").read_text() == "old"
