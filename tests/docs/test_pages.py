"""Runs the Python blocks and the commands of README and documentation, and builds the site without a warning."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import eagle_jax.core
import train.export
from eagle_jax.assets import bundled
from infer.common.programs import arguments

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in [REPOSITORY / "README.md", *sorted(DOCS.glob("*.md"))]}
SMALLER = {
    "infer.demo": "--max-new-tokens 16 --repetitions 1",
    "infer.aot": "--layers 2 --no-plain",
    "infer.bench": "--limit 1 --max-new-tokens 8 --repeats 1 --no-transformers --batches 1",
    "infer.acceptance": "--limit 1 --max-new-tokens 8 --tasks gsm8k",
    "infer.papers": "",
    "infer.tune": "--limit 1 --max-new-tokens 8 --depths 2 --top-ks 2 --nodes 4 --methods eagle3 --batches 1 "
    "--temperatures 0 --candidates 1 --repeats 5",
    "infer.cycle": "--turns 2 --repeats 1",
    "infer.rollouts": "--replies 4 --lanes 2 --median 2 --repeats 1 --tasks math",
    "train.demo.data": "",
    "train.regenerate": "--limit 24 --max-new-tokens 16 --batch 8",
    "train.head": "--steps 2 --unroll 1 --length 112 --warmup 1 --eval-every 0 --eval-prompts 1 --eval-tokens 8",
    "train.evaluate": "--prompts 1 --max-new-tokens 8",
    "train.export": "",
    "train.bench_step": "--size tiny --repeats 1",
}
"""Arguments behind those of a page (the last one given counts), so that a run takes seconds to minutes."""
LAST = {"README": None, "training": "export/config.json", "benchmarks": "report/report.md", "tuning": None,
        "evidence": "evidence/eagle3/head/config.json"}  # fmt: skip
"""Pages whose commands run in order, and the end of a path that they write."""


def blocks(text: str, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [block for language, block in found if language in languages]


def commands(text: str) -> list[str]:
    """Returns the command lines of a page, without comments, continued lines joined."""
    whole = "\n".join(blocks(text, "bash", "sh")).replace("\\\n", " ")
    lines = (line.split(" #")[0].strip() for line in whole.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def program_calls(text: str) -> list[list[str]]:
    """Returns the words of every `python -m PROGRAM OPTIONS` of a page, also within a quoted command."""
    found = (re.findall(r"python3? -m ((?:train|infer)\.[^'&|]*)", line) for line in commands(text))
    return [words for calls in found for call in calls if (words := shlex.split(call))[-1] != "..."]


def parse(words: list[str]) -> Any:
    """Parses a program's arguments: `words` begin with its module, `infer.bench` or a folder such as `infer.aot`."""
    module = importlib.import_module(words[0])
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{words[0]}.__main__")
    return arguments(module.Args, None, words[1:])


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if program_calls(text)])
def test_programs_accept_the_arguments_of_a_page(page, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    # --pair smollm2 is an argument whether or not the package of its weights is installed.
    monkeypatch.setattr("infer.common.methods.smollm2_target", lambda: Path("absent.gguf"))
    for words in program_calls(PAGES[page]):
        parse(words)
        if page in LAST:
            parse([*words, *shlex.split(SMALLER[words[0]])])


def test_make_targets_and_extras_of_the_readme_exist():
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for command in commands(PAGES["README"]):
        words = shlex.split(command)
        if words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=REPOSITORY, check=True, capture_output=True)
        elif words[0] == "pip":
            assert set(re.findall(r"\[(\w+)\]", command)) <= set(extras["optional-dependencies"])
        else:
            assert words[0] in ("git", "cd", "python"), command


def test_files_named_on_a_page_exist():
    others = [REPOSITORY / "CONTRIBUTING.md", bundled("target").parents[1] / "README.md"]
    for text in [*PAGES.values(), *(path.read_text(encoding="utf-8") for path in others)]:
        for name in re.findall(r"`((?:tests|eagle_jax|infer|train|configs|docs)/[\w/.]+)`", text):
            assert (REPOSITORY / name).exists(), name
    for link in re.findall(r"\]\(([^)#:]+)\)", PAGES["README"]):
        assert (REPOSITORY / link).exists(), link


def test_the_readme_lists_every_room_and_module():
    tree = next(text for text in blocks(PAGES["README"], "") if text.startswith("eagle_jax/"))
    lines = [line for line in tree.splitlines() if line.startswith("  ")]
    listed = {word for line in lines for words in re.findall(r"^  (\w+/)|(\w+\.py)", line) for word in words if word}
    package = REPOSITORY / "eagle_jax"
    rooms = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert listed == rooms | {path.name for path in package.glob("*.py") if not path.name.startswith("_")}


@pytest.fixture
def hub(monkeypatch):
    """Replaces downloads from the hub by the bundled pair, whose folders have the same layout."""

    def snapshot(repo_id, **options):
        return str(bundled("eagle3" if "EAGLE3" in repo_id else "target"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if blocks(text, "python")])
def test_python_of_a_page_runs_in_order(page, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profiles = [text for text in blocks(PAGES[page], "yaml") if "schema: eagle_jax" in text]
    for text in profiles:  # the profile that the page's Python reads
        (tmp_path / "profile.yaml").write_text(text, encoding="utf-8")
    names: dict[str, object] = {}
    for number, text in enumerate(blocks(PAGES[page], "python"), 1):
        exec(compile(text, f"{page}.md, Python block {number}", "exec"), names)


@pytest.fixture
def folder(tmp_path):
    """A working directory with six questions per task of the papers, and what the data program reads."""
    for name in ("configs", "docs", "eagle_jax"):
        os.symlink(REPOSITORY / name, tmp_path / name)
    pairs = [(f"What is {n} + {n}?", f"It is {2 * n}.") for n in range(400)]
    questions = [{"question_id": n, "category": "any", "turns": [pairs[n][0]]} for n in range(6)]
    replies = [{"instruction": question, "input": "", "response": answer} for question, answer in pairs]
    text = "".join(json.dumps(row) + "\n" for row in questions)
    data = tmp_path / "FOLDER"
    for name in ("gsm8k", "humaneval", "mt_bench", "alpaca", "qa", "sum", "gpteacher"):
        (data / name).mkdir(parents=True)
        (data / name / "question.jsonl").write_text(text)
    (tmp_path / "my.jsonl").write_text(text)
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in pairs]
    (data / "gsm8k" / "train.jsonl").write_text("\n".join(lines))
    (data / "gpteacher" / "instruct.json").write_text(json.dumps(replies))
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("page", LAST)
def test_commands_of_a_page_run_in_order(page, folder):
    """Each command reads what the one before it wrote; the last line of a measurement is one JSON object."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "EAGLE_JAX_TASKS": str(folder / "FOLDER")}
    for words in program_calls(PAGES[page]):
        for place, word in enumerate(words):
            if word == "PATH":
                words[place] = str(bundled(words[place - 1].removeprefix("--")))
        more = shlex.split(SMALLER[words[0]])
        done = subprocess.run([sys.executable, "-m", *words, *more], cwd=folder, env=environment, capture_output=True,
                              text=True, check=False, timeout=900)  # fmt: skip
        # Status 1 of `--check`: a profile that was tuned in a second may not hold.
        assert done.returncode == 0 or (done.returncode == 1 and "--check" in words), f"{words}: {done.stderr}"
        if words[0] != "train.demo.data":
            assert json.loads(done.stdout.strip().splitlines()[-1])
    if LAST[page]:
        assert any(str(path).endswith(LAST[page]) for path in (folder / "runs").rglob("*"))


@pytest.mark.slow
def test_exports_of_the_page_run(tmp_path):
    """The bundled head takes the place of the page's."""
    for number, words in enumerate(words for words in program_calls(PAGES["export"]) if words[0] == "train.export"):
        args = parse(words)
        if args.target is not None:
            args = dataclasses.replace(args, head=str(bundled("eagle3")), target=str(bundled("target")))
        train.export.main(dataclasses.replace(args, out=tmp_path / str(number)))
        assert (tmp_path / str(number) / "config.json").is_file(), words


@pytest.mark.slow
def test_the_site_builds_and_documents_every_public_name(tmp_path):
    """Every name of `__all__`, and every name that a Python block imports. `--quiet` would hide warnings."""
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install eagle-jax[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    anchors = re.findall(r'id="([\w.]+)"', (tmp_path / "api" / "index.html").read_text(encoding="utf-8"))
    trees = [ast.parse(block) for text in PAGES.values() for block in blocks(text, "python")]
    imported = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("eagle_jax", "infer"):
            imported |= {alias.name for alias in node.names}
    assert not {*eagle_jax.__all__, *eagle_jax.core.__all__, *imported} - {anchor.split(".")[-1] for anchor in anchors}
