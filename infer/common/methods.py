"""Loads drafting methods by the names of the papers.

`infer/common/labels.py` has the grammar of their labels.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eagle_jax
from eagle_jax.checkpoints import config_directory, read_target_config
from eagle_jax.checkpoints.files.mapping import DTYPES
from eagle_jax.config import EAGLE1_PARENTS, TreeConfig
from eagle_jax.data.chat.stops import with_stop_ids
from eagle_jax.data.chat.tokenizers import load_tokenizer
from eagle_jax.evaluate.positions import pooled
from eagle_jax.runtime.drafters import Medusa, TreeDrafter
from eagle_jax.shapes import best_parents, medusa_parents, parents_of_paths
from infer.common import drafts, own
from infer.common.labels import METHODS, PLAIN, Label, named
from infer.common.programs import naming, parse_template_args, parse_tree, use_template
from infer.common.results import Recorded, read_as

BUNDLED = {
    "sps": "small", "medusa": "medusa", "hydra": "hydra", "eagle1": "eagle1", "hass": "hass", "eagle2": "eagle1",
    "eagle3": "eagle3",
}  # fmt: skip
"""Methods whose weights are bundled with the target, and their names there. `eagle1` and `eagle2`
are one head, taught as EAGLE teaches, in EAGLE's static tree by default and in a dynamic one."""
OPTIONS = {name: name for name in BUNDLED} | {"sps": "draft_model"}
"""Methods with weights, and the option with their path."""


@dataclasses.dataclass(frozen=True)
class Places:
    """Options of every program: where targets and methods come from.

    Attributes:
      target: path or hub id of the model; default is the bundled one, for which all that drafts is bundled, too.
      chat_template: a Jinja file, for a tokenizer without one (Vicuna), or the name of one of the tokenizer's own.
      template_args: arguments of the chat template, NAME=VALUE each, such as enable_thinking=false.
      eagle1: path or hub id of an EAGLE-1/2 head for the method eagle1, whose own tree is the static one.
      hass: path or hub id of an EAGLE-1/2 head that was taught as HASS teaches.
      eagle2: path or hub id of its EAGLE-1/2 head.
      eagle3: path or hub id of its EAGLE-3 head.
      draft_model: path or hub id of a small model with its tokenizer, for sps.
      medusa: path or hub id of its Medusa heads.
      hydra: path or hub id of its Hydra or Hydra++ heads.
      positions: a result of infer.acceptance, for static trees that are best for it (medusa@best31).
      choices: a JSON file with the paths of a static tree (medusa@choices), as Medusa's are published:
        [[0], [0, 0], [1]] are a first child with one below it, and a second.
    """

    target: str | None = None
    chat_template: str | None = None
    template_args: tuple[str, ...] = ()
    eagle1: str | None = None
    hass: str | None = None
    eagle2: str | None = None
    eagle3: str | None = None
    draft_model: str | None = None
    medusa: str | None = None
    hydra: str | None = None
    positions: str | None = None
    choices: str | None = None


@dataclasses.dataclass(frozen=True)
class Sources(Places):
    """Where methods come from, and how to load them.

    Attributes:
      dtype: of all weights. tree: of heads whose label has none; None is each head's own.
    """

    dtype: str = "float32"
    tree: TreeConfig | None = None

    @classmethod
    def of(cls, args: Places, dtype: str = "float32", tree: str | None = None, option: str = "--dtype") -> Sources:
        """From a program's arguments; `tree` as its option says it, `option` is the one that `dtype` is of.

        Raises:
          ValueError: an unknown `dtype`, or a `tree` or template argument that does not read as one.
          ConfigError: there is no such tree.
        """
        parse_template_args(args.template_args)
        if dtype not in DTYPES:
            raise ValueError(f"{option} {dtype} must be one of {', '.join(DTYPES)}")
        given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Places)}
        return cls(**given, dtype=dtype, tree=parse_tree(tree) if tree else None)


def check_methods(labels: Sequence[str], sources: Sources) -> list[str]:
    """Checks labels and returns them, plain decoding first, each once.

    Raises:
      ValueError: none, an unknown one, one that nothing was given for, or a file that none of them uses.
      ConfigError: a tree that cannot be.
    """
    if not labels:
        raise ValueError(f"--methods names no method: there are {', '.join(METHODS)}")
    parsed = [Label.parse(text) for text in labels]
    shapes = {label.shape for label in parsed if isinstance(label.shape, str)}
    if sources.choices is not None and "choices" not in shapes:
        raise ValueError(f"--choices {sources.choices} is given, and no method has a use for it: medusa@choices would")
    if sources.positions is not None and not any(shape.startswith("best") for shape in shapes):
        raise ValueError(
            f"--positions {sources.positions} is given, and no method has a use for it: medusa@best31 would"
        )
    for label in parsed:
        name = label.method
        if isinstance(label.shape, str):
            static_parents(label, sources, EAGLE1_PARENTS)
        if own.is_own(name):
            own.find(name)
        if name not in OPTIONS or getattr(sources, OPTIONS[name]) is not None:
            continue
        if sources.target is not None:
            option = f"--{OPTIONS[name].replace('_', '-')} PATH"
            what = "a small model with its tokenizer" if name == "sps" else "the heads of that target"
            raise ValueError(f"{name} with --target needs {option}, {what}; pld and lookahead need none")
    return list(dict.fromkeys([PLAIN, *labels]))


def static_parents(
    label: Label, sources: Sources, published: tuple[int, ...], deepest: int | None = None
) -> tuple[int, ...]:
    """Returns the static tree of a label: the published one, the best for recorded acceptance, or a given one.

    Raises:
      ValueError: a file that is missing or holds none. ConfigError: paths that are no tree, or too few.
    """
    if label.shape == "choices":
        if sources.choices is None:
            raise ValueError(f"{label.text!r} needs --choices FILE, a JSON list of paths such as [[0], [0, 0], [1]]")
        with naming("--choices", sources.choices):
            return read_choices(Path(sources.choices))
    if label.shape == "static":
        return published
    if sources.positions is None:
        command = f"python -m infer.acceptance --methods {label.method}@static"
        raise ValueError(f"{label.text!r} needs --positions FILE, a result of `{command}`")
    return best_static(label, sources.positions, deepest)


def read_choices(path: Path) -> tuple[int, ...]:
    """Reads the parents of a static tree from a file of paths.

    Raises:
      ValueError: no JSON list of lists of whole numbers. ConfigError: the paths are no tree. OSError: no such file.
    """
    try:
        paths = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not JSON ({error}): give a list of paths such as [[0], [0, 0], [1]]") from error
    fits = isinstance(paths, list) and all(isinstance(ranks, list) for ranks in paths)
    if not fits or not paths or not all(type(rank) is int for ranks in paths for rank in ranks):
        raise ValueError("must be a list of paths of ranks, such as [[0], [0, 0], [1]]")
    return parents_of_paths(paths)


def best_static(label: Label, path: str | Path, deepest: int | None = None) -> tuple[int, ...]:
    """Returns the best static tree for a method's recorded acceptance, of the lowest recorded temperature.

    The rates by depth and rank are those of all tasks and trees of the method in the file together; a static tree,
    whose positions are all filled in every cycle, gives the fairest.

    Raises:
      ValueError: no result of infer.acceptance, none of that method, or too few positions for so many nodes.
    """
    with naming("--positions", path):
        recorded = read_as(path, Recorded)
    cells = [cell for cell in recorded.cells if cell.method == label.method]
    if not cells:
        raise ValueError(f"{label.text!r}: {path} holds nothing of {label.method}; record it with infer.acceptance")
    coolest = min(cell.temperature for cell in cells)
    tables = [cell.positions for cell in cells if cell.temperature == coolest]
    reached, accepted = (pooled([table[name] for table in tables])[:deepest] for name in ("reached", "accepted"))
    rates = [
        [hits / tries for hits, tries in zip(*level, strict=True) if tries]
        for level in zip(accepted, reached, strict=True)
    ]
    with named(label.text):
        return best_parents(list(itertools.takewhile(bool, rates)), int(str(label.shape).removeprefix("best")))


def load_pair(sources: Sources) -> tuple[eagle_jax.Target, Any]:
    """Loads the target, which stops where its chat template ends a turn, and its tokenizer."""
    if sources.target is None:
        target, _, tokenizer = eagle_jax.load_demo(dtype=sources.dtype)
        use_template(tokenizer, sources)
        return with_stop_ids(target, tokenizer), tokenizer
    with naming("--target", sources.target):
        tokenizer = load_tokenizer(sources.target, read_target_config(config_directory(sources.target)))
    use_template(tokenizer, sources)  # raises before weights are read
    with naming("--target", sources.target):
        return with_stop_ids(eagle_jax.load_target(sources.target, sources.dtype), tokenizer), tokenizer


class Loader:
    """Binds methods to one target by label, and reads the weights of a method once."""

    def __init__(self, target: eagle_jax.Target, sources: Sources):
        self.target, self.sources = target, sources
        self._weights: dict[tuple[str, bool], TreeDrafter] = {}

    def __call__(self, text: str) -> eagle_jax.BoundDrafter | None:
        """Returns a method with its setting; None is plain decoding.

        Raises:
          ValueError: as `Label.parse`. ConfigError: a tree that the method cannot fill.
          CheckpointError: weights that are missing or do not fit.
        """
        label = Label.parse(text)
        if label.method == PLAIN:
            return None
        if label.method == "pld":
            length, ngram = label.numbers
            return eagle_jax.prompt_lookup(self.target, length=length, ngram=ngram, **dict(label.fields))
        if label.method == "lookahead":
            ngram, window, guesses = label.numbers
            return eagle_jax.lookahead(self.target, ngram=ngram, window=window, guesses=guesses)
        if own.is_own(label.method):
            return own.bind(label.method, self.target)
        where = self.weights(label.method), label.method == "sps"  # a small model and heads may have the same path
        if where not in self._weights:
            self._weights[where] = self._load(label.method)
        bound = self._weights[where]
        self._check_kind(label.method, bound)
        static = medusa_parents(bound.config.num_heads) if isinstance(bound, Medusa) else EAGLE1_PARENTS
        if isinstance(label.shape, str):
            static = static_parents(label, self.sources, static, bound.deepest)
        default = bound.tree if label.method == "sps" else self.sources.tree or bound.tree
        tree = label.tree(default, static)
        with named(text):
            return bound.with_tree(tree)

    def weights(self, method: str) -> str:
        """Returns where the weights of a method come from: a path, a hub id, or the bundled ones."""
        return getattr(self.sources, OPTIONS[method]) or f"bundled {BUNDLED[method]}"

    def draft(self, text: str) -> dict[str, Any]:
        """What a label drafts, as result files record it (`infer/common/drafts.py`)."""
        bound, label = self(text), Label.parse(text)
        if bound is None:
            return drafts.PLAIN
        if own.is_own(text):
            return own.draft(bound)
        found = drafts.PLAIN | {"rows": bound.drafter.num_nodes + 1}
        if not isinstance(bound, TreeDrafter):
            kind = "lookup" if label.method == "pld" else "lookahead"
            numbers = dict(zip(drafts.FIELDS[kind], label.numbers, strict=True))
            return found | {"kind": kind} | numbers | dict(label.fields)
        tree = bound.tree
        kind = "chain" if tree.top_k == 1 else "dynamic" if tree.parents is None else "static"
        fields: dict[str, Any] = {
            "depth": tree.depth, "top_k": tree.top_k, "nodes": tree.num_nodes, "rank_by": tree.rank_by,
            "rerank": tree.rerank, "parents": drafts.written(tree.parents or ()),
        }  # fmt: skip
        found |= {"kind": kind, "weights": self.weights(label.method), "rule": tree.verification}
        found |= {"ranking": tree.sampled_ranking if tree.verification == "deterministic" else None}
        found |= {name: fields[name] for name in drafts.FIELDS[kind]}
        return found | ({} if tree.top_p == 1 else {"top_p": tree.top_p})

    def _load(self, method: str) -> TreeDrafter:
        path = getattr(self.sources, OPTIONS[method])
        if path is None:
            head: Any = BUNDLED[method]
            return eagle_jax.load_demo(head, dtype=self.sources.dtype)[1]
        load: Any = {"sps": eagle_jax.load_draft_model, "medusa": eagle_jax.load_medusa, "hydra": eagle_jax.load_medusa}
        with naming(f"--{OPTIONS[method].replace('_', '-')}", path):
            return load.get(method, eagle_jax.load_drafter)(path, self.target)

    def _check_kind(self, method: str, heads: Any) -> None:
        """Raises on heads of another method: its numbers would get the wrong name."""
        path = getattr(self.sources, OPTIONS[method])
        if path is None or method == "sps":
            return
        kind, asked = heads.config.kind, {"eagle2": "eagle1", "hass": "eagle1"}.get(method, method)
        if kind != asked:
            held = {"eagle1": "eagle2"}.get(kind, kind)
            raise ValueError(
                f"--{method} {path}: these are heads of {held}: give them as --{held}, for the method {held}"
            )
