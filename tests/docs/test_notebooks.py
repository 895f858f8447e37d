"""The notebooks run from top to bottom, and what is kept of them is the output of the cells that are there."""

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

PATHS = sorted(execute.FOLDER.glob("*.ipynb"))


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def sources(notebook: dict) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook: dict) -> list[dict]:
    return [output for cell in notebook["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]


def test_there_are_three():
    assert [path.stem for path in PATHS] == ["01_generate", "02_train_a_head", "03_inside_jit"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_outputs_are_those_of_the_cells(path):
    notebook = read(path)
    assert notebook["metadata"].get("eagle_jax") == {"sources": execute.digest(notebook)}, (
        f"cells of {path.name} were changed: python -m notebooks.execute {path.name[:2]}"
    )
    assert outputs(notebook)
    assert not [output for output in outputs(notebook) if output["output_type"] == "error"]
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))  # from top to bottom, once


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_metadata_is_colabs(path):
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


def test_the_cell_that_downloads_says_what():
    notebook = read(PATHS[0])
    at = next(n for n, cell in enumerate(notebook["cells"]) if "DOWNLOAD = False" in "".join(cell["source"]))
    before = "".join(notebook["cells"][at - 1]["source"])
    assert "downloads" in before and "GB" in before


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"])
def test_the_cell_that_downloads_runs_on_what_it_would_download(model, monkeypatch, capsys):
    """The bundled pair stands for Qwen3 and its head: a folder each, as the hub's snapshots are."""
    asked = []

    def snapshot(repo_id, **options):
        asked.append(repo_id)
        return bundled("eagle3" if repo_id.endswith("_eagle3") else "target")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    code = sources(read(PATHS[0]))
    shown: list[object] = []
    names: dict[str, object] = {"display": shown.append}
    imports = "\n".join(line for source in code for line in source.splitlines() if re.match("(import|from) ", line))
    exec(imports.replace("from IPython.display import HTML, Markdown, display", "HTML = str"), names)
    exec(next(source for source in code if source.startswith("questions = [")).partition("prompts =")[0], names)
    (cell,) = (source for source in code if "DOWNLOAD = False" in source)
    assert model in cell
    cell = cell.replace("DOWNLOAD = False", "DOWNLOAD = True").replace("256", "24")
    exec(cell.replace('MODEL = "Qwen/Qwen3-1.7B"', f'MODEL = "{model}"'), names)
    assert set(asked) == {model} | ({"AngelSlim/Qwen3-1.7B_eagle3"} if "1.7B" in model else set())
    assert len(shown) == 2 and "<span" in str(shown[0])
    out = capsys.readouterr().out
    assert len(re.findall(r"temperature 0\.[07]: tau = [1-6]\.\d\d, \d+\.\d\dx", out)) == 2
    assert len(re.findall(r"[0-3] of 3 texts are plain decoding's", out)) == 2


def test_the_extras_that_are_installed_are_there():
    project = tomllib.loads((execute.FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for path in PATHS:
        cell = sources(read(path))[0]
        named = set(re.findall(r'"(\w+)"\n', cell)) | set(re.findall(r'",(\w+)"', cell))
        assert named >= {"tpu", "cuda", "cuda12"} and named <= set(project["optional-dependencies"])


def test_no_kept_speed_is_above_the_peak():
    told = [float(share) for path in PATHS for share in re.findall(r"mfu ([\d.]+)%", path.read_text(encoding="utf-8"))]
    assert told and max(told) <= 100


@pytest.mark.parametrize(
    "name", ["01", pytest.param("02", marks=pytest.mark.slow), pytest.param("03", marks=pytest.mark.slow)]
)
def test_a_notebook_runs(name):
    """Each asserts by itself that the text is plain decoding's."""
    (path,) = execute.chosen((name,))
    found = execute.executed(path)
    assert not [output for output in outputs(found) if output["output_type"] == "error"]
    if name == "01":
        kinds = {kind for output in outputs(found) for kind in output.get("data", {})}
        assert {"image/png", "text/html", "text/markdown"} <= kinds


def test_an_unknown_notebook_is_refused():
    with pytest.raises(ValueError, match="no notebook begins with '09': there are 01_generate, 02_train"):
        execute.chosen(("09",))
