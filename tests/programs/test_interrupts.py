"""Ctrl-C in programs that run JAX: it ends the program, or a message says why it cannot yet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infer.common import interrupts

BUSY = """
import dataclasses, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background has it ignored
import jax
from infer.common import programs

@dataclasses.dataclass(frozen=True)
class Args:
    pass

def main(args):
    def billion(_, x):
        return jax.lax.fori_loop(0, 10**9, lambda i, x: x * 0.999 + 0.5, x)

    endless = jax.jit(lambda x: jax.lax.fori_loop(0, 10**9, billion, x)).lower(1.0).compile()
    print("begun", flush=True)
    if PLACE == "thread":
        threading.Thread(target=lambda: endless(1.0).block_until_ready(), daemon=True).start()
        time.sleep(600)
    endless(1.0).block_until_ready()

programs.run(main, Args, None)
"""


@pytest.mark.parametrize("place", ["main", "thread"])
def test_a_program_ends_while_xla_is_busy(place, repository):
    """In a thread: at the first Ctrl-C. In the main thread: after a message; two at once count as one."""
    command = [sys.executable, "-c", f"PLACE = {place!r}\n{BUSY}"]
    with subprocess.Popen(command, cwd=repository, text=True, stdout=-1, stderr=-1) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            time.sleep(0.5)  # until it runs
            process.send_signal(signal.SIGINT)
            if place == "main":
                time.sleep(0.2)
                process.send_signal(signal.SIGINT)
                lines = [process.stderr.readline(), process.stderr.readline()]
                assert lines[0] == "\n" and "Press Ctrl-C once more to end the program." in lines[1]
                time.sleep(0.3)
                assert process.poll() is None
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130
    assert (out, err) == (("", "\nInterrupted.\n") if place == "main" else ("\nInterrupted.\n", ""))


@pytest.mark.parametrize("program", ["infer.demo", "train.head"])
def test_ctrl_c_while_importing_ends_a_program_silently(repository, program):
    # A suite that a shell runs in the background has SIGINT ignored, and its children would inherit that.
    start = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        f"os.execv(sys.executable, [sys.executable, '-m', '{program}'])"
    )
    with subprocess.Popen([sys.executable, "-c", start], cwd=repository, stderr=subprocess.PIPE) as process:
        maps, begun = Path(f"/proc/{process.pid}/maps"), time.monotonic()
        if not maps.exists():
            time.sleep(0.7)
        while maps.exists() and b"numpy" not in maps.read_bytes():  # until the program's own imports run
            assert time.monotonic() - begun < 60, "it never came to its imports"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert err == b""


@pytest.fixture
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    signal.set_wakeup_fd(-1)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_at_once_prints_nothing(times, default_handler, capfd, monkeypatch):
    """Python may take two signals for one."""
    monkeypatch.setattr(interrupts, "PATIENCE", 0.3)
    interrupts.handle_interrupts()

    def wait():
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        wait()
    time.sleep(0.5)
    assert capfd.readouterr().err == ""


def test_an_ignored_signal_stays_ignored(default_handler):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.handle_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_interrupt_that_python_would_drop_comes_a_moment_later(default_handler):
    """Python prints and drops an exception inside JAX's callback of the garbage collector."""

    def _xla_gc_callback():
        interrupts.interrupt(signal.SIGINT, sys._getframe())

    signal.signal(signal.SIGINT, interrupts.interrupt)
    _xla_gc_callback()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(5)
