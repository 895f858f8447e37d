"""Runs every Python block of the documentation, parses its commands, and builds the site without a warning."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import eagle_jax
import train.export
from eagle_jax.assets import bundled
from eagle_jax.runtime.profile import ProfileFile
from eagle_jax.settings import load_yaml
from tests.docs.test_readme import REPOSITORY, commands, parse

pytestmark = pytest.mark.slow  # pages and programs for TPU: make test-all

DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CARD = "eagle_jax/assets/README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def blocks(path: Path, *languages: str) -> list[str]:
    return [text for found, text in BLOCK.findall(path.read_text(encoding="utf-8")) if found in languages]


def program_calls(path: Path) -> list[list[str]]:
    """Returns the words of every `python -m PROGRAM OPTIONS` of a page, also within a quoted command."""
    lines = [line for text in blocks(path, "bash", "sh") for line in commands(text)]
    return [shlex.split(call) for line in lines for call in re.findall(r"python3? -m ((?:train|infer)\.[^'&]*)", line)]


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in PAGES if program_calls(path)])
def test_commands_of_a_page_take_their_arguments(path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    for words in program_calls(path):
        if words[-1] != "...":
            parse(words)


@pytest.fixture
def hub(monkeypatch):
    """Replaces downloads from the hub by the bundled pair, whose folders have the same layout."""

    def snapshot(repo_id, **options):
        return str(bundled("eagle3" if "EAGLE3" in repo_id else "target"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)


@pytest.mark.slow
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in PAGES if blocks(path, "python")])
def test_python_of_a_page_runs_in_order(path, hub, tmp_path, monkeypatch, repository, capsys):
    monkeypatch.chdir(tmp_path)
    if path.name == "tuning.md":  # its Python reads the profile that its command writes
        (tmp_path / "profile.yaml").write_text((DOCS / "measured" / "profile.yaml").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for number, text in enumerate(blocks(path, "python"), 1):
        exec(compile(text, f"{path.name}, Python block {number}", "exec"), names)


def test_profiles_of_pages_can_be_read(tmp_path):
    texts = [text for path in PAGES for text in blocks(path, "yaml")]
    for text in texts:
        assert isinstance(yaml.safe_load(text), dict)
    profiles = [text for text in texts if "schema: eagle_jax" in text]
    assert profiles
    for text in profiles:
        (file := tmp_path / "profile.yaml").write_text(text, encoding="utf-8")
        assert len(load_yaml(ProfileFile, file).entries) == text.count("- {")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built documentation. `--quiet` would hide warnings from `--strict`."""
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install eagle-jax[docs]")
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)], cwd=REPOSITORY,
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_public_and_imported_names_are_in_the_reference(site):
    """Every name of `__all__`, and every name that a Python block imports from the package."""
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    documented = {anchor.split(".")[-1] for anchor in re.findall(r'id="([\w.]+)"', page)}
    imported = set()
    for path in [REPOSITORY / "README.md", *PAGES]:
        for text in blocks(path, "python"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("eagle_jax", "infer"):
                    imported |= {alias.name for alias in node.names}
    assert not {*eagle_jax.__all__, *imported} - documented


@pytest.mark.parametrize("path", [*PAGES, *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", CARD))])
def test_files_named_on_a_page_exist(path):
    """A test, module or configuration that moves must move on the page."""
    for name in re.findall(r"`((?:tests|eagle_jax|infer|train|configs)/[\w/.]+)`", path.read_text(encoding="utf-8")):
        assert (REPOSITORY / name).exists(), name


def test_exports_of_the_page_run(tmp_path):
    """Every layout, with the bundled head."""
    layouts = set()
    calls = [words for words in program_calls(DOCS / "export.md") if words[0] == "train.export"]
    for number, words in enumerate(calls):
        args = parse(words)
        if args.target is not None:
            args = dataclasses.replace(args, head=str(bundled("eagle3")), target=str(bundled("target")))
        args = dataclasses.replace(args, out=tmp_path / str(number))
        train.export.main(args)
        assert (args.out / "config.json").is_file(), words
        layouts.add(args.to)
    assert layouts == {"sglang", "speculators", "official"}


SHORTER = {
    "train.regenerate": "--limit 24 --max-new-tokens 16",
    "train.head": "--steps 2 --unroll 1 --length 112 --warmup 1 --eval-prompts 1 --eval-tokens 8",
    "train.evaluate": "--prompts 1 --max-new-tokens 8",
    "train.export": "",
}
"""Arguments that override those of training.md, so that all four programs take two minutes."""


@pytest.mark.slow
def test_from_conversations_to_an_export_by_the_commands_of_the_page(tmp_path):
    """Each command reads what the one before it wrote."""
    first = blocks(DOCS / "training.md", "bash")[0].replace("runs/", f"{tmp_path}/")
    programs = [shlex.split(line) for line in commands(first) if line.startswith("python -m ")]
    assert [command[2] for command in programs] == list(SHORTER)
    for command in programs:
        words = [*command[1:], *SHORTER[command[2]].split()]
        done = subprocess.run(
            [sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
    assert (tmp_path / "export" / "config.json").is_file()
