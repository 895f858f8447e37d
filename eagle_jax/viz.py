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

from eagle_jax.core import PADDING, ROOT
from eagle_jax.data.chat.decode import TextStream
from eagle_jax.evaluate import Calibration, Cycles
from eagle_jax.runtime.generation import GenerateOutput, StreamChunk

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
"""Colours that colour-blind readers can distinguish (Okabe and Ito)."""


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

    def value(self, row: int, before: str) -> str:
        """Returns `before` and the value with two decimals; "" at the root and for an unknown value."""
        return "" if row == 0 or math.isnan(self.values[row]) else f"{before}{self.values[row]:.2f}"


def drafted_tree(cycles: Cycles, number: int, tokenizer: Any = None) -> Tree:
    """Returns the tree of one cycle of `evaluate.record_cycles`.

    Args:
      number: index of the cycle; negative counts from the end.
      tokenizer: object with `decode`; None shows token ids.

    Raises:
      ValueError: there are fewer cycles.
    """
    count = len(cycles.tokens)
    if not -count <= number < count:
        raise ValueError(f"number must be {-count} to {count - 1}, got {number}. Choose one of the recorded cycles.")
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


def tree_text(tree: Tree) -> str:
    """Returns the tree for a terminal: a line per node with its value, and a tick if accepted."""
    lines: list[str] = []

    def add(row: int, branch: str, indent: str) -> None:
        value = " (root)" if row == 0 else tree.value(row, " ") + " ✓" * tree.accepted[row]
        lines.append(f'{branch}"{_visible(tree.words[row])}"{value}')
        children = tree.children(row)
        for child in children:
            last = child == children[-1]
            add(child, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  "))

    add(0, "", "")
    return "\n".join(lines)


def tree_figure(tree: Tree) -> Any:
    """Draws the tree from left to right: the accepted path green and thick, a value below every token.

    Characters that matplotlib's font lacks (Chinese, for one) become boxes; `tree_text` shows them.

    Raises:
      ValueError: matplotlib is not installed.
    """
    at = _layout(tree)
    deepest, leaves = max(x for x, _ in at), max(y for _, y in at) + 1
    figure, (axes,) = panels(1, size=(1.6 + 1.45 * deepest, max(1.6, 0.42 * leaves + 0.6)))
    for row, parent in enumerate(tree.parents):
        if parent != ROOT:
            look = {"color": COLOURS[2], "linewidth": 2.4} if tree.accepted[row] else {"color": "0.75", "linewidth": 1}
            axes.plot(*zip(at[parent], at[row], strict=True), zorder=1, **look)
    for row, (x, y) in enumerate(at):
        box = {"boxstyle": "round,pad=0.25", "facecolor": "#d8f0e6" if tree.accepted[row] else "white",
               "edgecolor": COLOURS[2] if tree.accepted[row] else "0.6"}  # fmt: skip
        word = _visible(tree.words[row]).replace("$", r"\$") + tree.value(row, "\n")
        axes.text(x, y, word, ha="center", va="center", fontsize=8, family="monospace", bbox=box, zorder=2)
    axes.set(xlim=(-0.6, deepest + 0.6), ylim=(leaves - 0.4, -0.6))
    axes.axis("off")
    return figure


def _layout(tree: Tree) -> list[tuple[int, float]]:
    """Returns (x, y) of every node: x is its depth, and leaves lie one below another."""
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    height, free = [0.0] * len(depths), iter(range(len(depths)))

    def place(row: int) -> float:
        ends = [place(child) for child in tree.children(row)]
        height[row] = (ends[0] + ends[-1]) / 2 if ends else float(next(free))
        return height[row]

    place(0)
    return list(zip(depths, height, strict=True))


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


def as_html(text: Iterable[Piece]) -> str:
    """Returns escaped HTML for `IPython.display.HTML`, accepted drafts on green."""
    green = '<span style="background:#bfe8d4;color:#000">{}</span>'
    spans = ((green if piece.drafted else "{}").format(html.escape(piece.text)) for piece in text)
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
    """Draws acceptance over the draft's confidence, a line for each named result of `evaluate.calibrate`.

    Raises:
      ValueError: matplotlib is not installed.
    """
    figure, (axes,) = panels(1)
    for place, (name, one) in enumerate(found.items()):
        full = one.count > 0
        plot_calibration(axes, one.confidence[full], one.accepted[full] / one.count[full], one.count[full], name, place)
    return legend_below(figure, axes)


def plot_calibration(
    axes: Any, confidence: np.ndarray, rate: np.ndarray, count: np.ndarray, name: str, place: int
) -> None:
    """Draws acceptance over each bin's mean confidence, and the diagonal; larger marks have more nodes."""
    if not axes.lines:
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":", label="calibrated")
    look = style(place)
    sizes = 12 + 90 * count / max(1, int(count.max(initial=1)))
    axes.plot(confidence, rate, color=look["color"], linestyle=look["linestyle"], linewidth=1.2)
    axes.scatter(confidence, rate, s=sizes, color=look["color"], marker=look["marker"], alpha=0.8)
    axes.plot([], [], **look, label=name)  # legend: colours and marks repeat, line styles do not
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    name_axes(axes, "confidence of the draft", "accepted of reached nodes")


def png(figure: Any) -> bytes:
    """Returns a figure as PNG, without a date or version: equal figures give equal bytes."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, metadata={"Software": None})
    return picture.getvalue()


def panels(
    count: int, width: float = 4.6, share: bool = False, columns: int = 4, size: tuple[float, float] | None = None
) -> tuple[Any, list[Any]]:
    """Returns a figure and its panels, at most `columns` in a row.

    Args:
      width: of a panel, in inches. size: of the figure, in inches; overrides `width`. share: panels share the y axis.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "matplotlib must be installed for figures, got no such module. Run pip install matplotlib."
        ) from error

    class Shown(Figure):
        def _repr_png_(self) -> bytes:  # shown by notebooks with any backend
            return png(self)

    count = max(1, count)
    rows = -(-count // columns)
    columns = -(-count // rows)
    size = size or (width * columns, 3.6 * rows)
    figure = Shown(figsize=size, layout="constrained", facecolor="white")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share).ravel().tolist()
    for empty in grid[count:]:
        empty.remove()
    return figure, grid[:count]


def style(place: int) -> dict[str, Any]:
    """Returns colour, mark and line style of the method at `place`; the first eight differ in colour."""
    turn, at = divmod(place, len(COLOURS))
    line = ("-", "--", "-.", ":")[turn % 4]
    return {"color": COLOURS[at], "marker": "osD^vP*X"[at], "markersize": 5, "linestyle": line}


def name_axes(axes: Any, x: str, y: str) -> None:
    """Names the axes and adds a light grid."""
    axes.set(xlabel=x, ylabel=y)
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
