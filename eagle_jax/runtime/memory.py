"""What a run needs of a device's memory: refused before it runs where it cannot be there, told where it was not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax

from eagle_jax.core.types import Drafter, KVCache
from eagle_jax.devices import device, exhausted, memory_of, more_of
from eagle_jax.runtime.request import Request


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
    rows, weights = request.arrays[0].shape[0], size_of(request.params)
    # Asked once of every shape: to trace the caches takes as long as a target pass of a small model.
    meshes = tuple(getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(request.params)[:1])
    shape = (request.options["target"], request.options["drafter"], rows, request.options["slots"], weights, meshes)
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
    rows, slots = request.arrays[0].shape[0], request.options["slots"]
    target, drafter = request.options["target"], request.options["drafter"]
    return jax.eval_shape(lambda: (target.init_cache(rows, slots), drafter.init(request.params, rows, slots)))


def needed(request: Request, lacking: str = "") -> str:
    """A sentence: weights, caches and logits of a run in gigabytes (1e9 bytes), and what makes them smaller.

    Sizes are those of all devices together, which the sentence says where the weights lie on several.

    Args:
      lacking: what the runtime said was too much.
    """
    prompts = request.arrays[0]
    drafter: Drafter = request.options["drafter"]
    rows, slots = prompts.shape[0], request.options["slots"]
    target = request.options["target"]

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
