"""Runs the notebooks from top to bottom."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("nbclient", reason="needs nbclient: pip install eagle-jax[test]")

from eagle_jax.assets import bundled
from notebooks import execute

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["01", "02", "03"])
def test_a_notebook_runs(name):
    """Each notebook asserts that its text is identical to plain decoding."""
    (path,) = execute.chosen((name,))
    outputs = [output for cell in execute.executed(path)["cells"] for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]
    if name == "01":
        kinds = {kind for output in outputs for kind in output.get("data", {})}
        assert {"image/png", "text/html", "text/markdown"} <= kinds


@pytest.mark.parametrize("model", ["Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"])
def test_the_cell_that_downloads_runs(model, monkeypatch, capsys):
    """The bundled pair takes the place of Qwen3 and its head: one folder each, as snapshots of the hub."""
    requested, shown = set(), []

    def snapshot(repo_id, **options):
        requested.add(repo_id)
        return bundled("eagle3" if repo_id.endswith("_eagle3") else "target")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    cells = json.loads(execute.chosen(("01",))[0].read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, object] = {"display": shown.append}
    exec(code[1].replace("from IPython.display import HTML, Markdown, display", "HTML = str"), names)
    exec(next(source for source in code if source.startswith("questions = [")).partition("prompts =")[0], names)
    (cell,) = (source for source in code if "DOWNLOAD = False" in source)
    cell = cell.replace("DOWNLOAD = False", "DOWNLOAD = True").replace("256", "24")
    exec(cell.replace('MODEL = "Qwen/Qwen3-1.7B"', f'MODEL = "{model}"'), names)
    assert requested == {model} | ({"AngelSlim/Qwen3-1.7B_eagle3"} if "1.7B" in model else set())
    assert len(shown) == 2 and "<span" in str(shown[0])
    out = capsys.readouterr().out
    assert len(re.findall(r"temperature 0\.[07]: tau = [1-6]\.\d\d, \d+\.\d\dx", out)) == 2
    assert len(re.findall(r"[0-3] of 3 texts are identical to plain", out)) == 2
