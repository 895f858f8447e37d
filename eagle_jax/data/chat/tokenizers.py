"""Loads the tokenizer of a target, checks that it fits the target, and computes cache keys of it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack

import msgspec

from eagle_jax.assets import PAIRS, pair_target
from eagle_jax.checkpoints import CheckpointError, GgufFile, Hub, is_gguf, read_json, tokenizer_directory
from eagle_jax.config import DecoderConfig
from eagle_jax.data.chat import tokenize
from eagle_jax.data.chat.encoding import prompt_ids
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.parse import Conversation

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files of which a tokenizer has at least one."""
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
"""Settings files of a tokenizer, which may be missing."""
QUESTION = Conversation([{"role": "user", "content": "Hello?"}])
TOKENIZER_KEY = "tokenizer_key"
"""Name of the tokenizer's key in the settings.json of `train.regenerate`."""
OPTIONS = ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces",
           "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "do_lower_case", "legacy",
           "split_special_tokens")  # fmt: skip
"""Attributes of a tokenizer of `transformers` that change token ids or text."""


class _Token(msgspec.Struct):
    content: str


_Tokens = list[str | _Token]
_Settings = msgspec.defstruct(
    "_Settings",
    [(name, bool | None, None) for name in OPTIONS]
    + [(f"{name}_token", str | _Token | None, None) for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    + [
        ("tokenizer_class", str | None, None),
        ("chat_template", str | list[dict[str, str]] | dict[str, str] | None, None),
        ("added_tokens_decoder", dict[int, _Token] | None, None),
        ("additional_special_tokens", _Tokens | None, None),
        ("extra_special_tokens", _Tokens | dict[str, str | _Token] | None, None),
    ],
)
"""Types of settings that `transformers` does not check."""


def load_tokenizer(
    path_or_hub_id: str | os.PathLike[str],
    config: DecoderConfig,
    *,
    chat_template: str | Path | None = None,
    template_args: Mapping[str, Any] | None = None,
    **hub: Unpack[Hub],
) -> Any:
    """Loads the `transformers` tokenizer of a checkpoint.

    Args:
      path_or_hub_id: "demo" (the bundled pair), "smollm2", a directory, a GGUF file, or a hub id.
      config: of the target that will read the tokens. Its vocabulary may be larger: many are padded.
      chat_template: a Jinja file that replaces the tokenizer's template, or the name of one of its templates.
      template_args: values of the template's arguments, such as `{"enable_thinking": False}`, for every rendering.
      hub: revision, token and cache_dir of a hub id, as in `huggingface_hub`.

    Raises:
      CheckpointError: the tokenizer or template is missing, cannot be read, or has more tokens than the target.
      ValueError: the template does not read an argument, or raises an error for its value.
    """
    if str(path_or_hub_id) in PAIRS:
        path_or_hub_id = pair_target(str(path_or_hub_id))
    directory = tokenizer_directory(path_or_hub_id, **hub)
    if is_gguf(directory):
        tokenizer = _read_gguf(directory)
    elif any((directory / name).is_file() for name in FILES):
        tokenizer = _read(directory)
    else:
        raise CheckpointError(
            f"{directory} must hold a tokenizer ({', '.join(FILES)}), got none. Copy its files there, or load it from "
            "the directory that has them."
        )
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    if size > config.vocab_size:
        raise CheckpointError(
            f"the tokenizer must have at most the target's {config.vocab_size} tokens, got {size} in {path_or_hub_id}. "
            "Use the tokenizer that the target was trained with."
        )
    tokenizer.model_max_length = 10**9  # silences a warning; callers check lengths against the model
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    else:
        _check_templates(tokenizer, directory)
    if template_args:
        set_template_args(tokenizer, template_args)
    return tokenizer


def _check_templates(tokenizer: Any, directory: Path) -> None:
    held = tokenizer.chat_template
    for text in held.values() if isinstance(held, Mapping) else [held]:
        try:
            if text:
                tokenize.variables(text)
        except (TypeError, ValueError) as error:
            reason = error.__cause__ or error
            raise CheckpointError(
                f"{directory}: chat_template must be Jinja, got {text!r:.60} ({reason!s:.200}). Correct it."
            ) from error


def set_chat_template(tokenizer: Any, name_or_file: str | Path) -> None:
    """Sets the chat template of a tokenizer: that of a Jinja file, or one of its own templates by name.

    Raises:
      CheckpointError: the text is no name and no file, or the template does not show a user's turn.
    """
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, Mapping) else {}
    path = Path(name_or_file)
    if str(name_or_file) not in named and not path.is_file():
        names = f" or one of the tokenizer's ({', '.join(sorted(named))})" if named else ""
        raise CheckpointError(f"chat_template must be a Jinja file{names}, got {path}. Check the spelling.")
    try:
        text = named.get(str(name_or_file)) or path.read_text(encoding="utf-8").strip("\n")
        tokenizer.chat_template = text
        prompt_ids(tokenizer, QUESTION)
    except (UnicodeDecodeError, SkippedRow) as error:
        raise CheckpointError(f"chat_template must show a user's turn, got {path}: {error}. Choose another.") from error


def set_template_args(tokenizer: Any, template_args: Mapping[str, Any]) -> None:
    """Sets default values of arguments of the tokenizer's chat template.

    Args:
      template_args: JSON values by name. A later rendering uses them unless it gives another value.

    Raises:
      ValueError: the template does not read an argument, or raises an error for its value.
    """
    tokenize.check_template_arguments(tokenizer, template_args)
    setattr(tokenizer, tokenize.ARGUMENTS, {**tokenize.default_arguments(tokenizer), **template_args})
    prompt_ids(tokenizer, QUESTION)


def _read_settings(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = read_json(path) if path.is_file() else {}
    try:
        msgspec.convert(values, _Settings, str_keys=True)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} must hold settings of a tokenizer: {error}. Correct the value.") from error
    return values


def _read(directory: Path) -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # of torch, which is not needed
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = [_read_settings(directory / name) for name in SETTINGS]
    try:
        # AutoTokenizer imports torch where it is installed: seconds.
        is_fast = settings[0].get("tokenizer_class") == "PreTrainedTokenizerFast"
        return (PreTrainedTokenizerFast if is_fast else AutoTokenizer).from_pretrained(directory)
    except Exception as error:  # of transformers, of a missing package; tokenizers raises plain Exception
        if (directory / "tokenizer.json").is_file():
            read_json(directory / "tokenizer.json")
        reason = " ".join(str(error).split())
        # Without these packages transformers takes the file for one of tiktoken's, and names tiktoken.
        missing = (directory / "tokenizer.model").is_file()
        remedy = "Run pip install --upgrade sentencepiece protobuf" if missing else "Fetch its files again"
        raise CheckpointError(f"the tokenizer in {directory} cannot be read: {reason[:300]}. {remedy}.") from error


def _read_gguf(path: Path) -> Any:
    """Builds the tokenizer of a GGUF file as AutoTokenizer does, which needs torch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    converter, metadata = _gguf_converter(), GgufFile(path).metadata
    mapping = converter.GGUF_TOKENIZER_MAPPING
    parts, options = (
        {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
        for names in (mapping["tokenizer"], mapping["tokenizer_config"])
    )
    try:
        if parts.get("tokenizer_type") == "llama":
            options.setdefault("add_bos_token", True)  # as llama.cpp reads older files
        for name in ("bos", "eos", "unk", "pad"):
            if (number := parts.get(f"{name}_token_id")) is not None:
                options[f"{name}_token"] = parts["tokens"][number]
        backend, others = converter.convert_gguf_tokenizer(metadata["general.architecture"], parts)
        if backend.get_vocab_size() > len(parts["tokens"]):
            # transformers adds GPT-2's unknown token behind a vocabulary without it, such as that of Llama 3.
            state = json.loads(backend.to_str())
            state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < len(parts["tokens"])]
            backend = Tokenizer.from_str(json.dumps(state))
        return PreTrainedTokenizerFast(tokenizer_object=backend, **others | options)
    except Exception as error:  # of transformers and tokenizers, for a kind that they do not convert
        raise CheckpointError(
            f"the tokenizer in {path} cannot be read: {str(error) or repr(error):.300}. Pass a directory with the "
            "tokenizer of the original model."
        ) from error


def _gguf_converter() -> Any:
    """Returns the module of `transformers` that converts the tokenizers of GGUF files; versions differ in its place."""
    for name in ("gguf.gguf_tokenizer_mapping", "gguf", "ggml"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"transformers.integrations.{name}")
            if hasattr(module, "convert_gguf_tokenizer") and hasattr(module, "GGUF_TOKENIZER_MAPPING"):
                return module
    raise CheckpointError(
        f"transformers {version('transformers')} does not convert tokenizers of GGUF files. Pass a directory with the "
        "tokenizer of the original model."
    )


def tokenizer_key(tokenizer: Any) -> str:
    """Returns a hash (16 letters) of a tokenizer's rules and vocabulary, without its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return _hash(backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True))


def tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    """Returns the settings of a tokenizer that determine token ids, prompts and text, as JSON values."""
    special = getattr(tokenizer, "special_tokens_map", {})
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = json.dumps([template.get(tokenize.DEFAULT), template.get(tokenize.TOOLS)]) if template else None
    settings = {
        TOKENIZER_KEY: tokenizer_key(tokenizer),
        "special tokens": {name: str(special[name]) for name in sorted(special)},
        "tokenizer options": {name: getattr(tokenizer, name) for name in OPTIONS if hasattr(tokenizer, name)},
        "chat template": _hash(template) if template else None,
    }
    if arguments := tokenize.default_arguments(tokenizer):
        settings["template arguments"] = arguments
    if template and "strftime_now" in (tokenize.chat_template(tokenizer) or ""):  # prompts depend on today's date
        options = {"tokenize": False, "add_generation_prompt": True}
        settings["prompt of chat template"] = tokenize.render(tokenizer, QUESTION.messages, **options)
    return settings


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
