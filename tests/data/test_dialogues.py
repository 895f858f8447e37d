"""Tests conversations with replies of the target: prompts, and the tokens of every reply, supervised once."""

from __future__ import annotations

import gzip
import json

import pytest

from eagle_jax.data.chat import Dialogue
from eagle_jax.data.chat.dialogues import AFTER_TOOLS
from eagle_jax.data.chat.encoding import prompt_ids
from eagle_jax.data.corpus import prompts_by_source
from eagle_jax.data.rows import SkippedRow, parse_row
from eagle_jax.data.rows.parse import Conversation
from tests.data.chats import TEMPLATES, THINKING, tokenizer_with
from tests.data.test_encode import PLAIN, RESULT, calling, talk

USER, OTHER = {"role": "user", "content": "Hi?"}, {"role": "user", "content": "And?"}
SYSTEM = {"role": "system", "content": "Be brief."}
OLD = {"role": "assistant", "content": "Old."}
TWO = [USER, OLD, OTHER, OLD]


def write(tokenizer, dialogue: Dialogue, *replies: str) -> Dialogue:
    """Returns the dialogue with these replies: texts, or lists of ids."""
    stops = {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    for reply in replies:
        ids = reply if isinstance(reply, list) else tokenizer.encode(reply)
        dialogue = dialogue.answered(tokenizer, dialogue.prompt(tokenizer), ids, stops)
    return dialogue


def supervised(tokenizer, dialogue: Dialogue) -> list[list[str]]:
    """Returns the replies that each training text supervises."""
    return [[tokenizer.decode(text.tokens[a:b]) for a, b in text.supervised] for text in dialogue.texts]


@pytest.mark.parametrize(
    ("messages", "pending"),
    [
        ([SYSTEM, USER, OLD, OTHER, OLD], [(SYSTEM, USER), (OTHER,)]),
        ([OLD, USER, OLD], [(USER,)]),  # a greeting is no reply
        ([SYSTEM, OLD, USER, OLD, OLD], [(SYSTEM, USER)]),  # one reply to one question
        ([USER, OLD, OTHER], [(USER,), (OTHER,)]),  # the last turn is answered, too
        ([USER, OLD, SYSTEM], [(USER,)]),
    ],
)
def test_every_user_turn_gets_a_reply(messages, pending):
    assert Dialogue.begin(Conversation(messages)).pending == tuple(pending)


THOUGHTS = "<think>\nEasy.\n</think>\n\nTwo.<|im_end|>"


@pytest.mark.parametrize(
    ("template", "replies", "texts"),
    [
        (TEMPLATES["chatml"], ["New.<|im_end|>", "Newer.<|im_end|>"], [["New.<|im_end|>", "Newer.<|im_end|>"]]),
        (TEMPLATES["chatml"], ["New", "Newer.<|im_end|>"], [["New", "Newer.<|im_end|>"]]),  # cut, without an end
        (THINKING, [THOUGHTS, "Four.<|im_end|>"], [[THOUGHTS], ["Four.<|im_end|>"]]),  # the template drops thoughts
    ],
)
def test_replies_are_supervised_in_the_text_that_the_target_read(template, replies, texts):
    tokenizer = tokenizer_with(template)
    begun = Dialogue.begin(Conversation([SYSTEM, *TWO]))
    done = write(tokenizer, begun, *replies)
    assert begun.open and not done.open
    assert supervised(tokenizer, done) == texts
    assert done.texts[-1].messages == list(done.history)
    contents = [message["content"] for message in done.history if message["role"] == "assistant"]
    assert contents == [reply.removesuffix("<|im_end|>") for reply in replies]
    if len(texts) == 1:
        whole = tokenizer.apply_chat_template(list(done.history), tokenize=False)
        assert tokenizer.decode(done.texts[0].tokens) == whole.removesuffix("\n")


def test_a_reply_that_tokenises_differently_begins_a_new_text():
    """The target wrote half a letter, which decodes to a replacement character of three bytes."""
    tokenizer = tokenizer_with(TEMPLATES["chatml"])
    half = [*tokenizer.encode("é")[:1], *tokenizer.encode("<|im_end|>")]
    done = write(tokenizer, Dialogue.begin(Conversation(TWO)), half, "Yes.<|im_end|>")
    assert done.texts[0].tokens[-2:] == half
    assert supervised(tokenizer, done)[1] == ["Yes.<|im_end|>"]


@pytest.mark.parametrize("turns", [[calling("{}"), RESULT, OLD, OTHER], [OLD, OTHER]])
def test_a_conversation_with_tools_has_one_reply(turns):
    """Later turns depend on a call of the row, which the target may not make."""
    tokenizer = tokenizer_with(PLAIN)
    dialogue = Dialogue.begin(parse_row(talk(*turns, tools=[{"name": "look"}])))
    prompt = tokenizer.decode(dialogue.prompt(tokenizer))
    assert prompt.startswith('<tools>[{"type": "function", "function": {"name": "l')
    done = write(tokenizer, dialogue, "New.<|im_end|>")
    assert (done.open, done.ended) == (False, AFTER_TOOLS)
    assert supervised(tokenizer, done) == [["New.<|im_end|>"]]
    assert done.texts[0].as_row()["tools"] == [{"type": "function", "function": {"name": "look"}}]


def test_the_prompt_has_the_system_column_and_the_template_arguments():
    tokenizer = tokenizer_with("{% if shout %}LOUD{% endif %}" + TEMPLATES["chatml"])
    shouting = {"system": "Be brief.", "prompt": "Hi?", "chat_template_kwargs": {"shout": True}}
    prompt = tokenizer.decode(Dialogue.begin(parse_row(shouting)).prompt(tokenizer))
    assert prompt.startswith("LOUD<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    (text,) = write(tokenizer, Dialogue.begin(parse_row(shouting)), "New.<|im_end|>").texts
    assert parse_row(text.as_row()).arguments == {"shout": True}


def test_a_prompt_needs_a_template_that_shows_every_turn():
    with pytest.raises(SkippedRow, match="drops a turn"):
        prompt_ids(tokenizer_with("{{ messages[-1]['content'] }}"), Conversation([USER, OLD, OTHER]))
    with pytest.raises(ValueError, match="must have a chat template to generate replies") as caught:
        prompt_ids(tokenizer_with(""), Conversation([USER]))
    assert not isinstance(caught.value, SkippedRow)  # it holds for every row


def test_prompts_of_a_source_are_stored_tokens_or_rendered(tmp_path):
    tokenizer = tokenizer_with(PLAIN)
    stored = talk(OLD, tokens=[5, 6, 7, 8], supervised=[[2, 4]])
    rows = [stored, {**stored, "supervised": [[2.0, 4]]}, talk(calling("{}"), RESULT, OLD), talk(OLD, images=[1])]
    path = str(tmp_path / "rows.json.gz")
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    (found,) = prompts_by_source([path], tokenizer, 9, 99).values()
    prompt = "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
    assert [found[0], tokenizer.decode(found[1])] == [[5, 6], prompt]
    assert prompts_by_source([path], tokenizer, 1, 99) == {path: [[5, 6]]}
    for reason in ("1 x tokens that are not", "2 x a longer prompt", "1 x the row has the key 'images'"):
        with pytest.raises(ValueError, match=rf"gz must have a prompt of at most 1 tokens \(--length 9\), .*{reason}"):
            prompts_by_source([path], tokenizer, 9, 1, " (--length 9)")
