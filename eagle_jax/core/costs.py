"""Holds what a cycle costs, and what drafts have yielded; `adaptive` weighs them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class CycleCost:
    """What the parts of a cycle cost, in plain steps of the same batch; hashable.

    Attributes:
      rows: sizes of verified trees, the root included, ascending; a size between two is interpolated.
      passes: cost of verifying so many rows per sequence.
      level: cost of drafting a level, and of its part in updating the drafter.
      token: cost of one accepted token per row: above temperature 0 the target draws for each of them.

    Raises:
      ValueError: naming the rule that is broken.
    """

    rows: tuple[int, ...]
    passes: tuple[float, ...]
    level: float = 0.0
    token: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(map(int, self.rows)))
        object.__setattr__(self, "passes", tuple(map(float, self.passes)))
        object.__setattr__(self, "level", float(self.level))
        object.__setattr__(self, "token", float(self.token))
        rises = bool(self.rows) and all(a < b for a, b in itertools.pairwise((0, *self.rows)))
        sound = all(0 < cost < np.inf for cost in self.passes)
        sound &= all(0 <= cost < np.inf for cost in (self.level, self.token))
        if not rises or len(self.rows) != len(self.passes) or not sound:
            raise ValueError(
                "CycleCost must have ascending rows of at least 1, as many positive passes, a level and a token of at "
                f"least 0, got rows {self.rows}, passes {self.passes}, level {self.level}, token {self.token}. Pass "
                "what infer.cycle measures."
            )

    def rungs(self, most: int, all_sizes: bool = True) -> tuple[tuple[int, float], ...]:
        """Returns sizes, and the costs of their passes, up to a tree of `most` rows; or this one alone.

        Raises:
          ValueError: the costs do not reach so many rows.
        """
        if self.rows[-1] < most:
            raise ValueError(
                f"CycleCost must reach the {most} rows of this tree (its nodes and the root), got rows up to "
                f"{self.rows[-1]}. Give the cost of a pass of so many rows."
            )
        smaller = [(rows, cost) for rows, cost in zip(self.rows, self.passes, strict=True) if rows < most and all_sizes]
        return *smaller, (most, float(np.interp(most, self.rows, self.passes)))


class Payoff(NamedTuple):
    """Holds what drafts have yielded so far: scalars. `adaptive` says how they choose sizes and plain steps.

    Attributes:
      balance: tokens gained less their cost in plain steps, at most `adaptive.SLACK`; plain steps pay a loss back.
      gained, spent: tokens that cycles emitted per row, less what the slowest row falls behind, and their cost; recent
        ones weigh more.
      hoped, kept: drafted tokens per running row, by the scores of the verified nodes and in truth; recent ones weigh
        more.
      saved: plain steps that all cycles have saved, those of earlier calls too; at most `adaptive.CREDIT` either way.
      wait: plain steps before the next drafted cycle. pause: those after the next failure, at least.
    """

    balance: Float[Array, ""]
    gained: Float[Array, ""]
    spent: Float[Array, ""]
    hoped: Float[Array, ""]
    kept: Float[Array, ""]
    saved: Float[Array, ""]
    wait: Int[Array, ""]
    pause: Int[Array, ""]
