"""Checks the types of values in a tokenizer's files, which `transformers` does not check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from eagle_jax.checkpoints import CheckpointError
from eagle_jax.checkpoints.files.tensors import read_json
from eagle_jax.data.templates.keys import OPTIONS
from eagle_jax.data.templates.render import check_syntax

SETTINGS, SPECIAL, TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"


class _Token(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


_ONE, _MANY = str | _Token | None, list[str | _Token] | None
_TYPES: dict[str, Any] = {
    **dict.fromkeys(OPTIONS, bool | None),
    **dict.fromkeys([f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")], _ONE),
    "tokenizer_class": str | None,
    "chat_template": str | list[_NamedTemplate] | dict[str, str] | None,
    "added_tokens_decoder": dict[int, _Token] | None,
    "additional_special_tokens": _MANY,
    "extra_special_tokens": _MANY | dict[str, str | _Token],
}
_Settings = msgspec.defstruct("_Settings", [(name, kind, None) for name, kind in _TYPES.items()])


def check_settings(directory: Path) -> dict[str, Any]:
    """Checks `tokenizer_config.json` and `special_tokens_map.json`, and returns the former; empty without one.

    Raises:
      CheckpointError: naming file, key and the expected type.
    """
    found: list[dict[str, Any]] = []
    for path in (directory / SETTINGS, directory / SPECIAL):
        found.append(read_json(path) if path.is_file() else {})
        try:
            msgspec.convert(found[-1], _Settings, str_keys=True)
        except msgspec.ValidationError as error:
            raise CheckpointError(
                f"{path} must hold a tokenizer's settings: {error}. "
                "Correct the value, or fetch the file again from where the weights came from."
            ) from error
    return found[0]


def check_templates(tokenizer: Any, directory: Path) -> None:
    """Checks the syntax of the tokenizer's chat templates.

    Raises:
      CheckpointError: naming the file and the error.
    """
    held = tokenizer.chat_template
    for name, text in (held if isinstance(held, Mapping) else {"": held}).items():
        files = [directory / "additional_chat_templates" / f"{name}.jinja", directory / TEMPLATE, directory / SETTINGS]
        try:
            check_syntax(text or "")
        except ValueError as error:
            path = next((path for path in files if path.is_file()), directory)
            raise CheckpointError(
                f"{path}: chat_template must be a Jinja template, got {text!r:.60}: {error}"
            ) from error
