"""docs/measured/README.md: its table of static trees follows from the recordings beside it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import infer.acceptance
from infer.common import recorded
from infer.common.drafts import written
from infer.common.labels import Label
from infer.common.methods import best_static
from infer.common.programs import arguments
from tests.docs.test_readme import commands

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "measured"
PAGE = (MEASURED / "README.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## A static tree built") :].split("\n## ")[0]
(BLOCK,) = re.findall(r"^```bash\n(.*?)^```$", SECTION, flags=re.DOTALL | re.MULTILINE)
ROWS = {"Medusa, published": "medusa@static", "Medusa, built": "medusa@best63", "Hydra, published": "hydra@static",
        "Hydra, built": "hydra@best63"}  # fmt: skip


def test_the_table_is_what_was_recorded():
    cells = recorded.read(MEASURED / "best_static.json").cells
    means = {}
    for name, label in ROWS.items():
        own = sorted((cell.task, cell.tau) for cell in cells if cell.label == label)
        means[name] = sum(tau for _, tau in own) / len(own)
        assert f"| {name} | {' | '.join(f'{tau:.2f}' for _, tau in own)} | {means[name]:.2f} |" in SECTION
    assert f"{means['Medusa, published'] - means['Medusa, built']:.2f} less for Medusa" in SECTION
    assert f"{means['Hydra, built'] - means['Hydra, published']:.2f} more for Hydra" in SECTION


@pytest.mark.parametrize(("command", "file"), list(zip(commands(BLOCK), ("calibrate", "best_static"), strict=True)))
def test_the_recordings_are_of_the_commands(command, file):
    args = arguments(infer.acceptance.Args, None, shlex.split(command)[3:])
    found = recorded.read(MEASURED / f"{file}.json").settings
    assert {name: getattr(args, name) for name in found.keys() - {"questions", "draws"}} == {
        name: value for name, value in found.items() if name not in ("questions", "draws")
    }


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_the_trees_are_built_from_the_calibration(method):
    built = best_static(Label.parse(f"{method}@best63"), MEASURED / "calibrate.json")
    (draft,) = {str(cell.draft["parents"]) for cell in recorded.read(MEASURED / "best_static.json").cells
                if cell.label == f"{method}@best63"}  # fmt: skip
    assert draft == written(built)
