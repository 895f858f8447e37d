"""Shows how far a long program is: a bar on a terminal, elsewhere a line every half minute."""

from __future__ import annotations

import logging
import sys
from typing import Any

from tqdm import tqdm


class LogLines:
    """Writes the states of a bar as log lines."""

    def write(self, text: str) -> None:
        """Logs a state of the bar."""
        if line := text.strip():
            logging.info("%s", line)

    def flush(self) -> None:
        """Does nothing: a log line is written at once."""


def progress_bar(total: int, done: int, unit: str) -> tqdm[Any]:
    """Returns a bar over `total` units, `done` of them by an earlier call."""
    if done:
        logging.info("%d of %d %s exist already", done, total, unit)
    options: dict[str, Any] = {"total": total, "initial": done, "unit": f" {unit}"}
    if not sys.stderr.isatty():
        shape = "{n_fmt} of {total_fmt}{unit}, {rate_fmt}, {remaining} left"
        options |= {"file": LogLines(), "mininterval": 30.0, "maxinterval": 30.0, "bar_format": shape}
    return tqdm(**options)
