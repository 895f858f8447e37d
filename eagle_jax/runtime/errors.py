"""Raises errors about runs: logits or drafts that are not finite, and device memory that is too small."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from eagle_jax.core import FINITE
from eagle_jax.devices import device_name, is_out_of_memory, memory_of, shortage, size_of
from eagle_jax.runtime.request import Request, empty_caches, empty_features

_LISTED = 8  # rows in a message


class NotFiniteError(ValueError):
    """The target's logits, or the scores of a drafter, were NaN or infinite.

    Attributes:
      positions: {row: generated position} of the first logits that are not finite. A row ends before that position.
      drafts: {row: generated position} from which the drafter's scores are NaN. The text of such a row is complete.
      output: the `GenerateOutput` of all rows; None for a stream. Rows that are not in `positions` are unaffected.
    """

    def __init__(self, positions: dict[int, int], drafts: dict[int, int], output: Any = None) -> None:
        self.positions, self.drafts, self.output = positions, drafts, output
        parts = []
        if positions:
            parts.append(
                f"the target has no finite logits for {_listed(positions)}. Load it in float32 or bfloat16 (float16 "
                "overflows at 65504), and check its weights for NaN."
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
    """Checks that the logits and drafts of all rows were finite.

    Args:
      not_finite, bad_drafts: [B] int32, as in `GenerateState`, on the host.
      output: `NotFiniteError.output`.
      ended: whether the run has ended. Before that, NaN drafts raise no error: they do not change the text.

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
def memory_errors(request: Request, replies: int = 0) -> Iterator[None]:
    """Converts JAX's "RESOURCE_EXHAUSTED" into a message with the sizes of the run.

    Raises:
      MemoryError: the run did not fit in device memory. Other errors pass.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(memory_message(request, shortage(str(error)), replies)) from error


def check_fits(request: Request, replies: int = 0) -> None:
    """Checks that weights, caches and kept features fit in device memory, before anything is compiled.

    A CPU would not report it: Linux promises more memory than there is, and kills the process that uses it.

    Args:
      replies: rows of features beside those of the request, of finished replies of a rollout.

    Raises:
      MemoryError: with the sizes, and how many rows fit.
    """
    if (limit := _limit(request.params)) is None:
        return
    rows, weights = request.batch.prompts.shape[0], size_of(request.params)
    shape = (request.engine, rows, request.sizes.slots)
    if (caches := _CACHES.get(shape)) is None:  # tracing the caches takes as long as a target pass of a small model
        if len(_CACHES) >= 1024:
            _CACHES.clear()
        caches = _CACHES[shape] = size_of(cache_shapes(request))
    features = _feature_bytes(request)  # of a row
    fixed, each = weights + features * replies, caches / rows + features
    if fixed + each * rows > limit:
        fit = max(0, int((limit - fixed) // each))
        raise MemoryError(memory_message(request, f", where {fit} of {rows} rows fit" if rows > 1 else "", replies))


_CACHES: dict[Any, int] = {}
"""Bytes of the caches by engine, rows and slots."""


def cache_shapes(request: Request) -> Any:
    """Returns the shapes of the caches of target and drafter."""
    rows, slots = request.batch.prompts.shape[0], request.sizes.slots
    return empty_caches.eval_shape(request.params, request.engine, rows, slots)


def _feature_bytes(request: Request) -> int:
    """Returns the bytes of the kept features of a row; 0 without `Engine.taps`."""
    if request.engine.taps is None:
        return 0
    rows = request.batch.prompts.shape[0]  # a mesh takes no other number of rows
    return size_of(empty_features.eval_shape(request.params, request.engine, rows, request.sizes.slots)) // rows


def memory_message(request: Request, detail: str = "", replies: int = 0) -> str:
    """Returns the error message of a run that does not fit; `detail` follows the name of the device."""
    rows, slots = request.batch.prompts.shape[0], request.sizes.slots
    weights, caches = (size_of(tree) / 1e9 for tree in (request.params, cache_shapes(request)))
    devices = max((len(leaf.sharding.device_set) for leaf in jax.tree.leaves(request.params)), default=1)
    together = f"on {devices} devices together" if devices > 1 else "together"
    spread = "spread them over more devices" if devices > 1 else "spread them over a mesh (mesh=)"
    features = _feature_bytes(request) * (rows + replies) / 1e9
    kept = f", features of {rows + replies} rows {features:.2f} GB (leave out taps to save them)" if features else ""
    total = f"{weights + caches + features:.2f} GB {together}"
    return (
        f"out of memory on {device_name()}{detail}: weights {weights:.2f} GB, caches of {rows} row{'s' * (rows > 1)} "
        f"and {slots} slots {caches:.2f} GB{kept}, {total} without activations and logits. "
        "Lower the number of prompts, max_new_tokens, a session's context, the lanes of a rollout or the tree's "
        f'num_nodes, load the models in bfloat16 or with weights="int8", or {spread}.'
    )


def _limit(params: Any) -> int | None:
    """Returns the memory of all devices that hold `params` in bytes, None if a device does not report it."""
    leaves = jax.tree.leaves(params)
    devices: set[Any] = {one for leaf in leaves if isinstance(leaf, jax.Array) for one in leaf.sharding.device_set}
    own = [one for one in devices if one.process_index == jax.process_index()]  # only these report their memory
    limits = [limit for one in own if (limit := memory_of(one)) is not None]
    if not own or len(limits) < len(own):
        return None
    # The devices of a CPU share its memory. Other processes are assumed to have as much memory as this one.
    total = max(limits) if own[0].platform == "cpu" else sum(limits)
    return total * len(devices) // len(own)
