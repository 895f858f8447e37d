"""Programs that train the bundled pair. Not installed; run them with `python -m train.<name> [--config FILE] ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeVar

import tyro

from eagle_jax.config import load_yaml

T = TypeVar("T")


def arguments(cls: type[T], description: str | None, argv: Sequence[str] | None = None) -> T:
    """The command line as a `cls`; `--config FILE.yaml`, where it comes first, gives the defaults.

    Raises:
      ConfigError: the file has a key that `cls` has not.
    """
    rest = list(sys.argv[1:] if argv is None else argv)
    if rest[:1] == ["--config"] and len(rest) > 1:
        return tyro.cli(cls, args=rest[2:], default=load_yaml(cls, rest[1]), description=description)
    return tyro.cli(cls, args=rest, description=description)
