"""Ctrl-C in programs that run JAX: heard wherever it comes, or answered."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from infer.common import interrupts

BUSY = """
import dataclasses, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background has it ignored
import jax
from infer.common import programs

@dataclasses.dataclass(frozen=True)
class Args:
    pass

def main(args):
    def million(_, x):
        return jax.lax.fori_loop(0, 10**6, lambda i, x: x * 0.999 + 0.5, x)

    long = jax.jit(lambda x: jax.lax.fori_loop(0, %d, million, x)).lower(1.0).compile()
    print("begun", flush=True)
    long(1.0).block_until_ready()
    print("done", flush=True)
    time.sleep(60)

programs.run(main, Args, None)
"""


@pytest.fixture
def start(repository):
    running = []

    def begin(turns):
        process = subprocess.Popen([sys.executable, "-c", BUSY % turns], cwd=repository, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
        running.append(process)
        assert process.stdout.readline() == "begun\n"
        time.sleep(1)  # until it is in there
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def test_one_more_ends_what_xla_does_not_let_python_hear_of(start):
    """One behind the line that says so: two impatient ones before it are one."""
    process = start(10**9)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    said = [process.stderr.readline(), process.stderr.readline()]
    assert said[0] == "\n" and re.match("Ctrl-C: XLA compiles .* Press it once more to end the program", said[1])
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=20)
    assert (process.returncode, rest) == (130, "\nInterrupted.\n")


def test_the_first_one_is_enough_where_xla_comes_to_an_end(start):
    process = start(3000)  # seconds, on any machine
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and out == "\nInterrupted.\n"
    assert err.count("Ctrl-C") == 1  # which was said in the meantime


def sent(times):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


def again():
    with contextlib.suppress(KeyboardInterrupt):
        sent(1)
    time.sleep(0.6)  # longer than it would be waited for
    sent(1)


def test_nothing_is_said_where_python_hears_at_once(capfd, monkeypatch):
    """Not of the second of two either, which Python may take for one; and all is as before afterwards."""
    monkeypatch.setattr(interrupts, "PATIENCE", 0.3)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threads = threading.active_count()
    try:
        for times in (1, 2):
            with pytest.raises(KeyboardInterrupt), interrupts.interruptible():
                sent(times)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert signal.set_wakeup_fd(-1) == -1 and threading.active_count() == threads
        with pytest.raises(KeyboardInterrupt), interrupts.interruptible():
            again()
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == ""


def test_an_ignored_one_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_one_that_would_be_lost_comes_a_moment_later():
    """Raised inside JAX's callback of the garbage collector it would be printed and forgotten."""

    def _xla_gc_callback():
        interrupts.interrupt(signal.SIGINT, sys._getframe())

    before = signal.signal(signal.SIGINT, interrupts.interrupt)
    try:
        try:
            _xla_gc_callback()
        except KeyboardInterrupt:
            pytest.fail("raised where JAX would have swallowed it")
        with pytest.raises(KeyboardInterrupt):
            time.sleep(5)
        with pytest.raises(KeyboardInterrupt):
            interrupts.interrupt(signal.SIGINT, None)
    finally:
        signal.signal(signal.SIGINT, before)
