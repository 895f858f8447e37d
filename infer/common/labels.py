"""Parses labels: the name of a method and its settings.

A label is `name[@setting]`; parts of a setting are separated by "/":

    eagle3@6x10x59            dynamic tree: depth, top_k, nodes     eagle2@static           the published static tree
    eagle3@chain3             a chain                               sps@chain5/block        and its acceptance rule
    eagle2@4x2x7/confidence   frontier by confidence, not value     eagle2@4x2x7/norerank   frontiers as they are
    eagle1                    EAGLE, with its static tree           hass                    HASS, with eagle2's tree
    eagle3@untempered         ranking at temperature > 0            eagle3@4x4x12/top_p0.9  children by probability
    pld@10, pld@10x3          drafted tokens (x longest n-gram)     lookahead@5x7x7         N, W and G
    pld@10x3/shortest2        no n-gram below 2 tokens              pld@10x3/latest         the last place, not first
    medusa@best31             static tree of 31 nodes that is best for the acceptance recorded in --positions
    medusa@choices            the static tree of the paths of ranks in --choices, as Medusa's trees are published
    own:module:function       a method of your own: what function(target) of an importable module returns
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from eagle_jax.config import EAGLE1_PARENTS, ConfigError, TreeConfig, Verification
from eagle_jax.drafters.lookahead import lookahead
from eagle_jax.drafters.prompt_lookup import prompt_lookup
from eagle_jax.runtime.drafters import DEFAULT_CHAIN
from infer.common import own

PLAIN = "vanilla"
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
class Label:
    """A parsed label.

    Attributes:
      text: as it was given. method: one of `METHODS`, or own:module:function.
      shape: "static", "choices", "best31" and the like, or a chain or dynamic tree; None is the method's own.
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
        """Parses "name[@setting]".

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
            with named(text):
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
        """Returns the tree that the label names, from the method's default tree and its static tree.

        Raises:
          ConfigError: there is no such tree; the message names the label.
        """
        with named(self.text):
            shape = TreeConfig.static(static) if isinstance(self.shape, str) else self.shape or default
            assert isinstance(shape, TreeConfig)
            fields = dict(self.fields)
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


def _shape(word: str) -> TreeConfig | str | None:
    """Returns the tree that a word of a setting names; None for other words."""
    if word in ("static", "choices") or re.fullmatch(r"best\d+", word):
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
        f"{text!r}: unknown setting {word!r}: a tree is 6x10x59 (depth, top_k, nodes), chain3, static, best31 or "
        f"choices, and after a slash there may be {', '.join(WORDS)} or top_p0.9"
    )


def _without_weights(text: str, method: str, setting: str) -> tuple[tuple[tuple[str, Any], ...], tuple[int, ...]]:
    """Returns the fields and numbers of a method without weights; building the method checks them."""
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
    with named(text):
        if method == "pld":
            prompt_lookup(numbers[1], numbers[0], **fields)
        else:
            lookahead(*numbers)
    usually = ("shortest", 1)  # the default is left out, so that equal drafts have equal descriptions
    return tuple(item for item in fields.items() if item != usually), numbers
