"""The documentation's figures are what its program draws from the bundled pair today."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from docs import figures

KEPT = Path(figures.__file__).parent / "figures"


def said(svg: Path) -> tuple[list[str], Counter[str]]:
    """Every word and number of a figure, in its order, and how many shapes have which colour.

    Where a line runs depends on matplotlib's version by fractions of a point, and is not compared.
    """
    text = svg.read_text(encoding="utf-8")
    return re.findall(r"<!-- (.*?) -->", text), Counter(re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", text))


@pytest.mark.slow
def test_the_kept_figures_are_drawn_from_the_bundled_pair(tmp_path):
    figures.main(figures.Args(tmp_path))
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in KEPT.iterdir()}
    for name in sorted(drawn):
        words, colours = said(KEPT / name)
        assert len(words) > 10, name
        assert said(tmp_path / name) == (words, colours), f"{name}: draw it anew with python -m docs.figures"


def test_every_figure_is_shown_on_a_page():
    pages = "".join(
        path.read_text(encoding="utf-8") for path in [*KEPT.parent.glob("*.md"), KEPT.parents[1] / "README.md"]
    )
    for path in KEPT.iterdir():
        assert f"figures/{path.name})" in pages, path.name
