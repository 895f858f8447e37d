"""Applies one-line faults to a copy of the tree, and runs the tests that must fail.

    python tests/mutants.py [NAME ...]      some of them, by words of their names; `make mutants` runs all

Prints a line per fault and `killed n/n` last; the exit status is 1 where a fault survived. Every selection is part of
`make test`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mutant_list import MUTANTS, Mutant  # beside this program

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("eagle_jax", "infer", "train", "tests", "configs", "docs")


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    killed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, Path(place, folder), ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / file, place)
        for mutant in chosen:
            outcome = _outcome(mutant, Path(place))
            killed += outcome == "killed"
            print(f"{outcome:9} {mutant.name} ({mutant.file})", flush=True)
    print(f"killed {killed}/{len(chosen)}")
    return int(killed < len(chosen))


def _outcome(mutant: Mutant, place: Path) -> str:
    path = place / "eagle_jax" / mutant.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(mutant.old) != 1:
        return "no line"
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    # A fault may make a loop endless: a test that does not end is red as well.
    options = "-q -x --timeout 300 --timeout-method thread -p no:cacheprovider -m 'not slow'"
    command = [sys.executable, "-m", "pytest", *shlex.split(options)]
    environment = os.environ | {
        "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1", "JAX_COMPILATION_CACHE_DIR": str(place / "compiled"),
    }  # fmt: skip
    run = subprocess.run(
        [*command, *shlex.split(mutant.tests)], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    path.write_text(text, encoding="utf-8")
    if "+ Timeout +" in run.stdout + run.stderr:  # pytest-timeout ends the process
        return "killed"
    return {0: "SURVIVED", 1: "killed"}.get(run.returncode, f"error {run.returncode}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
