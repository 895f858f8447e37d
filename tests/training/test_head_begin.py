"""`train.head` that begins with a trained head, is killed while it measures, or meets another run."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import train.head
import train.loop.log
import train.loop.run
from eagle_jax.checkpoints import load_head_checkpoint
from eagle_jax.config import ConfigError
from tests.training.runs import args_of, head_of, losses, same
from train.loop.learners import EagleLearner


class Killed(BaseException):
    """What no program catches, in place of kill -9."""


def measured(out) -> list[dict]:
    return [line for line in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if "tau" in line]


def test_a_trained_head_is_trained_on(place, whole, tmp_path):
    """With its own taps and draft vocabulary: those of published heads were counted over other data."""
    part = [json.loads(line) for line in (place / "train.jsonl").read_text().splitlines()][:20]
    (place / "part.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    args = args_of(place, tmp_path / "more", taps=None, draft_vocab=None, data_axis=1, init=str(whole / "head"))
    args = dataclasses.replace(args, data=(str(place / "part.jsonl"),))
    this = train.loop.run.Run(args, EagleLearner(args))
    this.prepare()
    config, given = load_head_checkpoint(whole / "head", this.target.config, "float32")
    assert (config.taps, config.draft_vocab_size) == ((0, 1, 2), 64) == (this.learner.taps, this.learner.draft_vocab)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), this.finished_head(), given)
    kept = set((given["d2t"] + np.arange(64)).tolist())
    supervised = [token for row in part for token in row["tokens"][row["supervised"][0][0] :]]
    assert this.coverage == pytest.approx(sum(token in kept for token in supervised) / len(supervised))


def test_a_head_of_another_shape_is_refused_as_init(place, whole, tmp_path):
    head = str(whole / "head")
    for changes, message in (
        (dict(taps=(0, 1, 1)), r"taps is \(0, 1, 2\) there and \(0, 1, 1\) here"),
        (dict(draft_vocab=65), r"draft_vocab_size is 64 there and 65 here\. Give"),
        (dict(fc_norm=True), r"--init must fit this run, got .*: fc_norm is False there and True here\. Give"),
        (dict(head_intermediate=8), r"intermediate_size is 24 there and 8 here\. Give"),
        (dict(method="hass", taps=None, draft_vocab=None), r"kind is eagle3 there and eagle1 here"),
    ):
        with pytest.raises(ConfigError, match=message):
            train.head.main(args_of(place, tmp_path / "other", init=head, **changes))
    with pytest.raises(ValueError, match=r"(?s)--init demo: .*hidden size is 256, the target's 16"):
        train.head.main(args_of(place, tmp_path / "other", init="demo"))
    with pytest.raises(ValueError, match=r"--init .*target holds a whole model"):
        train.head.main(args_of(place, tmp_path / "other", init=str(place / "target")))
    assert not (tmp_path / "other").exists()


@pytest.mark.slow  # killed at every other place it is in test_head_program
def test_killed_while_it_measures_a_run_ends_with_the_same_best_head(place, tmp_path, monkeypatch):
    """Before the measurement, and when the best head is on disk and the log does not know of it."""
    options = dict(heldout=(str(place / "held.jsonl"),), data_axis=1, eval_every=2)
    calm = tmp_path / "calm"
    assert train.head.main(args_of(place, calm, **options)) == 0
    taus = [(line["step"], line["tau"]) for line in measured(calm)]
    assert [step for step, _ in taus] == [2, 4, 6]
    evaluate = train.loop.run.Run.evaluate

    def killed(this, when: str):
        found = evaluate(this) if when == "behind" or this.step != 4 else None
        if this.step == 4:
            this.checkpoints.wait()
            raise Killed
        return found

    for when in ("before", "behind"):
        out = tmp_path / when
        with monkeypatch.context() as patch:
            patch.setattr(train.loop.run.Run, "evaluate", functools.partialmethod(killed, when))
            with pytest.raises(Killed):
                train.head.main(args_of(place, out, **options))
        assert (out / "latest" / "4").is_dir()  # saved first
        assert [line["step"] for line in measured(out)] == [2]
        assert train.head.main(args_of(place, out, **options)) == 0
        assert [(line["step"], line["tau"]) for line in measured(out)] == taus
        assert losses(out) == losses(calm)
        assert same(head_of(out), head_of(calm))


def test_a_finished_run_is_measured_when_prompts_are_given_later(place, whole, tmp_path, capsys):
    out = shutil.copytree(whole, tmp_path / "run")
    options = dict(heldout=(str(place / "held.jsonl"),), data_axis=1)
    assert train.head.main(args_of(place, out, **options)) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["tau"] >= 1 and report["updates_here"] == 0 and report["head_step"] == 6
    assert train.head.main(args_of(place, out, **options)) == 0
    assert len(measured(out)) == 1  # once is enough


def test_a_log_is_read_without_the_line_that_a_kill_tore(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"st')
    assert train.loop.log.read(tmp_path / "log.jsonl") == [{"step": 1}]


def test_the_log_names_shares_of_sources_and_a_small_draft_vocabulary(place, tmp_path, caplog):
    caplog.set_level("INFO")
    sources = [str(place / "train.jsonl"), str(place / "held.jsonl")]
    args = args_of(place, tmp_path / "run", data_axis=1, draft_vocab=3, length=20)
    args = dataclasses.replace(args, data=(f"{sources[0]}@1", f"{sources[1]}@3"))
    this = train.loop.run.Run(args, EagleLearner(args))
    this.prepare()
    train.loop.log.log_beginning(this, peak=1e9)
    assert re.search(r"the draft vocabulary holds only [\d.]+% of the supervised tokens", caplog.text)
    long = sum(len(json.loads(row)["tokens"]) > 20 for path in sources for row in Path(path).read_text().splitlines())
    assert f"{long} of 64 documents are longer than --length 20 and end there" in caplog.text
    for source, documents, share in zip(sources, (60, 4), ("25.0", "75.0"), strict=True):
        tokens = sum(len(json.loads(line)["tokens"]) for line in Path(source).read_text().splitlines())
        assert f"{source}: {documents} documents, {tokens} tokens, {share}% of what is drawn" in caplog.text


def test_a_head_that_training_makes_worse_stays_the_best(place, whole, tmp_path, capsys):
    """The initial weights of `--init` are measured as well."""
    options = dict(data_axis=1, init=str(whole), heldout=(str(place / "held.jsonl"),), steps=2, rate=10.0, warmup=1)
    assert train.head.main(args_of(place, tmp_path / "more", **options)) == 0
    taus = [(line["step"], line["tau"]) for line in measured(tmp_path / "more")]
    assert [step for step, _ in taus] == [0, 2]
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["head_step"] == max(taus, key=lambda each: (each[1], -each[0]))[0]
