"""The documentation: every block of code runs, every command is taken, the site builds without a warning."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import eagle_jax
import train.export
from eagle_jax.assets import bundled
from eagle_jax.runtime.profile import read_profile
from infer.common.programs import arguments
from tests.docs.test_readme import commands

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
NEEDS_PROFILE = {"tuning.md"}
"""Pages whose Python goes on from a profile that a command of theirs has written."""


def blocks(path: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(path.read_text(encoding="utf-8")) if found == language]


WITH_PYTHON = [path for path in PAGES if blocks(path, "python")]


@pytest.fixture
def hub(monkeypatch):
    """What the pages load from the hub is the bundled pair, whose folders are as a download would leave them."""

    def snapshot(repo_id, **options):
        return str(bundled("eagle3" if "EAGLE3" in repo_id else "target"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)


def test_every_block_has_a_language_that_is_checked():
    known = {"python", "bash", "sh", "yaml", "json", "dockerfile", ""}
    for path in PAGES:
        assert {language for language, _ in BLOCK.findall(path.read_text(encoding="utf-8"))} <= known, path
    assert {path.name for path in WITH_PYTHON} >= {"index.md", "concepts.md", "lossless.md", "own_model.md"}


SLOW = {"drafters.md", "tuning.md", "own_model.md", "lossless.md", "benchmarks.md"}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.name in SLOW else ()) for path in WITH_PYTHON],
)
def test_python_of_a_page_runs_in_order(path, hub, tmp_path, monkeypatch, repository, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    if path.name in NEEDS_PROFILE:
        (tmp_path / "profile.yaml").write_text((DOCS / "measured" / "profile.yaml").read_text(encoding="utf-8"))
    for number, text in enumerate(blocks(path, "python"), 1):
        exec(compile(text, f"{path.name}, Python block {number}", "exec"), names)


def test_yaml_blocks_read(tmp_path):
    import yaml

    found = [(path, text) for path in PAGES for text in blocks(path, "yaml")]
    profiles = [text for _, text in found if "schema: eagle_jax.runtime.profile" in text]
    assert profiles
    for number, text in enumerate(profiles):
        (file := tmp_path / f"{number}.yaml").write_text(text, encoding="utf-8")
        assert len(read_profile(file).entries) == text.count("- {")
    for path, text in found:
        assert isinstance(yaml.safe_load(text), dict), path


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built documentation; warnings are errors (not with --quiet, which hides them from --strict)."""
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install eagle-jax[docs]")
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)], cwd=REPOSITORY,
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_site_builds_without_a_warning(site):
    assert {"index.html", "concepts", "lossless", "api", "comparison"} <= {path.name for path in site.iterdir()}


def test_every_public_name_has_its_place_in_the_reference(site):
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    headings = set(re.findall(r'id="([\w.]+)"', page))
    missing = [name for name in eagle_jax.__all__ if not any(at.split(".")[-1] == name for at in headings)]
    assert not missing


def imported_by_pages() -> set[str]:
    """Dotted names of what Python blocks take from modules of the package."""
    found = set()
    for path in [REPOSITORY / "README.md", *PAGES]:
        for text in blocks(path, "python"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eagle_jax"):
                    found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def test_what_pages_import_has_its_place_in_the_reference(site):
    found = imported_by_pages()
    assert "eagle_jax.core.loop.generate" in found
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    missing = [name for name in sorted(found) if f'id="{name}"' not in page]
    assert not missing


def test_figures_of_the_pages_are_there():
    for path in PAGES:
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).is_file(), f"{path.name}: {link}"


def test_commands_are_known():
    """Programs' are parsed by tests/docs/test_readme.py; whatever else a block calls is a tool that is named here.

    Those of clouds cannot run here: that the shell reads them is all that is known of them.
    """
    tools = {"python", "make", "pip", "git", "gcloud", "xpk", "docker", "cd", "vllm", "mkdocs", "python3"}
    seen = set()
    for path in PAGES:
        for text in [*blocks(path, "bash"), *blocks(path, "sh")]:
            read = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True, check=False)
            assert read.returncode == 0, f"{path.name}: {read.stderr}"
            whole = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), text.replace("\\\n", " "))
            for line in whole.splitlines():
                words = shlex.split(line, comments=True)
                while words and "=" in words[0] and not words[0].startswith("-"):
                    words.pop(0)
                assert not words or words[0] in tools, f"{path.name}: {line}"
                seen |= set(words[:1])
    assert {"python", "gcloud", "xpk", "docker"} <= seen


def test_the_exports_of_the_page_run(tmp_path):
    """Every layout, of the bundled head; the servers that the page starts with them are not here."""
    lines = [line for text in blocks(DOCS / "export.md", "sh") for line in commands(text) if "train.export" in line]
    layouts = set()
    for number, line in enumerate(lines):
        args = arguments(train.export.Args, None, shlex.split(line)[3:])
        if args.target is not None:
            args = dataclasses.replace(args, head=str(bundled("eagle3")), target=str(bundled("target")))
        args = dataclasses.replace(args, out=tmp_path / str(number))
        train.export.main(args)
        assert (args.out / "config.json").is_file(), line
        layouts.add(args.to)
    assert layouts == {"sglang", "speculators", "official"}


SHORTER = {
    "train.regenerate": "--limit 24 --max-new-tokens 16",
    "train.head": "--steps 2 --unroll 1 --length 112 --warmup 1 --eval-prompts 1 --eval-tokens 8",
    "train.evaluate": "--prompts 1 --max-new-tokens 8",
    "train.export": "",
}
"""What is added to the commands of training.md (the last one given counts), so that all take two minutes."""


@pytest.mark.slow
def test_from_conversations_to_an_export_by_the_commands_of_the_page(tmp_path):
    """One after the other: each reads what the one before it wrote."""
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
