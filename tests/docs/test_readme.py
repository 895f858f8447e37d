"""Runs every command and every Python block of the README, and compares its tree with the package."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from infer.common.programs import arguments

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """Returns the command lines of a shell block, without comments, continued lines joined."""
    lines = (line.split(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def parse(words: list[str]) -> Any:
    """Parses a program's arguments: `words` begin with its module, `infer.bench` or a folder such as `infer.aot`."""
    module = importlib.import_module(words[0])
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{words[0]}.__main__")
    return arguments(module.Args, None, words[1:])


PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = sorted({line for language, text in BLOCKS if language == "bash" for line in commands(text)})
SHORTER = {
    "infer.demo": "--max-new-tokens 16 --repetitions 1",
    "infer.aot": "--layers 2 --no-plain",
    "infer.bench": "--limit 1 --max-new-tokens 16 --repeats 1 --out {tmp}/bench",
    "infer.tune": "--methods eagle2 --limit 1 --max-new-tokens 16 --temperatures 0 --depths 2 --top-ks 2 --nodes 4 "
    "--candidates 1 --repeats 5 --tasks math --out {tmp}/profile.yaml",
    "infer.cycle": "--turns 2 --repeats 1",
    "train.head": "--steps 2 --unroll 1 --length 96 --warmup 1 --eval-prompts 1 --eval-tokens 8 --out {tmp}/run",
    "train.bench_step": "--size tiny --length 24 --repeats 1",
}
"""Arguments that override the README's own, so that a run takes seconds."""


@pytest.mark.parametrize("count", [1, pytest.param(len(PYTHON), marks=pytest.mark.slow)])
def test_python_blocks_run_in_order(count, capsys):
    names: dict[str, object] = {}
    for number, block in enumerate(PYTHON[:count], 1):
        exec(compile(block, f"README.md, Python block {number}", "exec"), names)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists_and_takes_its_arguments(command):
    words = shlex.split(command)
    if words[:2] == ["python", "-m"]:
        parse(words[2:])
    elif words[0] == "make":
        plan = subprocess.run(["make", "-n", *words[1:]], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert plan.returncode == 0, plan.stderr
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = re.findall(r"\[(\w+)\]", command)
        assert set(extras) <= set(project["optional-dependencies"])
    else:
        assert words[0] in ("git", "cd"), f"{command!r} must be checked by this test"


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("python -m ")])
def test_program_runs(command, tmp_path):
    words = shlex.split(command)
    done = subprocess.run(
        [sys.executable, *words[1:], *SHORTER[words[2]].format(tmp=tmp_path).split()],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if name != "EAGLE_JAX_TASKS"},  # as in a fresh clone
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("{")


def test_the_tree_lists_every_room_and_module():
    tree = next(text for language, text in BLOCKS if language == "" and text.startswith("eagle_jax/"))
    lines = [line for line in tree.splitlines() if line.startswith("  ")]
    listed = {word for line in lines for word in re.findall(r"^  (\w+/)|(\w+\.py)", line) for word in word if word}
    package = REPOSITORY / "eagle_jax"
    rooms = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    modules = {path.name for path in package.glob("*.py") if not path.name.startswith("_")}
    assert listed == rooms | modules


def test_links_of_the_readme_exist():
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (REPOSITORY / link).exists(), link
