"""Holds what a cycle costs, and what drafts have yielded; `adaptive` weighs them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

MEASURED = "Pass what infer.cycle measures."


class Prices(NamedTuple):
    """Holds a `CycleCost` at one number of slots, as numbers or as scalars of a program.

    Attributes:
      rows: sizes of a tree, the root included, ascending.
      passes: [R] float32, cost of verifying each.
      level, token, draft: as in `CycleCost`.
    """

    rows: tuple[int, ...]
    passes: Float[Array | np.ndarray, " R"]
    level: Float[Array, ""] | float = 0.0
    token: Float[Array, ""] | float = 0.0
    draft: Float[Array, ""] | float = 0.0


@dataclasses.dataclass(frozen=True)
class CycleCost:
    """What the parts of a cycle cost, in plain steps of the same batch; hashable.

    Attributes:
      rows: sizes of verified trees, the root included, ascending; a size between two is interpolated.
      passes: cost of verifying so many rows per sequence; of one row near 1.
      level: cost of drafting a level, and of its part in updating the drafter.
      token: cost of one accepted token per row: above temperature 0 the target draws for each of them.
      draft: what a drafted cycle costs beside its pass and its levels, even if no node is verified.
      slots: of the cache that attention reads per sequence where these costs hold (`core.cache.slots_read`); None is
        any number.
      longer: the costs of the same `rows` at more slots; between the two they are interpolated. A mapping of their
        fields becomes one.

    Raises:
      ValueError: naming the field and its rule.
    """

    rows: tuple[int, ...]
    passes: tuple[float, ...]
    level: float = 0.0
    token: float = 0.0
    draft: float = 0.0
    slots: float | None = None
    longer: CycleCost | None = None

    def __post_init__(self) -> None:
        rows, passes = _numbers("rows", self.rows, 1, whole=True), _numbers("passes", self.passes, 1)
        single = {name: float(_numbers(name, getattr(self, name), 0)) for name in ("level", "token", "draft")}
        object.__setattr__(self, "rows", tuple(map(int, rows)))
        object.__setattr__(self, "passes", tuple(map(float, passes)))
        for name, cost in single.items():
            object.__setattr__(self, name, cost)
        if not self.rows or any(a >= b for a, b in itertools.pairwise((0, *self.rows))):
            raise ValueError(f"CycleCost.rows must ascend from at least 1, got {self.rows}. {MEASURED}")
        if len(self.passes) != len(self.rows):
            raise ValueError(
                f"CycleCost.passes must have a cost per number of rows ({len(self.rows)}), got {len(self.passes)}. "
                f"{MEASURED}"
            )
        for index, cost in enumerate(self.passes):
            if not 0 < cost < np.inf:
                raise ValueError(f"CycleCost.passes[{index}] must be above 0 and finite, got {cost}. {MEASURED}")
        for name, cost in single.items():
            if not 0 <= cost < np.inf:
                raise ValueError(f"CycleCost.{name} must be at least 0 and finite, got {cost}. {MEASURED}")
        if self.rows[0] == 1 and not 0.5 <= self.passes[0] <= 2:
            raise ValueError(
                "CycleCost.passes[0] must be near 1, since a pass of one row is a plain step, got "
                f"{self.passes[0]}. Divide all costs by that of a plain step."
            )
        if self.slots is not None:
            object.__setattr__(self, "slots", float(_numbers("slots", self.slots, 0)))
            if not 1 <= self.slots < np.inf:
                raise ValueError(f"CycleCost.slots must be at least 1 and finite, got {self.slots}. {MEASURED}")
        if self.longer is not None:
            self._check_longer()

    def _check_longer(self) -> None:
        """Makes `longer` a `CycleCost`, and checks that it continues this one."""
        later: Any = self.longer
        if isinstance(later, Mapping):
            try:
                later = CycleCost(**later)
            except TypeError:
                raise ValueError(
                    f"CycleCost.longer must have the fields of a CycleCost, got {later!r}. {MEASURED}"
                ) from None
            object.__setattr__(self, "longer", later)
        if not isinstance(later, CycleCost):
            raise ValueError(f"CycleCost.longer must be a CycleCost or None, got {later!r}. {MEASURED}")
        if self.slots is None or later.slots is None:
            raise ValueError(
                f"CycleCost.slots and CycleCost.longer.slots must both be given, got {self.slots} and {later.slots}. "
                "Give the slots of the cache at which the costs were measured."
            )
        if self.slots >= later.slots:
            raise ValueError(f"CycleCost.longer must have more slots, got {self.slots}, then {later.slots}. {MEASURED}")
        if later.rows != self.rows:
            raise ValueError(f"CycleCost.longer must have the rows {self.rows}, got {later.rows}. {MEASURED}")

    @property
    def points(self) -> tuple[CycleCost, ...]:
        """The costs, from the fewest slots to the most."""
        return self, *(self.longer.points if self.longer is not None else ())

    @property
    def has_levels(self) -> bool:
        """Whether a level costs anything."""
        return any(point.level for point in self.points)

    def prices(self, most: int, slots: Array | float = 1.0, all_sizes: bool = True) -> Prices:
        """Returns the costs of sizes up to a tree of `most` rows; of this one alone, without `all_sizes`.

        Args:
          slots: that attention reads; beyond those of the costs, the nearest hold.

        Raises:
          ValueError: the costs do not reach so many rows.
        """
        if self.rows[-1] < most:
            raise ValueError(
                f"CycleCost must reach the {most} rows of this tree (its nodes and the root), got rows up to "
                f"{self.rows[-1]}. Give the cost of a pass of so many rows."
            )
        sizes = *(rows for rows in self.rows if rows < most and all_sizes), most
        points = self.points
        passes = np.array([np.interp(sizes, self.rows, point.passes) for point in points], np.float32)
        single = [[getattr(point, name) for point in points] for name in ("level", "token", "draft")]
        if len(points) == 1:
            return Prices(sizes, passes[0], *(numbers[0] for numbers in single))
        # Weights of the points, in few operations: a CPU takes longer to start one than to compute it.
        places = np.array([point.slots for point in points], np.float32)
        passed = jnp.clip((slots - places[:-1]) / np.diff(places), 0, 1)
        weights = jnp.maximum(1 - jnp.abs(jnp.sum(passed) - np.arange(len(points), dtype=np.float32)), 0)
        numbers = np.concatenate([passes, np.array(single, np.float32).T], axis=1)
        mixed = jnp.sum(weights[:, None] * numbers, axis=0)
        return Prices(sizes, mixed[: len(sizes)], *mixed[len(sizes) :])


def _numbers(name: str, value: Any, axes: int, whole: bool = False) -> np.ndarray:
    """Returns numbers on the host; axes 0 is a single one."""
    try:
        found = np.asarray(value)
    except ValueError:  # lists of several lengths
        found = np.asarray(None)
    if found.ndim != axes or (found.size and found.dtype.kind not in ("iu" if whole else "iuf")):
        wanted = f"a list of {'integers' if whole else 'numbers'}" if axes else "a number"
        raise ValueError(f"CycleCost.{name} must be {wanted}, got {value!r}. {MEASURED}")
    return found


class Payoff(NamedTuple):
    """Holds what drafts have yielded so far: scalars (see `adaptive`).

    Attributes:
      balance: tokens gained less their cost in plain steps, at most `adaptive.SLACK`; plain steps pay a loss back.
      gained, spent: tokens that cycles emitted per row, less what the slowest row falls behind, and their cost; recent
        ones weigh more.
      shift: by how much the logarithm of a drafted token's odds of acceptance exceeds that of its probability; at
        temperature 0 it counts from `adaptive.GREEDY_SHIFT`.
      evidence: for it, by how much the expected drafts of all rows would have grown per unit of it; recent cycles
        weigh more.
      saved: plain steps that all cycles have saved, those of earlier calls too; within +-`adaptive.CREDIT`.
      wait: plain steps before the next drafted cycle. pause: those after the next failure, at least.
    """

    balance: Float[Array, ""]
    gained: Float[Array, ""]
    spent: Float[Array, ""]
    shift: Float[Array, ""]
    evidence: Float[Array, ""]
    saved: Float[Array, ""]
    wait: Int[Array, ""]
    pause: Int[Array, ""]
