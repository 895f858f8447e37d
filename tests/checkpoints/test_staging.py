"""What a killed process leaves half written, and that it does not stay."""

from __future__ import annotations

import subprocess
import sys

from eagle_jax.checkpoints.files.staging import sweep

KILLED = """
import os, sys
from pathlib import Path
from eagle_jax.checkpoints.files import staging
folder = Path(sys.argv[1])
Path.replace = lambda *_: os._exit(9)
if sys.argv[2] == "file":
    staging.write_whole(folder / "figure.png", b"new")
with staging.replacing(folder / "head") as new:
    (new / "config.json").touch()
    os._exit(9)
"""


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("old")
    for name in ("figure.png", ".lock", ".gitignore"):
        (tmp_path / name).write_text("old")
    whole = sorted(tmp_path.rglob("*"))
    for what in ("file", "directory"):
        assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), what], check=False).returncode == 9
    (tmp_path / "corpus-0.17091.partial").mkdir()  # of eagle_jax.data.corpus.documents
    assert len(list(tmp_path.iterdir())) == 4 + 3
    sweep(tmp_path, tmp_path / "nowhere")
    assert sorted(tmp_path.rglob("*")) == whole
    assert (tmp_path / "figure.png").read_text() == (tmp_path / "head" / "config.json").read_text() == "old"
