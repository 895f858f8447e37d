"""Tests rows of public data sets: every key is read or is metadata, or the row is skipped."""

from __future__ import annotations

import json

import pytest

from eagle_jax.data.corpus import Source
from eagle_jax.data.rows import SkippedRow, parse_row
from eagle_jax.data.rows.parse import Conversation
from tests.data.test_encode import ASK, REPLY, SHAREGPT, calling, talk


def test_forms_of_rows_give_the_same_conversation():
    parts = {"messages": [{**ASK, "content": [{"type": "text", "text": "Weather?"}]}, REPLY]}
    sharegpt = {"conversations": [SHAREGPT[0], SHAREGPT[3]], "id": 3}
    twice = talk(REPLY, system_prompt="Be brief.")
    twice["messages"].insert(0, {"role": "developer", "content": "Be brief."})
    assert parse_row(talk(REPLY)) == parse_row(sharegpt) == parse_row(parts) == Conversation([ASK, REPLY])
    assert parse_row(twice).messages == [{"role": "system", "content": "Be brief."}, ASK, REPLY]
    assert parse_row({"text": "plain", "prompt": "a"}) == "plain"
    assert parse_row({"prompt": "Weather?"}) == parse_row({"prompt": [ASK]}) == Conversation([ASK])
    tool = {"type": "function", "function": {"name": "look", "parameters": {"a": {"b": 1}}}}
    for columns in ({"tools": [tool]}, {"functions": [tool["function"]]}, {"tools": json.dumps([tool])}):
        assert parse_row(talk(REPLY, **columns)).tools == [tool]


THE_ROW, A_MESSAGE = "the row has the key ", "a message has the key "


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "neither messages, conversations, text nor prompt$"),
        ({"output": "b", "x": "a"}, r"text nor prompt \(found output, x\)"),
        ({"text": " "}, "empty text"),
        ({"text": "abc", "summary": "d"}, THE_ROW + "'summary'"),
        ({"messages": []}, "an empty conversation"),
        ({"messages": "hi"}, "not a list of messages"),
        ({"messages": ["hi"]}, "a message is not an object"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown speaker 'narrator'"),
        ({"messages": [{"role": "user", "content": None}]}, "a message without text"),
        ({"messages": [{"role": "user", "content": "a\ud83d"}, REPLY]}, "not valid Unicode"),
        (talk(REPLY, images=["a.png"]), THE_ROW + "'images', which is not read"),
        (talk(REPLY, prompt="Another?"), THE_ROW + "'prompt'"),
        (talk(REPLY, tokens=[1]), THE_ROW + "'tokens'"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, THE_ROW + "'history'"),
        (talk(REPLY, system="A", system_prompt="B"), "'system' and 'system_prompt' differ"),
        ({"system": "A", "messages": [{"role": "system", "content": "B"}, ASK, REPLY]}, "a system column and another"),
        (talk(REPLY, tools="look(city)"), "tools that is not JSON"),
        (talk(REPLY, tools=[{"type": "web_search"}]), "a tool without the name"),
        (talk({**REPLY, "refusal": "No."}), A_MESSAGE + "'refusal', which is not read"),
        (talk({"role": "assistant", "content": None, "audio": {"id": "x"}}), A_MESSAGE + "'audio'"),
        (talk({**ASK, "tool_calls": [1]}, REPLY), A_MESSAGE + "'tool_calls'"),
        (talk({**REPLY, "weight": float("nan")}), "a message has a 'weight' other than 0 and 1"),
        (talk({**REPLY, "train_detail": [{"begin": 0}]}), A_MESSAGE + "'train_detail'"),
        (talk({**REPLY, "value": "Sun."}), "'content' and 'value' differ"),
        (talk({**REPLY, "content": [{"type": "text", "text": None}]}), "a message without text"),
        (talk({**REPLY, "content": [{"type": "text", "text": "a"}, {"type": "image"}]}), "a part of the type 'image'"),
        (talk({**REPLY, "content": [{"type": "text", "text": "a", "image_url": "b"}]}), "has the key 'image_url'"),
        (talk({**REPLY, "tool_calls": [{"function": {"arguments": "{}"}}]}), "without the name of a function"),
        (talk(calling("{")), "a tool call with arguments that is not JSON"),
        (talk(calling("[1]")), "a tool call whose arguments are not an object"),
        (talk(calling("{}", parameters={"a": 1})), "a tool call has the key 'parameters'"),
        (talk(calling({"a": "\ud83d"})), "not valid Unicode"),
        ({"conversations": [SHAREGPT[0], {"from": "function_call", "value": "f()"}]}, "a tool call that is not JSON"),
        # Text under a name that often holds none.
        ({"task": "Translate to French", "input": "hello", "output": "bonjour"}, "'task'"),
        ({"question": "Where?", "knowledge": "In Paris.", "answer": "Paris"}, "'knowledge'"),
        ({"title": "Paris", "question": "where?", "answer": "here"}, "'title'"),
        (talk(REPLY, custom_instruction="Answer as a pirate."), "'custom_instruction'"),
        (talk(REPLY, metadata={"tools": [{"name": "look"}]}), "'metadata.tools'"),
        (talk(REPLY, used_tools=[{"name": "look"}]), "'used_tools'"),
        (talk(REPLY, img_url="http://x/y.png"), "'img_url'"),
        (talk(REPLY, has_image=True), "'has_image'"),
        ({"messages": [{**ASK, "title": "Read this"}, REPLY]}, "'title'"),
        ({"messages": [{**ASK, "type": "image"}, REPLY]}, "'image'"),
        ({"prompt": "q", "response": "<think>a</think>r", "reasoning": "because"}, "thoughts both in its text and"),
    ],
)  # fmt: skip
def test_rows_with_unknown_keys_or_forms_are_skipped(row, reason):
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
        {"topic": "cats", "knowledge": "To solve this ...", "meta": {"a": 1}},
    ],
)  # fmt: skip
def test_metadata_does_not_change_the_conversation(columns):
    assert parse_row(talk(REPLY, **columns)) == parse_row(talk(REPLY))
    known = {"timestamp": 3, "country": "X", "turn_identifier": 9, "toxic": False}
    assert parse_row(talk({**REPLY, **known})) == parse_row(talk(REPLY))


@pytest.mark.parametrize("mode", ["on", "off", "low", True])
def test_a_mode_of_reasoning_is_not_a_thought(mode):
    """In NVIDIA's post-training data, the column names a mode, and the reply holds its thoughts."""
    row = {"input": [ASK], "output": "<think>hm</think>yo", "reasoning": mode, "system_prompt": "thinking on"}
    messages = parse_row(row).messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert "reasoning_content" not in messages[-1]


@pytest.mark.parametrize(("name", "count"), [("gpteacher/roleplay.json", 1923), ("gsm8k/train.jsonl", 7473)])
def test_published_rows_are_read(shared, name, count):
    """Tests an array of instructions and lines of questions."""
    rows = list(Source(str(shared / "data" / name)).rows())
    assert len(rows) == count
    parsed = [parse_row(row) for row in rows[::10]]
    assert {tuple(message["role"] for message in row.messages) for row in parsed} == {("user", "assistant")}
