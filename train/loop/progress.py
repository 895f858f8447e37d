"""How far a long program is, for terminals and for logs."""

from __future__ import annotations

import logging
import sys
import time

from tqdm import tqdm


class Progress:
    """Rows, tokens per second and time left: a bar on a terminal, elsewhere a line now and then.

    Args:
      rows: to do in all. done: of them, by an earlier call. every: seconds between lines. unit: what is counted.
    """

    def __init__(self, rows: int, done: int, every: float = 30.0, unit: str = "rows") -> None:
        self.rows, self.done, self.tokens, self.every, self.unit = rows, done, 0, every, unit
        self._first, self._start, self._last = done, time.time(), time.time()
        self._bar = tqdm(total=rows, initial=done, unit=f" {unit}", disable=not sys.stderr.isatty())
        if done:
            logging.info("%d of %d %s were there", done, rows, unit)

    @property
    def speed(self) -> float:
        """Reply tokens per second of this call."""
        return self.tokens / max(time.time() - self._start, 1e-9)

    def add(self, rows: int, tokens: int) -> None:
        """Counts a batch."""
        self.done, self.tokens = self.done + rows, self.tokens + tokens
        self._bar.update(rows)
        self._bar.set_postfix_str(f"{self.speed:.0f} tokens/s")
        if self._bar.disable and time.time() - self._last > self.every:
            self._last = time.time()
            left = (self.rows - self.done) * (self._last - self._start) / max(self.done - self._first, 1)
            logging.info(
                "%d of %d %s, %.0f tokens/s, %.0f min left", self.done, self.rows, self.unit, self.speed, left / 60
            )

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()
