"""Tests training texts of rows: the mask covers what the assistant wrote and the end of its turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax.data.chat.encoding import encode, encode_row
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.parse import parse_row
from tests.data.chats import (
    ENDS,
    R1,
    TALK,
    TEMPLATES,
    THINKING,
    metaspace_tokenizer_with,
    supervised_texts,
    tokenizer_with,
)

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


@pytest.mark.parametrize("name", TEMPLATES)
def test_supervised_is_what_the_assistant_wrote(name):
    tokenizer = tokenizer_with(TEMPLATES[name])
    encoded = encode(tokenizer, TALK)
    assert tokenizer.decode(encoded.tokens.tolist()) == tokenizer.apply_chat_template(TALK, tokenize=False)
    lead = " " if name in ("llama2", "vicuna") else ""  # the blank behind [/INST] or ASSISTANT: is generated
    written = [lead + TALK[turn]["content"] + ENDS[name] for turn in (2, 4)]
    assert supervised_texts(tokenizer, encoded) == written


@pytest.mark.parametrize("prepended", ["first", "always", "normalizer"])
@pytest.mark.parametrize("name", ["llama2", "vicuna", "marked"])
def test_supervised_is_what_the_assistant_wrote_in_pieces_with_blanks(name, prepended):
    """The decoder takes a blank off the first piece; a letter in front of the run keeps the run's own."""
    tokenizer = metaspace_tokenizer_with(TEMPLATES[name], prepended)
    encoded = encode(tokenizer, TALK)
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert encoded.tokens.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    lead = "" if name == "marked" else " "
    wanted = [lead + TALK[turn]["content"] + ENDS[name] for turn in (2, 4)]
    assert supervised_texts(tokenizer, encoded, front="x") == wanted


@pytest.mark.parametrize("kind", [tokenizer_with, lambda template: metaspace_tokenizer_with(template, "first")])
def test_a_marked_span_may_end_within_a_letter_of_several_tokens(kind):
    tokenizer = kind(TEMPLATES["marked"].replace("+ '<|im_end|>' }}{% endg", "}}{% endg"))
    talk = [TALK[1], {"role": "assistant", "content": "Two 𝄞"}]
    assert supervised_texts(tokenizer, encode(tokenizer, talk)) == ["Two 𝄞"]


EASY, HARD = "<think>\nEasy.\n</think>\n\nTwo.", "<think>\nHarder.\n</think>\n\nFour."


@pytest.mark.parametrize(
    ("template", "replies", "wanted"),
    [
        (THINKING, [EASY, HARD], ["Two.<|im_end|>", HARD + "<|im_end|>"]),  # the template drops earlier thoughts
        (THINKING, [EASY, "Four."], ["Two.<|im_end|>", "Four.<|im_end|>"]),  # an empty thought is the template's
        (R1, [EASY], ["\n\nTwo.</s>"]),
        (R1, [EASY, HARD], ["\n\nTwo.</s>", "\n\nFour.</s>"]),
    ],
)
def test_thoughts_within_replies(template, replies, wanted):
    tokenizer = tokenizer_with(template)
    turns = [turn for reply in replies for turn in (ASK, {"role": "assistant", "content": reply})]
    assert supervised_texts(tokenizer, encode(tokenizer, turns)) == wanted


@pytest.mark.parametrize("template", [OBJECTS, PLAIN, JSON])
@pytest.mark.parametrize(
    ("row", "wanted"),
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
def test_what_a_row_holds_is_taught_as_the_template_shows_it(template, row, wanted):
    tokenizer = tokenizer_with(template)
    encoded = encode(tokenizer, parse_row(row))
    assert supervised_texts(tokenizer, encoded) == wanted
    shown = tokenizer.decode(encoded.tokens.tolist())
    assert "None" not in shown
    for text in ("dark clouds", "In Rome", "Rome"):
        assert (text in shown) == (text in str(row))


def test_columns_of_system_prompts_and_tools_are_shown():
    tokenizer = tokenizer_with(OBJECTS)
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"a": {"b": 1}}}}
    for columns in ({"tools": [tool]}, {"functions": [tool["function"]]}, {"tools": '[{"name": "look"}]'}):
        shown = tokenizer.decode(encode_row(tokenizer, talk(REPLY, system="Be brief.", **columns)).tokens.tolist())
        assert shown.startswith('<tools>[{"type": "function", "function": {"name": "look"')
        assert ("Looks." in shown) == ("parameters" in shown) == ("Looks." in str(columns))
        assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user" in shown


TEXTS = st.sampled_from(["a", "b\n", " c ", "<|im_end|>", "<call>", '{"x"}', "é", "<think>t</think>x", "</think>\n\n"])
CALLS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["f", "a"]), "arguments": st.dictionaries(TEXTS, TEXTS, max_size=2)}
    ),
    max_size=2,
)
TURNS = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": TEXTS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXTS},
        optional={"reasoning": TEXTS, "weight": st.sampled_from([0, 1]), "tool_calls": CALLS},
    ).filter(lambda turn: "reasoning" not in turn or "</think>" not in turn["content"]),  # such rows are left out
)


@settings(max_examples=60)
@given(st.lists(TURNS, min_size=1, max_size=5))
def test_what_is_found_by_marks_is_what_the_template_marks(turns):
    row = {"messages": [*turns, REPLY]}
    marked, plain = (encode_row(tokenizer_with(template), row) for template in (OBJECTS, PLAIN))
    assert marked.tokens.tolist() == plain.tokens.tolist()
    assert marked.supervised.tolist() == plain.supervised.tolist()


LOST = "the chat template drops "


@pytest.mark.parametrize("name", ["chatml", "marked"])  # by comparing texts, and by `generation` spans
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (talk({**calling("{}"), "content": "So."}), LOST + "tool_calls"),
        (talk(REPLY, tools=[{"name": "look"}]), LOST + "tools"),
        (talk({**REPLY, "reasoning": "Clouds."}), LOST + "reasoning_content"),
        ({"messages": [{**ASK, "name": "Ada"}, REPLY]}, LOST + "name"),
        (talk(REPLY, chat_template_kwargs={"enable_thinking": False}), "has no argument 'enable_thinking'"),
        (talk({**REPLY, "weight": 0}), "no assistant turn to train on"),
        (talk(), "no assistant turn"),
        ({"prompt": "a"}, "no assistant turn"),
    ],
)
def test_what_a_template_does_not_show_leaves_the_row_out(name, row, reason):
    with pytest.raises(SkippedRow, match=reason):
        encode_row(tokenizer_with(TEMPLATES[name]), row)


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        (
            FULL.replace("tools | tojson", "tools[0].function.name"),
            talk(REPLY, tools=[{"name": "look", "parameters": {"a": {}}}]),
            "parameters of tools",
        ),
        (
            OBJECTS.replace("{% for c", "{% endgeneration %}{% for c").replace("{% endgeneration %}{% else", "{% else"),
            talk({**calling("{}"), "content": "So."}),
            "tool_calls from its generation blocks",
        ),
    ],
)
def test_a_part_of_tools_that_is_lost_leaves_the_row_out(template, row, reason):
    with pytest.raises(SkippedRow, match=LOST + reason):
        encode_row(tokenizer_with(template), row)


@pytest.mark.parametrize("name", ["chatml", "marked"])
@pytest.mark.parametrize(
    "shown",
    ["messages[1:]", "messages[-1:]", "messages[:1] + messages[2:]", "messages[:2] + messages[3:]",
     "messages[:3] + messages[4:]", "messages | rejectattr('role', 'equalto', 'user')"],
)  # fmt: skip
def test_templates_that_drop_turns(name, shown):
    """Of any speaker: a head would learn replies to what it is not shown."""
    tokenizer = tokenizer_with(TEMPLATES[name].replace("in messages %", f"in {shown} %"))
    with pytest.raises(SkippedRow, match="drops a turn"):
        encode(tokenizer, TALK)
    if shown == "messages[1:]":  # nothing is lost of an empty turn
        assert encode(tokenizer, [{"role": "system", "content": "\n"}, *TALK[1:3]]).supervised.any()


def test_templates_that_refuse_the_order_of_turns():
    with pytest.raises(SkippedRow, match=r"raises an error for the conversation \(roles must alternate\)"):
        encode(tokenizer_with(TEMPLATES["llama2"]), [TALK[2], TALK[1]])


@pytest.mark.parametrize(
    ("name", "system", "user"), [("llama2", "Be brief.", "Hi?"), ("llama3", " Be brief.\n", " Hi?\n")]
)
def test_turns_that_are_merged_or_trimmed_are_not_dropped(name, system, user):
    talk = [{"role": "system", "content": system}, {"role": "user", "content": user}, TALK[4]]
    assert encode(tokenizer_with(TEMPLATES[name]), talk).supervised.any()


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
def test_stored_tokens_are_read_as_strictly(columns, reason):
    row = {
        "row": 1,
        "source": "a",
        **talk(REPLY),
        "tokens": [5, 6, 7],
        "supervised": [[0, 1], [1, 2]],
        "temperature": 0,
    }
    encoded = encode_row(None, row)
    assert encoded.tokens.dtype == np.int32 and encoded.supervised.tolist() == [True, True, False]
    with pytest.raises(SkippedRow, match=reason):
        encode_row(None, {**row, **columns})
