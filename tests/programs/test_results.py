"""Result files: what is written is read back, and a file that does not fit is refused in one sentence."""

from __future__ import annotations

import json

import pytest

from infer.common.results import Group, Recorded, Result, continued, read
from tests.programs.result_files import bench_cell, bench_file, recorded_file, recording


def test_what_is_written_is_read_back(tmp_path):
    cells = [bench_cell("vanilla", "gsm8k", 1.0, 1.0), bench_cell("transformers", "gsm8k", 0.5, None)]
    found = read(bench_file(tmp_path / "runs" / "result.json", *cells, limit=3), Result)
    assert found.cells == cells and found.settings["limit"] == 3
    assert found.cells[0].group == Group("gsm8k", 0.0, 1)
    recorded = [recording("eagle3", "gsm8k"), recording("pld", "gsm8k", calibration=None, chains=[])]
    path = recorded_file(tmp_path / "recorded.json", *recorded)
    assert read(path).cells == recorded


@pytest.mark.parametrize(
    ("kind", "place", "value", "message"),
    [
        (Result, ["schema"], "eagle_jax.tune/1", r"Invalid value 'eagle_jax.tune/1' - at `\$.schema`"),
        (Result, ["cells", 0, "accepted"], [1, "2"], r"Expected `int`, got `str` - at `\$.cells\[0\].accepted"),
        (Result, ["cells", 0, "tokens"], -1, r">= 0 - at `\$.cells\[0\].tokens`"),
        (Recorded, ["cells", 0, "positions"], None, r"Expected `object`, got `null` - at `\$.cells\[0\].positions`"),
    ],
)
def test_a_broken_file_is_refused(kind, place, value, message, tmp_path):
    path = tmp_path / "result.json"
    if kind is Result:
        bench_file(path, bench_cell("eagle3", "gsm8k", 2.0, 4.0))
    else:
        recorded_file(path, recording("eagle3", "gsm8k"))
    content = at = json.loads(path.read_text())
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as refused:
        read(path, kind)
    assert str(refused.value).startswith(f"{path} must be a result file") and "\n" not in str(refused.value)


def test_other_files_and_repeated_cells_are_refused(tmp_path):
    (tmp_path / "table.md").write_text("| task |", encoding="utf-8")
    with pytest.raises(ValueError, match=r"table\.md must be a result file: JSON is malformed.*Give a result\.json"):
        read(tmp_path / "table.md")
    path = bench_file(tmp_path / "twice.json", *[bench_cell("eagle3", "gsm8k", 2.0, 4.0)] * 2)
    with pytest.raises(ValueError, match=r"twice\.json must have a cell once, got \('eagle3', 'gsm8k', 0\.0, 1\) twi"):
        read(path)


def test_a_result_is_continued_with_the_same_settings(tmp_path):
    path, cells = tmp_path / "result.json", [bench_cell("eagle3", "gsm8k", 2.0, 4.0)]
    assert continued(Result("a laptop", "abc", {}, []), path, ()).cells == []
    bench_file(path, *cells, seed=0, tasks="gsm8k", **{"questions of gsm8k": "1f", "chat template": "a"})
    new = Result("a laptop", "def", {"seed": 0, "tasks": "nq", "questions of nq": "2e", "chat template": "a"}, [])
    found = continued(new, path, ["tasks"])
    assert (found.cells, found.revision) == (cells, "abc1234, def")
    assert found.settings["questions of gsm8k"] == "1f" and found.settings["tasks"] == "nq"
    for changed in ({"seed": 1}, {"questions of gsm8k": "3d"}, {"chat template": "b"}):
        ((name, value),) = changed.items()
        with pytest.raises(ValueError, match=rf"^--resume must have the settings of .*: {name} was .* is {value!r}\."):
            continued(Result("a laptop", None, new.settings | changed, []), path, ["tasks"])
    with pytest.raises(ValueError, match="machine was a laptop and is a server"):
        continued(Result("a server", None, new.settings, []), path, ["tasks"])
