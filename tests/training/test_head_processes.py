"""`train.head` as processes that are killed, pre-empted, or train as one."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

import train.head
from tests.training.runs import args_of, finished, free_port, head_of, losses, same, spawn
from train.loop.places import LOCK


def test_killed_in_the_middle_of_everything_it_ends_with_the_same_bits(place, tmp_path, capsys):
    """kill -9 while updates, saves and a measurement are under way; and nothing half-written stays behind."""
    options = dict(data_axis=1, steps=24, save_every=2, eval_every=8, heldout=(str(place / "held.jsonl"),))
    calm, out = tmp_path / "calm", tmp_path / "killed"
    process = spawn(place, out, 4, **options)
    while not (out / "log.jsonl").exists() or len(losses(out)) < 11:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.kill()
    process.wait()
    for each in (calm, out):
        assert train.head.main(args_of(place, each, **options)) == 0
    assert 0 < json.loads(capsys.readouterr().out.splitlines()[-1])["updates_here"] < 24
    assert losses(out) == losses(calm) and len(losses(out)) == 24
    assert same(head_of(out), head_of(calm))
    left = [path.name for path in (*out.iterdir(), *(out / "data").iterdir())]
    assert not [name for name in left if "partial" in name or (name.startswith(".") and name != LOCK)]


@pytest.mark.slow  # two processes on two cores
def test_sigterm_on_two_processes_saves_one_step(place, tmp_path):
    """What a pre-empted slice gets: all agree on an update, save it and end."""
    port, out = free_port(), tmp_path / "run"
    processes = [spawn(place, out, 4, port, index, fsdp=4, steps=400, save_every=400) for index in (0, 1)]
    deadline = time.time() + 300
    while not (out / "log.jsonl").exists() or len(losses(out)) < 3:
        assert processes[0].poll() is None and time.time() < deadline, processes[0].communicate()[0]
        time.sleep(0.02)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, "\n".join(texts)
    (saved,) = (int(path.name) for path in (out / "latest").iterdir())
    assert len(losses(out)) == saved < 400


@pytest.mark.slow  # three pairs of processes on two cores: minutes
def test_two_processes_train_as_one_and_resume_after_a_kill(place, tmp_path):
    """Four devices each; both are killed with -9 in mid-run, and end with the bits of a run that was not."""
    options = dict(fsdp=4, steps=60, save_every=10, heldout=[str(place / "held.jsonl")])

    def pair(out: Path) -> list[subprocess.Popen]:
        port = free_port()
        return [spawn(place, out, 4, port, index, **options) for index in (0, 1)]

    out = tmp_path / "killed"
    processes = pair(out)
    deadline = time.time() + 600
    while not (out / "latest" / "10").exists() and time.time() < deadline:
        assert processes[0].poll() is None, processes[0].communicate()[0]
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.wait()
    assert not (out / "head").exists()
    finished(*pair(out))
    texts = finished(*pair(tmp_path / "calm"))
    assert losses(out) == losses(tmp_path / "calm") and len(losses(out)) == 60
    assert same(head_of(out), head_of(tmp_path / "calm"))
    assert json.loads(texts[0].splitlines()[-1])["steps"] == 60
    assert not any(line.startswith("{") for line in texts[1].splitlines())
