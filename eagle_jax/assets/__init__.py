"""The bundled pair: a small trained target and its draft heads. README.md beside this file is the model card."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

DEMO = "demo"
"""What programs call the bundled pair where they take the path of a checkpoint."""


def bundled(name: str) -> Path:
    """Directory of the bundled `target` (with its tokenizer), `eagle2` or `eagle3`."""
    return Path(str(importlib.resources.files("eagle_jax.assets"))) / "demo" / name
