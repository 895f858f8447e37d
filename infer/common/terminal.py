"""Shows replies in a terminal as they come: accepted drafts in green, and a status row below."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from eagle_jax.data.chat import TextStream
from eagle_jax.runtime.generation import StreamChunk


def stdout_console(*, status: bool = True) -> Console:
    """Returns a console on stdout, without status rows for a file. Rich follows NO_COLOR and FORCE_COLOR."""
    return Console(highlight=False, force_interactive=None if status and sys.stdout.isatty() else False)


class ReplyView:
    """Writes the chunks of one reply, as a context, and ends its last line.

    On an interactive console the text is wrapped at words, above a row that `show` replaces. Rich redraws only the last
    row of the text and the status below it.
    """

    def __init__(self, console: Console, tokenizer: Any) -> None:
        self.console, self.stream = console, TextStream(tokenizer)
        self.text, self.status = Text(), Text(style="dim", no_wrap=True, overflow="ellipsis")
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_interactive else None

    def __enter__(self) -> ReplyView:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.write(self.stream.end())
        if self.live:
            self.live.stop()
        self.console.print(self.text)

    def push(self, chunk: StreamChunk) -> None:
        """Writes the text of a chunk."""
        self.write(self.stream.push(chunk.tokens[: chunk.drafted]), "green")
        self.write(self.stream.push(chunk.tokens[chunk.drafted :]))

    def show(self, status: str) -> None:
        """Replaces the status."""
        self.status.plain = status
        self._redraw()

    def write(self, text: str, style: str = "") -> None:
        """Appends text."""
        if not self.live:
            self.console.out(text, style=style, end="", highlight=False)
            return
        self.text.append(text, style)
        lines = self.text.split("\n", allow_blank=True)
        *rows, self.text = [row for line in lines for row in line.wrap(self.console, self.console.width)]
        for row in rows:
            self.console.print(row)
        self._redraw()

    def _redraw(self) -> None:
        if self.live:
            self.live.update(Group(self.text, self.status), refresh=True)
