"""Paths, chat templates and their arguments as programs take them."""

from __future__ import annotations

import copy

import pytest

import eagle_jax
from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.data.chat.tokenize import chat_text
from infer import acceptance, bench, chat, tune
from infer.common.labels import Label
from infer.common.methods import OPTIONS, Loader, Places, best_static, load_pair
from infer.common.programs import arguments
from tests.data.chats import TEMPLATES

TURN = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def loaded():
    return eagle_jax.load_demo()


def test_an_error_about_a_path_names_its_option(loaded, tmp_path):
    with pytest.raises(CheckpointError, match=r"^--target /nope: no such directory: /nope"):
        load_pair(Places(target="/nope"))
    for method, field in OPTIONS.items():
        option = f"--{field.replace('_', '-')}"
        with pytest.raises(CheckpointError, match=f"^{option} /nope: no such directory: /nope"):
            Loader(loaded[0], Places(**{field: "/nope"}))(method)
    with pytest.raises(ValueError, match=r"^--positions /nope: No such file or directory$"):
        best_static(Label.parse("medusa@best31"), "/nope")
    with pytest.raises(CheckpointError, match=r"^--eagle3 [^ ]*medusa holds Medusa heads\. Load them with load_medusa"):
        Loader(loaded[0], Places(eagle3=str(bundled("medusa"))))("eagle3")


@pytest.mark.parametrize("program", [acceptance, bench, chat, tune])
def test_every_program_takes_a_template_and_its_arguments(program, loaded, monkeypatch, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }} {{ effort }}" + TEMPLATES["chatml"])
    given = ["--chat-template", str(tmp_path / "own.jinja"), "--template-args", "effort=low"]
    monkeypatch.setattr(eagle_jax, "load_demo", lambda **_: (*loaded[:2], copy.deepcopy(loaded[2])))
    _, tokenizer = load_pair(arguments(program.Args, None, given))
    assert chat_text(tokenizer, TURN).startswith("Hi low")
    for wrong, message in (
        ("effrt=low", r"--template-args effrt=low: template arguments must be .* reads \(effort\)"),
        ("effort", "--template-args must be NAME=VALUE"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            load_pair(arguments(program.Args, None, [*given[:-1], wrong]))
