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
    if frame is None or frame.f_code.co_name != "_xla_gc_callback":
        raise KeyboardInterrupt
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()


@contextlib.contextmanager
def stop_event() -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C sets, to end work in order; a second one interrupts."""
    event = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        mark_handled()
        event.set()
        signal.signal(signal.SIGINT, interrupt)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def handle_interrupts() -> None:
    """Handles Ctrl-C by `interrupt` from now on; while XLA blocks Python, a message asks for a second one.

    A compilation is one step for Python, and signal handlers run between steps. Nothing changes where the shell ignores
    the signal.
    """
    if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler):
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, interrupt)
        threading.Thread(target=_watch, args=(reads,), daemon=True).start()


def _watch(reads: int) -> None:
    """Watches the pipe to which C writes signal numbers, whatever Python's main thread does."""
    is_late = False
    while select.select([reads], [], []):
        was_late, is_late = is_late, not _handled.wait(PATIENCE)
        _handled.clear()
        if signal.SIGINT not in os.read(reads, 512):  # several at once count as one
            continue
        if is_late and was_late:
            print("\nInterrupted.", file=sys.stderr, flush=True)
            os._exit(130)
        if is_late:
            text = "XLA compiles or computes, which Python cannot stop. Press Ctrl-C once more to end the program."
            print(f"\n{text}", file=sys.stderr, flush=True)
