"""Shows draft trees as text and figures, replies with accepted drafts in colour, accepted drafts and calibration.

Functions that return a figure need matplotlib (`pip install matplotlib`) and return its `Figure`: save it with
`figure.savefig("tree.svg")`, or show it as the last line of a notebook's cell.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.core.types import PADDING, ROOT
from eagle_jax.data.chat.decode import TextStream
from eagle_jax.evaluate.acceptance import Cycles
from eagle_jax.evaluate.positions import Calibration
from eagle_jax.runtime.generation import GenerateOutput, StreamChunk

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
"""Colours that colour-blind readers can distinguish (Okabe and Ito)."""
MARKS = "osD^vP*X"
LINES = ("-", "--", "-.", ":")
GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
WANTED = "figures need matplotlib: pip install matplotlib"


class Tree(NamedTuple):
    """A drafted tree of one cycle, to show. Row 0 is the root; parents precede children.

    Attributes:
      words: text of every node's token. parents: row of the parent, -1 at the root.
      values: probability that the draft gave the path to the node; NaN where a method has none (lookups).
      accepted: whether the reply went through the node; the root is.
    """

    words: tuple[str, ...]
    parents: tuple[int, ...]
    values: tuple[float, ...]
    accepted: tuple[bool, ...]

    def children(self, row: int) -> list[int]:
        """Returns the rows of the children, the most probable first."""
        found = [child for child, parent in enumerate(self.parents) if parent == row]
        return sorted(found, key=lambda child: (-np.nan_to_num(self.values[child]), child))


def drafted_tree(cycles: Cycles, number: int, tokenizer: Any = None) -> Tree:
    """Returns the tree of cycle `number` of `acceptance.record_cycles`.

    Args:
      tokenizer: with `decode`; without one, nodes are called by their token ids.

    Raises:
      ValueError: there are fewer cycles.
    """
    count = len(cycles.tokens)
    if not -count <= number < count:
        raise ValueError(f"number={number}: {count} cycles were recorded; give 0 to {count - 1}")
    tokens, parents, scores, taken = (
        getattr(cycles, name)[number] for name in ("tokens", "parents", "scores", "accepted")
    )
    rows = [row for row, parent in enumerate(parents) if parent != PADDING]
    place = {row: at for at, row in enumerate(rows)} | {ROOT: ROOT}
    # Zero everywhere is what methods without probabilities write.
    known = any(scores[row] != 0 and np.isfinite(scores[row]) for row in rows)
    return Tree(
        tuple(str(tokens[row]) if tokenizer is None else tokenizer.decode([int(tokens[row])]) for row in rows),
        tuple(place[int(parents[row])] for row in rows),
        tuple(math.exp(scores[row]) if known else math.nan for row in rows),
        tuple(bool(taken[row]) for row in rows),
    )


def tree_text(tree: Any, *, colours: bool = False) -> str:
    """The tree as lines for a terminal: a node per line, its value, a tick (and green) where it was accepted.

    Raises:
      ValueError: it is not what `drafted_tree` returns.
    """
    _check_tree(tree)
    lines = [_node(tree, 0, colours)]

    def below(row: int, indent: str) -> None:
        children = tree.children(row)
        for child in children:
            last = child == children[-1]
            lines.append(f"{indent}{'└─ ' if last else '├─ '}{_node(tree, child, colours)}")
            below(child, indent + ("   " if last else "│  "))

    below(0, "")
    return "\n".join(lines)


def _check_tree(tree: Any) -> None:
    if not isinstance(tree, Tree):
        raise ValueError(
            f"tree is a {type(tree).__name__}: pass what viz.drafted_tree(cycles, number, tokenizer) returns, of "
            "cycles that eagle_jax.evaluate.acceptance.record_cycles recorded"
        )


def _node(tree: Tree, row: int, colours: bool) -> str:
    word = f'"{_visible(tree.words[row])}"'
    if row == 0:
        return f"{word} (root)"
    value = "" if math.isnan(tree.values[row]) else f" {tree.values[row]:.2f}"
    if tree.accepted[row]:
        return paint(f"{word}{value} ✓", GREEN, colours)
    return f"{word}{value}"


def tree_figure(tree: Any) -> Any:
    """The tree from left to right, the accepted path green and thick, below each token the value of its node.

    Signs that matplotlib's font has not, as those of Chinese, are boxes; `tree_text` shows them.

    Raises:
      ValueError: it is not what `drafted_tree` returns, or matplotlib is not installed.
    """
    _check_tree(tree)
    at, depths = _layout(tree)
    leaves, deepest = max(y for _, y in at) + 1, max(depths)
    figure, (axes,) = panels(1, size=(1.6 + 1.45 * deepest, max(1.6, 0.42 * leaves + 0.6)))
    for row, parent in enumerate(tree.parents):
        if parent != ROOT:
            taken = tree.accepted[row]
            (x0, y0), (x1, y1) = at[parent], at[row]
            style = {"color": COLOURS[2] if taken else "0.75", "linewidth": 2.4 if taken else 1.0}
            axes.plot([x0, x1], [y0, y1], zorder=1, **style)
    for row, (x, y) in enumerate(at):
        value = "" if row == 0 or math.isnan(tree.values[row]) else f"\n{tree.values[row]:.2f}"
        box = {"boxstyle": "round,pad=0.25", "facecolor": "#d8f0e6" if tree.accepted[row] else "white",
               "edgecolor": COLOURS[2] if tree.accepted[row] else "0.6"}  # fmt: skip
        word = _visible(tree.words[row]).replace("$", r"\$")
        axes.text(x, y, f"{word}{value}", ha="center", va="center", fontsize=8, family="monospace", bbox=box, zorder=2)
    axes.set(xlim=(-0.6, deepest + 0.6), ylim=(leaves - 0.4, -0.6))
    axes.axis("off")
    return figure


def _layout(tree: Tree) -> tuple[list[tuple[float, float]], list[int]]:
    """Places of all nodes, leaves one below another, and depths."""
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    height, free = [0.0] * len(depths), iter(range(len(depths)))

    def place(row: int) -> float:
        ends = [place(child) for child in tree.children(row)]
        height[row] = (ends[0] + ends[-1]) / 2 if ends else float(next(free))
        return height[row]

    place(0)
    return list(zip(map(float, depths), height, strict=True)), depths


def _visible(word: str) -> str:
    """A token with its blanks and line ends to be seen."""
    shown = word.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return "".join(letter if letter.isprintable() else "�" for letter in shown)


class Piece(NamedTuple):
    """Text that became whole at once; `drafted`: of tokens that were drafted and accepted."""

    text: str
    drafted: bool


def pieces(chunks: Iterable[StreamChunk], tokenizer: Any) -> Iterator[Piece]:
    """The text of `eagle_jax.stream`'s chunks as it comes, drafted tokens apart from the target's own."""
    text = TextStream(tokenizer)
    for chunk in chunks:
        for tokens, drafted in ((chunk.tokens[: chunk.drafted], True), (chunk.tokens[chunk.drafted :], False)):
            if found := text.push(tokens):
                yield Piece(found, drafted)
    if rest := text.end():
        yield Piece(rest, False)


def _checked(text: Iterable[Any]) -> Iterator[Piece]:
    for piece in text:
        if not isinstance(piece, Piece):
            raise ValueError(f"text holds a {type(piece).__name__}: pass what viz.pieces(chunks, tokenizer) returns")
        yield piece


def ansi(text: Iterable[Piece]) -> str:
    """The text for a terminal, accepted drafts green.

    Raises:
      ValueError: what is given is not of `pieces`.
    """
    return "".join(paint(piece.text, GREEN, piece.drafted) for piece in _checked(text))


def as_html(text: Iterable[Piece]) -> str:
    """The text for a notebook, accepted drafts on green, escaped: `IPython.display.HTML(as_html(...))`.

    Raises:
      ValueError: what is given is not of `pieces`.
    """
    spans = (
        f'<span style="background:#bfe8d4;color:#000">{html.escape(piece.text)}</span>'
        if piece.drafted
        else html.escape(piece.text)
        for piece in _checked(text)
    )
    return f'<pre style="white-space:pre-wrap">{"".join(spans)}</pre>'


def paint(text: str, colour: str, colours: bool) -> str:
    """`text` between escape codes, if there is any text and the terminal shows colours."""
    return f"{colour}{text}{RESET}" if colours and text else text


def accepted_figure(outputs: Mapping[str, GenerateOutput | Sequence[GenerateOutput]]) -> Any:
    """Histogram of how many drafted tokens the cycles of some outputs accepted, by name; a list is pooled.

    Bars side by side; `infer.bench` draws its many methods as lines instead (`plot_accepted`).

    Raises:
      ValueError: matplotlib is not installed, or the outputs have no names.
    """
    _check_named("outputs", outputs, "output")
    figure, (axes,) = panels(1)
    width = 0.8 / max(1, len(outputs))
    for place, (name, found) in enumerate(outputs.items()):
        pooled = [found] if isinstance(found, GenerateOutput) else found
        shares = _shares(np.concatenate([out.accepted for out in pooled]).sum(axis=0))
        left = np.arange(len(shares)) + width * (place - (len(outputs) - 1) / 2)
        axes.bar(left, shares, width, color=style(place)["color"], label=name)
    _name_accepted(axes)
    return legend_below(figure, axes)


def _check_named(argument: str, given: Any, what: str) -> None:
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f'{argument} must give every {what} a name for the legend, such as {{"EAGLE-3": {what}}}')


def plot_accepted(axes: Any, counts: Sequence[int] | np.ndarray, name: str, place: int) -> None:
    """One histogram of accepted drafts as shares of all cycles, as a line, so that many can be told apart."""
    shares = _shares(counts)
    axes.plot(range(len(shares)), shares, **style(place), label=name)
    _name_accepted(axes)


def _shares(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(counts) / max(1, int(np.sum(counts)))


def _name_accepted(axes: Any) -> None:
    axes.set_ylim(bottom=0, auto=True)  # or the next, taller line would leave the picture
    axes.xaxis.get_major_locator().set_params(integer=True)
    name_axes(axes, "drafted tokens accepted in a cycle", "share of cycles")


def calibration_figure(found: Mapping[str, Calibration]) -> Any:
    """Acceptance over the draft's confidence (`positions.calibrate`), a line for each method, by name.

    Raises:
      ValueError: matplotlib is not installed, or what was found has no names.
    """
    _check_named("found", found, "calibration")
    figure, (axes,) = panels(1)
    diagonal(axes)
    for place, (name, one) in enumerate(found.items()):
        full = one.count > 0
        plot_calibration(axes, one.confidence[full], one.accepted[full] / one.count[full], one.count[full], name, place)
    return legend_below(figure, axes)


def plot_calibration(
    axes: Any, confidence: np.ndarray, rate: np.ndarray, count: np.ndarray, name: str, place: int
) -> None:
    """One line of acceptance over mean confidence of each bin; the larger the mark, the more nodes."""
    look = style(place)
    sizes = 12 + 90 * count / max(1, int(count.max(initial=1)))
    axes.plot(confidence, rate, color=look["color"], linestyle=look["linestyle"], linewidth=1.2)
    axes.scatter(confidence, rate, s=sizes, color=look["color"], marker=look["marker"], alpha=0.8)
    axes.plot([], [], **look, label=name)  # for the legend: colours and marks repeat, lines tell them apart
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    name_axes(axes, "confidence of the draft", "accepted of those looked at")


def diagonal(axes: Any) -> None:
    """Where a draft would be as confident as it is right."""
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":", label="as confident as right")


def panels(
    count: int, width: float = 4.6, share: bool = False, columns: int = 4, size: tuple[float, float] | None = None
) -> tuple[Any, list[Any]]:
    """A figure of panels side by side, `columns` in a row at most, each `width` inches wide, or `size` in all.

    Raises:
      ValueError: matplotlib is not installed.
    """
    count = max(1, count)
    rows = -(-count // columns)
    columns = -(-count // rows)
    size = size or (width * columns, 3.6 * rows)
    figure = _figure_class()(figsize=size, layout="constrained", facecolor="white")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share).ravel().tolist()
    for empty in grid[count:]:
        empty.remove()
    return figure, grid[:count]


def _figure_class() -> Any:
    """Matplotlib's figure, which a notebook shows where it is the value of a cell, whatever backend is set."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(WANTED) from error

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=110, metadata={"Software": None})
            return picture.getvalue()

    return Shown


def style(place: int) -> dict[str, Any]:
    """Colour, mark and line of the method at this place; the first eight differ in colour."""
    look = {"color": COLOURS[place % len(COLOURS)], "marker": MARKS[place % len(MARKS)], "markersize": 5}
    return look | {"linestyle": LINES[place // len(COLOURS) % len(LINES)]}


def name_axes(axes: Any, x: str, y: str) -> None:
    """Says what is drawn, with a light grid."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def legend_below(figure: Any, *of: Any) -> Any:
    """One legend under all panels, each name once: it can cover nothing."""
    found = {label: handle for axes in of for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if found:
        columns = min(len(found), max(2, int(figure.get_figwidth() // 2.3)))
        figure.legend(
            found.values(), found.keys(), loc="outside lower center", ncols=columns, fontsize="small", frameon=False
        )
    return figure
