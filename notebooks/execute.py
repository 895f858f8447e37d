"""Executes notebooks and keeps their outputs: `python -m notebooks.execute 01 02 03`.

Each notebook runs from its first cell in a kernel of its own, on the CPU, and is written as a whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import tyro

from eagle_jax.checkpoints import write_whole
from infer.common.programs import run

FOLDER = Path(__file__).parent
TIMEOUT = 1800
"""Most seconds of a cell."""


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments.

    Attributes:
      which: first letters of the names of notebooks, such as 01; none selects all.
    """

    which: tyro.conf.Positional[tuple[str, ...]] = ()


def main(args: Args) -> None:
    """Executes them in order."""
    for path in chosen(args.which):
        print(f"{path.name} ...", file=sys.stderr, flush=True)
        write_whole(path, text_of(executed(path)))


def chosen(which: tuple[str, ...]) -> list[Path]:
    """Returns the paths of the notebooks whose names begin with `which`.

    Raises:
      ValueError: no notebook has such a name.
    """
    every = sorted(FOLDER.glob("*.ipynb"))
    if unknown := [name for name in which if not any(path.name.startswith(name) for path in every)]:
        raise ValueError(f"which must be the beginning of {', '.join(p.stem for p in every)}, got {unknown[0]!r}")
    return [path for path in every if not which or path.name.startswith(which)]


def executed(path: Path) -> Any:
    """Runs a notebook and returns it with its new outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    paths = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    settings = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": paths,
        "TQDM_DISABLE": "1",
        "NO_COLOR": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",  # XLA's notes on slow compilation
        "PYTHONWARNINGS": "ignore",  # tqdm's warnings contain paths of this machine
    }
    client = NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", coalesce_streams=True,
                            resources={"metadata": {"path": str(FOLDER)}})  # fmt: skip
    client.execute(env=os.environ | settings)
    for number, cell in enumerate(notebook.cells):
        cell.metadata = {name: value for name, value in cell.metadata.items() if name != "execution"}
        cell.id = f"cell{number:02d}"
    return notebook


def text_of(notebook: Any) -> bytes:
    """Returns the bytes of the notebook's file."""
    return (json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n").encode()


if __name__ == "__main__":
    run(main, Args, __doc__)
