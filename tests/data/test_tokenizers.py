"""Tests loading tokenizers: vocabularies, templates, and errors that name the damaged file and key."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError, read_target_config
from eagle_jax.data.chat import chat_text, load_tokenizer
from eagle_jax.data.chat.encoding import encode
from eagle_jax.data.rows.parse import Conversation
from tests.data.chats import TEMPLATES, tokenizer_with

CONFIG = read_target_config(bundled("target"))
SETTINGS = json.loads((bundled("target") / "tokenizer_config.json").read_text())


def write(folder, *, file="tokenizer_config.json", values):
    """Copies the bundled tokenizer, with one file replaced."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled("target") / name, folder)
    (folder / file).write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def test_the_target_has_at_least_the_tokens_of_the_tokenizer(tmp_path):
    assert len(load_tokenizer("demo", CONFIG)) == CONFIG.vocab_size == 512
    tokenizer = tokenizer_with(TEMPLATES["chatml"])
    tokenizer.save_pretrained(tmp_path)
    size = len(tokenizer)
    again = load_tokenizer(tmp_path, CONFIG)
    assert size < 512 and again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template
    load_tokenizer(tmp_path, dataclasses.replace(CONFIG, vocab_size=size))
    with pytest.raises(CheckpointError, match=f"must have at most the target's {size - 1} tokens, got {size} in "):
        load_tokenizer(tmp_path, dataclasses.replace(CONFIG, vocab_size=size - 1))


def test_a_missing_tokenizer_or_package_is_named(tmp_path, monkeypatch):
    with pytest.raises(
        CheckpointError, match=r"must hold a tokenizer \(.*tokenizer\.json.*\), got none\. Copy its files"
    ):
        load_tokenizer(tmp_path, CONFIG)
    with pytest.raises(CheckpointError, match=r"path_or_hub_id must be .*, got .*nowhere"):
        load_tokenizer(tmp_path / "nowhere", CONFIG)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.delitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", raising=False)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*pip install .*sentencepiece protobuf"):
        load_tokenizer(tmp_path, CONFIG)


def test_a_sentencepiece_model_is_read(tmp_path, repository):
    """Vicuna-13B has such a model, without tokenizer.json."""
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = ["USER: Hello there ASSISTANT: Two, of course.", "A curious user and an artificial assistant."] * 30
    with (tmp_path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, vocab_size=360, model_type="bpe", byte_fallback=True,
            normalization_rule_name="identity", minloglevel=2,
        )  # fmt: skip
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    values = {"tokenizer_class": "LlamaTokenizer", "legacy": False, **special}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path, CONFIG, chat_template=repository / "configs" / "templates" / "vicuna.jinja")
    talk = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Two, 𝄞 of course."}]
    encoded = encode(tokenizer, Conversation(talk))
    supervised = encoded.tokens[encoded.supervised].tolist()
    assert tokenizer.convert_ids_to_tokens(supervised)[0] == "▁Two"
    assert tokenizer.decode(supervised) == "Two, 𝄞 of course.</s>"


def test_a_chat_template_replaces_that_of_the_tokenizer(tmp_path, repository):
    """A template that is replaced is not checked."""
    folder = write(tmp_path / "target", values=SETTINGS | {"chat_template": "{% if"})
    tokenizer = load_tokenizer(folder, CONFIG, chat_template=repository / "configs" / "templates" / "vicuna.jinja")
    text = chat_text(tokenizer, [{"role": "user", "content": "Hi"}])
    assert text.endswith("answers to the user's questions. USER: Hi ASSISTANT:")
    with pytest.raises(CheckpointError, match=r"chat_template must be a Jinja file, got .*nowhere\.jinja\. Check"):
        load_tokenizer("demo", CONFIG, chat_template=tmp_path / "nowhere.jinja")
    contents = ((b"{% if %}", "raises an error .*Expected"), (b"\xff\xfe", "'utf-8' codec"), (b"# Me", "drops a turn"))
    for content, reason in contents:
        (tmp_path / "other.jinja").write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"must show a user's turn, got .*other\.jinja: .*{reason}"):
            load_tokenizer("demo", CONFIG, chat_template=tmp_path / "other.jinja")


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("tokenizer_config.json", "[1]", "tokenizer_config.json must hold a JSON object, got list"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: cannot be read as JSON"),
        ("tokenizer_config.json", SETTINGS | {"padding_side": 3}, "the tokenizer in .*target cannot be read: "),
        ("special_tokens_map.json", "{", "special_tokens_map.json: cannot be read as JSON"),
        ("tokenizer_config.json", {"eos_token": 5}, r"config.json must .* got `int` - at `\$\.eos_token"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, r"`bool \| null`, got `str` - at `\$\.add_bos_token"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"0": 3}}, r"`object`, got `int` - at `\$\.added_tok"),
        ("special_tokens_map.json", {"additional_special_tokens": [3]}, r"map.json must .*`\$\.additional_special_"),
        ("tokenizer.json", '{"version"', "tokenizer.json: cannot be read as JSON"),
        ("chat_template.jinja", "{% if", "chat_template must be Jinja, got '{% if' \\("),
        ("tokenizer.json", '{"model": 3}', "the tokenizer in .*target cannot be read: "),
    ],
)
def test_a_damaged_file_is_an_error_of_one_line(file, values, message, tmp_path):
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(write(tmp_path / "target", file=file, values=values), CONFIG)
    assert "\n" not in str(caught.value)


KEYS = [*SETTINGS, "added_tokens_decoder", "extra_special_tokens", "unk_token", "add_bos_token", "padding_side"]
NAMES = ["0", "content", "name", "template"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.sampled_from([0, -1, 5, 2**63, 0.5]) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=2))
@example({"model_max_length": "long"})
@example({"chat_template": 5})
def test_random_settings_load_or_raise_a_checkpoint_error(tmp_path_factory, changes):
    folder = write(tmp_path_factory.mktemp("tokenizers"), values=SETTINGS | changes)
    with contextlib.suppress(CheckpointError):
        tokenizer = load_tokenizer(folder, CONFIG)
        assert tokenizer.decode(tokenizer.encode("Hello there", add_special_tokens=False))
