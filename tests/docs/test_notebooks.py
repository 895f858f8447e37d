"""Runs the notebooks from top to bottom, and compares their kept outputs with their cells."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="needs nbclient: pip install eagle-jax[test]")

from eagle_jax.assets import bundled
from notebooks import execute

pytestmark = pytest.mark.slow  # pages and programs for TPU: make test-all

PATHS = sorted(execute.FOLDER.glob("*.ipynb"))


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def sources(notebook: dict) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook: dict) -> list[dict]:
    return [output for cell in notebook["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_outputs_belong_to_the_cells(path):
    notebook = read(path)
    assert notebook["metadata"].get("eagle_jax") == {"sources": execute.digest(notebook)}, (
        f"cells of {path.name} were changed: python -m notebooks.execute {path.name[:2]}"
    )
    assert outputs(notebook)
    assert not [output for output in outputs(notebook) if output["output_type"] == "error"]
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))  # from top to bottom, once


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_metadata_fits_colab(path):
    notebook = read(path)
    assert notebook["metadata"]["accelerator"] == "TPU"
    assert notebook["metadata"]["colab"]["gpuType"] == "V5E1"
    first = "".join(notebook["cells"][0]["source"])
    project = tomllib.loads((execute.FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project["urls"]["Repository"]
    place = address.removeprefix("https://").replace(".com", "")
    badge = f"colab.research.google.com/{place}/blob/main/notebooks/{path.name})"
    assert badge in first
    assert badge in (execute.FOLDER.parent / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert set(re.findall(r"https://github\.com/[\w-]+/[\w-]+", "\n".join(sources(notebook)))) <= {address}
    for source in sources(notebook):
        ast.parse(source)
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(root|home|tmp|work)/", text), "a path of the machine that executed it"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"])
def test_the_cell_that_downloads_runs_on_what_it_would_download(model, monkeypatch, capsys):
    """Replaces Qwen3 and its head by the bundled pair: one folder each, as snapshots of the hub."""
    requested = []

    def snapshot(repo_id, **options):
        requested.append(repo_id)
        return bundled("eagle3" if repo_id.endswith("_eagle3") else "target")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    code = sources(read(PATHS[0]))
    shown: list[object] = []
    names: dict[str, object] = {"display": shown.append}
    exec(code[1].replace("from IPython.display import HTML, Markdown, display", "HTML = str"), names)
    exec(next(source for source in code if source.startswith("questions = [")).partition("prompts =")[0], names)
    (cell,) = (source for source in code if "DOWNLOAD = False" in source)
    assert model in cell
    cell = cell.replace("DOWNLOAD = False", "DOWNLOAD = True").replace("256", "24")
    exec(cell.replace('MODEL = "Qwen/Qwen3-1.7B"', f'MODEL = "{model}"'), names)
    assert set(requested) == {model} | ({"AngelSlim/Qwen3-1.7B_eagle3"} if "1.7B" in model else set())
    assert len(shown) == 2 and "<span" in str(shown[0])
    out = capsys.readouterr().out
    assert len(re.findall(r"temperature 0\.[07]: tau = [1-6]\.\d\d, \d+\.\d\dx", out)) == 2
    assert len(re.findall(r"[0-3] of 3 texts are identical to plain", out)) == 2


def test_the_extras_that_are_installed_exist():
    project = tomllib.loads((execute.FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for path in PATHS:
        cell = sources(read(path))[0]
        named = set(re.findall(r'"(\w+)"\n', cell)) | set(re.findall(r'",(\w+)"', cell))
        assert named >= {"tpu", "cuda", "cuda12"} and named <= set(project["optional-dependencies"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["01", "02", "03"])
def test_a_notebook_runs(name):
    """Each notebook asserts that its text is identical to plain decoding."""
    (path,) = execute.chosen((name,))
    found = execute.executed(path)
    assert not [output for output in outputs(found) if output["output_type"] == "error"]
    if name == "01":
        kinds = {kind for output in outputs(found) for kind in output.get("data", {})}
        assert {"image/png", "text/html", "text/markdown"} <= kinds


def test_an_unknown_notebook_raises():
    with pytest.raises(ValueError, match=r"which must be the beginning of 01_generate, .* got '09'"):
        execute.chosen(("09",))
