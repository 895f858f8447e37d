"""Parses labels: the name of a method and its settings.

A label is `name[@setting]`; parts of a setting are separated by "/":

    eagle3@6x10x59            dynamic tree: depth, top_k, nodes     eagle2@static           the published static tree
    eagle3@chain3             a chain                               sps@chain5/block        and its acceptance rule
    eagle2@4x2x7/confidence   frontier by confidence, not value     eagle2@4x2x7/norerank   keeps frontiers: no rerank
    eagle1                    EAGLE, with its static tree           hass                    HASS, with eagle2's tree
    eagle3@untempered         ranking at temperature > 0            eagle3@4x4x12/top_p0.9  children by probability
    eagle3@noise_scale0.5     assumed scale of the head-target difference, for ranking at temperature > 0
    eagle3@4x2x7/pld6x3       the tree, and prompt lookup's chain of 6 tokens (x longest n-gram) in the same pass
    pld@10, pld@10x3          drafted tokens (x longest n-gram)     lookahead@5x7x7         N, W and G
    pld@10x3/shortest2        no n-gram below 2 tokens              pld@10x3/latest         the last place, not first
    medusa@best31             static tree of 31 nodes that is best for the acceptance recorded in --positions
    medusa@choices            the static tree of the paths of ranks in --choices, as Medusa's trees are published
    own:module:function       a method of your own: what function(target) of an importable module returns
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import eagle_jax
from eagle_jax.config import EAGLE1_PARENTS, ConfigError, TreeConfig, Verification
from eagle_jax.drafters import lookahead_drafter, prompt_lookup_drafter
from eagle_jax.runtime.drafters import DEFAULT_CHAIN

PLAIN = "vanilla"
METHODS = (PLAIN, "sps", "pld", "lookahead", "medusa", "hydra", "eagle1", "hass", "eagle2", "eagle3")
"""Plain decoding, standard speculative sampling, prompt lookup, lookahead, Medusa-1, Hydra or Hydra++, EAGLE heads:
`eagle1`, `hass` and `eagle2` load heads of one kind, which differ in training and in their default tree."""
NUMBERS: dict[str, dict[str, int]] = {
    "pld": {"length": 10, "ngram": 3},
    "lookahead": {"ngram": 5, "window": 7, "guesses": 7},
}
"""The numbers of methods without weights, as in the READMEs of their authors' code."""
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
FORMS = {
    "pld": ("LENGTHxNGRAM, shortestN or latest", "10x3/shortest2"),
    "lookahead": ("NGRAMxWINDOWxGUESSES", "5x7x7"),
}
"""The form of a setting and an example, of methods whose drafts have no `TreeConfig`."""
TREE_FORM = (
    f"DEPTHxTOP_KxNODES, chainN, static, {', '.join(WORDS)}, top_pP, noise_scaleS, pldLENGTH",
    "4x2x7/untempered",
)
PATTERNS = {
    "pld": r"(?P<length>\d+)(x(?P<ngram>\d+))?|shortest(?P<shortest>\d+)|(?P<latest>latest)",
    "lookahead": r"(?P<ngram>\d+)x(?P<window>\d+)x(?P<guesses>\d+)",
}
"""The parts of a setting by method, as regular expressions whose groups are fields."""
TREE_PATTERN = (
    r"(?P<shape>static|choices|best\d+|chain\d+|\d+x\d+x\d+)|top_p(?P<top_p>\d*\.?\d+)"
    r"|noise_scale(?P<noise_scale>\d*\.?\d+)|pld(?P<lookup>\d+(x\d+)?)"
)
TYPES: dict[str, Any] = {"shape": str, "top_p": float, "noise_scale": float, "lookup": str, "latest": bool}
"""Types of fields that are no integers."""


@dataclasses.dataclass(frozen=True)
class Label:
    """Holds a parsed label."""

    text: str  # as it was given
    method: str  # one of `METHODS`, or own:module:function
    # "static", "choices" or "bestN" (such as "best31"), or a chain or dynamic tree; None is the method's own
    shape: TreeConfig | str | None = None
    # other fields of `TreeConfig`; of pld and lookahead their arguments
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    # arguments of prompt lookup, whose chain the trees also hold; None is no chain
    lookup: dict[str, Any] | None = None

    @classmethod
    def parse(cls, text: str) -> Label:
        """Parses "name[@setting]".

        Raises:
          ValueError: an unknown method or setting, or one that the method does not take.
          ConfigError: an impossible tree.
        """
        if is_own(text):
            if not re.fullmatch(r"own:[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
                raise ValueError(f"method must be own:module:function without a setting, got {text!r}. "
                                 "Name a function for each setting.")  # fmt: skip
            return cls(text, text)
        method, at, setting = text.partition("@")
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)} or own:module:function, got {method!r}. "
                             "Settings follow an @, as in eagle3@6x10x59.")  # fmt: skip
        if method == PLAIN and at:
            raise ValueError(f"{PLAIN} must have no setting, got {setting!r}. Write {PLAIN}.")
        given: dict[str, Any] = {}
        for word in setting.split("/") if at else ():
            found = _fields(method, word)
            if found.keys() & given.keys():
                raise ValueError(f"settings of {text!r} must be given once, got {word!r} again. Leave one out.")
            if not found:
                form, example = FORMS.get(method, TREE_FORM)
                raise ValueError(f"setting of {method} must be {form}, got {word!r}. Write {method}@{example}.")
            given |= found
        shape = given.pop("shape", "static" if method == "eagle1" else None)
        chain = given.pop("lookup", None)
        lookup = None if chain is None else NUMBERS["pld"] | _fields("pld", chain)
        with named(text):
            label = cls(text, method, _tree(shape), NUMBERS.get(method, {}) | given, lookup)
            if method == "pld" or lookup is not None:
                prompt_lookup_drafter(**(label.fields if lookup is None else lookup))
            elif method == "lookahead":
                lookahead_drafter(**label.fields)
        if shape is not None:
            label.tree(DEFAULT_CHAIN, EAGLE1_PARENTS)
        return label

    def tree(self, default: TreeConfig, static: Sequence[int]) -> TreeConfig:
        """Returns the tree that the label names, from the method's default tree and its static tree.

        Raises:
          ConfigError: an impossible tree; the message names the label.
        """
        with named(self.text):
            shape = TreeConfig.static(static) if isinstance(self.shape, str) else self.shape or default
            fields = self.fields
            if self.method == "sps" and shape.top_k == 1 and shape.parents is None:
                fields = {"verification": "rejection"} | fields  # the method of the papers
            return dataclasses.replace(shape, **fields)


@contextlib.contextmanager
def named(text: str) -> Iterator[None]:
    """Adds the label to the message of a `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{text}: {error}") from error


def _fields(method: str, word: str) -> dict[str, Any]:
    """Returns the fields that a part of a setting gives; none for an unknown word."""
    if word in WORDS and method not in FORMS:
        return dict([WORDS[word]])
    found = re.fullmatch(PATTERNS.get(method, TREE_PATTERN), word)
    values = found.groupdict() if found else {}
    return {name: TYPES.get(name, int)(value) for name, value in values.items() if value is not None}


def _tree(shape: str | None) -> TreeConfig | str | None:
    """Returns the tree of "chain3" or "6x10x59"; other shapes depend on files or on the method."""
    if shape is None or not re.match(r"chain|\d", shape):
        return shape
    if shape.startswith("chain"):
        return TreeConfig.chain(int(shape.removeprefix("chain")))
    depth, top_k, num_nodes = map(int, shape.split("x"))
    return TreeConfig(depth, top_k, num_nodes)


def is_own(method: str) -> bool:
    """Returns whether a method is a function of the user: own:module:function, as own:my_drafter:make."""
    return method.startswith("own:")


def own_function(method: str) -> Callable[[eagle_jax.Target], Any]:
    """Imports the function that takes a target and returns a `Drafter` or `BoundDrafter`.

    Raises:
      ValueError: the module, or one that it imports, is missing; or it has no such function of one argument.
    """
    _, module, function = method.split(":")
    try:
        made = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"module of {method!r} must be importable ({error}). "
                         "Run in its folder, or add that to PYTHONPATH.") from error  # fmt: skip
    try:
        inspect.signature(made).bind(None)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"{method!r} must take one argument, the target, got {made} ({error}). Correct it.") from error
    return made  # type: ignore[return-value]


def own_drafter(method: str, target: eagle_jax.Target) -> eagle_jax.BoundDrafter:
    """Returns the user's method bound to `target`.

    Raises:
      ValueError: as `own_function`, or the function returns no drafter.
    """
    made = own_function(method)(target)
    if isinstance(made, eagle_jax.BoundDrafter):
        return made
    if not isinstance(made, eagle_jax.Drafter):
        raise ValueError(f"{method!r} must return a Drafter or BoundDrafter, got {type(made).__name__}. Correct it.")
    return eagle_jax.BoundDrafter.bind(made, target, name=method)
