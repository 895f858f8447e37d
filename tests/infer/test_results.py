"""Result files: what is written is read back, and a file that does not fit is refused in one sentence."""

from __future__ import annotations

import copy
import json

import pytest

from infer.common.results import Group, Recorded, Result, read, read_as
from tests.infer.result_files import bench_cell, bench_file, recorded_file, recording


def test_what_is_written_is_read_back(tmp_path):
    cells = [bench_cell("vanilla", "gsm8k", 1.0, 1.0), bench_cell("transformers", "gsm8k", 0.5, None)]
    path = bench_file(tmp_path / "runs" / "result.json", *cells, limit=3)
    found = read(path)
    assert found.cells == cells and found.settings["limit"] == 3
    assert found.groups == [Group("gsm8k", 0.0, 1)]
    assert found.labels == ["vanilla", "transformers"]
    assert found.cell("transformers", found.groups[0]) is found.cells[1]
    assert found.cell("transformers", Group("gsm8k", 1.0, 1)) is None
    content = json.loads(path.read_text()) | {"golden": {"identical": "8/8"}}
    path.write_text(json.dumps(content))
    assert read(path).more == {"golden": {"identical": "8/8"}}
    assert read(path).as_json() == content
    recorded = [recording("eagle3", "gsm8k"), recording("pld", "gsm8k", calibration=None, chains=[])]
    path = recorded_file(tmp_path / "recorded.json", *recorded)
    assert read_as(path, Result, Recorded).cells == recorded


def cell_of(content):
    return content["cells"][0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content.update(schema="eagle_jax.tune/1"), "have the schema 'eagle_jax.bench/3', got 'ea"),
        (lambda content: content.pop("schema"), "have the schema 'eagle_jax.bench/3', got None: give a res"),
        (lambda content: content.pop("settings"), "missing required field `settings`"),
        (lambda content: cell_of(content).pop("tau"), r"missing required field `tau` - at `\$.cells\[0\]`"),
        (lambda content: cell_of(content).update(accepted=[1, "2"]), r"Expected `int`, got `str` - at `\$.cells\[0\]"),
        (lambda content: cell_of(content).update(tokens=-1), r">= 0 - at `\$.cells\[0\].tokens`"),
        (lambda content: cell_of(content)["spec_bench"].pop("tok_s"), r"`tok_s` - at `\$.cells\[0\].spec_bench`"),
        (lambda content: cell_of(content)["by_question"].pop("call"), r"`call` - at `\$.cells\[0\].by_question`"),
        (lambda content: cell_of(content)["by_question"].update(seconds=[[0.0] * 5]), r"> 0.*seconds"),
        (lambda content: cell_of(content)["by_question"].update(tokens=[1]), "must have columns of one length"),
        (lambda content: cell_of(content)["draft"].update(kind="bush"), r"'bush' - at `\$.cells\[0\].draft.kind`"),
        (lambda content: cell_of(content)["draft"].pop("top_k"), r"draft of kind dynamic must have top_k - at"),
        (lambda content: content["cells"].append(copy.copy(cell_of(content))), "eagle3 on gsm8k at .* is there twi"),
    ],
)  # fmt: skip
def test_a_broken_file_of_the_benchmark_is_refused(tmp_path, damage, message):
    path = bench_file(tmp_path / "result.json", bench_cell("eagle3", "gsm8k", 2.0, 4.0))
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as refused:
        read(path)
    assert str(refused.value).startswith(str(path)) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda cell: cell["positions"].update(accepted=[[11, 1], [2, 0]]), "positions must not count more accepted"),
        (lambda cell: cell["calibration"].update(accepted=[5, 0, 6]), "calibration must not count more accepted"),
        (lambda cell: cell["chains"][1].update(accepted=[6, 7]), "chains must not count more accepted"),
        (lambda cell: cell["chains"][1].update(accepted=[6]), "chains must not count more accepted"),
        (lambda cell: cell["by_question"].update(cycles=[1]), "must have columns of one length"),
        (lambda cell: cell.update(positions=None), "Expected `object`, got `null`"),
    ],
)
def test_a_broken_recording_is_refused(tmp_path, damage, message):
    path = recorded_file(tmp_path / "result.json", recording("eagle3", "gsm8k"))
    content = json.loads(path.read_text())
    damage(content["cells"][0])
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_as(path, Recorded)


@pytest.mark.parametrize(("text", "message"), [("| task |", "is not a JSON file"), ("[]", "must have the schema")])
def test_other_files_are_refused(tmp_path, text, message):
    (tmp_path / "table.md").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"table\.md {message}.*: give a result\.json that infer\.bench or infer\.ac"):
        read_as(tmp_path / "table.md", Result, Recorded)
