"""Every key of a cached or resumed result changes with whatever of the tokenizer decides it."""

from __future__ import annotations

import json

import pytest
from tokenizers import normalizers

from eagle_jax.data.chat.tokenizers import set_template_args
from eagle_jax.data.corpus.shards import remember
from eagle_jax.data.corpus.sources import Source, corpus_key
from eagle_jax.data.templates.keys import tokenizer_settings
from tests.data.test_conversations import TEMPLATES, tokenizer_with

TEMPLATE = TEMPLATES["chatml"] + "{{ effort }}"
CHANGES = {
    "another end of text": lambda one: setattr(one, "eos_token", "<|im_end|>"),
    "another token": lambda one: one.add_tokens(["<tool>"]),
    "another special token": lambda one: one.add_special_tokens({"pad_token": "<s>"}),
    "what begins a text": lambda one: setattr(one, "add_bos_token", True),
    "what ends a text": lambda one: setattr(one, "add_eos_token", True),
    "clean-up": lambda one: setattr(one, "clean_up_tokenization_spaces", True),
    "split special tokens": lambda one: setattr(one, "split_special_tokens", True),
    "normaliser": lambda one: setattr(one.backend_tokenizer, "normalizer", normalizers.Lowercase()),
    "template": lambda one: setattr(one, "chat_template", TEMPLATE + " "),
    "template of tools": lambda one: setattr(one, "chat_template", {"default": TEMPLATE, "tool_use": "x"}),
    "argument": lambda one: set_template_args(one, {"effort": "low"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_keys_depend_on_all_that_a_tokenizer_decides(change, tmp_path):
    (tmp_path / "chat.jsonl").write_text("{}")
    sources = [Source(str(tmp_path / "chat.jsonl"))]
    one, same = tokenizer_with(TEMPLATE), tokenizer_with(TEMPLATE)
    settings = tokenizer_settings(one)
    assert settings == tokenizer_settings(same) == json.loads(json.dumps(settings))
    assert corpus_key(sources, one) == corpus_key(sources, same)
    remember(tmp_path / "replies", settings)
    CHANGES[change](one)
    assert corpus_key(sources, one) != corpus_key(sources, same)
    changed = [name for name, value in tokenizer_settings(one).items() if value != settings[name]]
    with pytest.raises(ValueError, match=rf"begun with other settings .*\b{changed[0]} was .* and is now "):
        remember(tmp_path / "replies", tokenizer_settings(one))


def test_a_template_that_is_never_in_force_changes_nothing():
    one, other = (tokenizer_with({"default": TEMPLATE, "rag": text}) for text in "ab")
    assert tokenizer_settings(one) == tokenizer_settings(other)
    assert tokenizer_settings(tokenizer_with(None))["chat template"] is None
