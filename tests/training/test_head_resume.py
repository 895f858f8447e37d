"""Checks `train.head` that starts from a trained head, is killed, or runs as two processes."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

import train.head
import train.loop.log
import train.loop.run
from eagle_jax.checkpoints import load_head_checkpoint
from eagle_jax.config import ConfigError
from tests.training.common import args_of, finished, head_of, kill, logged, losses, report_of, same, spawn, wait_until
from train.loop.learners import EagleLearner
from train.loop.places import LOCK


def test_init_keeps_the_taps_and_the_draft_vocabulary(place, whole, tmp_path):
    """Published heads counted their draft vocabulary over other data."""
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


def test_init_raises_on_a_head_of_another_shape(place, whole, tmp_path):
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
    with pytest.raises(ValueError, match=r"--init .*target must hold an EAGLE.*, got a whole model"):
        train.head.main(args_of(place, tmp_path / "other", init=str(place / "target")))
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_run_killed_while_it_measures_ends_with_the_same_best_head(place, tmp_path, monkeypatch):
    """Killed before the measurement, and after the best head is on disk but before the log has it."""
    options = dict(heldout=(str(place / "held.jsonl"),), data_axis=1, eval_every=2)
    calm = tmp_path / "calm"
    assert train.head.main(args_of(place, calm, **options)) == 0
    assert [line["step"] for line in logged(calm, "tau")] == [2, 4, 6]
    evaluate = train.loop.run.Run.evaluate

    def killed(this, when: str):
        found = evaluate(this) if when == "behind" or this.step != 4 else None
        if this.step == 4:
            this.checkpoints.wait()
            raise KeyboardInterrupt
        return found

    for when in ("before", "behind"):
        out = tmp_path / when
        with monkeypatch.context() as patch:
            patch.setattr(train.loop.run.Run, "evaluate", functools.partialmethod(killed, when))
            with pytest.raises(KeyboardInterrupt):
                train.head.main(args_of(place, out, **options))
        assert (out / "latest" / "4").is_dir()  # saved first
        assert [line["step"] for line in logged(out, "tau")] == [2]
        assert train.head.main(args_of(place, out, **options)) == 0
        assert logged(out, "tau") == logged(calm, "tau")
        assert losses(out) == losses(calm)
        assert same(head_of(out), head_of(calm))


@pytest.mark.slow
def test_a_finished_run_measures_prompts_that_are_given_later(place, whole, tmp_path, capsys):
    out = shutil.copytree(whole, tmp_path / "run")
    options = dict(heldout=(str(place / "held.jsonl"),), data_axis=1)
    assert train.head.main(args_of(place, out, **options)) == 0
    report = report_of(capsys)
    assert report["tau"] >= 1 and report["updates_here"] == 0 and report["head_step"] == 6
    assert train.head.main(args_of(place, out, **options)) == 0
    assert len(logged(out, "tau")) == 1


def test_read_omits_a_torn_last_line_of_a_log(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"st')
    assert train.loop.log.read(tmp_path / "log.jsonl") == [{"step": 1}]


def test_the_log_has_shares_of_sources_and_warns_of_a_small_draft_vocabulary(place, tmp_path, caplog):
    caplog.set_level("INFO")
    sources = [str(place / "train.jsonl"), str(place / "held.jsonl")]
    args = args_of(place, tmp_path / "run", data_axis=1, draft_vocab=3, length=20)
    args = dataclasses.replace(args, data=(f"{sources[0]}@1", f"{sources[1]}@3"))
    this = train.loop.run.Run(args, EagleLearner(args))
    this.prepare()
    train.loop.log.log_beginning(this, peak=1e9)
    assert re.search(r"the draft vocabulary holds only [\d.]+% of the supervised tokens", caplog.text)
    sizes = [[len(json.loads(row)["tokens"]) for row in Path(path).read_text().splitlines()] for path in sources]
    long = sum(size > 20 for some in sizes for size in some)
    assert f"{long} of 64 documents are longer than --length 20 and end there" in caplog.text
    for source, lengths, share in zip(sources, sizes, ("25.0", "75.0"), strict=True):
        text = f"{source}: {len(lengths)} documents, {sum(lengths)} tokens, {share}% of what is drawn"
        assert text in caplog.text


@pytest.mark.slow
def test_the_initial_head_stays_the_best_if_training_makes_it_worse(place, whole, tmp_path, capsys):
    options = dict(data_axis=1, init=str(whole), heldout=(str(place / "held.jsonl"),), steps=2, rate=10.0, warmup=1)
    assert train.head.main(args_of(place, tmp_path / "more", **options)) == 0
    taus = {line["step"]: line["tau"] for line in logged(tmp_path / "more", "tau")}
    assert list(taus) == [0, 2] and report_of(capsys)["head_step"] == max(taus, key=taus.get)


@pytest.mark.slow
def test_a_run_resumed_after_kill_9_ends_with_the_same_bits(place, tmp_path, capsys):
    """The kill comes during updates, saves and a measurement. No partial file stays."""
    options = dict(data_axis=1, steps=24, save_every=2, eval_every=8, heldout=(str(place / "held.jsonl"),))
    calm, out = tmp_path / "calm", tmp_path / "killed"
    kill(*spawn(place, out, **options), when=lambda: len(losses(out)) > 10)
    for each in (calm, out):
        assert train.head.main(args_of(place, each, **options)) == 0
    assert 0 < report_of(capsys)["updates_here"] < 24
    assert losses(out) == losses(calm) and len(losses(out)) == 24
    assert same(head_of(out), head_of(calm))
    left = [path.name for path in (*out.iterdir(), *(out / "data").iterdir())]
    assert not [name for name in left if "partial" in name or (name.startswith(".") and name != LOCK)]


@pytest.mark.slow  # two processes on two cores
def test_sigterm_makes_two_processes_save_the_same_step(place, tmp_path):
    """A pre-empted slice sends SIGTERM to all processes."""
    out = tmp_path / "run"
    processes = spawn(place, out, 2, fsdp=4, steps=400, save_every=400)
    wait_until(lambda: len(losses(out)) > 2, processes[0])
    for process in processes:
        process.send_signal(signal.SIGTERM)
    finished(*processes, status=128 + signal.SIGTERM)
    (saved,) = (int(path.name) for path in (out / "latest").iterdir())
    assert len(losses(out)) == saved < 400


@pytest.mark.slow  # three pairs of processes on two cores: minutes
def test_two_processes_train_as_one_and_resume_after_a_kill(place, tmp_path):
    """Both are killed with -9, resume, and end with the bits of a calm run."""
    options = dict(fsdp=4, steps=60, save_every=10, heldout=[str(place / "held.jsonl")])
    calm, out = tmp_path / "calm", tmp_path / "killed"
    kill(*spawn(place, out, 2, **options), when=(out / "latest" / "10").exists)
    assert not (out / "head").exists()
    finished(*spawn(place, out, 2, **options))
    texts = finished(*spawn(place, calm, 2, **options))
    assert losses(out) == losses(calm) and len(losses(out)) == 60
    assert same(head_of(out), head_of(calm))
    assert json.loads(texts[0].splitlines()[-1])["steps"] == 60
    assert not any(line.startswith("{") for line in texts[1].splitlines())
