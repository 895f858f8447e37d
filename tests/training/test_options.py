"""Checks options of train/: errors that name them before compilation, locks, checkpoints by name."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path

import jax
import pytest

import eagle_jax
import train.loop.run
from eagle_jax.assets import bundled
from eagle_jax.checkpoints import CheckpointError, save_medusa_checkpoint
from eagle_jax.config import ConfigError, MedusaConfig
from eagle_jax.models import init_medusa_params
from tests.training.common import EAGLE, OPTIONS
from train.loop import places
from train.loop.options import TargetArgs
from train.loop.places import LOCK, alone_in, head_path, target_of_head

OTHER = {name: value for name, value in OPTIONS.items() if name not in EAGLE}
GIVEN = {
    "eagle3": OPTIONS, "hass": {**OTHER, "taps": (0, 1, 2)}, "medusa": OTHER, "hydra++": OTHER, "distill": OTHER,
    "regenerate": {"max_prompt": 96, "max_new_tokens": 8}, "bench_step": {}, "demo.data": {}, "target": {},
    "evaluate": {"head": "demo", "target": "demo", "heldout": ("train.jsonl",)},
}  # fmt: skip
"""Good options of every program and method."""


@pytest.fixture(scope="module")
def folder(place, tmp_path_factory):
    """Writes the files that the options name, and two targets that do not fit."""
    root = tmp_path_factory.mktemp("options")
    for name in ("target", "other", "short"):
        shutil.copytree(place / "target", root / name)
    content = json.loads((root / "target" / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    names = sorted(vocab, key=vocab.get)
    vocab[names[300]], vocab[names[301]] = 301, 300
    (root / "other" / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((root / "target" / "config.json").read_text())
    (root / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    layer = eagle_jax.load_target(root / "target").config.one_layer(tie_word_embeddings=False)
    heads = MedusaConfig("hydra", 16, 512, 3, 1, layer)
    save_medusa_checkpoint(heads, init_medusa_params(heads, jax.random.key(0)), root / "heads")
    for name in ("train", "held"):
        shutil.copy(place / f"{name}.jsonl", root)
    for name, text in (("empty", ""), ("plain", '{"text": "a"}\n'), ("mute", '{"x": 1}\n'),
                       ("asked", '{"prompt": "a"}\n')):  # fmt: skip
        (root / f"{name}.jsonl").write_text(text)
    return root


@pytest.mark.parametrize(
    ("program", "changes", "message"),
    [
        ("eagle3", dict(steps=0), "--steps must be at least 1, got 0"),
        ("eagle3", dict(rate=0.0), "--rate must be above 0, got 0.0"),
        ("eagle3", dict(seed=-1), "--seed must be from 0 to"),
        ("eagle3", dict(decay=7.0), "--decay must be at most 1, got 7.0"),
        ("eagle3", dict(draft_vocab=-1), "--draft-vocab must be at least 0, got -1"),
        ("eagle3", dict(draft_vocab=513), "--draft-vocab must be at most the target's vocabulary of 512, got 513"),
        ("eagle3", dict(rows=6, micro_batches=4), "--rows must be a multiple of 16 .* 4 times the 4 devices.* got 6"),
        ("eagle3", dict(fsdp=3), "--fsdp times --tensor must divide the 4 devices, got 3 times 1"),
        ("eagle3", dict(length=129), "--length must be at most the target's context of 128, got 129"),
        ("eagle3", dict(eval_every=2), "--eval-every must come with --heldout"),
        ("eagle3", dict(eval_tree="x"), "--eval-tree must be depth,top_k,num_nodes, got 'x'"),
        ("eagle3", dict(eta=1.0), "--eta must come with --token-loss lk_blend"),
        ("eagle3", dict(heads=3), "--heads must come with --method medusa, hydra or hydra\\+\\+, got eagle3"),
        ("eagle3", dict(taps=(1, 99, 2)), "--taps must be hidden states of the target, 0 to 2, got 99"),
        ("eagle3", dict(taps=None), "--taps must be given for a target of 2 layers, got none"),
        ("eagle3", dict(copy_layer=True, head_intermediate=8), "--copy-layer must .*: --head-intermediate 8 is not"),
        ("hass", dict(copy_layer=True, taps=None), "--copy-layer must come with --method eagle3, got hass"),
        ("hass", dict(), "--taps must come with --method eagle3, got hass"),
        ("medusa", dict(unroll=3), "--unroll must come with --method eagle3, eagle1 or hass, got medusa"),
        ("eagle3", dict(target="./other/no"), "--target ./other/no: path_or_hub_id must be .*, got other/no"),
        ("eagle3", dict(init="."), "--init . must hold config.json, got none"),
        ("eagle3", dict(heldout=("train.jsonl",)), "--heldout must be apart from --data, got .*train.jsonl in both"),
        ("eagle3", dict(data=("t*n.jsonl",), heldout=("other/../train.jsonl",)), "--heldout must be .*jsonl in both"),
        ("eagle3", dict(heldout=("empty.jsonl",)), "empty.jsonl must have a prompt of at most 24 .* \\(--length 32"),
        ("eagle3", dict(data=("train.jsonl@2", "held.jsonl")), "got none for .*held.jsonl"),
        ("medusa", dict(heads=3, eval_tree="4,1,4"), "--eval-tree must have at most 3 levels, got 4,1,4"),
        ("medusa", dict(init="heads"), "--init must be heads of --method medusa, got heads of hydra"),
        ("hydra++", dict(init="heads", heads=3, head_layers=2), "num_layers is 1 there and 2 here"),
        ("distill", dict(target_layers=(0, 2), hidden=8), "--hidden must come without --target-layers"),
        ("distill", dict(target_layers=(0, 2)), "--target-layers must .*, got 2"),
        ("distill", dict(init="demo", target_layers=(0,)), "--init must come without --target-layers"),
        ("distill", dict(init="other"), "draft model .*must have .*tokenizer"),
        ("distill", dict(init="short"), "--length must be .* 16 pos.* 32"),
        ("distill", dict(num_heads=3), "the sizes of the draft model must fit together: DecoderConfig.num_heads must"),
        ("regenerate", dict(data=("empty.jsonl",)), "empty.jsonl, which is empty"),
        ("regenerate", dict(data=("plain.jsonl", "mute.jsonl")), "got none: 1 x plain text.*; 1 x neither messages"),
        ("regenerate", dict(data=()), "--data must name at least one source, got none"),
        ("regenerate", dict(max_new_tokens=99), "--max-prompt plus --max-new-tokens must be .* 128 .* 96 plus 99"),
        ("regenerate", dict(temperatures=()), "--temperatures must be at least one number, got none"),
        ("regenerate", dict(top_p=2.0), "--top-p must be above 0 and at most 1, got 2.0"),
        ("regenerate", dict(tensor=3, data=("asked.jsonl",)), "--tensor must divide the 4 devices of a process, got 3"),
        ("regenerate", dict(head="no/such/one"), "--head no/such/one: path_or_hub_id must be .*, got no/such/one"),
        ("evaluate", dict(heldout=("plain.jsonl",)), "plain.jsonl must have a prompt of at most"),
        ("bench_step", dict(length=2), r"--length must be at least --unroll \+ 2 = 9, got 2"),
        ("demo.data", dict(data=Path("nowhere")), "without nowhere/gsm8k/train.jsonl and nowhere/gpteacher"),
        ("target", dict(data=Path("nowhere")), "--data must hold a tokenizer, got nowhere. Write it there by python"),
    ],
)
def test_bad_options_raise(folder, program, changes, message, monkeypatch):
    monkeypatch.chdir(folder)
    given = {**GIVEN[program], **changes}
    if GIVEN[program] and program != "evaluate":
        given = {"target": "./target", "data": ("train.jsonl",), "out": Path("run"), **given}
    method = program in ("eagle3", "hass", "medusa", "hydra++")
    module = importlib.import_module("train.head" if method else f"train.{program}")
    given |= {"method": program} if method else {}
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(train.loop.run.Run, "prepare", lambda this: pytest.fail("went on to compile"))
    monkeypatch.setattr(eagle_jax, "generate", lambda *_, **__: pytest.fail("generated"))
    with pytest.raises((ValueError, CheckpointError), match=message):
        module.main(module.Args(**given))
    assert sorted(folder.rglob("*")) == before


OWN = (("mark",), "a run")


def test_alone_in_raises_until_the_first_run_ends(tmp_path):
    out = tmp_path / "new" / "run"
    for _ in range(2):  # the lock file of an ended run does not count
        with alone_in(out, *OWN):
            (out / "mark").touch()
            with pytest.raises(ConfigError, match=r"no other run writes, got .*run\. Wait"), alone_in(out, *OWN):
                pytest.fail("two runs in one directory")


def test_alone_in_raises_on_other_directories_and_removes_its_own(tmp_path):
    (tmp_path / "notes.txt").touch()
    for out, message in (
        (tmp_path, r"--out must be empty or a run, got .* with other files"),
        (tmp_path / "notes.txt", r"--out must be a directory, got the file .*notes.txt"),
    ):
        with pytest.raises(ConfigError, match=message), alone_in(out, *OWN):
            pytest.fail("not our directory")
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):  # a new directory is removed if nothing was written
        with pytest.raises(ValueError, match="bad"), alone_in(tmp_path / name, *OWN):
            raise ValueError("bad")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "notes.txt"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [LOCK]


def test_paths_of_checkpoints(tmp_path):
    assert places.target_path("demo") == str(bundled("target")) and places.target_path("a/b") == "a/b"
    assert head_path("demo") == str(bundled("hass")) and head_path("demo", part="eagle3") == str(bundled("eagle3"))
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(ValueError, match=r"--init must be a run that has written a head, got "):
        head_path(str(tmp_path), "--init")
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").touch()
    assert head_path(str(tmp_path)) == head_path(str(tmp_path / "head")) == str(tmp_path / "head")
    assert target_of_head(str(tmp_path / "head")) is None
    places.note_run(tmp_path, "some/model")
    assert target_of_head(str(tmp_path / "head")) == "some/model"


def test_errors_of_sources_and_tokenizers_name_their_option(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    names = [str(tmp_path / "rows.jsonl"), "a/b"]
    assert [one.path for one in places.sources_of(names)] == names
    with pytest.raises(ValueError, match=r"^--heldout \./no\.jsonl: source must be .* got no file \./no\.jsonl"):
        places.sources_of(["./no.jsonl"], "--heldout")
    config = places.target_config("demo")
    for options, message in (
        ({"tokenizer": str(tmp_path)}, f"^--tokenizer {re.escape(str(tmp_path))} must hold a tokenizer"),
        ({"chat_template": str(tmp_path / "no.jinja")}, r"^--chat-template .* must be a Jinja file, got .*no\.jinja"),
        ({"template_args": ("a=1",)}, r"^--template-args a=1: template arguments must be .* reads \(none\), got a"),
        ({"template_args": ("a",)}, "^--template-args must be NAME=VALUE, got 'a'"),
        ({"target": "/nope"}, r"^--target /nope: path_or_hub_id must be .*, got /nope"),
    ):
        with pytest.raises((ValueError, CheckpointError), match=message):
            places.tokenizer_of(TargetArgs(**{"target": "demo", **options}), config)
