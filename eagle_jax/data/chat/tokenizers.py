"""Loads the tokenizer of a target, and checks that it fits the target."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import msgspec

from eagle_jax.assets import DEMO, bundled
from eagle_jax.checkpoints import CheckpointError, tokenizer_directory
from eagle_jax.checkpoints.files.hub import Hub
from eagle_jax.checkpoints.files.tensors import read_json
from eagle_jax.config import DecoderConfig
from eagle_jax.data.chat.encode import prompt_ids
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.templates.keys import OPTIONS
from eagle_jax.data.templates.render import set_default_arguments, variables

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files of which a tokenizer has at least one."""
SETTINGS, SPECIAL, TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
QUESTION = [{"role": "user", "content": "Hello?"}]


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


def load_tokenizer(
    path_or_id: str | os.PathLike[str],
    config: DecoderConfig,
    *,
    chat_template: str | Path | None = None,
    template_args: Mapping[str, Any] | None = None,
    **hub: Unpack[Hub],
) -> Any:
    """Loads the `transformers` tokenizer of a checkpoint.

    Args:
      path_or_id: "demo" (the bundled pair), a directory, or a hub id.
      config: of the target that will read the tokens. Its vocabulary may be larger: many are padded.
      chat_template: a Jinja file that replaces the tokenizer's template, or the name of one of its templates.
      template_args: values of the template's arguments, such as `{"enable_thinking": False}`, for every rendering.
      hub: revision, token and cache_dir of a hub id, as in `huggingface_hub`.

    Raises:
      CheckpointError: the tokenizer or template is missing, cannot be read (names file, key and the expected type), or
        has more tokens than the target.
      ValueError: the template does not read an argument, or raises an error for its value.
    """
    if str(path_or_id) == DEMO:
        path_or_id = bundled("target")
    directory = tokenizer_directory(path_or_id, **hub)
    if not any((directory / name).is_file() for name in FILES):
        raise CheckpointError(f"no tokenizer in {directory} ({', '.join(FILES)}). Pass the directory that holds it.")
    tokenizer = _read(directory)
    check_vocabulary(tokenizer, config, str(path_or_id))
    tokenizer.model_max_length = 10**9  # silences a warning; callers check lengths against the model
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    _check_templates(tokenizer, directory)
    if template_args:
        set_template_args(tokenizer, template_args)
    return tokenizer


def set_chat_template(tokenizer: Any, name_or_file: str | Path) -> None:
    """Sets the chat template of a tokenizer, from a Jinja file or by the name of one it has.

    Raises:
      CheckpointError: neither a name nor a file, or the template does not show a user's turn.
    """
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, Mapping) else {}
    path = Path(name_or_file)
    if str(name_or_file) not in named and not path.is_file():
        names = f", or one of the tokenizer's: {', '.join(sorted(named))}" if named else ""
        raise CheckpointError(f"{path}: no such chat template: give a Jinja file{names}")
    try:
        text = named.get(str(name_or_file)) or path.read_text(encoding="utf-8").strip("\n")
        tokenizer.chat_template = text
        prompt_ids(tokenizer, QUESTION)
    except (UnicodeDecodeError, SkippedRow) as error:
        raise CheckpointError(f"chat_template must show a user's turn, got {path}: {error}. Choose another.") from error


def set_template_args(tokenizer: Any, template_args: Mapping[str, Any]) -> None:
    """Sets arguments of the tokenizer's chat template, for every later rendering.

    Raises:
      ValueError: the template does not read an argument, or raises an error for its value.
    """
    set_default_arguments(tokenizer, template_args)
    prompt_ids(tokenizer, QUESTION)


def check_vocabulary(tokenizer: Any, config: DecoderConfig, name: str = "the tokenizer") -> None:
    """Checks that the target has an embedding for every token of a tokenizer.

    Raises:
      CheckpointError: naming both sizes.
    """
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    if size > config.vocab_size:
        raise CheckpointError(
            f"{name} has token ids up to {size - 1}, a vocabulary of {size}, and the target's vocabulary has "
            f"{config.vocab_size}: use the tokenizer that the target was trained with"
        )


def _read(directory: Path) -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # of torch, which is not needed
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    named = _check_settings(directory).get("tokenizer_class")
    try:
        # AutoTokenizer imports torch where it is installed: seconds.
        cls = PreTrainedTokenizerFast if named == "PreTrainedTokenizerFast" else AutoTokenizer
        return cls.from_pretrained(directory)
    except Exception as error:  # of transformers, of a missing package; tokenizers raises plain Exception
        if (directory / "tokenizer.json").is_file():
            read_json(directory / "tokenizer.json")
        elif (directory / "tokenizer.model").is_file():
            _check_sentencepiece(directory)
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the tokenizer in {directory} cannot be read: {reason[:300]}") from error


def _check_sentencepiece(directory: Path) -> None:
    # Without these packages transformers takes the file for one of tiktoken's, and names tiktoken in its error.
    try:
        importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except Exception as error:  # of protobuf as well, if it is older than the file that it reads
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"the tokenizer.model in {directory} needs the packages sentencepiece and protobuf ({reason[:200]}): "
            "pip install --upgrade sentencepiece protobuf"
        ) from error


def _check_settings(directory: Path) -> dict[str, Any]:
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


def _check_templates(tokenizer: Any, directory: Path) -> None:
    """Checks the syntax of the tokenizer's chat templates.

    Raises:
      CheckpointError: naming the file and the error.
    """
    held = tokenizer.chat_template
    for name, text in (held if isinstance(held, Mapping) else {"": held}).items():
        files = [directory / "additional_chat_templates" / f"{name}.jinja", directory / TEMPLATE, directory / SETTINGS]
        try:
            variables(text or "")
        except ValueError as error:
            path = next((path for path in files if path.is_file()), directory)
            raise CheckpointError(
                f"{path}: chat_template must be a Jinja template, got {text!r:.60}: {error}"
            ) from error
