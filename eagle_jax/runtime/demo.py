"""The bundled target with one of the drafters that were trained for it: everything here runs without a download."""

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
"""EAGLE's head, which is EAGLE-2's as well (`eagle1` and `eagle2` are one), a head of that kind taught as HASS teaches,
an EAGLE-3 head, Medusa-1, Hydra++, a distilled small model."""

DEMO_TREE_CPU = TreeConfig(depth=4, top_k=2, num_nodes=7)
"""Among the best measured for the bundled pair on two CPU cores at temperature 0, where a pass over eight tokens costs
about as much as one and a half over one; `infer.tune` finds what is best by batch size and temperature."""


def load_demo(
    head: Bundled = "hass", tree: TreeConfig | None = None, *, dtype: DTypeLike = "float32"
) -> tuple[Target, TreeDrafter, Any]:
    """Loads the bundled target, a small trained chat model, with a drafter and its tokenizer. Needs no network.

    Args:
      head: which drafter: HASS's head, an EAGLE-1/2 head that was taught on its own outputs, or the EAGLE-3 head
        (level; HASS's a little ahead on two CPU cores: README, model card), EAGLE's, which was taught on the target's
        features alone and accepts less, Medusa or Hydra++ heads, or the small model.
      tree: None takes the best tree measured for the platform (small on CPU, where width costs time), of the small
        model a chain of 5.
      dtype: as in `load_target`; the files hold bfloat16.

    Returns:
      target, drafter, tokenizer (of `transformers`, with a chat template).

    Raises:
      ValueError: no such drafter. ConfigError: a tree that it cannot fill. MemoryError, DeviceError: as `load_target`.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch, which nothing here needs
    # Not AutoTokenizer, which imports torch where it is installed: seconds.
    from transformers import PreTrainedTokenizerFast

    if head not in get_args(Bundled):
        raise ValueError(f"head={head!r}: the bundled drafters are {', '.join(get_args(Bundled))}")
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
