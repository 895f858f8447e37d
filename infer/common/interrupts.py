"""Ctrl-C as a person at a terminal means it: it is never lost, and never waits for XLA without a word."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

PATIENCE = 1.0
"""Seconds that Ctrl-C may wait for Python before a person is told why."""
_heard = threading.Event()


def heard() -> None:
    """Every handler of SIGINT says with this that it runs."""
    _heard.set()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raises `KeyboardInterrupt`, as Python's own handler does, but where it would be lost a moment later.

    JAX has a callback of the garbage collector, and what is raised there is printed and forgotten: a program that was
    told to stop went on.
    """
    heard()
    at = frame
    while at is not None:
        if at.f_code.co_name == "_xla_gc_callback":
            main = threading.main_thread().ident
            later = threading.Timer(0.05, signal.pthread_kill, (main, number))
            later.daemon = True
            later.start()
            return
        at = at.f_back
    raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """While it lasts Ctrl-C is `interrupt`'s, and a Ctrl-C that Python does not hear for `PATIENCE` is answered.

    Handlers run between two steps of Python, and what XLA compiles is one step, of minutes for a large model. Then a
    line says so, and a second Ctrl-C ends the process with status 130. Nothing changes where a shell has the signal
    ignored, or outside the main thread.
    """
    before = signal.getsignal(signal.SIGINT)
    usual = before in (signal.SIG_DFL, signal.default_int_handler)
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    _heard.clear()
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    woken = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, interrupt)
    watcher = threading.Thread(target=_watch, args=(reads,), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(woken)
        heard()  # nothing is waited for any longer
        os.close(writes)  # which ends the watcher
        watcher.join()
        os.close(reads)


def _watch(reads: int) -> None:
    """Reads the numbers of signals, which C writes as they come, whatever Python's main thread is at."""
    while came := os.read(reads, 512):
        if signal.SIGINT not in came:
            continue
        if not _heard.wait(PATIENCE):
            _drain(reads)  # what came before the line is no answer to it
            _say("Ctrl-C: what XLA compiles or computes now is finished first; once more ends the program at once.")
            while not _heard.wait(0.05):
                if signal.SIGINT in _drain(reads):
                    _say("Interrupted.")
                    os._exit(130)
        _heard.clear()
        _drain(reads)  # two that came before Python heard of either are one to its handler: none is waited for


def _drain(reads: int) -> bytes:
    """What there is to read, at once."""
    came = b""
    while select.select([reads], [], [], 0)[0] and (more := os.read(reads, 512)):
        came += more
    return came


def _say(words: str) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, f"\n{words}\n".encode())
