"""Computes cache keys of a tokenizer: everything of it that decides token ids, prompts and text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from eagle_jax.data.templates.render import DEFAULT, TOOLS, chat_template, default_arguments, render

TOKENIZER_KEY = "tokenizer_key"
"""Name of the tokenizer's key in the settings.json of `train.regenerate`."""
OPTIONS = ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces",
           "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "do_lower_case", "legacy",
           "split_special_tokens")  # fmt: skip
"""Attributes of a tokenizer of `transformers` that change token ids or text."""


def tokenizer_key(tokenizer: Any) -> str:
    """Returns 16 letters for how a tokenizer splits and numbers text, without its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return _hash(backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True))


def tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    """Returns everything of a tokenizer that decides token ids, prompts and text, as JSON values by name."""
    special = getattr(tokenizer, "special_tokens_map", {})
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = json.dumps([template.get(DEFAULT), template.get(TOOLS)]) if template else None
    settings = {
        TOKENIZER_KEY: tokenizer_key(tokenizer),
        "special tokens": {name: str(special[name]) for name in sorted(special)},
        "tokenizer options": {
            name: value if isinstance(value := getattr(tokenizer, name), bool | int | str | None) else str(value)
            for name in OPTIONS
            if hasattr(tokenizer, name)
        },
        "chat template": _hash(template) if template else None,
    }
    if arguments := default_arguments(tokenizer):
        settings["template arguments"] = arguments
    if template and "strftime_now" in (chat_template(tokenizer) or ""):  # prompts depend on today's date
        question = [{"role": "user", "content": "?"}]
        settings["prompt of chat template"] = render(tokenizer, question, tokenize=False, add_generation_prompt=True)
    return settings


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
