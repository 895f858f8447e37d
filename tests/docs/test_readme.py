"""The README is true: every command and every Python block in it is run, and its tree lists what is there.

Of the pages in docs/ that name commands, every command parses.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from infer.common.programs import arguments

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """The command lines of a shell block, comments removed, continued lines joined."""
    lines = (line.split(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [line for language, text in BLOCKS if language in ("bash", "sh") for line in commands(text)]
PROGRAMS = [line for line in COMMANDS if line.startswith("python -m ")]
# Added behind the README's own arguments (the last one given counts), so that a run takes seconds.
SHORTER = {
    "infer.demo": "--max-new-tokens 16 --repetitions 1",
    "infer.aot": "--layers 2 --no-plain",
    "infer.bench": "--limit 1 --max-new-tokens 16 --repeats 1 --out {tmp}/bench",
    "infer.tune": "--methods eagle2 --limit 1 --max-new-tokens 16 --temperatures 0 --depths 2 --top-ks 2 --nodes 4 "
    "--widths 1,5 --candidates 1 --repeats 1 --turns 2 --tasks math --out {tmp}/profile.yaml",
    "infer.cycle": "--turns 2 --repeats 1",
    "train.head": "--steps 2 --unroll 1 --length 96 --warmup 1 --eval-prompts 1 --eval-tokens 8 --out {tmp}/run",
    "train.bench_step": "--size tiny --no-compile --repeats 1",
}


def test_blocks_have_a_language_that_is_checked():
    assert {language for language, _ in BLOCKS} <= {"python", "bash", "sh", "", "yaml", "json"}
    assert PYTHON
    assert {"make demo", "make test"} <= set(COMMANDS)


@pytest.mark.parametrize("count", [1, pytest.param(len(PYTHON), marks=pytest.mark.slow)])
def test_python_blocks_run_in_order(count, capsys):
    names: dict[str, object] = {}
    for number, block in enumerate(PYTHON[:count], 1):
        exec(compile(block, f"README.md, Python block {number}", "exec"), names)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_command_exists_and_takes_its_arguments(command):
    words = shlex.split(command)
    while "=" in words[0]:  # NAME=value before the program
        words.pop(0)
    if words[:2] == ["python", "-m"]:
        module = importlib.import_module(words[2])
        arguments(module.Args, None, words[3:])
    elif words[0] == "make":
        plan = subprocess.run(["make", "-n", *words[1:]], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert plan.returncode == 0, plan.stderr
    elif words[:2] == ["pip", "install"]:
        known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = re.findall(r"\[([\w,-]+)\]", command)
        assert {extra for group in extras for extra in group.split(",")} <= set(known["optional-dependencies"])
    elif len(words) == 1 and "/" in words[0]:
        assert os.access(REPOSITORY / words[0], os.X_OK)
    elif words[0] in ("git", "cd"):
        pass  # how one gets here
    else:
        pytest.fail(f"say in this test how {command!r} is checked")


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(set(PROGRAMS)))
def test_programs_run(command, tmp_path):
    words = shlex.split(command)
    assert words[2] in SHORTER, f"say in SHORTER how {words[2]} ends within seconds"
    run = subprocess.run(
        [sys.executable, *words[1:], *SHORTER[words[2]].format(tmp=tmp_path).split()],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if name != "EAGLE_JAX_TASKS"},  # as in a fresh clone
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith("{")


def named_commands(page: str) -> list[str]:
    """`python -m PROGRAM OPTIONS` wherever it stands in a block of the page, also within a quoted command."""
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [
        found.strip()
        for block in blocks
        for line in commands(block)
        for found in re.findall(r"python3? -m ((?:train|infer)\.[^'&]*)", line)
    ]


PAGES = sorted(str(path.relative_to(REPOSITORY / "docs")) for path in (REPOSITORY / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", [page for page in PAGES if named_commands(page)])
def test_every_command_of_a_page_takes_its_arguments(page, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    found = named_commands(page)
    for command in found:
        module, *words = shlex.split(command)
        if words[-1:] != ["..."]:
            arguments(importlib.import_module(module).Args, None, words)


def test_the_tree_lists_what_is_there():
    tree = next(text for language, text in BLOCKS if language == "" and text.startswith("eagle_jax/"))
    listed = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.startswith("  ") and line.split()}
    package = REPOSITORY / "eagle_jax"
    there = {path.name for path in package.iterdir() if path.suffix in ("", ".py") and not path.name.startswith("_")}
    assert listed == there


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (REPOSITORY / link).exists(), link


def test_the_pages_with_commands_are_found():
    found = {page for page in PAGES if named_commands(page)}
    assert found >= {"training.md", "pod.md", "export.md", "tuning.md", "benchmarks.md", "results.md"}
