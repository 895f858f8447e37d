"""Values of another type in a tokenizer's files: one error that names file, key and what is expected."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError, read_target_config
from eagle_jax.data.chat.tokenizers import load_tokenizer
from tests.data.test_conversations import TEMPLATES

CONFIG = read_target_config(bundled("target"))
SETTINGS = json.loads((bundled("target") / "tokenizer_config.json").read_text())


def write(folder, *, file="tokenizer_config.json", values):
    """Copies the bundled tokenizer, with one file replaced."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled("target") / name, folder)
    (folder / file).write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


TOKEN = "a string or an object with content"
WRONG = [
    ({"tokenizer_class": 3}, "tokenizer_class must be a string, got 3"),
    ({"added_tokens_decoder": 3}, "added_tokens_decoder must be an object of keys and values, got 3"),
    ({"added_tokens_decoder": {"0": 3}}, "added_tokens_decoder.0 must be an object with content, got 3"),
    ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder must be an object whose keys are"),
    ({"added_tokens_decoder": {"0": {"content": 3}}}, r"added_tokens_decoder\.0\.content must be a string, got 3"),
    ({"chat_template": ["x"]}, "chat_template must be a Jinja template or a list of objects with name and template"),
    ({"chat_template": [{"name": "default"}]}, "chat_template must be a Jinja template or a list of objects with name"),
    ({"chat_template": 3}, "chat_template must be a Jinja template or a list of objects with name and template, got 3"),
    ({"chat_template": "{% if"}, "chat_template must be a Jinja template, got '{% if': "),
    ({"chat_template": [{"name": "default", "template": "{{"}]}, "chat_template must be a Jinja template, got '{{': "),
    ({"eos_token": 5}, f"eos_token must be {TOKEN}, got 5"),
    ({"pad_token": {"content": None}}, f"pad_token must be {TOKEN}, got "),
    ({"additional_special_tokens": "x"}, "additional_special_tokens must be a list of tokens, got 'x'"),
    ({"additional_special_tokens": [3]}, "additional_special_tokens must be a list of tokens, got"),
    ({"extra_special_tokens": 3}, "extra_special_tokens must be a list of tokens, or an object of tokens by name"),
    ({"add_bos_token": "yes"}, "add_bos_token must be true or false, got 'yes'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_one_sentence_names_file_key_and_what_is_expected(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=rf"/tokenizer_config\.json: {message}") as caught:
        load_tokenizer(write(tmp_path, values=SETTINGS | changes), CONFIG)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=rf"/tokenizer_config\.json: {message}"):
        load_tokenizer(write(tmp_path, values=changes), CONFIG)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", "[1]", "expected a JSON object, found list"),
        ("tokenizer_config.json", "null", "expected a JSON object, found NoneType"),
        ("tokenizer_config.json", "{", "cannot be read as JSON"),
        ("tokenizer.json", "[1]", "expected a JSON object, found list"),
        ("tokenizer.json", "null", "expected a JSON object, found NoneType"),
        ("tokenizer.json", '{"version"', "cannot be read as JSON"),
        ("tokenizer.json", "{}", "model must be an object of keys and values, got no value"),
        ("tokenizer.json", '{"model": 3}', "model must be an object of keys and values, got 3"),
        ("special_tokens_map.json", '{"eos_token": 5}', f"eos_token must be {TOKEN}, got 5"),
        ("chat_template.jinja", "{% if", "must be a Jinja template, got '{% if'"),
    ],
)
def test_files_of_another_form(file, content, message, tmp_path):
    with pytest.raises(CheckpointError, match=rf"/{file.replace('.', '[.]')}: {message}"):
        load_tokenizer(write(tmp_path, file=file, values=content), CONFIG)


def test_a_template_that_is_replaced_is_not_read(tmp_path):
    folder = write(tmp_path, values=SETTINGS | {"chat_template": "{% if"})
    (tmp_path / "other.jinja").write_text(TEMPLATES["chatml"])
    assert load_tokenizer(folder, CONFIG, chat_template=tmp_path / "other.jinja").chat_template == TEMPLATES["chatml"]


@pytest.mark.parametrize(
    "changes",
    [
        {"chat_template": None},
        {"chat_template": [{"name": "default", "template": TEMPLATES["chatml"]}]},
        {"eos_token": {"__type": "AddedToken", "content": "<|end|>", "special": True}},
        {"pad_token": None, "model_max_length": 1e30},
        {"additional_special_tokens": None, "extra_special_tokens": {"user_token": "<|user|>"}},
        {"added_tokens_decoder": {"1": {"content": "<|end|>", "special": True}}, "add_bos_token": None},
    ],
)
def test_what_transformers_reads_is_read(changes, tmp_path):
    assert load_tokenizer(write(tmp_path, values=SETTINGS | changes), CONFIG).eos_token == "<|end|>"


KEYS = [*SETTINGS, "added_tokens_decoder", "extra_special_tokens", "unk_token", "add_bos_token", "padding_side"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.sampled_from([0, -1, 5, 2**63, 0.5]) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["0", "content", "name", "template"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=2))
@example({"model_max_length": "long"})
@example({"padding_side": 3})
def test_no_other_exception(tmp_path_factory, changes):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder = write(tmp_path_factory.mktemp("tokenizers"), values=SETTINGS | changes)
    with contextlib.suppress(CheckpointError):
        tokenizer = load_tokenizer(folder, CONFIG)
        assert tokenizer.decode(tokenizer.encode("Hello there", add_special_tokens=False))
