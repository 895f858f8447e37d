"""Checks that the wheel holds all of eagle_jax, the bundled pair included, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile

import pytest

import eagle_jax


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory):
    """A wheel built from a copy of the package, so that no build folder is left in the checkout."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=repository, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (source := repository / name).is_file() and not name.startswith("tests/golden/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(source.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, copy]
    subprocess.run(command, check=True, capture_output=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_assets(wheel, repository):
    package = repository / "eagle_jax"
    expected = {
        str(path.relative_to(repository))
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts
    }
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected
    assert "eagle_jax/py.typed" in expected
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_one_version(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == eagle_jax.__version__


def test_the_bundled_weights_are_small(repository):
    size = sum(path.stat().st_size for path in (repository / "eagle_jax" / "assets").rglob("*") if path.is_file())
    assert size <= 64 * 2**20, f"the bundled weights take {size / 2**20:.1f} MiB; at most 64 belong in a repository"


@pytest.mark.slow
def test_the_wheel_alone_runs_the_readmes_example(wheel, repository, tmp_path):
    """In an empty environment, outside the checkout, as after `pip install eagle-jax`."""
    readme = (repository / "README.md").read_text(encoding="utf-8")
    example = readme.split("```python\n")[1].split("```")[0]
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel.filename], check=True)
    done = subprocess.run([python, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tokens per target pass" in done.stdout
