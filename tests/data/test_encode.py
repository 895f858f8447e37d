"""Tests training texts of rows: the mask covers what the assistant wrote and the end of its turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax.data.chat.encoding import encode, encode_row
from eagle_jax.data.rows import SkippedRow, parse_row
from eagle_jax.data.rows.parse import Conversation
from tests.data import chats
from tests.data.chats import ENDS, TALK, TEMPLATES, metaspace_tokenizer_with, supervised_texts, tokenizer_with

ASK, REPLY = {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Rain."}
RESULT = {"role": "tool", "content": "dark clouds"}
# What Qwen's templates show, in their order.
FULL = (
    "{% if tools %}{{ '<tools>' + (tools | tojson) + '</tools>' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' + ARGUMENTS + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OBJECTS = FULL.replace("ARGUMENTS", "(c.function.arguments | tojson)")
PLAIN = OBJECTS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
JSON = PLAIN.replace("(c.function.arguments | tojson)", "c.function.arguments")
CALL = '<call>look {"to": "Rome"}</call><|im_end|>'
THOUGHT = "<think>Clouds.</think>Rain.<|im_end|>"
SHAREGPT = [
    {"from": "human", "value": "Weather?"},
    {"from": "function_call", "value": '{"name": "look", "arguments": {"to": "Rome"}}'},
    {"from": "observation", "value": "dark clouds"},
    {"from": "gpt", "value": "Rain."},
]


def calling(arguments, **more) -> dict:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments, **more}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def talk(*turns, **columns) -> dict:
    return {"messages": [ASK, *turns], **columns}


@pytest.mark.parametrize("prepended", [None, "first", "always", "normalizer"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_that_the_assistant_wrote_are_supervised(name, prepended):
    tokenizer = metaspace_tokenizer_with(TEMPLATES[name], prepended) if prepended else tokenizer_with(TEMPLATES[name])
    encoded = encode(tokenizer, Conversation(TALK))
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert encoded.tokens.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    lead = " " if name in ("llama2", "vicuna") else ""  # the blank behind [/INST] or ASSISTANT: is generated
    written = [lead + TALK[turn]["content"] + ENDS[name] for turn in (2, 4)]
    assert supervised_texts(tokenizer, encoded) == written


@pytest.mark.parametrize("kind", [tokenizer_with, lambda template: metaspace_tokenizer_with(template, "first")])
def test_a_marked_span_may_end_within_a_letter_of_several_tokens(kind):
    tokenizer = kind(TEMPLATES["marked"].replace("+ '<|im_end|>' }}{% endg", "}}{% endg"))
    talk = Conversation([TALK[1], {"role": "assistant", "content": "Two 𝄞"}])
    assert supervised_texts(tokenizer, encode(tokenizer, talk)) == ["Two 𝄞"]


EASY, HARD = "<think>\nEasy.\n</think>\n\nTwo.", "<think>\nHarder.\n</think>\n\nFour."


@pytest.mark.parametrize(
    ("template", "replies", "expected"),
    [
        (chats.THINKING, [EASY, HARD], ["Two.<|im_end|>", HARD + "<|im_end|>"]),  # the template drops earlier thoughts
        (chats.THINKING, [EASY, "Four."], ["Two.<|im_end|>", "Four.<|im_end|>"]),  # an empty thought is the template's
        (chats.R1, [EASY], ["\n\nTwo.</s>"]),
        (chats.R1, [EASY, HARD], ["\n\nTwo.</s>", "\n\nFour.</s>"]),
    ],
)
def test_thoughts_that_the_template_shows_are_supervised(template, replies, expected):
    tokenizer = tokenizer_with(template)
    turns = [turn for reply in replies for turn in (ASK, {"role": "assistant", "content": reply})]
    assert supervised_texts(tokenizer, encode(tokenizer, Conversation(turns))) == expected


@pytest.mark.parametrize("template", [OBJECTS, PLAIN, JSON])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (talk(calling('{"to": "Rome"}'), RESULT, REPLY), [CALL, "Rain.<|im_end|>"]),
        (talk(calling({"to": "Rome", "z": None}, strict=None)), [CALL]),  # as Parquet unites structs
        (talk({"role": "assistant", "function_call": {"name": "look", "arguments": '{"to": "Rome"}'}}), [CALL]),
        ({"conversations": SHAREGPT, "tools": '[{"name": "look"}]'}, [CALL, "Rain.<|im_end|>"]),
        (talk({**REPLY, "reasoning_content": "Clouds."}), [THOUGHT]),
        (talk({**REPLY, "thinking": "Clouds.", "reasoning": None}), [THOUGHT]),
        ({"question": "Weather?", "reasoning": "Clouds.", "answer": "Rain."}, [THOUGHT]),
        (talk({**calling('{"to": "Rome"}'), "content": "So. ", "reasoning": "Hm."}), ["<think>Hm.</think>So. " + CALL]),
        (talk({**REPLY, "weight": 0}, ASK, {**REPLY, "weight": 1}), ["Rain.<|im_end|>"]),
        (talk({**REPLY, "train": False, "tool_calls": []}, ASK, {**REPLY, "content": "Sun."}), ["Sun.<|im_end|>"]),
        (talk(calling("{}", weight=None) | {"weight": 0.0}, RESULT, REPLY), ["Rain.<|im_end|>"]),
        ({"instruction": "Weather?", "input": "In Rome", "output": "Rain."}, ["Rain.<|im_end|>"]),
        ({"prompt": [ASK], "completion": [REPLY]}, ["Rain.<|im_end|>"]),
        ({"prompt": "Weather?", "chosen": [ASK, REPLY], "rejected": [ASK, ASK]}, ["Rain.<|im_end|>"]),
        (talk({**REPLY, "content": [{"type": "text", "text": "Ra", "image_url": None}, {"text": "in."}]}),
         ["Rain.<|im_end|>"]),
        (talk(REPLY, prompt="Weather?", prompt_id="7", messages_score=3, answer="Sun", x=None), ["Rain.<|im_end|>"]),
    ],
)  # fmt: skip
def test_every_form_of_row_is_supervised_as_the_template_shows_it(template, row, expected):
    tokenizer = tokenizer_with(template)
    encoded = encode(tokenizer, parse_row(row))
    assert supervised_texts(tokenizer, encoded) == expected
    shown = tokenizer.decode(encoded.tokens.tolist())
    assert "None" not in shown
    for text in ("dark clouds", "In Rome", "Rome"):
        assert (text in shown) == (text in str(row))


TEXTS = st.sampled_from(["a", "b\n", " c ", "<|im_end|>", "<call>", '{"x"}', "é", "<think>t</think>x", "</think>\n\n"])
CALL_PARTS = {"name": st.sampled_from(["f", "a"]), "arguments": st.dictionaries(TEXTS, TEXTS, max_size=2)}
CALLS = st.lists(st.fixed_dictionaries(CALL_PARTS), max_size=2)
TURNS = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": TEXTS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXTS},
        optional={"reasoning": TEXTS, "weight": st.sampled_from([0, 1]), "tool_calls": CALLS},
    ).filter(lambda turn: "reasoning" not in turn or "</think>" not in turn["content"]),  # such rows are left out
)


@settings(max_examples=60)
@given(st.lists(TURNS, min_size=1, max_size=5))
def test_marks_find_the_tokens_of_generation_blocks(turns):
    row = {"messages": [*turns, REPLY]}
    marked, plain = (encode_row(tokenizer_with(template), row) for template in (OBJECTS, PLAIN))
    assert marked.tokens.tolist() == plain.tokens.tolist()
    assert marked.supervised.tolist() == plain.supervised.tolist()


LOST = "the chat template drops "
DROPPED = ("messages[1:]", "messages[-1:]", "messages[:1] + messages[2:]", "messages[:2] + messages[3:]",
           "messages[:3] + messages[4:]", "messages | rejectattr('role', 'equalto', 'user')")  # fmt: skip


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        # By comparing texts, and by `generation` spans.
        *((TEMPLATES[name], *case) for name in ("chatml", "marked") for case in (
            (talk({**calling("{}"), "content": "So."}), LOST + "tool_calls"),
            (talk(REPLY, tools=[{"name": "look"}]), LOST + "tools"),
            (talk({**REPLY, "reasoning": "Clouds."}), LOST + "reasoning_content"),
            ({"messages": [{**ASK, "name": "Ada"}, REPLY]}, LOST + "name"),
            (talk(REPLY, chat_template_kwargs={"enable_thinking": False}), "has no argument 'enable_thinking'"),
            (talk({**REPLY, "weight": 0}), "no assistant turn to train on"),
            (talk(), "no assistant turn"),
            ({"prompt": "a"}, "no assistant turn"),
        )),
        # A head would learn replies to turns that it does not see.
        *((TEMPLATES[name].replace("in messages %", f"in {shown} %"), {"messages": TALK}, LOST + "a turn")
          for name in ("chatml", "marked") for shown in DROPPED),
        (FULL.replace("tools | tojson", "tools[0].function.name"),
         talk(REPLY, tools=[{"name": "look", "parameters": {"a": {}}}]), LOST + "parameters of tools"),
        (OBJECTS.replace("{% for c", "{% endgeneration %}{% for c").replace("{% endgeneration %}{% else", "{% else"),
         talk({**calling("{}"), "content": "So."}), LOST + "tool_calls from its generation blocks"),
        (TEMPLATES["llama2"], {"messages": [TALK[2], TALK[1]]}, r"for the conversation \(roles must alternate\)"),
    ],
)  # fmt: skip
def test_a_row_that_the_template_does_not_show_in_full_is_skipped(template, row, reason):
    with pytest.raises(SkippedRow, match=reason):
        encode_row(tokenizer_with(template), row)


@pytest.mark.parametrize(
    ("template", "system", "user"),
    [
        (TEMPLATES["llama2"], "Be brief.", "Hi?"),
        (TEMPLATES["llama3"], " Be brief.\n", " Hi?\n"),
        (TEMPLATES["chatml"].replace("in messages %", "in messages[1:] %"), "\n", "Hi?"),
    ],
)
def test_merged_trimmed_and_empty_turns_are_not_dropped(template, system, user):
    talk = [{"role": "system", "content": system}, {"role": "user", "content": user}, TALK[4]]
    assert encode(tokenizer_with(template), Conversation(talk)).supervised.any()


def test_plain_text_is_supervised_from_its_second_token():
    assert encode(tokenizer_with(""), "abc").supervised.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        *(({"tokens": wrong}, "that are not token ids") for wrong in ("abc", [1, 1.5], [True], [-2], [2**31], [[2]])),
        *(({"supervised": wrong}, "that is not .start, end. ranges") for wrong in
          ([[1, 4]], [[-2, 2]], [[1, 2, 3]], [[1.0, 2.0]], [0, 1], 5, [[2, 2]], [[1, 3], [2, 3]])),
        ({"supervised": []}, "no assistant token"),
        ({"note": "x"}, "the row has the key 'note', which is not read"),
    ],
)  # fmt: skip
def test_stored_tokens_are_checked(columns, reason):
    row = talk(REPLY, row=1, source="a", temperature=0, tokens=[5, 6, 7], supervised=[[0, 1], [1, 2]])
    encoded = encode_row(None, row)
    assert encoded.tokens.dtype == np.int32 and encoded.supervised.tolist() == [True, True, False]
    with pytest.raises(SkippedRow, match=reason):
        encode_row(None, {**row, **columns})
