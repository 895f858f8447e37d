"""Tests conversations with replies of the target: prompts, and every reply's tokens, taught once."""

from __future__ import annotations

import gzip
import json

import pytest

from eagle_jax.data.chat.dialogues import AFTER_TOOLS, Dialogue
from eagle_jax.data.chat.encoding import prompt_ids
from eagle_jax.data.corpus.sources import prompts_by_source
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.parse import parse_row
from tests.data.chats import TEMPLATES, THINKING, tokenizer_with
from tests.data.test_encode import PLAIN, RESULT, calling, talk

USER, OTHER = {"role": "user", "content": "Hi?"}, {"role": "user", "content": "And?"}
SYSTEM = {"role": "system", "content": "Be brief."}
OLD = {"role": "assistant", "content": "Old."}
TWO = [USER, OLD, OTHER, OLD]


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(tokenizer, dialogue: Dialogue, *replies: str) -> Dialogue:
    """The dialogue with these replies, tokenised as the tokenizer does unless they are lists of ids already."""
    stops = {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    for reply in replies:
        ids = reply if isinstance(reply, list) else tokenizer.encode(reply)
        dialogue = dialogue.answered(tokenizer, dialogue.prompt(tokenizer), ids, stops)
    return dialogue


def taught(tokenizer, dialogue: Dialogue) -> list[list[str]]:
    """Per training text, the replies that it supervises."""
    return [[tokenizer.decode(text.tokens[a:b]) for a, b in text.supervised] for text in dialogue.texts]


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ([SYSTEM, USER, OLD, OTHER, OLD], [(SYSTEM, USER), (OTHER,)]),
        ([OLD, USER, OLD], [(USER,)]),  # nobody asked for the greeting
        ([SYSTEM, OLD, USER, OLD, OLD], [(SYSTEM, USER)]),  # one reply to one question
        ([USER, OLD, OTHER], [(USER,), (OTHER,)]),  # the last turn is answered, too
        ([USER, OLD, SYSTEM], [(USER,)]),
        ("text", "plain text"),
        ([SYSTEM, OLD], "no turn of a user to answer"),
    ],
)
def test_what_the_target_is_asked(row, asked):
    if isinstance(asked, list):
        assert Dialogue.begin(row).pending == tuple(asked)
        return
    with pytest.raises(SkippedRow, match=asked):
        Dialogue.begin(row)


THOUGHTS = "<think>\nEasy.\n</think>\n\nTwo.<|im_end|>"


@pytest.mark.parametrize(
    ("template", "replies", "texts"),
    [
        (TEMPLATES["chatml"], ["New.<|im_end|>", "Newer.<|im_end|>"], [["New.<|im_end|>", "Newer.<|im_end|>"]]),
        (TEMPLATES["chatml"], ["New", "Newer.<|im_end|>"], [["New", "Newer.<|im_end|>"]]),  # cut: no end is taught
        (THINKING, [THOUGHTS, "Four.<|im_end|>"], [[THOUGHTS], ["Four.<|im_end|>"]]),  # the template drops thoughts
    ],
)
def test_replies_are_taught_in_the_text_that_the_target_read(template, replies, texts):
    tokenizer = tokenizer_with(template)
    begun = Dialogue.begin([SYSTEM, *TWO])
    done = write(tokenizer, begun, *replies)
    assert begun.open and not done.open
    assert taught(tokenizer, done) == texts
    assert done.texts[-1].messages == list(done.history)
    assert [message["content"] for message in done.history if message["role"] == "assistant"] == [
        reply.removesuffix("<|im_end|>") for reply in replies
    ]
    if len(texts) == 1:
        whole = tokenizer.apply_chat_template(list(done.history), tokenize=False)
        assert tokenizer.decode(done.texts[0].tokens) == whole.removesuffix("\n")


def test_a_reply_that_is_tokenised_otherwise_begins_a_new_text():
    """The target wrote half a character, which is read back as a mark of three bytes."""
    tokenizer = tokenizer_with(TEMPLATES["chatml"])
    half = [*tokenizer.encode("é")[:1], *tokenizer.encode("<|im_end|>")]
    done = write(tokenizer, Dialogue.begin(TWO), half, "Yes.<|im_end|>")
    assert done.texts[0].tokens[-2:] == half
    assert taught(tokenizer, done)[1] == ["Yes.<|im_end|>"]


@pytest.mark.parametrize("turns", [[calling("{}"), RESULT, OLD, OTHER], [OLD, OTHER]])
def test_a_conversation_with_tools_is_one_reply(turns):
    """Later turns answer a call of the row's, which the target may not make."""
    tokenizer = tokenizer_with(PLAIN)
    dialogue = Dialogue.begin(parse_row(talk(*turns, tools=[{"name": "look"}])))
    asked = tokenizer.decode(dialogue.prompt(tokenizer))
    assert asked.startswith('<tools>[{"type": "function", "function": {"name": "l')
    done = write(tokenizer, dialogue, "New.<|im_end|>")
    assert (done.open, done.ended) == (False, AFTER_TOOLS)
    assert taught(tokenizer, done) == [["New.<|im_end|>"]]
    assert done.texts[0].as_row()["tools"] == [{"type": "function", "function": {"name": "look"}}]


def test_a_system_column_and_arguments_of_the_template_reach_the_prompt():
    tokenizer = tokenizer_with("{% if shout %}LOUD{% endif %}" + TEMPLATES["chatml"])
    shouting = {"system": "Be brief.", "prompt": "Hi?", "chat_template_kwargs": {"shout": True}}
    asked = tokenizer.decode(Dialogue.begin(parse_row(shouting)).prompt(tokenizer))
    assert asked.startswith("LOUD<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    (text,) = write(tokenizer, Dialogue.begin(parse_row(shouting)), "New.<|im_end|>").texts
    assert parse_row(text.as_row()).arguments == {"shout": True}


def test_templates_that_cannot_ask():
    with pytest.raises(SkippedRow, match="drops a turn"):
        prompt_ids(tokenizer_with("{{ messages[-1]['content'] }}"), [USER, said("a"), OTHER])
    with pytest.raises(ValueError, match="must have a chat template to generate replies") as caught:
        prompt_ids(tokenizer_with(""), [USER])
    assert not isinstance(caught.value, SkippedRow)  # it is true of every row


def test_prompts_of_a_source(tmp_path):
    """Those of stored rows are the very tokens; of others, what the template shows up to the first reply."""
    tokenizer = tokenizer_with(PLAIN)
    stored = talk(OLD, tokens=[5, 6, 7, 8], supervised=[[2, 4]])
    rows = [stored, {**stored, "supervised": [[2.0, 4]]}, talk(calling("{}"), RESULT, OLD), talk(OLD, images=[1])]
    path = str(tmp_path / "rows.json.gz")
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    (found,) = prompts_by_source([path], tokenizer, 9, 99).values()
    asked = "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
    assert [found[0], tokenizer.decode(found[1])] == [[5, 6], asked]
    assert prompts_by_source([path], tokenizer, 1, 99) == {path: [[5, 6]]}
    for reason in ("1 x tokens that are not", "2 x a longer prompt", "1 x the row has the key 'images'"):
        with pytest.raises(ValueError, match=f"gz must have a prompt of at most 1 tokens, .*{reason}.* .--length 9.$"):
            prompts_by_source([path], tokenizer, 9, 1, " (--length 9)")
