"""What is shown of drafting: trees, coloured text, figures."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

import eagle_jax
from docs.figures import telling
from eagle_jax import viz
from eagle_jax.core.types import PADDING
from eagle_jax.evaluate.acceptance import record_cycles
from eagle_jax.evaluate.positions import Calibration
from tests.infer.conftest import ByteTokenizer
from tests.models import TREES, random_prompts, tiny_head, tiny_target

TREE = viz.Tree(
    ("a", " b", "\n", "c", "d"), (-1, 0, 0, 1, 1), (1.0, 0.5, 0.125, 0.0625, 0.25), (True, True, False, False, True)
)


def test_a_tree_as_text():
    assert viz.tree_text(TREE).splitlines() == [
        '"a" (root)',
        '├─ "␣b" 0.50 ✓',
        '│  ├─ "d" 0.25 ✓',
        '│  └─ "c" 0.06',
        '└─ "⏎" 0.12',
    ]
    coloured = viz.tree_text(TREE, colours=True)
    assert coloured.count(viz.GREEN) == 2 and f'{viz.GREEN}"d" 0.25 ✓{viz.RESET}' in coloured
    unknown = TREE._replace(values=(math.nan,) * 5)  # siblings then stand as they were drafted
    assert viz.tree_text(unknown).splitlines()[1:3] == ['├─ "␣b" ✓', '│  ├─ "c"']


@pytest.mark.parametrize("tree", ["k3n12", "static", "top-p"])
def test_a_recorded_tree_is_what_was_drafted(tree):
    head = tiny_head("eagle3", TREES[tree])
    cycles = record_cycles(tiny_target(), head, random_prompts([9], 12), max_new_tokens=12)
    seen = 0
    for number in range(len(cycles.tokens)):
        shown = viz.drafted_tree(cycles, number)
        rows = np.flatnonzero(cycles.parents[number] != PADDING)
        assert shown.words == tuple(map(str, cycles.tokens[number][rows]))
        assert shown.accepted == tuple(cycles.accepted[number][rows])
        np.testing.assert_allclose(shown.values, np.exp(cycles.scores[number][rows]), rtol=1e-6)
        depth_of_path = sum(shown.accepted) - 1
        row = 0
        for _ in range(depth_of_path):  # the accepted nodes are one path from the root
            (row,) = [child for child in shown.children(row) if shown.accepted[child]]
        seen += depth_of_path
        assert len(viz.tree_text(shown).splitlines()) == len(rows)
    assert seen > 0
    named = viz.drafted_tree(cycles, -1, ByteTokenizer())
    assert named.words[0] == chr(cycles.tokens[-1][0])
    with pytest.raises(ValueError, match=rf"number=99: {len(cycles.tokens)} cycles were recorded; give 0 to"):
        viz.drafted_tree(cycles, 99)


def test_lookups_have_no_values():
    method = eagle_jax.prompt_lookup(tiny_target(), ngram=1, length=3)
    cycles = record_cycles(tiny_target(), method, [[1, 2, 3, 1, 2, 3, 1]], max_new_tokens=8)
    assert all(math.isnan(value) for value in viz.drafted_tree(cycles, 0).values)


def test_a_tree_as_a_figure(tmp_path):
    from matplotlib.colors import to_hex

    figure = viz.tree_figure(TREE)
    figure.savefig(tmp_path / "tree.png")
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert texts == {"a", "␣b\n0.50", "⏎\n0.12", "c\n0.06", "d\n0.25"}
    green = [line for line in figure.axes[0].lines if to_hex(line.get_color()) == viz.COLOURS[2]]
    assert len(green) == 2 and len(figure.axes[0].lines) == 4
    assert (tmp_path / "tree.png").stat().st_size > 3000
    assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook shows
    wide = viz.Tree(("x",) * 60, (-1, *[0] * 10, *np.repeat(np.arange(1, 8), 7).tolist()), (0.5,) * 60, (True,) * 60)
    places, _ = viz._layout(wide)
    assert len(set(places)) == 60  # no node lies on another


def test_text_is_coloured_by_who_wrote_it():
    """Of a stream whose second chunk has two accepted tokens and one of the target's own."""
    chunks = [eagle_jax.StreamChunk([*b"a"], 0), eagle_jax.StreamChunk([*b"<c\xc3"], 2),
              eagle_jax.StreamChunk([0xA9, *b"e"], 2)]  # fmt: skip
    found = list(viz.pieces(chunks, ByteTokenizer()))
    assert found == [viz.Piece("a", False), viz.Piece("<c", True), viz.Piece("ée", True)]
    assert viz.ansi(found) == f"a{viz.GREEN}<c{viz.RESET}{viz.GREEN}ée{viz.RESET}"
    shown = viz.as_html(found)
    assert "&lt;c</span>" in shown and shown.count("<span") == 2 and '">a<span' in shown
    half = list(viz.pieces([eagle_jax.StreamChunk([*b"a\xc3"], 0)], ByteTokenizer()))
    assert half == [viz.Piece("a", False), viz.Piece("\ufffd", False)]


def test_accepted_drafts_and_calibration():
    head = tiny_head("eagle3", TREES["chain4"])
    out = eagle_jax.generate(tiny_target(), head, random_prompts([9, 4], 12), max_new_tokens=20)
    figure = viz.accepted_figure({"EAGLE-3": out, "twice": [out, out]})
    shares = out.accepted.sum(0) / out.cycles.sum()
    for bars, left in zip(figure.axes[0].containers, (-0.4, 0.0), strict=True):
        np.testing.assert_allclose([bar.get_height() for bar in bars], shares)
        np.testing.assert_allclose([bar.get_x() for bar in bars], left + np.arange(len(shares)), atol=1e-12)
    found = Calibration(np.array([4, 0, 6]), np.array([0.25, np.nan, 0.75]), np.array([2, 0, 3]))
    figure = viz.calibration_figure({"EAGLE-3": found})
    _, line, _ = figure.axes[0].lines
    np.testing.assert_allclose(line.get_xydata(), [[0.25, 0.5], [0.75, 0.5]])
    for draw, argument in ((viz.accepted_figure, "outputs"), (viz.calibration_figure, "found")):
        with pytest.raises(ValueError, match=f"^{argument} must give every .* a name for the legend, such as"):
            draw({})
    # Colours and marks repeat, so that the legend has to show the lines.
    assert {handle.get_linestyle() for handle in figure.axes[0].get_legend_handles_labels()[0]} == {":", "-"}
    with pytest.raises(ValueError, match=r'^outputs must .* such as {"EAGLE-3": output}$'):
        viz._check_named("outputs", out, "output")


def test_without_matplotlib_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"figures need matplotlib: pip install matplotlib"):
        viz.tree_figure(TREE)


def test_a_taller_line_stays_in_the_picture():
    _, (axes,) = viz.panels(1)
    for place, counts in enumerate(([1, 2, 1], [9, 1, 0])):
        viz.plot_accepted(axes, counts, str(place), place)
        bottom, top = axes.get_ylim()
        assert bottom == 0 and top >= max(line.get_ydata().max() for line in axes.lines)


def test_text_must_be_in_pieces():
    for show in (viz.ansi, viz.as_html):
        with pytest.raises(ValueError, match=r"text holds a int: pass what viz\.pieces\(chunks, tokenizer\) returns"):
            show.__wrapped__([1, 2])


def test_the_figure_of_the_readme_shows_a_path_off_the_likeliest_branch():
    cycles = record_cycles(
        tiny_target(), tiny_head("eagle3", TREES["k3n12"]), random_prompts([9, 4], 12), max_new_tokens=20
    )

    def off(number):
        tree = viz.drafted_tree(cycles, number)
        path = [row for row, taken in enumerate(tree.accepted) if taken]
        return len(path) >= 3 and any(row != tree.children(tree.parents[row])[0] for row in path[1:])

    every = [off(number) for number in range(len(cycles.tokens))]
    assert any(every) and not all(every)
    assert every[telling(cycles)]


@pytest.mark.parametrize("draw", [viz.tree_text, viz.tree_figure])
def test_what_is_no_tree_is_told_where_one_comes_from(draw):
    with pytest.raises(ValueError, match=r"tree is a TreeConfig: pass what viz\.drafted_tree\(cycles, number, tok"):
        draw(eagle_jax.TreeConfig.chain(2))


def test_it_is_there_without_an_import_of_its_own_and_without_matplotlib():
    command = "import sys, eagle_jax; assert 'matplotlib' not in sys.modules; print(eagle_jax.viz.tree_text.__name__)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "tree_text\n"
