"""Scores and pads token arrays as tunix does, and makes a mesh of this library of one of tunix."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from eagle_jax.config import ConfigError
from eagle_jax.core import Params, TargetFn
from eagle_jax.parallel import make_mesh

_AXES = {"data": "data", "dp": "data", "fsdp": "fsdp", "tp": "tensor", "tensor": "tensor"}


@functools.partial(jax.jit, static_argnames=("fn", "pad_id"))
def token_log_probs(
    params: Params, prompts: Int[Array, "B P"], completions: Int[Array, "B C"], *, fn: TargetFn, pad_id: int
) -> Float[Array, "B C"]:
    """Returns the log-probability of every completion token; prompts are padded on the left, completions on the right.

    Positions and mask are those of tunix's `process_ids` (`tunix/rl/common.py`).
    """
    tokens = jnp.concatenate([prompts, completions], axis=1)
    length, width = tokens.shape[1], completions.shape[1]
    real = tokens != pad_id
    positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    seen = jnp.tril(jnp.ones((length, length), bool))[None] & real[:, None, :]
    seen = seen | jnp.eye(length, dtype=bool)[None]  # padding sees itself: a softmax needs one score
    hidden = fn.forward(params, tokens, positions, seen, None, ()).hidden
    log_probs = jax.nn.log_softmax(fn.logits(params, hidden[:, length - width - 1 : -1]))
    return jnp.take_along_axis(log_probs, completions[..., None], axis=-1)[..., 0]


def left_padded(rows: Sequence[Sequence[int]], width: int, pad_id: int) -> np.ndarray:
    """Returns [B, W] int32; W is `width`, or the next power of two of a longer row, as in tunix."""
    longest = max(map(len, rows))
    if longest > width:
        width = 1 << (longest - 1).bit_length()
    padded = np.full((len(rows), width), pad_id, np.int32)
    for index, row in enumerate(rows):
        padded[index, width - len(row) :] = row
    return padded


def own_mesh(mesh: Mesh | None) -> Mesh | None:
    """Returns the mesh of this library on the same devices; None for a single device.

    Raises:
      ConfigError: an axis has another name and more than one device.
    """
    if mesh is None or mesh.size == 1:
        return None
    sizes = dict.fromkeys(("data", "fsdp", "tensor"), 1)
    order = []
    for axis, size in mesh.shape.items():
        if size == 1:
            continue
        if axis not in _AXES:
            raise ConfigError(
                f"mesh must have the axes {sorted(_AXES)}, got {axis!r}={size}. Rename it or set it to 1."
            )
        sizes[_AXES[axis]] *= size
        order.append(_AXES[axis])
    if order != sorted(order, key=list(sizes).index):
        raise ConfigError(f"mesh must have its axes in the order data, fsdp, tp, got {mesh.axis_names}. Reorder them.")
    return make_mesh(**sizes, devices=mesh.devices.flat)
