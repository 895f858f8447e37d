"""The tokenizer beside a checkpoint, and those that are refused."""

from __future__ import annotations

import dataclasses

import pytest

from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError, read_target_config
from eagle_jax.data.tokenizers import load_tokenizer
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


def test_a_chat_template_may_be_given(config, tmp_path, repository):
    """Vicuna's tokenizer has none."""
    path = repository / "configs" / "templates" / "vicuna.jinja"
    tokenizer = load_tokenizer("demo", config, chat_template=path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("answers to the user's questions. USER: Hi ASSISTANT:")
    with pytest.raises(CheckpointError, match=r"no chat template at .*nowhere\.jinja: give a Jinja file"):
        load_tokenizer("demo", config, chat_template=tmp_path / "nowhere.jinja")
