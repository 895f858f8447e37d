"""Draws docs/figures/*.svg from replies: `python -m docs.figures`, after `make smollm`.

The reply with its accepted drafts is of SmolLM2-135M-Instruct, all others of the bundled pair.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import eagle_jax
from eagle_jax import viz
from eagle_jax.checkpoints import write_whole
from eagle_jax.data.chat import chat_ids
from eagle_jax.evaluate import calibrate, record_cycles
from eagle_jax.runtime.compilation import use_compilation_cache
from infer.common.programs import run

QUESTIONS = (
    "Write a Python function that computes the factorial of n.",
    "Tom has 3 boxes with 12 pencils each. He gives away 5 pencils. How many pencils does he have left?",
    "Write a Python function that returns the largest number in a list.",
    "A book costs 7 dollars. Anna buys 4 books and pays with 50 dollars. How much change does she get?",
)
TREE = eagle_jax.TreeConfig(depth=4, top_k=3, num_nodes=12)


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments.

    Attributes:
      out: folder of the figures.
    """

    out: Path = Path(__file__).parent / "figures"


def main(args: Args) -> None:
    """Draws all figures."""
    use_compilation_cache()
    args.out.mkdir(parents=True, exist_ok=True)
    pairs = {"HASS": eagle_jax.load_demo("hass"), "EAGLE-3": eagle_jax.load_demo("eagle3")}
    target, _, tokenizer = pairs["HASS"]
    prompts = [chat_ids(tokenizer, [{"role": "user", "content": text}]) for text in QUESTIONS]
    trees, outputs, calibrated = {}, {}, {}
    for name, (_, drafter, _) in pairs.items():
        wide = drafter.rebind(target).with_tree(TREE)
        outputs[name] = eagle_jax.generate(target, wide, prompts, max_new_tokens=96)
        trees[name] = record_cycles(target, wide, prompts, max_new_tokens=96)
        calibrated[name] = calibrate(trees[name])
    real, head, words = eagle_jax.load_demo("smollm2")
    asked = chat_ids(words, [{"role": "user", "content": QUESTIONS[0]}])
    chunks = eagle_jax.stream(real, head, asked, max_new_tokens=96, eos_ids=eagle_jax.stop_ids(real, words))
    figures: dict[str, Callable[[], Any]] = {
        "tree": lambda: viz.tree_figure(viz.drafted_tree(trees["HASS"], 0, tokenizer)),
        "accepted": lambda: viz.accepted_figure(outputs),
        "calibration": lambda: viz.calibration_figure(calibrated),
        "text": lambda: text_figure(viz.pieces(chunks, words)),
    }
    for name, draw in figures.items():
        write_whole(args.out / f"{name}.svg", svg(draw()))
        print(args.out / f"{name}.svg")


def text_figure(pieces: Iterable[viz.Piece], columns: int = 84) -> Any:
    """Draws a text in cells of one width, accepted drafts on green."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    letters = [(letter, piece.drafted) for piece in pieces for letter in piece.text]
    text = "".join(letter for letter, _ in letters)
    cells: list[tuple[int, int, str, bool]] = []
    row = column = 0
    for at, (letter, drafted) in enumerate(letters):
        starts_word = not text[at - 1 : at].strip()
        length = len(text[at:].split(maxsplit=1)[0]) if letter.strip() else 0
        if letter == "\n" or column == columns or (starts_word and column + length > columns):
            row, column = row + 1, 0
        if letter != "\n":
            cells.append((row, column, letter, drafted))
            column += 1
    figure = Figure(figsize=(columns * 0.082, (row + 1) * 0.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, columns), ylim=(row + 1, 0))
    axes.axis("off")
    for at, place, letter, drafted in cells:
        if drafted:
            axes.add_patch(Rectangle((place, at), 1, 1, facecolor="#bfe8d4", edgecolor="none"))
        axes.text(place + 0.5, at + 0.72, letter, family="monospace", fontsize=9, ha="center", color="black")
    figure.patch.set_facecolor("white")
    return figure


def svg(figure: Any) -> bytes:
    """Returns the same bytes for the same figure: no date, no random names."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "eagle_jax", "svg.fonttype": "path"}):
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"[ \t]+\n", "\n", picture.getvalue()).encode()


if __name__ == "__main__":
    run(main, Args, __doc__)
