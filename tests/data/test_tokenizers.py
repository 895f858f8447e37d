"""The tokenizer beside a checkpoint, and those that are refused."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError, read_target_config
from eagle_jax.data.chat.encode import encode
from eagle_jax.data.chat.tokenizers import load_tokenizer
from tests.data.test_conversations import TEMPLATES, tokenizer_with


@pytest.fixture(scope="module")
def config():
    return read_target_config(bundled("target"))


def test_the_bundled_pairs(config):
    assert len(load_tokenizer("demo", config)) == config.vocab_size == 512


def test_a_vocabulary_may_be_padded_and_never_cut(config, tmp_path):
    tokenizer = tokenizer_with(TEMPLATES["chatml"])
    tokenizer.save_pretrained(tmp_path)
    size = len(tokenizer)
    assert size < 512
    again = load_tokenizer(tmp_path, config)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template
    load_tokenizer(tmp_path, dataclasses.replace(config, vocab_size=size))
    with pytest.raises(CheckpointError, match=f"a vocabulary of {size}, and the target's vocabulary has {size - 1}: "):
        load_tokenizer(tmp_path, dataclasses.replace(config, vocab_size=size - 1))


def test_what_is_no_tokenizer_is_named(config, tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer in .*tokenizer\.json.*: give the directory"):
        load_tokenizer(tmp_path, config)
    with pytest.raises(CheckpointError, match=r"no such directory: .*nowhere"):
        load_tokenizer(tmp_path / "nowhere", config)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text('{"version"')
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path, config)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path, config)


def test_the_packages_that_a_sentencepiece_model_takes_are_named(config, tmp_path, monkeypatch):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.delitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", raising=False)
    with pytest.raises(
        CheckpointError, match=r"a tokenizer\.model, which takes .*: pip install .*sentencepiece protobuf"
    ):
        load_tokenizer(tmp_path, config)


def test_a_sentencepiece_model_is_read(config, tmp_path, repository):
    """As Vicuna-13B has it, without tokenizer.json."""
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = ["USER: Hello there ASSISTANT: Two, of course.", "A curious user and an artificial assistant."] * 30
    with (tmp_path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, vocab_size=360, model_type="bpe", byte_fallback=True,
            normalization_rule_name="identity", minloglevel=2,
        )  # fmt: skip
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, **special}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path, config, chat_template=repository / "configs" / "templates" / "vicuna.jinja")
    talk = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Two, 𝄞 of course."}]
    encoded = encode(tokenizer, talk)
    pieces = tokenizer.convert_ids_to_tokens(encoded.tokens[encoded.supervised].tolist())
    assert pieces[0] == "▁Two" and pieces[-1] == "</s>"
    assert tokenizer.decode(encoded.tokens[encoded.supervised].tolist()) == "Two, 𝄞 of course.</s>"


def test_a_chat_template_may_be_given(config, tmp_path, repository):
    """Vicuna's tokenizer has none."""
    path = repository / "configs" / "templates" / "vicuna.jinja"
    tokenizer = load_tokenizer("demo", config, chat_template=path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("answers to the user's questions. USER: Hi ASSISTANT:")
    with pytest.raises(CheckpointError, match=r"nowhere\.jinja: no such chat template: give a Jinja file"):
        load_tokenizer("demo", config, chat_template=tmp_path / "nowhere.jinja")
    for content, reason in (
        (b"{% if %}", "refuses .*Expected"),
        (b"\xff\xfe", "'utf-8' codec"),
        (b"# Me", "drops a turn"),
    ):
        (tmp_path / "other.jinja").write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"other\.jinja is no chat template that shows .*{reason}"):
            load_tokenizer("demo", config, chat_template=tmp_path / "other.jinja")
    (tmp_path / "marked.jinja").write_text(TEMPLATES["marked"])
    assert load_tokenizer("demo", config, chat_template=tmp_path / "marked.jinja").chat_template == TEMPLATES["marked"]
