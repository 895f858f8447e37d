"""What an installation gets: everything of eagle_jax, the bundled pair included, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tomllib
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


def test_the_wheel_holds_the_package_and_its_assets(wheel, repository):
    package = repository / "eagle_jax"
    expected = {
        str(path.relative_to(repository))
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts
    }
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected
    assert {"eagle_jax/py.typed", "eagle_jax/assets/__init__.py"} <= expected


def test_the_wheel_carries_licence_and_metadata(wheel):
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text
    assert {f"Provides-Extra: {extra}" for extra in ("tpu", "cuda", "test")} <= set(text.splitlines())
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_one_version(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == eagle_jax.__version__


def test_the_bundled_pair_is_small(repository):
    size = sum(path.stat().st_size for path in (repository / "eagle_jax" / "assets").rglob("*") if path.is_file())
    assert size <= 48 * 2**20, f"the bundled pair takes {size / 2**20:.1f} MiB; at most 48 belong in a repository"
