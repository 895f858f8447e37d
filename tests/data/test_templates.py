"""Chat templates: the one in force of several, and their arguments."""

from __future__ import annotations

import pytest

from eagle_jax.data.conversations import SkippedRow, encode, prompt_ids
from eagle_jax.measure import chat_ids
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
    with pytest.raises(ValueError, match="rag, tool_use, none of which is named default. Name one") as caught:
        call(tokenizer, TALK)
    assert not isinstance(caught.value, SkippedRow)  # it is true of every row
