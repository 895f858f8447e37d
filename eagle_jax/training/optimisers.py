"""Defines the optimisers of heads, draft models and small targets: Adam, and Muon for the matrices of layers."""

from __future__ import annotations

from typing import Literal

import jax
import optax
from jaxtyping import Array

from eagle_jax.core.types import Params

OptimiserKind = Literal["adam", "muon"]


def head_optimiser(
    rate: float, warmup: int, total: int, clip: float = 0.5, kind: OptimiserKind = "adam"
) -> optax.GradientTransformation:
    """Returns the optimiser of a head: linear warm-up, cosine decay to 1% of `rate`, clipped gradients.

    Args:
      rate: peak learning rate. warmup: updates until the peak. total: updates of the run.
      clip: largest global norm of a gradient.
      kind: "adam" (0.9, 0.95), or "muon" for the matrices of layers and Adam for the rest.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, max(total, warmup + 1), rate * 0.01)
    adam = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.0)
    return optax.chain(optax.clip_by_global_norm(clip), adam if kind == "adam" else muon(schedule))


def target_optimiser() -> optax.GradientTransformation:
    """Returns Muon with weight decay 0.1 and gradients clipped to norm 1, for `pretrain.train_step`.

    The learning rate is 1 here; `train_step` multiplies updates by the rate.
    """
    return optax.chain(optax.clip_by_global_norm(1.0), muon(1.0, weight_decay=0.1))


def muon(rate: optax.ScalarOrSchedule, weight_decay: float = 0.0) -> optax.GradientTransformation:
    """Returns Muon (kellerjordan.github.io/posts/muon) for matrices of layers, and Nesterov Adam for the rest.

    Muon's updates have the root mean square of Adam's (arXiv:2502.16982, section 2.2), so both use one learning rate.
    """
    return optax.contrib.muon(
        rate, weight_decay=weight_decay, adam_b1=0.9, adam_b2=0.95, consistent_rms=0.2,
        muon_weight_dimension_numbers=_matrices,
    )  # fmt: skip


def _matrices(params: Params) -> Params:
    """Marks the weights [out, in] of layers; an lm_head or an embedding has a row per token, and is none."""

    def spec(path: tuple, leaf: Array) -> optax.contrib.MuonDimensionNumbers | None:
        of_layer = path[-1].key == "weight" and not any("lm_head" in part.key for part in path)
        return optax.contrib.MuonDimensionNumbers(1, 0) if of_layer else None

    return jax.tree_util.tree_map_with_path(spec, params)
