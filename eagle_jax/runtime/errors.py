"""The error for logits and drafts that are not finite, raised after a run from what its state recorded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from eagle_jax.core.types import FINITE, KVCache
from eagle_jax.devices import device, exhausted, memory_of, more_of
from eagle_jax.runtime.request import Request

_LISTED = 8  # rows


class NotFiniteError(ValueError):
    """The target's logits, or the drafts of a drafter, were NaN or infinite.

    Attributes:
      positions: {row: generated position} of the target's logits. A row ends before that position.
      drafts: {row: generated position} from which the drafter's scores were NaN. The text of such a row is complete.
      output: the `GenerateOutput` of all rows, where the call returns one: rows that are not in `positions` are as they
        would be without the others.
    """

    def __init__(self, positions: dict[int, int], drafts: dict[int, int], output: Any = None) -> None:
        self.positions, self.drafts, self.output = positions, drafts, output
        parts = []
        if positions:
            parts.append(
                f"the target has no finite logits for {_listed(positions)}. Load it in float32 or bfloat16 (float16 "
                "overflows at 65504), and look for NaN in its weights."
            )
        if drafts:
            parts.append(
                f"the drafter's scores are NaN from {_listed(drafts)} on. The text is right; load or train the drafter "
                "anew, or pass drafter=None."
            )
        if output is not None:
            parts.append("The tokens of all rows are in .output of this error.")
        super().__init__(" ".join(parts))


def check_finite(not_finite: np.ndarray, bad_drafts: np.ndarray, *, output: Any = None, ended: bool = True) -> None:
    """Raises if a row met logits or drafts that are not finite.

    Args:
      not_finite, bad_drafts: [B] int32, as in `GenerateState`, on the host.
      output: what the error carries.
      ended: whether the run is over. Before that bad drafts alone raise nothing: the text goes on and is right.

    Raises:
      NotFiniteError: naming rows and positions.
    """
    positions, drafts = _rows(not_finite), _rows(bad_drafts)
    if positions or (drafts and ended):
        raise NotFiniteError(positions, drafts, output)


def _rows(found: np.ndarray) -> dict[int, int]:
    return {int(row): int(found[row]) for row in np.flatnonzero(np.asarray(found) != FINITE)}


def _listed(rows: dict[int, int]) -> str:
    named = [f"row {row}, generated token {position}" for row, position in list(rows.items())[:_LISTED]]
    return "; ".join(named) + f" and {len(rows) - _LISTED} more rows" * (len(rows) > _LISTED)


@contextlib.contextmanager
def explained(request: Request) -> Iterator[None]:
    """Turns the runtime's "RESOURCE_EXHAUSTED" into what was needed and what to lower.

    Raises:
      MemoryError: in its place; every other error passes.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not exhausted(error):
            raise
        raise MemoryError(needed(request, more_of(str(error)))) from error


def check_fits(request: Request) -> None:
    """Refuses, before anything is compiled, what the devices could not hold: weights and caches alone are larger.

    A CPU would not say so: Linux promises more memory than there is, and ends the process that takes it.

    Raises:
      MemoryError: with what is needed, and how many prompts fit.
    """
    rows, weights = request.batch.prompts.shape[0], size_of(request.params)
    # Asked once of every shape: to trace the caches takes as long as a target pass of a small model.
    meshes = tuple(getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(request.params)[:1])
    shape = (request.engine, rows, request.sizes.slots, weights, meshes)
    if shape in _FIT:
        return
    if (limit := _limit(request.params)) is not None:
        caches = size_of(_held(request))
        if weights + caches > limit:
            fit = max(0, int((limit - weights) // (caches / rows)))
            raise MemoryError(needed(request, f", where {fit} of {rows} rows fit" if rows > 1 else ""))
    if len(_FIT) >= MOST_SHAPES:
        _FIT.clear()
    _FIT.add(shape)


MOST_SHAPES = 1024
_FIT: set[Any] = set()
"""Shapes that were found to fit."""


def _limit(params: Any) -> int | None:
    """Bytes that the devices of these arrays hold together, None where they do not tell."""
    arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    devices: set[Any] = {one for leaf in arrays for one in leaf.sharding.device_set}
    own = [one for one in devices if one.process_index == jax.process_index()]  # others cannot be asked
    limits = [limit for one in own if (limit := memory_of(one)) is not None]
    if not own or len(limits) < len(own):
        return None
    # Devices of one CPU share its memory. Other processes are taken to have as much as this one.
    mine = max(limits) if own[0].platform == "cpu" else sum(limits)
    return mine * len(devices) // len(own)


def _held(request: Request) -> Any:
    """Shapes of the caches of target and drafter."""
    rows, slots = request.batch.prompts.shape[0], request.sizes.slots
    target, drafter = request.engine.target, request.engine.drafter
    return jax.eval_shape(lambda: (target.init_cache(rows, slots), drafter.init(request.params, rows, slots)))


def needed(request: Request, lacking: str = "") -> str:
    """A sentence: weights, caches and logits of a run in gigabytes (1e9 bytes), and what makes them smaller.

    Sizes are those of all devices together, which the sentence says where the weights lie on several.

    Args:
      lacking: what the runtime said was too much.
    """
    rows, slots = request.batch.prompts.shape[0], request.sizes.slots
    target, drafter = request.engine.target, request.engine.drafter

    def logits(cache: KVCache) -> Any:
        width = drafter.num_nodes + 1
        tokens = jax.numpy.zeros((rows, width), jax.numpy.int32)
        mask = jax.numpy.ones((width, width), bool)
        out = target.forward(request.params["target"], tokens, tokens, mask, cache, drafter.taps)
        return target.logits(request.params["target"], out.hidden)

    held = _held(request)
    sizes = {
        "weights": size_of(request.params),
        f"caches of {rows} row{'s' * (rows > 1)} and {slots} slots": size_of(held),
        f"logits of trees of {drafter.num_nodes + 1} rows": size_of(jax.eval_shape(logits, held[0])),
    }
    parts = ", ".join(f"{what} {size / 1e9:.2f} GB" for what, size in sizes.items())
    devices = max((len(leaf.sharding.device_set) for leaf in jax.tree.leaves(request.params)), default=1)
    together, spread = ("together", "spread them over a mesh (mesh=)")
    if devices > 1:
        together, spread = (f"on {devices} devices together", "spread them over more devices")
    return (
        f"out of memory on {device()}{lacking}: {parts}, {sum(sizes.values()) / 1e9:.2f} GB {together}, and what a "
        "pass computes in between. Lower the number of prompts, max_new_tokens, a session's context or the tree's "
        f"num_nodes, load the models in bfloat16, or {spread}"
    )


def size_of(tree: Any) -> int:
    """Bytes of all arrays of a tree, or of their shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
