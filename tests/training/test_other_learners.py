"""Checks `train.head` with heads of Medusa and Hydra, and `train.distill`."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import eagle_jax
import train.distill
import train.features
import train.head
import train.loop.run
from eagle_jax.checkpoints import save_medusa_checkpoint
from eagle_jax.config import DecoderConfig, MedusaConfig, RopeConfig, TreeConfig
from eagle_jax.models import init_medusa_params, init_params
from tests.training.common import EAGLE, OPTIONS, VOCAB, check_lossless, logged, losses, report_of, save_target
from train.loop.learners import MedusaLearner, SmallModelLearner

GPT2 = DecoderConfig(
    vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=6,
    rope=RopeConfig(kind="none"), max_position=128, block="gpt2", qkv_bias=True, out_bias=True, mlp_bias=True,
    tie_word_embeddings=True, eos_ids=(1,), bos_id=0, architecture="GPT2LMHeadModel",
)  # fmt: skip


def arguments(kind, place, out, **changes):
    options = {name: value for name, value in OPTIONS.items() if name not in EAGLE}
    options |= {"target": str(place / "target"), "data": (str(place / "train.jsonl"),), "out": out, "data_axis": 1}
    if kind == "distill":
        return train.distill.Args(**{**options, "layers": 1, "hidden": 8, "intermediate": 12, **changes})
    if kind == "gpt2":
        return train.distill.Args(**{**options, "target": str(place / "gpt2"), "target_layers": (0,), **changes})
    return train.head.Args(**{**options, "method": kind, "heads": 3, **changes})


def main(args):
    return (train.distill if isinstance(args, train.distill.Args) else train.head).main(args)


@pytest.fixture(scope="module")
def features(place):
    """Stores features of the target, with a tap that these learners do not read."""
    options = dict(target=str(place / "target"), data=(str(place / "train.jsonl"),), out=place / "features", taps=(1,))
    train.features.main(train.features.Args(**options, stored="float32", length=32, rows=4, dtype="float32"))
    return place / "features"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++", "distill", "gpt2"])
def test_a_run_writes_a_lossless_drafter_and_a_log(place, tmp_path, kind, capsys):
    """Hydra++ has all parts of Medusa and Hydra. A small GPT-2 for a larger one is the textbook pair."""
    params = jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, init_params(GPT2, jax.random.key(0)))
    save_target(GPT2, params, place / "gpt2")
    held = {} if kind == "gpt2" else dict(heldout=(str(place / "held.jsonl"),), eval_every=4)
    args = arguments(kind, place, tmp_path, rate=1e-2, steps=8, **held)
    assert main(args) == 0
    report = report_of(capsys)
    assert report["steps"] == 8 and (report["tau"] >= 1 if held else "tau" not in report)
    small, seen = kind in ("distill", "gpt2"), losses(tmp_path)
    assert seen[-1][0] < seen[0][0] and all(len(line) == 2 + (1 if small else 3) for line in seen)
    target = eagle_jax.load_target(args.target)
    drafter = (eagle_jax.load_draft_model if small else eagle_jax.load_medusa)(report["head"], target)
    check_lossless(target, drafter.with_tree(TreeConfig.chain(2)))
    measured = logged(tmp_path, "tau")
    assert [line["step"] for line in measured] == ([4, 8] if held else [])
    assert all(len(line["n_alpha"]) == (6 if small else 3) for line in measured)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hydra++", "distill"])
def test_meshes_micro_batches_and_remat_do_not_change_the_losses(place, tmp_path, kind):
    same = {} if kind == "hydra++" else {"head_dim": 6}  # 2 key-value heads spread over 4 devices
    assert main(arguments(kind, place, tmp_path / "whole", **same)) == 0
    changes = (dict(data_axis=0, fsdp=2), dict(data_axis=0, tensor=2, micro_batches=2), dict(remat=True, chunk=4))
    for number, change in enumerate(changes):
        assert main(arguments(kind, place, tmp_path / str(number), **same, **change)) == 0
        np.testing.assert_allclose(losses(tmp_path / str(number)), losses(tmp_path / "whole"), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_stored_features_of_other_taps_give_the_same_training(place, features, tmp_path, monkeypatch):
    assert main(arguments("hydra++", place, tmp_path / "hydra")) == 0
    monkeypatch.setattr(eagle_jax, "load_target", lambda *_, **__: pytest.fail("loaded the layers of the target"))
    assert main(arguments("hydra++", place, tmp_path / "run", features=features)) == 0
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "hydra"), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_draft_model_of_all_target_layers_starts_as_the_target(place, features, tmp_path):
    """Stored features do not prevent it: the run loads these layers."""
    begun = dict(target_layers=(0, 1), hidden=None, intermediate=None, rate=1e-9, steps=1)
    assert main(arguments("distill", place, tmp_path / "run", features=features, **begun)) == 0
    assert losses(tmp_path / "run")[0][0] == pytest.approx(0.0, abs=1e-4)
    target = eagle_jax.load_target(place / "target")
    model = eagle_jax.load_draft_model(tmp_path / "run" / "model", target)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2), model.params["model"], target.params
    )
    kept = eagle_jax.generate(target, model, [[7, 8, 9]], max_new_tokens=30)
    assert kept.tau > 3  # without bfloat16 it would accept every token


def test_learners_start_with_the_weights_of_init(place, tmp_path):
    target = eagle_jax.load_target(place / "target")
    small = dataclasses.replace(target.config, num_layers=1)
    params = init_params(small, jax.random.key(1))
    save_target(small, params, tmp_path / "small")
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
