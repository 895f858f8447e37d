"""Loads the bundled target and drafters; needs no download."""

from __future__ import annotations

import os
from typing import Any, Literal, get_args

import jax
from jax.typing import DTypeLike

from eagle_jax.assets import bundled
from eagle_jax.config import TreeConfig
from eagle_jax.runtime.drafters import DEFAULT_CHAIN, TreeDrafter
from eagle_jax.runtime.loading import load_draft_model, load_drafter, load_medusa, load_target
from eagle_jax.runtime.target import Target

Bundled = Literal["eagle1", "eagle2", "hass", "eagle3", "medusa", "hydra", "small"]
"""The bundled drafters. `eagle1` and `eagle2` are the same head; `small` is a distilled draft model."""

DEMO_TREE_CPU = TreeConfig(depth=4, top_k=2, num_nodes=7)
"""A small tree that we chose for two CPU cores; it is not always the fastest. `python -m infer.tune` finds the fastest
method and tree by batch size and temperature."""


def load_demo(
    head: Bundled = "hass", tree: TreeConfig | None = None, *, dtype: DTypeLike = "float32"
) -> tuple[Target, TreeDrafter, Any]:
    """Loads the bundled target, a small trained chat model, its tokenizer and a drafter; no network.

    Args:
      head: name of the drafter. "hass" is an EAGLE-1/2 head trained on its own outputs; "eagle1"/"eagle2" was trained
        on the target's features alone.
      tree: None is `DEMO_TREE_CPU` on CPU, else the default of the method; for "small" a chain of 5.
      dtype: as in `load_target`; the files hold bfloat16.

    Returns:
      target, drafter, tokenizer (of `transformers`, with a chat template).

    Raises:
      ValueError: `head` is unknown. ConfigError: the drafter cannot draft `tree`.
      MemoryError, DeviceError: as `load_target`.
    """
    os.environ.setdefault(
        "TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"
    )  # transformers warns without torch, which is not needed
    # Not AutoTokenizer, which imports torch where it is installed: seconds.
    from transformers import PreTrainedTokenizerFast

    if head not in get_args(Bundled):
        raise ValueError(f"head must be one of {', '.join(get_args(Bundled))}, got {head!r}.")
    target = load_target(bundled("target"), dtype)
    drafter: TreeDrafter
    if head == "small":
        drafter = load_draft_model(bundled(head), target, tree or DEFAULT_CHAIN)
    elif head in ("medusa", "hydra"):
        drafter = load_medusa(bundled(head), target, tree or (DEMO_TREE_CPU if _on_cpu() else None))
    else:
        drafter = load_drafter(bundled(head), target, tree or (DEMO_TREE_CPU if _on_cpu() else None))
    return target, drafter, PreTrainedTokenizerFast.from_pretrained(bundled("target"))


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"
