"""The methods that the programs of this folder compare, by the names of the papers, each with a setting.

A label is `name[@setting]`; parts of a setting are separated by "/":

    eagle3@6x10x59            dynamic tree: depth, top_k, nodes     eagle2@static           the published static tree
    eagle3@chain3             a chain                               sps@chain5/block        and its acceptance rule
    eagle2@4x2x7/confidence   frontier by confidence, not value     eagle2@4x2x7/norerank   frontiers as they are
    eagle1                    EAGLE, with its static tree           hass                    HASS, with eagle2's tree
    eagle3@untempered         ranking at temperature > 0            eagle3@4x4x12/top_p0.9  children by probability
    pld@10, pld@10x3          drafted tokens (x longest n-gram)     lookahead@5x7x7         N, W and G
    pld@10x3/shortest2        no n-gram below 2 tokens              pld@10x3/latest         the last place, not first
    medusa@best31             static tree of 31 nodes that is best for the acceptance recorded in --positions
    own:module:function       a method of your own: what function(target) of an importable module returns
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import eagle_jax
from eagle_jax.bound import DEFAULT_CHAIN, Medusa, TreeDrafter
from eagle_jax.checkpoints.mapping import DTYPES
from eagle_jax.config import EAGLE1_PARENTS, ConfigError, TreeConfig, Verification
from eagle_jax.data.tokenizers import load_tokenizer
from eagle_jax.drafters.lookahead import lookahead
from eagle_jax.drafters.prompt_lookup import prompt_lookup
from eagle_jax.positions import pooled
from eagle_jax.programs import naming, parse_tree
from eagle_jax.shapes import best_parents, medusa_parents
from infer import drafts, own
from infer.recorded import read as read_recorded

PLAIN = "vanilla"
BUNDLED = {
    "sps": "small", "medusa": "medusa", "hydra": "hydra", "eagle1": "eagle1", "hass": "hass", "eagle2": "eagle1",
    "eagle3": "eagle3",
}  # fmt: skip
"""Methods whose weights are bundled with the target, and their names there. `eagle1` and `eagle2`
are one head, taught as EAGLE teaches, in EAGLE's static tree by default and in a dynamic one."""
OPTIONS = {name: name for name in BUNDLED} | {"sps": "draft_model"}
"""Methods with weights, and the option that names their path."""
WEIGHTLESS = {"pld": (10, 3), "lookahead": (5, 7, 7)}
"""Methods without weights, and the numbers of the papers: length and longest n-gram; N, W and G."""
METHODS = (PLAIN, "sps", "pld", "lookahead", "medusa", "hydra", "eagle1", "hass", "eagle2", "eagle3")
"""Plain decoding, standard speculative sampling, prompt lookup, lookahead, Medusa-1, Hydra or Hydra++, EAGLE heads:
`eagle1`, `hass` and `eagle2` load heads of one kind, which differ in how they were taught and what tree they fill."""
WORDS: dict[str, tuple[str, Any]] = {
    "value": ("rank_by", "value"),
    "confidence": ("rank_by", "confidence"),
    "rerank": ("rerank", True),
    "norerank": ("rerank", False),
    "draw": ("sampled_ranking", "draw"),
    "law": ("sampled_ranking", "law"),
    "untempered": ("sampled_ranking", "untempered"),
} | {rule: ("verification", rule) for rule in get_args(Verification)}
"""Words of a setting, and the field of `TreeConfig` that each gives."""


@dataclasses.dataclass(frozen=True)
class Places:
    """Where methods come from: options that every program here has.

    Attributes:
      target: path or hub id of the model; default is the bundled one, for which all that drafts is bundled, too.
      eagle1: path or hub id of an EAGLE-1/2 head for the method eagle1, whose own tree is the static one.
      hass: path or hub id of an EAGLE-1/2 head that was taught as HASS teaches.
      eagle2: path or hub id of its EAGLE-1/2 head.
      eagle3: path or hub id of its EAGLE-3 head.
      draft_model: path or hub id of a small model with its tokenizer, for sps.
      medusa: path or hub id of its Medusa heads.
      hydra: path or hub id of its Hydra or Hydra++ heads.
      positions: a result of infer.acceptance, for static trees that are best for it (medusa@best31).
    """

    target: str | None = None
    eagle1: str | None = None
    hass: str | None = None
    eagle2: str | None = None
    eagle3: str | None = None
    draft_model: str | None = None
    medusa: str | None = None
    hydra: str | None = None
    positions: str | None = None


@dataclasses.dataclass(frozen=True)
class Sources(Places):
    """Where methods come from, and how they are loaded.

    Attributes:
      dtype: of all weights. tree: of the heads whose label says none; None is each one's own.
    """

    dtype: str = "float32"
    tree: TreeConfig | None = None

    @classmethod
    def of(cls, args: Places, dtype: str = "float32", tree: str | None = None) -> Sources:
        """From a program's arguments; `tree` as its option says it.

        Raises:
          ValueError: an unknown `dtype`, or `tree` does not read as one. ConfigError: there is no such tree.
        """
        if dtype not in DTYPES:
            raise ValueError(f"--dtype {dtype} must be one of {', '.join(DTYPES)}")
        given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Places)}
        return cls(**given, dtype=dtype, tree=parse_tree(tree) if tree else None)


@dataclasses.dataclass(frozen=True)
class Label:
    """A label, read.

    Attributes:
      text: as it was given. method: one of `METHODS`, or own:module:function.
      shape: "static", "best31" and the like, or a chain or dynamic tree; None is the method's own.
      fields: fields of `TreeConfig` that the setting gives besides; of pld those of `eagle_jax.prompt_lookup`.
      numbers: of pld and lookahead.
    """

    text: str
    method: str
    shape: TreeConfig | str | None = None
    fields: tuple[tuple[str, Any], ...] = ()
    numbers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Label:
        """Reads "name[@setting]".

        Raises:
          ValueError: an unknown method or setting, or one that the method does not take.
          ConfigError: a tree that cannot be.
        """
        if own.is_own(text):
            own.check_name(text)
            return cls(text, text)
        method, at, setting = text.partition("@")
        if (before := method.partition("/")[0]) in METHODS and before != method:
            raise ValueError(f"{text!r}: what a method is set to begins with @: {before}@{method[len(before) + 1 :]}")
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}: there are {', '.join(METHODS)} and own:module:function")
        if at and not setting:
            raise ValueError(f"{text!r}: a setting must follow the @, such as eagle3@6x10x59; leave it out for the own")
        if method in WEIGHTLESS:
            return cls(text, method, None, *_without_weights(text, method, setting))
        if setting and method == PLAIN:
            raise ValueError(f"{text!r}: {PLAIN} is plain decoding and takes no setting")
        shape: TreeConfig | str | None = None
        fields: dict[str, Any] = {}
        for place, word in enumerate(setting.split("/") if setting else ()):
            with _named(text):
                found = _shape(word)
            if found is not None:
                if place:
                    raise ValueError(f"{text!r}: the tree {word!r} comes first, and once")
                shape = found
                continue
            name, value = _field(text, word)
            if name in fields:
                raise ValueError(f"{text!r}: {word!r} contradicts or repeats what is said before it")
            fields[name] = value
        if method == "eagle1" and shape is None:
            shape = "static"
        label = cls(text, method, shape, tuple(fields.items()))
        if shape is not None:
            label.tree(DEFAULT_CHAIN, EAGLE1_PARENTS)
        return label

    def tree(self, default: TreeConfig, static: Sequence[int]) -> TreeConfig:
        """The tree that is asked for, given the method's own and its published (or best) static one.

        Raises:
          ConfigError: there is no such tree; the message names the label.
        """
        with _named(self.text):
            shape = TreeConfig.static(static) if isinstance(self.shape, str) else self.shape or default
            assert isinstance(shape, TreeConfig)
            fields = dict(self.fields)
            if self.method == "sps" and shape.top_k == 1 and shape.parents is None:
                fields = {"verification": "rejection"} | fields  # the method of the papers
            return dataclasses.replace(shape, **fields)


@contextlib.contextmanager
def _named(text: str) -> Iterator[None]:
    """Puts the label before the message of a `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{text}: {error}") from error


def _shape(word: str) -> TreeConfig | str | None:
    """The tree that a word of a setting names; None if it names none."""
    if word == "static" or re.fullmatch(r"best\d+", word):
        return word
    if chain := re.fullmatch(r"chain(\d+)", word):
        return TreeConfig.chain(int(chain[1]))
    if dynamic := re.fullmatch(r"(\d+)x(\d+)x(\d+)", word):
        depth, top_k, num_nodes = map(int, dynamic.groups())
        return TreeConfig(depth, top_k, num_nodes)
    return None


def _field(text: str, word: str) -> tuple[str, Any]:
    if word in WORDS:
        return WORDS[word]
    if word.startswith("top_p"):
        try:
            return "top_p", float(word.removeprefix("top_p"))
        except ValueError:
            raise ValueError(f"{text!r}: {word!r} must read like top_p0.9") from None
    raise ValueError(
        f"{text!r}: unknown setting {word!r}: a tree is 6x10x59 (depth, top_k, nodes), chain3, static or best31, and "
        f"after a slash there may be {', '.join(WORDS)} or top_p0.9"
    )


def _without_weights(text: str, method: str, setting: str) -> tuple[tuple[tuple[str, Any], ...], tuple[int, ...]]:
    """Fields and numbers of a method that has no tree; what builds it checks them."""
    usual, words = WEIGHTLESS[method], setting.split("/") if setting else []
    pattern, form = (r"\d+(x\d+)?", "pld@10, pld@10x3, pld@10x3/shortest2 or pld@10x3/latest")
    if method == "lookahead":
        pattern, form = r"\d+x\d+x\d+", "lookahead@5x7x7"
    given: tuple[int, ...] = ()
    if words and re.fullmatch(pattern, words[0]):
        given = tuple(map(int, words.pop(0).split("x")))
    fields: dict[str, Any] = {}
    for word in words:
        shortest = re.fullmatch(r"shortest(\d+)", word)
        name, value = ("shortest", int(shortest[1])) if shortest else (word, True)
        if method != "pld" or not (shortest or word == "latest") or name in fields:
            raise ValueError(f"{text!r}: unknown setting {setting!r}: it reads {form}")
        fields[name] = value
    numbers = given + usual[len(given) :]
    with _named(text):
        if method == "pld":
            prompt_lookup(numbers[1], numbers[0], **fields)
        else:
            lookahead(*numbers)
    usually = ("shortest", 1)  # what is as usual is not said, so that equal drafts are described alike
    return tuple(item for item in fields.items() if item != usually), numbers


def check_methods(labels: Sequence[str], sources: Sources) -> list[str]:
    """The labels in order, plain decoding first, each once.

    Raises:
      ValueError: none, an unknown one, or one that nothing was given for. ConfigError: a tree that cannot be.
    """
    if not labels:
        raise ValueError(f"--methods names no method: there are {', '.join(METHODS)}")
    for label in map(Label.parse, labels):
        name = label.method
        if isinstance(label.shape, str) and label.shape != "static":
            if sources.positions is None:
                command = f"python -m infer.acceptance --methods {name}@static"
                raise ValueError(f"{label.text!r} needs --positions FILE, a result of `{command}`")
            best_static(label, sources.positions)
        if own.is_own(name):
            own.find(name)
        if name not in OPTIONS or getattr(sources, OPTIONS[name]) is not None:
            continue
        if sources.target is not None:
            option = f"--{OPTIONS[name].replace('_', '-')} PATH"
            what = "a small model with its tokenizer" if name == "sps" else "the heads of that target"
            raise ValueError(f"{name} with --target needs {option}, {what}")
    return list(dict.fromkeys([PLAIN, *labels]))


def best_static(label: Label, path: str | Path, deepest: int | None = None) -> tuple[int, ...]:
    """The static tree that is best for a method's recorded acceptance, greedy where that was recorded.

    The rates by depth and rank are those of all tasks and trees of the method in the file together; a static tree,
    whose positions are all filled in every cycle, gives the fairest.

    Raises:
      ValueError: no result of infer.acceptance, none of that method, or too few positions for so many nodes.
    """
    with naming("--positions", path):
        recorded = read_recorded(path)
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
    with _named(label.text):
        return best_parents(list(itertools.takewhile(bool, rates)), int(str(label.shape).removeprefix("best")))


def load_pair(sources: Sources) -> tuple[eagle_jax.Target, Any]:
    """The target and its tokenizer."""
    if sources.target is None:
        target, _, tokenizer = eagle_jax.load_demo(dtype=sources.dtype)
        return target, tokenizer
    with naming("--target", sources.target):
        target = eagle_jax.load_target(sources.target, sources.dtype)
        return target, load_tokenizer(sources.target, target.config)


class Loader:
    """Methods bound to one target, by label; weights are read once, however many settings want them."""

    def __init__(self, target: eagle_jax.Target, sources: Sources):
        self.target, self.sources = target, sources
        self._weights: dict[tuple[str, bool], TreeDrafter] = {}

    def __call__(self, text: str) -> eagle_jax.BoundDrafter | None:
        """A method with its setting; None is plain decoding.

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
        where = self.weights(label.method), label.method == "sps"  # a model is no heads, whatever its path
        if where not in self._weights:
            self._weights[where] = self._load(label.method)
        bound = self._weights[where]
        self._check_kind(label.method, bound)
        static = medusa_parents(bound.config.num_heads) if isinstance(bound, Medusa) else EAGLE1_PARENTS
        if isinstance(label.shape, str) and label.shape != "static":
            assert self.sources.positions is not None, "`check_methods` asks for it"
            static = best_static(label, self.sources.positions, bound.deepest)
        default = bound.tree if label.method == "sps" else self.sources.tree or bound.tree
        tree = label.tree(default, static)
        with _named(text):
            return bound.with_tree(tree)

    def weights(self, method: str) -> str:
        """Where the weights of a method come from: a path or hub id, or which of those bundled."""
        return getattr(self.sources, OPTIONS[method]) or f"bundled {BUNDLED[method]}"

    def draft(self, text: str) -> dict[str, Any]:
        """What a label drafts, as result files record it (`infer/drafts.py`)."""
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
        """Refuses heads of another method: the numbers would stand under its name."""
        path = getattr(self.sources, OPTIONS[method])
        if path is None or method == "sps":
            return
        kind, asked = heads.config.kind, {"eagle2": "eagle1", "hass": "eagle1"}.get(method, method)
        if kind != asked:
            held = {"eagle1": "eagle2"}.get(kind, kind)
            raise ValueError(
                f"--{method} {path}: these are heads of {held}: give them as --{held}, for the method {held}"
            )


def load_method(label: str, target: eagle_jax.Target, sources: Sources) -> eagle_jax.BoundDrafter | None:
    """One method bound to the target; None is plain decoding. Several of one target: `Loader`."""
    return Loader(target, sources)(label)
