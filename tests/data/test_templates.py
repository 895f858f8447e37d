"""Chat templates: the one in force of several, and their arguments."""

from __future__ import annotations

import inspect

import pytest

from eagle_jax.checkpoints import CheckpointError
from eagle_jax.data.chat.encode import encode, prompt_ids
from eagle_jax.data.chat.tokenize import chat_ids, chat_text
from eagle_jax.data.chat.tokenizers import set_chat_template, set_template_args
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.templates import keys
from eagle_jax.data.templates.keys import tokenizer_settings
from eagle_jax.data.templates.render import chat_template, set_template_arguments, template_arguments
from infer.common.programs import parse_template_args
from tests.data.test_conversations import TALK, TEMPLATES, tokenizer_with

CHATML, MARKED = TEMPLATES["chatml"], TEMPLATES["marked"]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_of_several_templates_the_default_is_in_force(template):
    tokenizer = tokenizer_with({"default": template, "tool_use": "tools {{ messages }}", "rag": "rag"})
    alone = tokenizer_with(template)
    assert chat_ids(tokenizer, TALK[:2]) == prompt_ids(tokenizer, TALK[:2]) == chat_ids(alone, TALK[:2])
    found, wanted = encode(tokenizer, TALK), encode(alone, TALK)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.supervised.tolist() == wanted.supervised.tolist()


@pytest.mark.parametrize("call", [encode, prompt_ids, chat_ids])
def test_several_templates_without_a_default_are_listed(call):
    tokenizer = tokenizer_with({"rag": CHATML, "tool_use": CHATML})
    with pytest.raises(ValueError, match=r"rag, tool_use, none of which is named default\. Name one") as caught:
        call(tokenizer, TALK)
    assert not isinstance(caught.value, SkippedRow)  # it is true of every row


# As Qwen3's template reads `enable_thinking`, and gpt-oss's `reasoning_effort`.
THOUGHTFUL = CHATML + (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{%- if effort is not defined %}{%- set effort = 'medium' %}{%- endif %}"
    "{% if effort not in ['low', 'medium'] %}{{ raise_exception('no such effort') }}{% endif %}{{ '#' + effort }}"
)
ASKED = TALK[1:2]


def text_of(tokenizer, **template_args) -> str:
    return tokenizer.decode(chat_ids(tokenizer, ASKED, **template_args))


def test_arguments_of_a_call_reach_the_template():
    tokenizer = tokenizer_with(THOUGHTFUL)
    assert text_of(tokenizer).endswith("assistant\n#medium")
    assert text_of(tokenizer, enable_thinking=False, effort="low").endswith("assistant\n<think>\n\n</think>\n\n#low")
    with pytest.raises(ValueError, match=r"chat template reads \(effort, enable_thinking\), got thinking\. Leave it"):
        text_of(tokenizer, thinking=False)
    with pytest.raises(ValueError, match=r"chat template reads \(none\), got effort"):
        chat_ids(tokenizer_with(CHATML), ASKED, effort="low")
    with pytest.raises(ValueError, match=r"chat template reads \(none\), got effort"):
        chat_ids(tokenizer_with(None), ASKED, effort="low")
    with pytest.raises(ValueError, match=r"no such effort"):
        text_of(tokenizer, effort="high")


def test_tools_of_a_call_take_the_template_of_tools():
    tokenizer = tokenizer_with({"default": CHATML, "tool_use": "{{ tools[0].name }}{{ messages[0].content }}"})
    assert text_of(tokenizer, tools=[{"name": "clock"}]) == "clockOne and one?"


def test_arguments_of_a_tokenizer_hold_wherever_it_renders():
    tokenizer, bare = tokenizer_with(THOUGHTFUL), tokenizer_with(THOUGHTFUL)
    set_template_args(tokenizer, {"enable_thinking": False})
    set_template_args(tokenizer, {"effort": "low"})
    wanted = text_of(bare, enable_thinking=False, effort="low")
    assert text_of(tokenizer) == tokenizer.decode(prompt_ids(tokenizer, ASKED)) == wanted
    assert text_of(tokenizer, enable_thinking=True) == text_of(bare, effort="low")
    learnt = encode(tokenizer, TALK)
    assert tokenizer.decode(learnt.tokens.tolist()).endswith("#low")
    set_template_args(tokenizer, {"effort": "medium"})  # the last one counts
    assert text_of(tokenizer).endswith("#medium")


@pytest.mark.parametrize("start", ["\n  ", "  {% if true %}x{% endif %}\n", "", "{# c #}\n\n"])
@pytest.mark.parametrize(
    "value", [None, True, 3, -1.5, "", "a\"b\\'{% %}{{ }}\n𝄞", ["x", {"y": [None]}], {"a": {"b": "c"}}]
)
def test_a_value_is_the_template_s_as_it_is(start, value):
    template = start + "{{ value is defined }} {{ (value if value is defined else given) | tojson }}"
    one, other = tokenizer_with(template), tokenizer_with(template)
    set_template_arguments(one, {"value": value})
    talk = [{"role": "user", "content": "Hi"}]
    assert one.apply_chat_template(talk, tokenize=False) == other.apply_chat_template(talk, tokenize=False, value=value)


@pytest.mark.parametrize("value", [float("nan"), object(), b"x"])
def test_a_value_that_is_none_of_jsons(value):
    with pytest.raises(ValueError, match=r"must be strings, numbers, .*, got \w+ "):
        set_template_args(tokenizer_with(THOUGHTFUL), {"effort": value})


def test_of_several_templates_those_that_read_an_argument_get_it():
    tokenizer = tokenizer_with({"default": THOUGHTFUL, "rag": "{{ messages[0].content }}"})
    set_template_args(tokenizer, {"effort": "low"})
    assert text_of(tokenizer).endswith("#low")
    assert tokenizer.chat_template["rag"] == "{{ messages[0].content }}"
    set_chat_template(tokenizer, "rag")
    assert text_of(tokenizer) == "One and one?"
    with pytest.raises(ValueError, match=r"reads \(none\), got effort"):
        set_template_args(tokenizer, {"effort": "low"})


def test_templates_are_chosen_by_name():
    tokenizer = tokenizer_with({"rag": CHATML, "tool_use": CHATML})
    with pytest.raises(CheckpointError, match=r"rga: no such chat template: give a Jinja file, or .*: rag, tool_use$"):
        set_chat_template(tokenizer, "rga")
    set_chat_template(tokenizer, "rag")
    assert chat_template(tokenizer) == CHATML


def test_what_is_no_template_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="the chat template is no Jinja"):
        chat_ids(tokenizer_with("{% if %}"), ASKED, effort="low")


def test_options_are_read_as_json():
    texts = ["a=false", "b=low", 'c={"d": [1]}', "e=False", "f=", "g=x=y"]
    found = {"a": False, "b": "low", "c": {"d": [1]}, "e": False, "f": "", "g": "x=y"}
    assert parse_template_args(texts) == found
    for wrong in ("a", "=1", "a-b=1"):
        with pytest.raises(ValueError, match=f"--template-args must be NAME=VALUE, got {wrong!r}"):
            parse_template_args([wrong])
    with pytest.raises(ValueError, match="must name an argument once, got a twice"):
        parse_template_args(["a=1", "a=2"])


def test_a_variable_that_the_template_sets_itself_is_no_argument():
    tokenizer = tokenizer_with(
        "{% if not date is defined %}{% set date = 'today' %}{% endif %}{% for m in messages %}{% if m.x is defined %}"
        "{% set content = m.x %}{% else %}{% set content = m.content %}{% endif %}{{ date }}{{ content }}{% endfor %}"
        "{% if thinking is false %}.{% endif %}"
    )
    assert template_arguments(tokenizer) == ("date", "thinking")


def test_a_template_that_writes_the_date_is_keyed_by_it(monkeypatch):
    tokenizer = tokenizer_with("{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    before = tokenizer_settings(tokenizer)
    monkeypatch.setattr(keys, "render", lambda *_, **__: "another year")
    assert tokenizer_settings(tokenizer) != before


@pytest.mark.parametrize("messages", [None, 3, "", "Hello", {"role": "user", "content": "Hello"}, ["Hello"]])
def test_what_is_no_list_of_messages_is_named(messages):
    with pytest.raises(ValueError, match=r"^messages=.* must be a list of dicts, each with a role"):
        inspect.unwrap(chat_text)(tokenizer_with(TEMPLATES["chatml"]), messages)  # without the annotations
