"""Writes streamed text to a terminal, with a status row below it."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text


class StatusLine:
    """A context that prints text as it comes, wrapped at words, above a row that `show` replaces.

    Rich redraws only the last row of the text and the status below it; finished rows scroll away as usual.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.text, self.status = Text(), Text(style="dim", no_wrap=True, overflow="ellipsis")
        self.live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> StatusLine:
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.live.stop()
        self.console.print(self.text)

    def show(self, status: str) -> None:
        """Replaces the status."""
        self.status.plain = status
        self._redraw()

    def write(self, text: str, style: str = "") -> None:
        """Appends text."""
        self.text.append(text, style)
        lines = self.text.split("\n", allow_blank=True)
        *rows, self.text = [row for line in lines for row in line.wrap(self.console, self.console.width)]
        for row in rows:
            self.console.print(row)
        self._redraw()

    def _redraw(self) -> None:
        self.live.update(Group(self.text, self.status), refresh=True)
