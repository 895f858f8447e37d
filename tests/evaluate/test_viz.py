"""Checks trees as text and figures, coloured text, and figures of acceptance."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

import eagle_jax
from eagle_jax import viz
from eagle_jax.core.types import PADDING
from eagle_jax.evaluate import Calibration, Cycles, record_cycles
from tests.models import TREES, random_prompts, tiny_head, tiny_target
from tests.programs.conftest import ByteTokenizer

TREE = viz.Tree(
    ("a", " b", "\n", "c", "d"), (-1, 0, 0, 1, 1), (1.0, 0.5, 0.125, 0.0625, 0.25), (True, True, False, False, True)
)


def test_tree_text_has_a_line_per_node():
    assert viz.tree_text(TREE).splitlines() == [
        '"a" (root)',
        '├─ "␣b" 0.50 ✓',
        '│  ├─ "d" 0.25 ✓',
        '│  └─ "c" 0.06',
        '└─ "⏎" 0.12',
    ]
    unknown = TREE._replace(values=(math.nan,) * 5)  # siblings then have the order of the draft
    assert viz.tree_text(unknown).splitlines()[1:3] == ['├─ "␣b" ✓', '│  ├─ "c"']


@pytest.fixture(scope="module")
def cycles() -> Cycles:
    return record_cycles(
        tiny_target(), tiny_head("eagle3", TREES["k2n6"]), random_prompts([9, 4], 12), max_new_tokens=20
    )


@pytest.mark.slow
def test_drafted_tree_holds_a_recorded_cycle(cycles):
    seen = 0
    for number in range(len(cycles.tokens)):
        shown = viz.drafted_tree(cycles, number)
        assert shown.words == tuple(map(str, cycles.tokens[number]))
        assert shown.accepted == tuple(cycles.accepted[number])
        np.testing.assert_allclose(shown.values, np.exp(cycles.scores[number]), rtol=1e-6)
        row = 0
        for _ in range(sum(shown.accepted) - 1):  # the accepted nodes are one path from the root
            (row,) = [child for child in shown.children(row) if shown.accepted[child]]
            seen += 1
        assert len(viz.tree_text(shown).splitlines()) == len(shown.words)
    assert seen > 0
    named = viz.drafted_tree(cycles, -1, ByteTokenizer())
    assert named.words[0] == chr(cycles.tokens[-1][0])
    with pytest.raises(ValueError, match=rf"number must be -\d+ to {len(cycles.tokens) - 1}, got 99"):
        viz.drafted_tree(cycles, 99)


def test_drafted_tree_omits_padding_and_zero_scores():
    parents = np.array([[-1, 0, PADDING, 1]])
    row, flags = np.zeros(1, int), np.array([[True, True, False, False]])
    cycles = Cycles(row, np.array([[7, 5, 0, 6]]), parents, np.zeros((1, 4)), flags, flags, row)
    shown = viz.drafted_tree(cycles, 0)
    assert (shown.words, shown.parents, shown.accepted) == (("7", "5", "6"), (-1, 0, 1), (True, True, False))
    assert all(math.isnan(value) for value in shown.values)
    scored = cycles._replace(scores=np.log([[1.0, 0.5, 1.0, 0.25]]))
    np.testing.assert_allclose(viz.drafted_tree(scored, 0).values, [1.0, 0.5, 0.25])


def test_tree_figure_draws_every_node_and_edge():
    from matplotlib.colors import to_hex

    figure = viz.tree_figure(TREE)
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert texts == {"a", "␣b\n0.50", "⏎\n0.12", "c\n0.06", "d\n0.25"}
    green = [line for line in figure.axes[0].lines if to_hex(line.get_color()) == viz.COLOURS[2]]
    assert len(green) == 2 and len(figure.axes[0].lines) == 4
    assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook shows
    wide = viz.Tree(("x",) * 60, (-1, *[0] * 10, *np.repeat(np.arange(1, 8), 7).tolist()), (0.5,) * 60, (True,) * 60)
    assert len(set(viz._layout(wide))) == 60  # no node lies on another


def test_accepted_drafts_are_coloured():
    """The second chunk has two accepted tokens and one of the target's own."""
    chunks = [eagle_jax.StreamChunk([*b"a"], 0), eagle_jax.StreamChunk([*b"<c\xc3"], 2),
              eagle_jax.StreamChunk([0xA9, *b"e"], 2)]  # fmt: skip
    found = list(viz.pieces(chunks, ByteTokenizer()))
    assert found == [viz.Piece("a", False), viz.Piece("<c", True), viz.Piece("ée", True)]
    shown = viz.as_html(found)
    assert "&lt;c</span>" in shown and shown.count("<span") == 2 and '">a<span' in shown
    half = list(viz.pieces([eagle_jax.StreamChunk([*b"a\xc3"], 0)], ByteTokenizer()))
    assert half == [viz.Piece("a", False), viz.Piece("\ufffd", False)]


def test_figures_draw_shares_of_accepted_drafts_and_calibration():
    out = eagle_jax.GenerateOutput([[1], [2]], np.array([4, 3]), np.array([[1, 2, 1], [2, 0, 1]]), None)
    figure = viz.accepted_figure({"EAGLE-3": out, "twice": [out, out]})
    shares = out.accepted.sum(0) / out.cycles.sum()
    for bars, left in zip(figure.axes[0].containers, (-0.4, 0.0), strict=True):
        np.testing.assert_allclose([bar.get_height() for bar in bars], shares)
        np.testing.assert_allclose([bar.get_x() for bar in bars], left + np.arange(len(shares)), atol=1e-12)
    found = Calibration(np.array([4, 0, 6]), np.array([0.25, np.nan, 0.75]), np.array([2, 0, 3]))
    figure = viz.calibration_figure({"EAGLE-3": found})
    _, line, _ = figure.axes[0].lines
    np.testing.assert_allclose(line.get_xydata(), [[0.25, 0.5], [0.75, 0.5]])
    # Colours and marks repeat, so the legend shows line styles.
    assert {handle.get_linestyle() for handle in figure.axes[0].get_legend_handles_labels()[0]} == {":", "-"}


def test_a_missing_matplotlib_raises_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"must be installed for figures, .* Run pip install matplotlib"):
        viz.tree_figure(TREE)
