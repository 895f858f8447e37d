"""Tests chat templates: the choice among several, their arguments, and cache keys."""

from __future__ import annotations

import inspect
import json

import pytest
from tokenizers import normalizers

from eagle_jax.checkpoints import CheckpointError
from eagle_jax.data.chat import chat_ids, chat_text, set_chat_template, set_template_args, tokenizer_settings
from eagle_jax.data.chat.encoding import encode, prompt_ids
from eagle_jax.data.corpus import Source, corpus_key, remember
from eagle_jax.data.rows import SkippedRow
from eagle_jax.data.rows.parse import Conversation
from infer.common.programs import parse_template_args
from tests.data.chats import TALK, TEMPLATES, tokenizer_with

CHATML = TEMPLATES["chatml"]
QUESTION = TALK[1:2]


@pytest.mark.parametrize("template", [CHATML, TEMPLATES["marked"]])
def test_the_default_of_several_templates_renders(template):
    tokenizer = tokenizer_with({"default": template, "tool_use": "tools {{ messages }}", "rag": "rag"})
    alone = tokenizer_with(template)
    assert chat_ids(tokenizer, QUESTION) == prompt_ids(tokenizer, Conversation(QUESTION)) == chat_ids(alone, QUESTION)
    found, expected = encode(tokenizer, Conversation(TALK)), encode(alone, Conversation(TALK))
    assert [array.tolist() for array in found] == [array.tolist() for array in expected]


@pytest.mark.parametrize("call", [encode, prompt_ids, lambda tokenizer, row: chat_ids(tokenizer, row.messages)])
def test_several_templates_without_a_default_are_an_error(call):
    tokenizer = tokenizer_with({"rag": CHATML, "tool_use": CHATML})
    with pytest.raises(ValueError, match=r"templates rag, tool_use and none named default\. Choose one") as caught:
        call(tokenizer, Conversation(TALK))
    assert not isinstance(caught.value, SkippedRow)  # it holds for every row


# As Qwen3's template reads `enable_thinking`, and gpt-oss's `reasoning_effort`.
THOUGHTFUL = CHATML + (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{%- if effort is not defined %}{%- set effort = 'medium' %}{%- endif %}"
    "{% if effort not in ['low', 'medium'] %}{{ raise_exception('no such effort') }}{% endif %}{{ '#' + effort }}"
)


def text_of(tokenizer, **template_args) -> str:
    return tokenizer.decode(chat_ids(tokenizer, QUESTION, **template_args))


def test_arguments_of_a_call_reach_the_template():
    tokenizer = tokenizer_with(THOUGHTFUL)
    assert text_of(tokenizer).endswith("assistant\n#medium")
    assert text_of(tokenizer, enable_thinking=False, effort="low").endswith("assistant\n<think>\n\n</think>\n\n#low")
    with pytest.raises(ValueError, match=r"chat template reads \(effort, enable_thinking\), got thinking\. Leave it"):
        text_of(tokenizer, thinking=False)
    for bare in (CHATML, None, "{% if effort %}{% set effort = 1 %}{% endif %}"):  # set by the template itself
        with pytest.raises(ValueError, match=r"chat template reads \(none\), got effort"):
            text_of(tokenizer_with(bare), effort="low")
    with pytest.raises(ValueError, match=r"no such effort"):
        text_of(tokenizer, effort="high")
    with pytest.raises(ValueError, match="chat template must be valid Jinja"):
        text_of(tokenizer_with("{% if %}"), effort="low")
    tools = tokenizer_with({"default": CHATML, "tool_use": "{{ tools[0].name }}{{ messages[0].content }}"})
    assert text_of(tools, tools=[{"name": "clock"}]) == "clockOne and one?"


def test_arguments_of_a_tokenizer_hold_for_every_rendering():
    tokenizer, bare = tokenizer_with(THOUGHTFUL), tokenizer_with(THOUGHTFUL)
    set_template_args(tokenizer, {"enable_thinking": False})
    set_template_args(tokenizer, {"effort": "low"})
    expected = text_of(bare, enable_thinking=False, effort="low")
    assert text_of(tokenizer) == tokenizer.decode(prompt_ids(tokenizer, Conversation(QUESTION))) == expected
    assert text_of(tokenizer, enable_thinking=True) == text_of(bare, effort="low")
    assert tokenizer.decode(encode(tokenizer, Conversation(TALK)).tokens.tolist()).endswith("#low")
    set_template_args(tokenizer, {"effort": "medium"})  # the last one counts
    assert text_of(tokenizer).endswith("#medium")


def test_templates_are_chosen_by_name():
    tokenizer = tokenizer_with({"default": THOUGHTFUL, "rag": "{{ messages[0].content }}"})
    set_template_args(tokenizer, {"effort": "low"})
    assert text_of(tokenizer).endswith("#low")
    with pytest.raises(CheckpointError, match=r"must be a Jinja file or .* \(default, rag\), got rga\. Check"):
        set_chat_template(tokenizer, "rga")
    set_chat_template(tokenizer, "rag")
    assert text_of(tokenizer) == "One and one?"
    with pytest.raises(ValueError, match=r"reads \(none\), got effort"):
        set_template_args(tokenizer, {"effort": "low"})


def test_template_arguments_of_programs_are_json():
    texts = ["a=false", "b=low", 'c={"d": [1]}', "e=False", "f=", "g=x=y"]
    found = {"a": False, "b": "low", "c": {"d": [1]}, "e": False, "f": "", "g": "x=y"}
    assert parse_template_args(texts) == found
    for wrong in ("a", "=1", "a-b=1"):
        with pytest.raises(ValueError, match=f"--template-args must be NAME=VALUE, got {wrong!r}"):
            parse_template_args([wrong])
    with pytest.raises(ValueError, match="must name an argument once, got a twice"):
        parse_template_args(["a=1", "a=2"])


@pytest.mark.parametrize("messages", [None, 3, "", "Hello", {"role": "user", "content": "Hello"}, ["Hello"]])
def test_messages_of_another_form_are_an_error(messages):
    with pytest.raises(ValueError, match=r"^messages must be a list of dicts, each with a role .*, got "):
        inspect.unwrap(chat_text)(tokenizer_with(CHATML), messages)  # without the annotations


TEMPLATE = CHATML + "{{ effort }}"
CHANGES = {
    "another end of text": lambda one: setattr(one, "eos_token", "<|im_end|>"),
    "another token": lambda one: one.add_tokens(["<tool>"]),
    "another special token": lambda one: one.add_special_tokens({"pad_token": "<s>"}),
    "token before a text": lambda one: setattr(one, "add_bos_token", True),
    "token after a text": lambda one: setattr(one, "add_eos_token", True),
    "clean-up": lambda one: setattr(one, "clean_up_tokenization_spaces", True),
    "split special tokens": lambda one: setattr(one, "split_special_tokens", True),
    "normaliser": lambda one: setattr(one.backend_tokenizer, "normalizer", normalizers.Lowercase()),
    "template": lambda one: setattr(one, "chat_template", TEMPLATE + " "),
    "template of tools": lambda one: setattr(one, "chat_template", {"default": TEMPLATE, "tool_use": "x"}),
    "argument": lambda one: set_template_args(one, {"effort": "low"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_keys_depend_on_every_setting_of_the_tokenizer(change, tmp_path):
    (tmp_path / "chat.jsonl").write_text("{}")
    sources = [Source(str(tmp_path / "chat.jsonl"))]
    one, same = tokenizer_with(TEMPLATE), tokenizer_with(TEMPLATE)
    settings = tokenizer_settings(one)
    assert settings == tokenizer_settings(same) == json.loads(json.dumps(settings))
    assert corpus_key(sources, one) == corpus_key(sources, same)
    remember(tmp_path / "replies", settings)
    CHANGES[change](one)
    assert corpus_key(sources, one) != corpus_key(sources, same)
    changed = [name for name, value in tokenizer_settings(one).items() if value != settings.get(name)]
    with pytest.raises(ValueError, match=rf"must be those of .*, got others .*\b{changed[0]} was .* and is now "):
        remember(tmp_path / "replies", tokenizer_settings(one))


def test_an_unused_template_does_not_change_the_settings():
    one, other = (tokenizer_with({"default": TEMPLATE, "rag": text}) for text in "ab")
    assert tokenizer_settings(one) == tokenizer_settings(other)
    assert tokenizer_settings(tokenizer_with(None))["chat template"] is None


def test_the_settings_depend_on_the_date_if_the_template_writes_it(monkeypatch):
    tokenizer = tokenizer_with("{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    before = tokenizer_settings(tokenizer)
    monkeypatch.setattr("eagle_jax.data.chat.tokenize.render", lambda *_, **__: "another year")
    assert tokenizer_settings(tokenizer) != before
