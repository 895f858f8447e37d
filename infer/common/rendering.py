"""Checks that a resumed result file has prompts of the same tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_jax.data.templates.keys import tokenizer_settings
from eagle_jax.runtime.target import Target

NOTE = "tokenizer"
"""The field of result files with `tokenizer_settings`."""


def check_rendering(
    path: Path, known: dict[str, Any] | None, target: Target, tokenizer: Any, *, begun: bool
) -> dict[str, Any]:
    """Returns the settings of the tokenizer and the stop tokens, which the result file keeps.

    Args:
      path: of the result file. known: its settings. begun: whether it has measurements.

    Raises:
      ValueError: the file has other settings; the message names them.
    """
    settings = tokenizer_settings(tokenizer) | {"stop tokens": list(target.config.eos_ids)}
    if not begun or known == settings:
        return settings
    if known is None:
        raise ValueError(
            f"{path} cannot be gone on with: it does not hold which tokenizer and chat template its prompts were "
            "rendered by. Give another --out"
        )
    changed = [name for name in settings if known.get(name) != settings[name]]
    raise ValueError(
        f"{path} cannot be gone on with: {' and '.join(changed)} changed since it was begun. Give the same "
        "--chat-template and --template-args and an unchanged tokenizer, or another --out"
    )
