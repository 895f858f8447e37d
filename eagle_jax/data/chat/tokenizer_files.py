"""Checks the types of values in a tokenizer's files, which `transformers` reads without looking."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints import CheckpointError
from eagle_jax.checkpoints.files.fields import Fields
from eagle_jax.checkpoints.files.tensors import read_json
from eagle_jax.data.templates.keys import OPTIONS
from eagle_jax.data.templates.render import check_syntax

SETTINGS, SPECIAL, TEMPLATE, TOKENS = (
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer.json",
)  # fmt: skip
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def check_settings(directory: Path) -> dict[str, Any]:
    """Checks `tokenizer_config.json` and `special_tokens_map.json`, and returns the former; empty without one.

    Raises:
      CheckpointError: naming file, key and what is expected.
    """
    paths = [directory / name for name in (SETTINGS, SPECIAL)]
    settings, special = (Fields(read_json(path) if path.is_file() else {}, path) for path in paths)
    settings.text("tokenizer_class", "", null=True)
    for name in OPTIONS:
        settings.flag(name, null=True)
    added = settings.mapping("added_tokens_decoder")
    for number, token in added.values.items():
        if not number.isdecimal():
            settings.fail("added_tokens_decoder", "an object whose keys are token ids")
        if not isinstance(token, Mapping):
            added.fail(number, "an object with content")
        added.mapping(number).text("content")
    if not _is_template(settings.values.get("chat_template")):
        settings.fail("chat_template", "a Jinja template or a list of objects with name and template")
    _check_special_tokens(settings)
    _check_special_tokens(special)
    return dict(settings.values)


def check_tokens(directory: Path) -> None:
    """Checks that `tokenizer.json` is an object with a model; it is large, and read only to explain an error.

    Raises:
      CheckpointError: naming the file, or its key.
    """
    path = directory / TOKENS
    if path.is_file():
        fields = Fields(read_json(path), path)
        if not isinstance(fields.values.get("model"), Mapping):
            fields.fail("model", "an object of keys and values")


def check_templates(tokenizer: Any, directory: Path) -> None:
    """Checks the syntax of the tokenizer's chat templates.

    Raises:
      CheckpointError: naming the file and the error.
    """
    held = tokenizer.chat_template
    named = held if isinstance(held, Mapping) else {"": held}
    for name, text in named.items():
        if not text:
            continue
        alone = directory / "additional_chat_templates" / f"{name}.jinja"  # of named templates but the default
        path = alone if alone.is_file() else directory / TEMPLATE
        where = f"{path}:" if path.is_file() else f"{directory / SETTINGS}: chat_template"
        try:
            check_syntax(text)
        except ValueError as error:
            raise CheckpointError(f"{where} must be a Jinja template, got {text!r:.60}: {error}") from error


def _check_special_tokens(fields: Fields) -> None:
    for key in _SPECIAL_TOKENS:
        if not (fields.values.get(key) is None or _is_token(fields.values[key])):
            fields.fail(key, "a string or an object with content")
    if not _is_token_list(fields.values.get("additional_special_tokens")):
        fields.fail("additional_special_tokens", "a list of tokens")
    extra = fields.values.get("extra_special_tokens")
    if not _is_token_list(list(extra.values()) if isinstance(extra, Mapping) else extra):
        fields.fail("extra_special_tokens", "a list of tokens, or an object of tokens by name")


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and isinstance(value.get("content"), str))


def _is_token_list(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_token, value)))


def _is_template(value: Any) -> bool:
    if isinstance(value, list):
        return all(
            isinstance(item, Mapping) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
            for item in value
        )
    if isinstance(value, Mapping):
        return all(isinstance(text, str) for text in value.values())
    return value is None or isinstance(value, str)
