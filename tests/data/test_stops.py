"""Tests stop tokens of replies: those of the target, and the token that ends a turn in the template."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

import eagle_jax
from eagle_jax.data.chat.stops import stop_ids, turn_end, with_stop_ids
from tests.data.chats import ENDS, R1, TEMPLATES, THINKING, tokenizer_with


@pytest.fixture(scope="module")
def pair():
    return eagle_jax.load_demo()


@pytest.mark.parametrize(
    ("template", "end"),
    [*((TEMPLATES[name], end.strip()) for name, end in ENDS.items()), (THINKING, "<|im_end|>"), (R1, "</s>")],
)
def test_the_template_gives_the_end_of_a_turn(template, end):
    tokenizer = tokenizer_with(template)
    always = tokenizer_with(template.replace("{% if add_generation_prompt %}", "{% if true %}"))
    assert turn_end(tokenizer)[0] == turn_end(always)[0] == tokenizer.convert_tokens_to_ids(end)


def test_an_added_token_ends_a_turn_unless_it_is_blank():
    tokenizer = tokenizer_with(TEMPLATES["chatml"].replace("<|im_end|>", "\n\n<end>"))
    tokenizer.add_tokens(["\n\n", "<end>"])
    assert turn_end(tokenizer)[0] == tokenizer.convert_tokens_to_ids("<end>")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ '\n### ' + m.role + '\n' + m.content }}{% endfor %}", "with nothing"),
        ("{% for m in messages %}{{ m.content + '### End' }}{% endfor %}", "with the text '### End', no single"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "shows no assistant's turn"),
        ("{% for m in messages %}{{ '</s>' * (m.role == 'user') + m.content }}{% endfor %}{{ '<s>' }}", "nothing"),
        ("{{ raise_exception('not today') }}", "raises an error for the conversation .not today."),
    ],
)
def test_a_turn_without_an_end_token_gives_a_warning(pair, template, reason):
    config = dataclasses.replace(pair[0].config, eos_ids=(4,))
    with pytest.warns(UserWarning, match=f"{reason}.*: replies stop at .* alone, and may run on"):
        assert stop_ids(config, tokenizer_with(template)) == (4,)


def test_replies_stop_at_the_tokens_of_the_target_and_at_the_end_of_a_turn(pair):
    """A target without stop tokens has that of the tokenizer."""
    target, _, tokenizer = pair
    silent = dataclasses.replace(target.config, eos_ids=())
    chatml = tokenizer_with(TEMPLATES["chatml"])
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    other = dataclasses.replace(target, config=dataclasses.replace(target.config, eos_ids=(4,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stop_ids(target, tokenizer) == stop_ids(silent, tokenizer) == target.config.eos_ids
        assert stop_ids(target, tokenizer_with("")) == target.config.eos_ids
        assert stop_ids(silent, tokenizer_with("")) == (chatml.eos_token_id,)
        assert stop_ids(silent, chatml) == (chatml.eos_token_id, end)
        with pytest.raises(ValueError, match=r"the end of turn must be below the target's \d+ tokens, got "):
            stop_ids(dataclasses.replace(silent, vocab_size=end), chatml)
    with pytest.warns(UserWarning, match=r"the target stops at \['.*'\], its chat template at '<.end.>'"):
        assert stop_ids(other, tokenizer) == with_stop_ids(other, tokenizer).config.eos_ids == (4, 1)


@pytest.mark.parametrize("call", [stop_ids, with_stop_ids])
def test_another_type_than_a_target_is_an_error(pair, call):
    for wrong, other in ((pair[2], pair[0]), ("owner/name", pair[2])):
        with pytest.raises(ValueError, match=r"^target must be a Target or its DecoderConfig, got .*load_target"):
            call(wrong, other)
