"""The bundled pair: a small trained target and its drafters. README.md beside this file is the model card."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

DEMO = "demo"
"""What programs call the bundled pair where they take the path of a checkpoint."""


def bundled(name: str) -> Path:
    """Directory of `target` (with its tokenizer), or of what drafts for it: eagle1 to eagle3, medusa, hydra, small."""
    return _folder() / "demo" / name


def bundled_questions() -> Path:
    """Folder of the bundled questions, `chat`, `math` and `code`: ten each, written for this project."""
    return _folder() / "questions"


def _folder() -> Path:
    return Path(str(importlib.resources.files("eagle_jax.assets")))
