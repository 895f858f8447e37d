"""Chat templates and their arguments as the programs take them, and results that another one would go on with."""

from __future__ import annotations

import copy
import types

import pytest

import eagle_jax
from eagle_jax.data.chat.tokenize import chat_text
from infer import acceptance, bench, chat, tune
from infer.common.methods import Sources, load_pair
from infer.common.programs import arguments
from infer.common.rendering import check_rendering
from tests.data.test_conversations import TEMPLATES, tokenizer_with

ASKED = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def loaded():
    return eagle_jax.load_demo()


@pytest.mark.parametrize("program", [acceptance, bench, chat, tune])
def test_every_program_takes_a_template_and_its_arguments(program, loaded, monkeypatch, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }} {{ effort }}" + TEMPLATES["chatml"])
    given = ["--chat-template", str(tmp_path / "own.jinja"), "--template-args", "effort=low"]
    monkeypatch.setattr(eagle_jax, "load_demo", lambda **_: (*loaded[:2], copy.deepcopy(loaded[2])))
    _, tokenizer = load_pair(Sources.of(arguments(program.Args, None, given)))
    assert chat_text(tokenizer, ASKED).startswith("Hi low")
    with pytest.raises(ValueError, match=r"^--template-args effrt=low: template arguments must be .* reads \(effort\)"):
        load_pair(Sources.of(arguments(program.Args, None, [*given[:-1], "effrt=low"])))
    with pytest.raises(ValueError, match=r"^--template-args must be NAME=VALUE"):
        Sources.of(arguments(program.Args, None, [*given[:-1], "effort"]))


def test_a_result_goes_on_with_the_same_prompts_only(tmp_path):
    target = types.SimpleNamespace(config=types.SimpleNamespace(eos_ids=(1,)))
    path, tokenizer = tmp_path / "result.json", tokenizer_with(TEMPLATES["chatml"])
    note = check_rendering(path, None, target, tokenizer, begun=False)
    assert check_rendering(path, note, target, tokenizer, begun=True) == note
    with pytest.raises(ValueError, match="does not hold which tokenizer and chat template"):
        check_rendering(path, None, target, tokenizer, begun=True)
    tokenizer.chat_template += " "
    tokenizer.eos_token = "<|im_end|>"
    with pytest.raises(ValueError, match="special tokens and chat template changed since it was begun"):
        check_rendering(path, note, target, tokenizer, begun=True)
