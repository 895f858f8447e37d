"""The last row of a terminal, for what changes while text streams above it.

The rows above become the scroll region (DECSTBM) for as long as there is something to show, so that text goes on where
it stood and never pushes the status away; the control sequences are those of ECMA-48 and the DEC VT100 that every
terminal in use knows.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"
_WHOLE = f"{_SAVE}\x1b[r{_RESTORE}\x1b[J"
"""All rows scroll, and nothing stands behind the text: a window that was made larger or smaller has moved the row."""
_ROOM = "\x1bD\x1b[1A"  # down and up again in the same column: the text scrolls if it stood in the last row


class StatusLine:
    """A context: the row appears with the first `show` and is gone behind it.

    Args:
      write: takes text for the terminal. shown: False shows nothing, for files and pipes.
    """

    def __init__(self, write: Callable[[str], Any], shown: bool) -> None:
        self.write = write
        self.shown = shown and os.environ.get("TERM") != "dumb"
        self.rows = 0

    def __enter__(self) -> StatusLine:
        return self

    def show(self, words: str) -> None:
        """Replaces what the row says, cut to the terminal's width; a window of another size is noticed here."""
        columns, rows = shutil.get_terminal_size()
        if not self.shown or rows < 3:
            return
        if rows != self.rows:
            self.write(f"{_WHOLE if self.rows else ''}{_ROOM}{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}")
            self.rows = rows
        self.write(f"{_SAVE}\x1b[{rows};1H{_CLEAR}{words[: columns - 1]}{_RESTORE}")

    def __exit__(self, *_: object) -> None:
        if self.rows:
            self.write(_WHOLE)
            self.rows = 0
