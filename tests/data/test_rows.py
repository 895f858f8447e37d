"""Rows as public data sets have them: what they hold reaches the template, or they are left out with the reason."""

from __future__ import annotations

import collections
import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax.data.chat.encode import Encoded, encode, encode_row, parse_row
from eagle_jax.data.corpus.prompts import first_prompts
from eagle_jax.data.corpus.sources import Source
from eagle_jax.data.rows.columns import SkippedRow
from tests.data.test_conversations import TEMPLATES, supervised_texts, tokenizer_with

ASK, REPLY = {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Rain."}
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
RESULT = {"role": "tool", "content": "dark clouds"}


def calling(arguments, **more) -> dict:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments, **more}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def talk(*turns, **columns) -> dict:
    return {"messages": [ASK, *turns], **columns}


CALL = '<call>look {"to": "Ro\\u006de"}</call><|im_end|>'.replace("\\u006d", "m")
SHAREGPT = [
    {"from": "human", "value": "Weather?"},
    {"from": "function_call", "value": '{"name": "look", "arguments": {"to": "Rome"}}'},
    {"from": "observation", "value": "dark clouds"},
    {"from": "gpt", "value": "Rain."},
]
THOUGHT = "<think>Clouds.</think>Rain.<|im_end|>"


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
    same = talk(REPLY, system_prompt="Be brief.")
    same["messages"] = [{"role": "developer", "content": "Be brief."}, *same["messages"]]
    assert parse_row(same).messages[1:] == [ASK, REPLY]


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


@settings(max_examples=60, deadline=None)
@given(st.lists(TURNS, min_size=1, max_size=5))
def test_what_is_found_by_marks_is_what_the_template_marks(turns):
    row = {"messages": [*turns, REPLY]}
    marked, plain = (encode_row(tokenizer_with(template), row) for template in (OBJECTS, PLAIN))
    assert marked.tokens.tolist() == plain.tokens.tolist()
    assert marked.supervised.tolist() == plain.supervised.tolist()


LOST = "the chat template drops "


@pytest.mark.parametrize("name", ["chatml", "marked"])
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (talk({**calling("{}"), "content": "So."}), LOST + "tool_calls"),
        (talk(REPLY, tools=[{"name": "look"}]), LOST + "tools"),
        (talk({**REPLY, "reasoning": "Clouds."}), LOST + "reasoning_content"),
        ({"messages": [{**ASK, "name": "Ada"}, REPLY]}, LOST + "name"),
        (talk(REPLY, chat_template_kwargs={"enable_thinking": False}), "has no argument 'enable_thinking'"),
        (talk({**REPLY, "weight": 0}), "no assistant turn that is taught"),
    ],
)
def test_what_a_template_does_not_show_leaves_the_row_out(name, row, reason):
    for _ in range(2):  # found out, and remembered
        with pytest.raises(SkippedRow, match=reason):
            encode_row(tokenizer_with(TEMPLATES[name]), row)


def test_calls_outside_what_a_template_marks_as_generated_leave_the_row_out():
    part = "{% for c in m.tool_calls or [] %}"
    template = OBJECTS.replace("{{ '<|im_end|>' }}{% endgeneration %}", "{{ '<|im_end|>' }}").replace(
        part, "{% endgeneration %}" + part
    )
    assert encode_row(tokenizer_with(template), talk(REPLY)).supervised.any()
    with pytest.raises(SkippedRow, match=LOST + "tool_calls from what it marks as generated"):
        encode_row(tokenizer_with(template), talk(calling('{"a": 1}')))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (talk(REPLY, images=["a.png"]), "the row has the key 'images', which is not read"),
        (talk(REPLY, input_ids=[1]), "the row has the key 'input_ids'"),
        (talk(REPLY, prompt="Another?"), "the row has the key 'prompt'"),
        (talk(REPLY, tokens=[1]), "the row has the key 'tokens'"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "the row has the key 'history'"),
        ({"text": "abc", "summary": "d"}, "the row has the key 'summary'"),
        (talk(REPLY, system="A", system_prompt="B"), "'system' and 'system_prompt' differ"),
        ({"system": "A", "messages": [{"role": "system", "content": "B"}, ASK, REPLY]}, "a system column and another"),
        (talk(REPLY, tools="look(city)"), "tools that is not JSON"),
        (talk(REPLY, tools=[{"type": "web_search"}]), "a tool without the name"),
        (talk({**REPLY, "refusal": "No."}), "a message has the key 'refusal', which is not read"),
        (talk({"role": "assistant", "content": None, "audio": {"id": "x"}}), "a message has the key 'audio'"),
        (talk({**ASK, "tool_calls": [1]}, REPLY), "a message has the key 'tool_calls'"),
        (talk({**REPLY, "weight": 0.5}), "a message has a 'weight' other than 0 and 1"),
        (talk({**REPLY, "weight": float("nan")}), "a message has a 'weight' other"),
        (talk({**REPLY, "train_detail": [{"begin": 0}]}), "a message has the key 'train_detail'"),
        (talk({**REPLY, "value": "Sun."}), "'content' and 'value' differ"),
        (talk({**REPLY, "content": [{"type": "text", "text": None}]}), "a message without text"),
        (talk({**REPLY, "content": [{"type": "text", "text": "a"}, {"type": "image"}]}), "a part of the type 'image'"),
        (talk({**REPLY, "content": [{"type": "text", "text": "a", "image_url": "b"}]}), "has the key 'image_url'"),
        (talk({**REPLY, "tool_calls": [{"function": {"arguments": "{}"}}]}), "without the name of a function"),
        (talk(calling("{")), "a tool call with arguments that is not JSON"),
        (talk(calling("[1]")), "a tool call whose arguments are not an object"),
        (talk(calling("{}", parameters={"a": 1})), "a tool call has the key 'parameters'"),
        (talk(calling({"a": "\ud83d"})), "no Unicode text"),
        ({"conversations": [SHAREGPT[0], {"from": "function_call", "value": "f()"}]}, "a tool call that is not JSON"),
    ],
)  # fmt: skip
def test_what_is_not_read_leaves_the_row_out(row, reason):
    with pytest.raises(SkippedRow, match=reason):
        parse_row(row)


@pytest.mark.parametrize(
    "columns",
    [  # of OpenHermes, WildChat, Magpie, UltraFeedback, LMSYS-Chat-1M
        {"custom_instruction": False, "model_name": "x", "avatarUrl": "u", "idx": "3", "title": "T", "views": 4.0},
        {"conversation_hash": "a", "hashed_ip": "b", "header": {"a": 1}, "toxic": True, "state": "X", "turn": 2},
        {"uuid": "a", "gen_input_configs": {"t": 1}, "category": "Math", "llama_guard_2": "safe", "response": "Rain."},
        {"prompt": "Weather?", "chosen": [ASK, REPLY], "score_chosen": 5.0, "score_rejected": 1.0, "rejected": [ASK]},
        {"conversation_id": "a", "model": "m", "language": "en", "openai_moderation": [{"a": 1}], "redacted": False},
        {"__index_level_0__": 7, "_note": "mine", "source": "web", "created_at": "today", "solution": "42"},
    ],
)  # fmt: skip
def test_columns_without_text_of_a_conversation_change_nothing(columns):
    assert parse_row(talk(REPLY, **columns)) == parse_row(talk(REPLY))
    known = {"timestamp": 3, "country": "X", "turn_identifier": 9, "toxic": False}
    assert parse_row(talk({**REPLY, **known})) == parse_row(talk(REPLY))


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"tokens": [1.5, 2.0, 3.0]}, "tokens that are not token ids"),
        ({"tokens": [1, float("nan"), 3]}, "tokens that are not token ids"),
        ({"tokens": [1, True, 3]}, "tokens that are not token ids"),
        ({"tokens": [1, -2, 3]}, "tokens that are not token ids"),
        ({"tokens": [1, 2**31, 3]}, "tokens that are not token ids"),
        ({"tokens": [1, 10**30, 3]}, "tokens that are not token ids"),
        ({"tokens": [[1, 2, 3]]}, "tokens that are not token ids"),
        ({"tokens": "abc"}, "tokens that are not token ids"),
        ({"supervised": [[1, 4]]}, "supervised that is not"),
        ({"supervised": [[-2, 2]]}, "supervised that is not"),
        ({"supervised": [[1, 2, 3]]}, "supervised that is not"),
        ({"supervised": [[1.0, 2.0]]}, "supervised that is not"),
        ({"supervised": [0, 1, 1]}, "supervised that is not"),
        ({"supervised": []}, "no assistant token"),
        ({"supervised": 5}, "supervised that is not"),
        ({"supervised": [[2, 2]]}, "empty or out of order"),
        ({"supervised": [[1, 3], [2, 3]]}, "empty or out of order"),
        ({"note": "x"}, "the row has the key 'note', which is not read"),
    ],
)
def test_stored_tokens_are_read_as_strictly(columns, reason):
    row = {"row": 1, "source": "a", **talk(REPLY), "tokens": [5, 6, 7], "supervised": [[1, 2]], "temperature": 0.0}
    assert encode_row(None, row).supervised.tolist() == [False, True, False]
    assert encode_row(None, {**row, "tokens": np.array([5, 6, 7])}).tokens.tolist() == [5, 6, 7]
    with pytest.raises(SkippedRow, match=reason):
        encode_row(None, {**row, **columns})


def test_ranges_may_touch():
    assert Encoded.from_spans([1, 2, 3, 4], [[0, 1], [1, 2], [3, 4]]).supervised.tolist() == [True, True, False, True]


@pytest.mark.parametrize(("name", "count"), [("gpteacher/roleplay.json", 1923), ("gsm8k/train.jsonl", 7473)])
def test_real_rows_are_read(shared, name, count):
    """An array of instructions and lines of questions, as their authors publish them."""
    rows = list(Source(str(shared / "data" / name)).rows())
    assert len(rows) == count
    parsed = [parse_row(row) for row in rows[::10]]
    assert {tuple(message["role"] for message in row.messages) for row in parsed} == {("user", "assistant")}


def test_prompts_are_read_as_strictly(tmp_path):
    """Those of stored rows are the very tokens; of others, what the template shows up to the first reply."""
    tokenizer = tokenizer_with(PLAIN)
    stored = talk(REPLY, tokens=[5, 6, 7, 8], supervised=[[2, 4]])
    rows = [stored, {**stored, "supervised": [[2.0, 4]]}, talk(calling("{}"), RESULT, REPLY), talk(REPLY, images=[1])]
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    reasons: collections.Counter[str] = collections.Counter()
    found = first_prompts(Source(str(tmp_path / "rows.json.gz")), tokenizer, 9, 99, reasons)
    asked = "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
    assert [found[0], tokenizer.decode(found[1])] == [[5, 6], asked]
    assert sorted(reasons) == [
        "supervised that is not [start, end) ranges of the tokens",
        "the row has the key 'images', which is not read",
    ]


@pytest.mark.parametrize(
    ("row", "culprit"),
    [
        ({"task": "Translate to French", "input": "hello", "output": "bonjour"}, "'task'"),
        ({"question": "Where?", "knowledge": "In Paris.", "answer": "Paris"}, "'knowledge'"),
        ({"title": "Paris", "question": "where?", "answer": "here"}, "'title'"),
        ({"messages": [ASK, REPLY], "custom_instruction": "Answer as a pirate."}, "'custom_instruction'"),
        ({"messages": [ASK, REPLY], "metadata": {"tools": [{"name": "look"}]}}, "'metadata.tools'"),
        ({"messages": [ASK, REPLY], "used_tools": [{"name": "look"}]}, "'used_tools'"),
        ({"messages": [ASK, REPLY], "img_url": "http://x/y.png"}, "'img_url'"),
        ({"messages": [ASK, REPLY], "has_image": True}, "'has_image'"),
        ({"messages": [{**ASK, "title": "Read this"}, REPLY]}, "'title'"),
        ({"messages": [{**ASK, "type": "image"}, REPLY]}, "'image'"),
        ({"prompt": "q", "response": "<think>a</think>r", "reasoning": "because"}, "thoughts in its text and beside"),
    ],
)
def test_text_in_a_column_of_another_name_leaves_the_row_out(row, culprit):
    with pytest.raises(SkippedRow, match=culprit):
        parse_row(row)


@pytest.mark.parametrize("mode", ["on", "off", "low", True])
def test_a_mode_of_reasoning_is_no_thought(mode):
    """As in NVIDIA's post-training data: the mode stands beside a reply that holds its own thoughts."""
    row = {"input": [ASK], "output": "<think>hm</think>yo", "reasoning": mode, "system_prompt": "thinking on"}
    messages = parse_row(row).messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert "reasoning_content" not in messages[-1]


def test_descriptions_of_a_conversation_are_metadata():
    notes = {"topic": "cats", "knowledge": "To solve this ...", "custom_instruction": False, "meta": {"a": 1}}
    row = {"messages": [ASK, REPLY], **notes}
    assert len(parse_row(row).messages) == 2
