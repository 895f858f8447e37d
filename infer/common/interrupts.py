"""Ends a program at Ctrl-C, also while XLA compiles and Python cannot run its signal handler."""

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
"""Seconds that Ctrl-C may wait for Python before a message explains why."""
_handled = threading.Event()


def mark_handled() -> None:
    """Records that Python heard Ctrl-C; every handler calls this."""
    _handled.set()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raises `KeyboardInterrupt`, later if JAX's garbage-collector callback runs: Python drops what that raises."""
    mark_handled()
    while frame is not None:
        if frame.f_code.co_name == "_xla_gc_callback":
            again = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, number))
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Handles Ctrl-C with `interrupt`; if XLA blocks Python, prints a message and lets a second Ctrl-C end the process.

    A compilation is one step for Python, and signal handlers run between steps. Nothing changes where the shell
    ignores the signal or outside the main thread.
    """
    before = signal.getsignal(signal.SIGINT)
    usual = before in (signal.SIG_DFL, signal.default_int_handler)
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    _handled.clear()
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    wakeup = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, interrupt)
    watcher = threading.Thread(target=_watch, args=(reads,), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(wakeup)
        _handled.set()  # ends a wait of the watcher
        os.close(writes)  # ends the watcher
        watcher.join()
        os.close(reads)


def _watch(reads: int) -> None:
    """Reads signal numbers, which C writes to the pipe whatever Python's main thread does."""
    blocked = False
    while came := os.read(reads, 512):
        if signal.SIGINT not in came:
            continue
        if blocked and not _handled.is_set():
            _write("Interrupted.")
            os._exit(130)
        if blocked := not _handled.wait(PATIENCE):
            _write("Ctrl-C: XLA compiles or computes, which Python cannot stop. Press it once more to end the program.")
        else:
            _handled.clear()
        while select.select([reads], [], [], 0)[0] and os.read(reads, 512):
            pass  # two impatient signals count as one


def _write(message: str) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, f"\n{message}\n".encode())
