"""The methods that the programs of this folder compare, by the names of the papers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, cast

import eagle_jax
from eagle_jax.checkpoints import tokenizer_directory
from eagle_jax.config import TreeConfig, Verification

PLAIN = "vanilla"
BUNDLED = ("eagle2", "eagle3")
GIVEN = {"sps": "draft_model", "medusa": "medusa", "hydra": "hydra"}
"""Methods whose weights are no part of the bundled pair, and where they come from."""
METHODS = (PLAIN, "sps", "pld", "lookahead", "medusa", "hydra", *BUNDLED)
"""Plain decoding, standard speculative sampling, prompt lookup, lookahead, Medusa-1, Hydra or Hydra++, EAGLE heads."""


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where methods come from.

    Attributes:
      target: path or hub id; None is the bundled one. eagle2, eagle3: its heads; None are the bundled ones.
      draft_model: a small model with the target's tokenizer. medusa, hydra: heads. dtype: of all weights.
      tree: of the heads; None is each one's own. chain: tokens that a small model drafts, and their rule.
      sampled_ranking: what heads rank by at temperature > 0.
    """

    target: str | None = None
    eagle2: str | None = None
    eagle3: str | None = None
    draft_model: str | None = None
    medusa: str | None = None
    hydra: str | None = None
    dtype: str = "float32"
    tree: TreeConfig | None = None
    chain: int = 5
    verification: Verification = "rejection"
    sampled_ranking: Literal["draw", "law", "untempered"] = "draw"


def check_methods(names: Sequence[str], sources: Sources) -> list[str]:
    """The methods in order, plain decoding first, each once.

    Raises:
      ValueError: none, an unknown one, or one that nothing was given for.
    """
    if not names:
        raise ValueError(f"--methods names no method: there are {', '.join(METHODS)}")
    if unknown := [name for name in names if name not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}: there are {', '.join(METHODS)}")
    for name, option in GIVEN.items():
        if name in names and getattr(sources, option) is None:
            what = "a small model with the target's tokenizer" if name == "sps" else "heads trained for the target"
            raise ValueError(f"--methods {name} needs --{option.replace('_', '-')} PATH, {what}")
    for name in BUNDLED:
        if name in names and sources.target is not None and getattr(sources, name) is None:
            raise ValueError(f"--methods {name} with --target needs --{name} PATH, the head of that target")
    return list(dict.fromkeys([PLAIN, *names]))


def load_pair(sources: Sources) -> tuple[eagle_jax.Target, Any]:
    """The target and its tokenizer."""
    if sources.target is None:
        target, _, tokenizer = eagle_jax.load_demo(dtype=sources.dtype)
        return target, tokenizer
    from transformers import AutoTokenizer

    target = eagle_jax.load_target(sources.target, sources.dtype)
    return target, AutoTokenizer.from_pretrained(tokenizer_directory(sources.target))


def load_method(name: str, target: eagle_jax.Target, sources: Sources) -> eagle_jax.BoundDrafter | None:
    """A method bound to the target; None is plain decoding. `name` has passed `check_methods`."""
    if name == PLAIN:
        return None
    if name == "sps":
        chain = TreeConfig.chain(sources.chain, sources.verification)
        return eagle_jax.load_draft_model(str(sources.draft_model), target, chain)
    if name == "pld":
        return eagle_jax.prompt_lookup(target)
    if name == "lookahead":
        return eagle_jax.lookahead(target)
    path = getattr(sources, name)
    if name in ("medusa", "hydra"):
        return eagle_jax.load_medusa(path, target, sources.tree)
    if path is None:
        kind = cast(Literal["eagle3", "eagle2"], name)
        head = eagle_jax.load_demo(kind, dtype=sources.dtype)[1]
    else:
        head = eagle_jax.load_drafter(path, target)
    return head.with_tree(dataclasses.replace(sources.tree or head.tree, sampled_ranking=sources.sampled_ranking))
