"""Computes cache keys of a tokenizer: everything of it that decides token ids, prompts and text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from eagle_jax.data.templates.render import DEFAULT, TOOLS, chat_template, render

TOKENIZER_KEY = "tokenizer_key"
"""Under which `train.regenerate` notes the tokenizer in its settings.json."""
OPTIONS = ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces",
           "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "do_lower_case", "legacy",
           "split_special_tokens")  # fmt: skip
"""Attributes of a tokenizer of `transformers` that change token ids or text."""


def tokenizer_key(tokenizer: Any) -> str:
    """Returns 16 letters for how a tokenizer splits and numbers text, without its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return _letters(content)


def tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    """Returns everything of a tokenizer that decides token ids, prompts and text, as JSON values by name.

    The chat template stands there with its arguments (`set_template_args`), which are written into it.
    """
    special = getattr(tokenizer, "special_tokens_map", {})
    return {
        TOKENIZER_KEY: tokenizer_key(tokenizer),
        "special tokens": {name: str(special[name]) for name in sorted(special)},
        "tokenizer options": {
            name: value if isinstance(value := getattr(tokenizer, name), bool | int | str | None) else str(value)
            for name in OPTIONS
            if hasattr(tokenizer, name)
        },
        "chat template": _template_key(getattr(tokenizer, "chat_template", None)),
        **_date_of(tokenizer),
    }


def _date_of(tokenizer: Any) -> dict[str, str]:
    """Returns the rendering of a template that writes today's date, which prompts then depend on."""
    template = chat_template(tokenizer) if getattr(tokenizer, "chat_template", None) else None
    if template is None or "strftime_now" not in template:
        return {}
    question = [{"role": "user", "content": "?"}]
    return {"prompt of chat template": render(tokenizer, question, tokenize=False, add_generation_prompt=True)}


def _template_key(template: Any) -> str | None:
    if isinstance(template, Mapping):  # without tools, and with them
        template = json.dumps([template.get(DEFAULT), template.get(TOOLS)]) if len(template) else None
    return _letters(template) if template else None


def _letters(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
