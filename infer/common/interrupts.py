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
    """Records that Python received Ctrl-C; every handler calls this."""
    _handled.set()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raises `KeyboardInterrupt`, later inside JAX's garbage-collector callback: Python drops it there."""
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
def stop_event() -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C sets, to end a program in order; a second one interrupts."""
    event = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            interrupt(number, frame)
        mark_handled()
        event.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Handles Ctrl-C by `interrupt`; while XLA blocks Python, a message asks for a second one.

    A compilation is one step for Python, and signal handlers run between steps. Nothing changes where the shell ignores
    the signal.
    """
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_DFL, signal.default_int_handler):
        yield
        return
    _handled.clear()
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    wakeup = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGINT, interrupt)
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
    while received := os.read(reads, 512):
        if signal.SIGINT not in received:
            continue
        if blocked and not _handled.is_set():
            print("\nInterrupted.", file=sys.stderr, flush=True)
            os._exit(130)
        if blocked := not _handled.wait(PATIENCE):
            text = "XLA compiles or computes, which Python cannot stop. Press Ctrl-C once more to end the program."
            print(f"\n{text}", file=sys.stderr, flush=True)
        else:
            _handled.clear()
        while select.select([reads], [], [], 0)[0] and os.read(reads, 512):
            pass  # two impatient signals count as one
