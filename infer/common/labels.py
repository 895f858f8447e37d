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
from infer.common.own import check_name, is_own

PLAIN = "vanilla"
METHODS = (PLAIN, "sps", "pld", "lookahead", "medusa", "hydra", "eagle1", "hass", "eagle2", "eagle3")
"""Plain decoding, standard speculative sampling, prompt lookup, lookahead, Medusa-1, Hydra or Hydra++, EAGLE heads:
`eagle1`, `hass` and `eagle2` load heads of one kind, which differ in training and in the tree they fill."""
NUMBERS: dict[str, dict[str, int]] = {
    "pld": {"length": 10, "ngram": 3},
    "lookahead": {"ngram": 5, "window": 7, "guesses": 7},
}
"""The numbers of methods without weights, as in the papers."""
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
TREES = "a tree first (6x10x59, chain3, static, best31 or choices), then top_p0.9 or " + ", ".join(WORDS)
FORMS = {"pld": "pld@10x3/shortest2/latest", "lookahead": "lookahead@5x7x7", PLAIN: PLAIN}


@dataclasses.dataclass(frozen=True)
class Label:
    """A parsed label.

    Attributes:
      text: as it was given. method: one of `METHODS`, or own:module:function.
      shape: "static", "choices" or "bestN" (such as "best31"), or a chain or dynamic tree; None is the method's own.
      fields: other fields of `TreeConfig`; of pld those of `eagle_jax.prompt_lookup`.
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
          ConfigError: an impossible tree.
        """
        if is_own(text):
            check_name(text)
            return cls(text, text)
        method, at, setting = text.partition("@")
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)} or own:module:function, got {method!r}. "
                             "Settings follow an @, as in eagle3@6x10x59.")  # fmt: skip
        shape: TreeConfig | str | None = "static" if method == "eagle1" else None
        numbers, fields = tuple(NUMBERS.get(method, {}).values()), dict[str, Any]()
        for place, word in enumerate(setting.split("/") if at else ()):
            if place == 0 and (found := _numbers(method, word)):
                numbers = found
                continue
            with named(text):
                tree = _shape(word) if place == 0 and method not in FORMS else None
            if tree is not None:
                shape = tree
                continue
            name, value = _field(method, word)
            if name is None or name in fields:
                raise ValueError(f"setting of {text!r} must be {FORMS.get(method, TREES)}, each once, got {word!r}.")
            fields[name] = value
        label = cls(text, method, shape, tuple(fields.items()), numbers)
        with named(text):
            if method == "pld":
                prompt_lookup(numbers[1], numbers[0], **fields)
            elif method == "lookahead":
                lookahead(*numbers)
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


def _numbers(method: str, word: str) -> tuple[int, ...]:
    """Returns the numbers of pld (10 or 10x3) or lookahead (5x7x7) in the first word of a setting; () for others."""
    usual = tuple(NUMBERS.get(method, {}).values())
    given = tuple(map(int, word.split("x"))) if re.fullmatch(r"\d+(x\d+)*", word) else ()
    complete = len(given) == len(usual) or (method == "pld" and len(given) == 1)
    return given + usual[len(given) :] if given and complete else ()


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


def _field(method: str, word: str) -> tuple[str | None, Any]:
    """Returns the field that a word of a setting gives, and its value; None for an unknown word."""
    if method == "pld":
        shortest = re.fullmatch(r"shortest(\d+)", word)
        return ("shortest", int(shortest[1])) if shortest else ("latest" if word == "latest" else None, True)
    if method in FORMS:
        return None, None
    if number := re.fullmatch(r"top_p(\d*\.?\d+)", word):
        return "top_p", float(number[1])
    return WORDS.get(word, (None, None))
