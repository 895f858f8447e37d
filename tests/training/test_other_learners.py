"""`train.head` with Medusa's and Hydra's heads, and `train.distill`: what every learner must do, and what differs."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

import eagle_jax
import train.distill
import train.features
import train.head
import train.loop.run
from eagle_jax.checkpoints import CheckpointError, save_medusa_checkpoint, save_target_checkpoint
from eagle_jax.config import ConfigError, MedusaConfig
from eagle_jax.models.decoder import init_params
from eagle_jax.models.medusa import init_medusa_params
from eagle_jax.runtime.drafters import TreeDrafter
from tests.training.runs import OPTIONS, losses
from train.loop.learners import MedusaLearner, SmallModelLearner

KINDS = [
    pytest.param("medusa", marks=pytest.mark.slow),
    pytest.param("hydra", marks=pytest.mark.slow),
    "hydra++",
    "distill",
]
"""Hydra++ has all parts of the first two, which run with the slow tests."""
EAGLE = ("unroll", "taps", "draft_vocab", "eval_tree")


def arguments(kind, place, out, **changes):
    options = {name: value for name, value in OPTIONS.items() if name not in EAGLE}
    options |= {"target": str(place / "target"), "data": (str(place / "train.jsonl"),), "out": out, "data_axis": 1}
    if kind == "distill":
        return train.distill.Args(**{**options, "layers": 1, "hidden": 8, "intermediate": 12, **changes})
    return train.head.Args(**{**options, "method": kind, "heads": 3, **changes})


def main(args):
    return (train.distill if isinstance(args, train.distill.Args) else train.head).main(args)


def trained(out, kind, target) -> TreeDrafter:
    if kind == "distill":
        return eagle_jax.load_draft_model(out / "model", target)
    return eagle_jax.load_medusa(out / "head", target)


@pytest.fixture(scope="module")
def hydra(place):
    """A run of `--method hydra++`."""
    assert main(arguments("hydra++", place, place / "hydra")) == 0
    return place / "hydra"


@pytest.fixture(scope="module")
def features(place):
    """Stored features of the target, with a tap that these learners do not read."""
    options = dict(target=str(place / "target"), data=(str(place / "train.jsonl"),), out=place / "features", taps=(1,))
    train.features.main(train.features.Args(**options, stored="float32", length=32, rows=4, dtype="float32"))
    return place / "features"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_leaves_what_drafts_losslessly_and_a_log(place, tmp_path, kind, capsys):
    out = tmp_path / "run"
    held = (str(place / "held.jsonl"),)
    assert main(arguments(kind, place, out, heldout=held, rate=1e-2, steps=8, eval_every=4)) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["steps"] == 8 and report["tau"] >= 1
    seen = losses(out)
    assert seen[-1][0] < seen[0][0]
    places = {"distill": 1}.get(kind, 3)
    assert all(len(line) == 2 + places for line in seen)
    target = eagle_jax.load_target(place / "target")
    drafter = trained(out, kind, target)
    prompts = [[7, 8, 9], [100, 20]]
    texts = [eagle_jax.generate(target, one, prompts, max_new_tokens=12).tokens for one in (drafter, None)]
    assert texts[0] == texts[1]
    measured = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines() if "tau" in line]
    assert [line["step"] for line in measured] == [4, 8]
    assert len(measured[0]["n_alpha"]) == (6 if kind == "distill" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hydra++", "distill"])
def test_meshes_micro_batches_and_recomputation_change_nothing(place, tmp_path, kind):
    same = {} if kind == "hydra++" else {"head_dim": 6}  # 2 key-value heads spread over 4 devices
    assert main(arguments(kind, place, tmp_path / "whole", **same)) == 0
    changes = (dict(data_axis=0, fsdp=2), dict(data_axis=0, tensor=2, micro_batches=2), dict(remat=True, chunk=4))
    for number, change in enumerate(changes):
        assert main(arguments(kind, place, tmp_path / str(number), **same, **change)) == 0
        np.testing.assert_allclose(losses(tmp_path / str(number)), losses(tmp_path / "whole"), rtol=1e-4, atol=1e-5)


def test_stored_features_of_any_taps_teach_the_same(place, hydra, features, tmp_path, monkeypatch):
    monkeypatch.setattr(eagle_jax, "load_target", lambda *_, **__: pytest.fail("loaded the layers of the target"))
    assert main(arguments("hydra++", place, tmp_path / "run", features=features)) == 0
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(hydra), rtol=1e-4, atol=1e-5)


def test_a_draft_model_of_the_targets_own_layers_begins_as_they_are(place, features, tmp_path):
    """Also with stored features, for which a run does not load the layers of other targets."""
    begun = dict(target_layers=(0, 1), hidden=None, intermediate=None, rate=1e-9, steps=1)
    assert main(arguments("distill", place, tmp_path / "run", features=features, **begun)) == 0
    assert losses(tmp_path / "run")[0][0] == pytest.approx(0.0, abs=1e-4)  # all layers: it is the target
    target = eagle_jax.load_target(place / "target")
    model = eagle_jax.load_draft_model(tmp_path / "run" / "model", target)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2), model.params["model"], target.params
    )
    kept = eagle_jax.generate(target, model, [[7, 8, 9]], max_new_tokens=30)
    assert kept.tau > 3  # without bfloat16 it would accept every token


def test_a_run_begins_with_the_given_weights(place, tmp_path):
    """`Run.prepare` trains `Learner.initial` (test_head_begin)."""
    target = eagle_jax.load_target(place / "target")
    small = dataclasses.replace(target.config, num_layers=1)
    params = init_params(small, jax.random.key(1))
    save_target_checkpoint(small, params, tmp_path / "small", "float32")
    for path in (place / "target").glob("tokenizer*"):
        shutil.copy(path, tmp_path / "small")
    sizes = dict(hidden=None, intermediate=None)
    model = SmallModelLearner(arguments("distill", place, tmp_path, init=str(tmp_path / "small"), **sizes))
    model.begin(target)
    heads = MedusaConfig("medusa", target.config.hidden_size, target.config.vocab_size, 3, 1)
    given = init_medusa_params(heads, jax.random.key(2))
    save_medusa_checkpoint(heads, given, tmp_path / "heads")
    medusa = MedusaLearner(arguments("medusa", place, tmp_path, init=str(tmp_path / "heads")))
    medusa.begin(target)
    for found, wanted in ((model.initial, params), (medusa.initial, given["heads"])):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2), found, wanted)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("medusa", dict(unroll=3), "--unroll is an option of --method eagle3, eagle1 or hass, got medusa"),
        ("hydra", dict(draft_vocab=9), "--draft-vocab is an option of --method eagle3, eagle1 or hass, got hydra"),
        ("eagle3", dict(), "--heads is an option of --method medusa, hydra or hydra\\+\\+, got eagle3"),
        ("medusa", dict(heads=0), "--heads must be at least 1, got 0"),
        ("medusa", dict(eval_tree="4,1,4"), "--eval-tree must have at most 3 levels, .* got 4,1,4"),
        ("medusa", dict(init="./tests"), "--init ./tests: no config.json in"),
        ("hydra++", dict(init="HERE/hydra/head", head_layers=2), "num_layers is 1 there and 2 here"),
        ("medusa", dict(init="HERE/hydra/head"), r"--init must be heads of --method medusa, got heads of hy"),
        ("distill", dict(layers=0), "--layers must be at least 1, got 0"),
        ("distill", dict(target_layers=(0, 2)), "--hidden is an option of a fresh model.* --target-layers"),
        ("distill", dict(target_layers=(0, 2), hidden=None, intermediate=None), "--target-layers must .*, got 2"),
        ("distill", dict(init="HERE/target"), "--hidden is an option of a fresh model.* --init"),
        ("distill", dict(init="demo", hidden=None, intermediate=None, target_layers=(0,)), "exclude each other"),
        ("distill", dict(init="HERE/other", hidden=None, intermediate=None), "a draft model must have its target's"),
        ("distill", dict(init="HERE/short", hidden=None, intermediate=None), "--length must be .* 16 pos.* 32"),
        ("distill", dict(num_heads=3), "the sizes of the draft model do not fit together: num_attention_heads must"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(place, hydra, tmp_path, kind, changes, message, monkeypatch):
    other = place / "other"
    if not other.exists():
        shutil.copytree(place / "target", other)
        content = json.loads((other / "tokenizer.json").read_text())
        vocab = content["model"]["vocab"]
        names = sorted(vocab, key=vocab.get)
        vocab[names[300]], vocab[names[301]] = 301, 300
        (other / "tokenizer.json").write_text(json.dumps(content))
    short = place / "short"
    if not short.exists():
        shutil.copytree(place / "target", short)
        config = json.loads((short / "config.json").read_text())
        (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    args = arguments(kind, place, tmp_path / "run")
    given = {name: value.replace("HERE", str(place)) if isinstance(value, str) else value
             for name, value in changes.items()}  # fmt: skip
    monkeypatch.setattr(train.loop.run.Run, "prepare", lambda this: pytest.fail("went on to compile"))
    with pytest.raises((ValueError, ConfigError, CheckpointError), match=message):
        main(dataclasses.replace(args, **given))
    assert not (tmp_path / "run").exists()
