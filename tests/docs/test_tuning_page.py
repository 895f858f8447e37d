"""docs/tuning.md's measured part is what the kept files say, and those were written by the commands beside them.

tune.json is the report beside the profile, the others are last lines.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.runtime.profile import ProfileFile, read_profile
from infer import tune
from infer.common.programs import arguments

REPOSITORY = Path(__file__).resolve().parents[2]
MEASURED = REPOSITORY / "docs" / "measured"
PAGE = (REPOSITORY / "docs" / "tuning.md").read_text(encoding="utf-8")
HERE = PAGE[PAGE.index("## Measured on the bundled pair") :]
ROWS = {line for line in HERE.splitlines() if line.startswith("|")}
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", HERE, flags=re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines()
]


def kept(name: str) -> dict[str, Any]:
    """What the program reported."""
    return json.loads((MEASURED / name).read_text(encoding="utf-8"))


TUNED, CHECKED, EXHAUSTED = (kept(f"tune{name}.json") for name in ("", "_check", "_exhaustive"))
BETWEEN = kept("tune_between.json")
RESULTS = (TUNED, CHECKED, BETWEEN, EXHAUSTED)
CHECKS = [row for result in RESULTS[1:] for row in result["settings"]]


def rows_of_tuning() -> set[str]:
    """Chosen at every temperature: predicted and measured, and what was off over all that was measured."""
    rows = set()
    for setting in TUNED["settings"][TUNED["dtype"]]:
        even = {"predicted": 1.0, "measured": 1.0, "worst": 1.0}  # plain decoding, where nothing else was chosen
        found = setting["candidates"].get(setting["chosen"], even)
        length = "longer" if setting["prompt"] is None else f"to {setting['prompt']}"
        rows.add(
            f"| {setting['batch']} | {setting['temperature']:g} | {length} | {setting['chosen']} | "
            f"{setting['searched']} | {found['predicted']:.2f}x | {found['measured']:.2f}x | "
            f"{found['worst']:.2f}x | {setting['mean_absolute_error']:.1%} |"
        )
    return rows


def test_the_tables_are_what_was_measured():
    numbers = {row for row in ROWS if re.match(r"\| \d", row)}
    assert numbers == rows_of_tuning() | {tune.checked(row) for row in CHECKS}
    for result in RESULTS:
        assert result["machine"] in " ".join(HERE.split())


def test_what_is_said_of_the_predictions():
    settings = TUNED["settings"][TUNED["dtype"]]
    errors = [row["error"] for setting in settings for row in setting["candidates"].values()]
    assert f"the farthest were {-min(errors):.0%} too low and {max(errors):.0%} too high" in HERE


def test_nothing_was_left_to_fill_in():
    assert not re.findall(r"\b[A-Z]{5,}\b", re.sub(r"```.*?```", "", HERE, flags=re.DOTALL))


def test_the_report_has_all_that_a_choice_rests_on():
    """Costs of the pass by width and of drafting, acceptance by depth and rank, the prediction of every setting."""
    for setting in TUNED["settings"][TUNED["dtype"]]:
        assert {"pass_over_plain", "draft_over_plain", "acceptance", "predicted"} <= setting.keys()


def test_auto_loses_at_most_five_percent_on_any_task():
    tasks = {"gsm8k", "humaneval", "mt_bench", "alpaca", "sum", "qa"}
    assert {row["temperature"] for row in CHECKED["settings"]} == {0.0, 1.0, 1.5}
    assert {row["temperature"] for row in BETWEEN["settings"]} == {0.5, 1.25}
    for row in CHECKS:
        assert set(row["per_task"]) == tasks
        assert row["worst"] == min(row["per_task"].values())
    rows = [row for result in (CHECKED, BETWEEN) for row in result["settings"]]
    assert min(row["worst"] for row in rows) >= 0.95
    assert CHECKED["holds"] and BETWEEN["holds"]
    assert f"the least is {min(row['worst'] for row in rows):.2f}x in the checks" in " ".join(HERE.split())


def test_what_auto_reaches_of_the_best_of_a_search():
    assert {row["temperature"] for row in EXHAUSTED["settings"]} == {0.0, 1.0, 1.5}
    assert EXHAUSTED["holds"]
    assert min(row["worst"] for row in EXHAUSTED["settings"]) >= 0.95
    least = min(row["over_best"] for row in EXHAUSTED["settings"])
    assert least >= 0.95
    words = " ".join(HERE.split())
    assert f"and {min(row['worst'] for row in EXHAUSTED['settings']):.2f}x in the search" in words
    assert f"reaches {math.floor(1000 * least) / 10}% of it or more" in words
    assert {row["rounds"][0]["trees"] for row in EXHAUSTED["settings"]} == {18} and "best of the 18 settings" in words


def test_what_two_questions_a_task_would_have_said():
    """Kept for the sentence on how many texts it takes: the same search with the first two of the eight questions."""
    few = kept("tune_few.json")
    names = ("limit", "data", "check")
    alike = [{name: value for name, value in of["arguments"].items() if name not in names} for of in (few, EXHAUSTED)]
    assert alike[0] == alike[1] and (few["arguments"]["limit"], EXHAUSTED["arguments"]["limit"]) == (2, 8)
    row, whole = (next(one for one in of["settings"] if one["temperature"] == 1) for of in (few, EXHAUSTED))
    words = " ".join(HERE.split())
    assert f"HumanEval {row['per_task']['humaneval']:.2f}x with two questions" in words
    assert f"{whole['per_task']['humaneval']:.2f}x with all eight" in words
    assert f"{row['over_best']:.0%} of the best with twelve texts and {whole['over_best']:.0%} with 47" in words


@pytest.mark.parametrize(("command", "result"), list(zip(COMMANDS, RESULTS, strict=True)))
def test_every_file_was_written_by_its_command(command, result, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    said = tune.shown(arguments(tune.Args, None, shlex.split(command)[3:]))
    found = result["arguments"]
    places = ("data", "out", "check")  # folders of the one who measured
    assert {name: value for name, value in found.items() if name not in places} == {
        name: said[name] for name in found if name not in places
    }
    younger = said.keys() - found.keys()  # options that came later: the command leaves them alone
    assert {name: said[name] for name in younger} == {name: tune.shown(tune.Args())[name] for name in younger}


def test_the_profile_is_kept_and_reads():
    file = read_profile(str(MEASURED / "profile.yaml"))
    assert isinstance(file, ProfileFile)
    settings = TUNED["settings"][TUNED["dtype"]]
    places = ("batch", "temperature", "prompt")
    chosen = {tuple(one[name] for name in places): one["chosen"].partition("@")[0] for one in settings}
    assert {tuple(getattr(entry, name) for name in places): entry.method for entry in file.entries} == chosen
    assert file.dtype == TUNED["dtype"]
