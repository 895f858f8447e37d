"""Finds the bundled pair: a small trained target and its drafters (README.md here is the model card)."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

DEMO = "demo"
"""Name of the bundled pair in options that take the path of a checkpoint."""


_SHARED = {"eagle2": "eagle1", "sps": "small"}
"""Other names of a folder: EAGLE-2 changed EAGLE's tree and left its head as it was."""


def bundled(name: str) -> Path:
    """Returns the directory of `target` (with its tokenizer), or of a drafter of it.

    Args:
      name: target, eagle1 or eagle2 (one head), hass, eagle3, medusa, hydra, small or sps (one model).
    """
    return _folder() / "demo" / _SHARED.get(name, name)


def bundled_questions() -> Path:
    """Returns the folder of the bundled questions `chat`, `math` and `code`, ten each, of this project."""
    return _folder() / "questions"


def _folder() -> Path:
    return Path(str(importlib.resources.files("eagle_jax.assets")))
