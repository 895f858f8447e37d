"""Checks `train.head` from rows to a saved head: exact resumption, meshes, errors of a run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import eagle_jax
import train.features
import train.head
import train.loop.run
import train.loop.training
from eagle_jax import load_tokenizer
from eagle_jax.checkpoints import CheckpointError, read_target_config
from eagle_jax.config import TreeConfig
from eagle_jax.parallel import make_mesh
from tests.training.common import args_of, check_lossless, head_of, logged, losses, replaced, report_of, same
from train.loop.setup import held_prompts


def test_a_run_writes_a_lossless_head_and_a_log(place, capsys, monkeypatch):
    out = place / "evaluated"
    advance = train.loop.run.Run.advance

    def checking(this):
        assert this.step < 5 or (out / "head" / "config.json").is_file(), "the first measurement writes a head"
        return advance(this)

    monkeypatch.setattr(train.loop.run.Run, "advance", checking)
    args = args_of(place, out, heldout=(str(place / "held.jsonl"),), data_axis=1, eval_every=4, tensorboard=True)
    assert train.head.main(args) == 0
    report = report_of(capsys)
    assert report["steps"] == 6 and np.isfinite(report["loss"]) and report["tau"] >= 1
    assert losses(out)[-1][0] == report["loss"]
    measured = logged(out, "tau")
    assert [line["step"] for line in measured] == [4, 6]
    assert report["tau"] == pytest.approx(max(line["tau"] for line in measured), abs=1e-3)
    assert report["head_step"] == max(measured, key=lambda line: (line["tau"], -line["step"]))["step"]
    assert sum(path.stat().st_size for path in (out / "tensorboard").iterdir()) > 500
    target = eagle_jax.load_target(place / "target")
    check_lossless(target, eagle_jax.load_drafter(out / "head", target, TreeConfig(2, 2, 3)))


def test_a_head_may_begin_with_the_targets_last_layer(place, tmp_path, monkeypatch):
    monkeypatch.setattr(train.loop.run.Run, "_scale", lambda *_: jnp.full((48,), 4.0))
    args = args_of(place, tmp_path / "run", copy_layer=True, steps=1, rate=1e-9, data_axis=1)
    assert train.head.main(args) == 0
    head = {name: weight.astype(np.float32) for name, weight in head_of(args.out).items()}
    layer = eagle_jax.load_target(place / "target").params["layers_1"]
    for name in ("mlp.down_proj", "self_attn.o_proj"):
        part, leaf = name.split(".")
        np.testing.assert_allclose(head[f"midlayer.{name}.weight"], layer[part][leaf]["weight"], rtol=1e-2, atol=1e-2)
    # The scale of the features is folded into `fc` at the end: what was the identity on the highest tap is it again.
    np.testing.assert_allclose(np.mean(np.diag(head["fc.weight"][:, -16:])), 1, atol=0.1)


def test_a_stopped_run_resumes_to_the_same_bits(place, whole, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    advance = train.loop.run.Run.advance

    def stopped_in_third(this):
        if this.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(this)

    args = args_of(place, out, data_axis=1)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        patch.setattr(train.loop.run.Run, "advance", stopped_in_third)
        assert train.head.main(args) == 128 + signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert len(losses(out)) == 3 and not (out / "head").exists()
    shutil.copytree(out, tmp_path / "other")
    assert train.head.main(args) == 0
    assert losses(out) == losses(whole)
    assert same(head_of(out), head_of(whole))
    # On another mesh: sums in another order, the same run.
    assert train.head.main(args_of(place, tmp_path / "other", fsdp=2, tensor=2)) == 0
    np.testing.assert_allclose(losses(tmp_path / "other"), losses(whole), rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match=r"--out must be new or .* got .* \(rate was 0.003, is 0.001\)"):
        train.head.main(args_of(place, out, data_axis=1, rate=1e-3))
    capsys.readouterr()
    assert train.head.main(args) == 0  # nothing is left to do: the same report
    again = report_of(capsys)
    assert (again["loss"], again["updates_here"]) == (losses(whole)[-1][0], 0)
    with pytest.raises(CheckpointError, match=r"--steps must be at least 6, as .* has, got 5"):
        train.head.main(args_of(place, out, data_axis=1, steps=5))


def test_a_resumed_run_raises_if_contents_changed(place, whole, tmp_path):
    """More rows change the draft vocabulary and the position in the data. Training may change a target."""
    shutil.copytree(whole, tmp_path / "run")
    data, weights, settings = (
        place / name for name in ("train.jsonl", "target/model.safetensors", "target/tokenizer_config.json")
    )
    tensors = safetensors.numpy.load_file(weights)
    tensors["model.layers.1.self_attn.q_proj.weight"] += 0.5
    tokens = json.dumps(json.loads(settings.read_text()) | {"eos_token": "<|user|>"}).encode()
    for path, content, message in (
        (data, data.read_bytes() + (place / "held.jsonl").read_bytes(), "contents of data was .* tokens, is .* tokens"),
        (settings, tokens, r"special tokens was .*end.*, is .*user"),
        (weights, safetensors.numpy.save(tensors), r"\(weights of target was \w{16}, is \w{16}\)"),
    ):
        with replaced(path, content), pytest.raises(CheckpointError, match=message):
            train.head.main(args_of(place, tmp_path / "run", data_axis=1, steps=8))


def test_held_out_prompts_end_where_a_reply_begins(place):
    """They include the template's marks before a reply."""
    row = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}
    (place / "asked.jsonl").write_text(json.dumps(row) + "\n")
    tokenizer = load_tokenizer(str(place / "target"), read_target_config(place / "target"))
    text = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
    sources = (str(place / "held.jsonl"), str(place / "asked.jsonl"))
    prompts = held_prompts(args_of(place, place / "never", heldout=sources, eval_prompts=3), tokenizer, make_mesh())
    held = [json.loads(line)["tokens"][:5] for line in (place / "held.jsonl").read_text().splitlines()]
    assert prompts == [held[0], tokenizer.encode(text, add_special_tokens=False), held[1]]


@pytest.mark.slow
def test_a_batch_with_nan_loss_stops_the_run_and_the_error_names_its_rows(place, tmp_path, monkeypatch):
    """The run finishes a checkpoint in progress and saves nothing after it."""
    out, seen = tmp_path / "run", []
    check = train.loop.training.check_update

    def poisoned(this, step, report, documents):
        seen.append({int(document) for document in documents[documents >= 0]})
        return check(this, step, report._replace(loss=report.loss + float("nan")) if step == 3 else report, documents)

    monkeypatch.setattr(train.loop.training, "check_update", poisoned)
    rows = (place / "train.jsonl").read_text()
    unusable = '{"tokens": [7, 8, 9], "supervised": []}\n'  # left out: the numbers of documents are not those of rows
    (place / "gaps.jsonl").write_text(2 * unusable + rows)
    args = dataclasses.replace(args_of(place, out, data_axis=1), data=(str(place / "gaps.jsonl"),))
    message = r"got nan and .* at step 3\. The checkpoint of step 2 is kept\. Lower --rate"
    with pytest.raises(ValueError, match=message) as error:
        train.head.main(args)
    named = re.search(r"gaps.jsonl ([\d ]+)\.", str(error.value)).group(1)
    assert {int(number) for number in named.split()} == {document + 2 for document in seen[-1]}
    assert 0 < len(seen[-1]) < 60
    assert sorted(path.name for path in (out / "latest").iterdir()) == ["2"]
    assert not (out / "head").exists()
    with pytest.raises(ValueError, match=r"at most --max-gradient 1e-06, got .*No checkpoint had been saved"):
        train.head.main(dataclasses.replace(args, out=tmp_path / "limit", max_gradient=1e-6))


@pytest.mark.slow
def test_stored_features_give_the_same_training(place, whole, tmp_path, capsys, monkeypatch):
    out = tmp_path / "features"
    options = dict(
        target=str(place / "target"), data=(str(place / "train.jsonl"),), out=out, taps=(0, 1, 2), stored="float32",
        length=32, shard_tokens=200, rows=4, dtype="float32",
    )  # fmt: skip
    write = lambda **changes: train.features.main(train.features.Args(**{**options, **changes}))  # noqa: E731
    write()
    report, shards = report_of(capsys), sorted(out.glob("features-*.npy"))
    assert len(shards) == report["shards"] > 2
    written = [path.read_bytes() for path in shards]
    assert sum(map(len, written)) == report["bytes"] + 128 * len(shards)  # NumPy's header
    shards[1].unlink()
    stamp = shards[0].stat().st_mtime_ns
    write()  # only the missing shard
    assert [path.read_bytes() for path in shards] == written and shards[0].stat().st_mtime_ns == stamp
    args = args_of(place, tmp_path / "run", data_axis=1, features=out)
    with monkeypatch.context() as patch:  # nothing runs the target: its layers need not fit
        patch.setattr(eagle_jax, "load_target", lambda *_, **__: pytest.fail("loaded the layers of the target"))
        assert train.head.main(args) == 0
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(whole), rtol=1e-4, atol=1e-5)
    args = dataclasses.replace(args, out=tmp_path / "other")
    with pytest.raises(ValueError, match=r"taps of .* must be \(0, 1, 1\), as in this run, got \(0, 1, 2\)"):
        train.head.main(dataclasses.replace(args, taps=(0, 1, 1)))
    shards[1].unlink()
    with pytest.raises(ValueError, match=r"features must hold all shards, got \d+ of \d+\. Run train\.features"):
        train.head.main(args)
    with pytest.raises(ValueError, match="--out must hold features of this call's data"):
        write(stored="float16")
    weights = place / "target" / "model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    norm = safetensors.numpy.save({**tensors, "model.norm.weight": tensors["model.norm.weight"] + 0.5})
    with replaced(weights, norm):
        with pytest.raises(ValueError, match="--out must hold features of this call's data"):
            write()
        with pytest.raises(ValueError, match=r"norm and lm_head of .* must be \w{16}, .* got \w{16}\. Write"):
            train.head.main(args)
    assert not (tmp_path / "other" / "head").exists()


def test_features_of_another_quantisation_are_an_error(place, tmp_path):
    """int4 keeps embedding and lm_head in int8, so the fingerprint of these is that of an int8 target."""
    out = tmp_path / "features"
    options = dict(target=str(place / "target"), data=(str(place / "train.jsonl"),), weights="int8", dtype="float32")
    train.features.main(train.features.Args(**options, out=out, taps=(0, 1, 2), length=32))
    args = args_of(place, tmp_path / "run", data_axis=1, features=out)
    with pytest.raises(ValueError, match=r"quantisation of the target .* must be int4, .* got int8\. Give --weights"):
        train.head.main(dataclasses.replace(args, weights="int4"))
    with pytest.raises(ValueError, match=r"dtype of the target .* must be bfloat16, .* got float32\. Give --dtype"):
        train.head.main(dataclasses.replace(args, weights="int8", dtype="bfloat16"))
    assert not (tmp_path / "run" / "head").exists()
