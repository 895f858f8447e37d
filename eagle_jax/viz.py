"""Draws draft trees, replies with coloured accepted drafts, histograms of acceptance, and calibration.

Figures need matplotlib (`pip install matplotlib`). Save one with `figure.savefig("tree.svg")`, or make it the last line
of a notebook cell.
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
GREEN, RESET = "\x1b[32m", "\x1b[0m"
WANTED = "matplotlib must be installed for figures, got no such module. Run pip install matplotlib."


class Tree(NamedTuple):
    """The drafted tree of one cycle. Row 0 is the root; parents precede children.

    Attributes:
      words: text of every node's token.
      parents: row of the parent, -1 at the root.
      values: probability that the draft gave the path to the node; NaN for drafters without probabilities (lookups).
      accepted: True for nodes in the reply; the root is one.
    """

    words: tuple[str, ...]
    parents: tuple[int, ...]
    values: tuple[float, ...]
    accepted: tuple[bool, ...]

    def children(self, row: int) -> list[int]:
        """Returns the rows of the children, most probable first."""
        found = [child for child, parent in enumerate(self.parents) if parent == row]
        return sorted(found, key=lambda child: (-np.nan_to_num(self.values[child]), child))


def drafted_tree(cycles: Cycles, number: int, tokenizer: Any = None) -> Tree:
    """Returns the tree of one cycle of `acceptance.record_cycles`.

    Args:
      number: index of the cycle; negative counts from the end.
      tokenizer: object with `decode`; None shows token ids.

    Raises:
      ValueError: there are fewer cycles.
    """
    count = len(cycles.tokens)
    if not -count <= number < count:
        raise ValueError(f"number must be 0 to {count - 1}, got {number}: {count} cycles were recorded.")
    _, tokens, parents, scores, accepted, *_ = (field[number] for field in cycles)
    rows = [row for row, parent in enumerate(parents) if parent != PADDING]
    place = {row: at for at, row in enumerate(rows)} | {ROOT: ROOT}
    # Drafters without probabilities have only zeros.
    known = any(scores[row] != 0 and np.isfinite(scores[row]) for row in rows)
    return Tree(
        tuple(str(tokens[row]) if tokenizer is None else tokenizer.decode([int(tokens[row])]) for row in rows),
        tuple(place[int(parents[row])] for row in rows),
        tuple(math.exp(scores[row]) if known else math.nan for row in rows),
        tuple(bool(accepted[row]) for row in rows),
    )


def tree_text(tree: Tree, *, colours: bool = False) -> str:
    """Returns the tree for a terminal: a line per node with its value, a tick (or green) if accepted."""
    lines = [_node(tree, 0, colours)]

    def add_children(row: int, indent: str) -> None:
        children = tree.children(row)
        for child in children:
            last = child == children[-1]
            lines.append(f"{indent}{'└─ ' if last else '├─ '}{_node(tree, child, colours)}")
            add_children(child, indent + ("   " if last else "│  "))

    add_children(0, "")
    return "\n".join(lines)


def _node(tree: Tree, row: int, colours: bool) -> str:
    word = f'"{_visible(tree.words[row])}"'
    if row == 0:
        return f"{word} (root)"
    value = "" if math.isnan(tree.values[row]) else f" {tree.values[row]:.2f}"
    if tree.accepted[row]:
        return f"{GREEN}{word}{value} ✓{RESET}" if colours else f"{word}{value} ✓"
    return f"{word}{value}"


def tree_figure(tree: Tree) -> Any:
    """Draws the tree from left to right: the accepted path green and thick, a value below every token.

    Characters that matplotlib's font lacks (Chinese, for one) become boxes; `tree_text` shows them.

    Raises:
      ValueError: matplotlib is not installed.
    """
    at, depths = _layout(tree)
    leaves, deepest = max(y for _, y in at) + 1, max(depths)
    figure, (axes,) = panels(1, size=(1.6 + 1.45 * deepest, max(1.6, 0.42 * leaves + 0.6)))
    for row, parent in enumerate(tree.parents):
        if parent != ROOT:
            look = {"color": COLOURS[2], "linewidth": 2.4} if tree.accepted[row] else {"color": "0.75", "linewidth": 1}
            axes.plot(*zip(at[parent], at[row], strict=True), zorder=1, **look)
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
    """Returns (x, y) and depth of every node; leaves lie one below another."""
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
    """Replaces white space by visible signs, and unprintable characters."""
    shown = word.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return "".join(letter if letter.isprintable() else "�" for letter in shown)


class Piece(NamedTuple):
    """Decoded text; `drafted` is True for accepted drafts."""

    text: str
    drafted: bool


def pieces(chunks: Iterable[StreamChunk], tokenizer: Any) -> Iterator[Piece]:
    """Decodes the chunks of `eagle_jax.stream`; drafted tokens and the target's own are separate pieces."""
    text = TextStream(tokenizer)
    for chunk in chunks:
        for tokens, drafted in ((chunk.tokens[: chunk.drafted], True), (chunk.tokens[chunk.drafted :], False)):
            if found := text.push(tokens):
                yield Piece(found, drafted)
    if rest := text.end():
        yield Piece(rest, False)


def ansi(text: Iterable[Piece]) -> str:
    """Returns text for a terminal, accepted drafts in green."""
    return "".join(f"{GREEN}{piece.text}{RESET}" if piece.drafted else piece.text for piece in text)


def as_html(text: Iterable[Piece]) -> str:
    """Returns escaped HTML for `IPython.display.HTML`, accepted drafts on green."""
    spans = (
        f'<span style="background:#bfe8d4;color:#000">{html.escape(piece.text)}</span>'
        if piece.drafted
        else html.escape(piece.text)
        for piece in text
    )
    return f'<pre style="white-space:pre-wrap">{"".join(spans)}</pre>'


def accepted_figure(outputs: Mapping[str, GenerateOutput | Sequence[GenerateOutput]]) -> Any:
    """Draws a histogram of accepted drafts per cycle for every named output; a list of outputs is pooled.

    Raises:
      ValueError: matplotlib is not installed.
    """
    figure, (axes,) = panels(1)
    width = 0.8 / max(1, len(outputs))
    for place, (name, found) in enumerate(outputs.items()):
        pooled = [found] if isinstance(found, GenerateOutput) else found
        counts = np.concatenate([out.accepted for out in pooled]).sum(axis=0)
        left = np.arange(len(counts)) + width * (place - (len(outputs) - 1) / 2)
        axes.bar(left, counts / max(1, counts.sum()), width, color=style(place)["color"], label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    name_axes(axes, "drafted tokens accepted in a cycle", "share of cycles")
    return legend_below(figure, axes)


def calibration_figure(found: Mapping[str, Calibration]) -> Any:
    """Draws acceptance over the draft's confidence, a line for each named result of `positions.calibrate`.

    Raises:
      ValueError: matplotlib is not installed.
    """
    figure, (axes,) = panels(1)
    diagonal(axes)
    for place, (name, one) in enumerate(found.items()):
        full = one.count > 0
        plot_calibration(axes, one.confidence[full], one.accepted[full] / one.count[full], one.count[full], name, place)
    return legend_below(figure, axes)


def plot_calibration(
    axes: Any, confidence: np.ndarray, rate: np.ndarray, count: np.ndarray, name: str, place: int
) -> None:
    """Draws one line of acceptance over mean confidence of each bin; larger marks have more nodes."""
    look = style(place)
    sizes = 12 + 90 * count / max(1, int(count.max(initial=1)))
    axes.plot(confidence, rate, color=look["color"], linestyle=look["linestyle"], linewidth=1.2)
    axes.scatter(confidence, rate, s=sizes, color=look["color"], marker=look["marker"], alpha=0.8)
    axes.plot([], [], **look, label=name)  # legend: colours and marks repeat, line styles do not
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    name_axes(axes, "confidence of the draft", "accepted of reached nodes")


def diagonal(axes: Any) -> None:
    """Draws the diagonal: confidence equals acceptance."""
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":", label="calibrated")


def panels(
    count: int, width: float = 4.6, share: bool = False, columns: int = 4, size: tuple[float, float] | None = None
) -> tuple[Any, list[Any]]:
    """Returns a figure and its panels, at most `columns` in a row.

    Args:
      width: of a panel, in inches. size: of the figure, in inches; overrides `width`. share: panels share the y axis.

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
    """Returns a subclass of matplotlib's figure that notebooks show with any backend."""
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
    """Returns colour, mark and line style of the method at `place`; the first eight differ in colour."""
    look = {"color": COLOURS[place % len(COLOURS)], "marker": MARKS[place % len(MARKS)], "markersize": 5}
    return look | {"linestyle": LINES[place // len(COLOURS) % len(LINES)]}


def name_axes(axes: Any, x: str, y: str) -> None:
    """Names the axes and adds a light grid."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def legend_below(figure: Any, *of: Any) -> Any:
    """Adds one legend below all panels, with each name once."""
    found = {label: handle for axes in of for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if found:
        columns = min(len(found), max(2, int(figure.get_figwidth() // 2.3)))
        figure.legend(
            found.values(), found.keys(), loc="outside lower center", ncols=columns, fontsize="small", frameon=False
        )
    return figure
