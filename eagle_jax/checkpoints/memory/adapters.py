"""Merges adapters (LoRA, arXiv:2106.09685) of qwix into the weights that they change."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle_jax.checkpoints.files.fields import CheckpointError


def adapter_paths(path: str) -> tuple[str, str]:
    """Returns the paths of both parts of the adapter of a leaf."""
    return f"{path}_lora_a", f"{path}_lora_b"


def merge_adapter(
    weight: Float[Array, "..."], down: Float[Array, "..."], up: Float[Array, "..."], axes: str | None, stacked: bool,
    alpha: float,
) -> Float[Array, "..."]:  # fmt: skip
    """Returns `weight + alpha / rank * down @ up`, computed in float32, in the dtype of the weight.

    Args:
      weight: of another library, before `Leaf` is applied.
      down: [*inputs, rank]; qwix merges the inputs of some layers into one axis. up: [rank, *outputs]; inputs and
        outputs are in the order of the weight's axes.
      axes: of `Leaf`; the last group of the result has the inputs. None is no matrix, and has no adapter.
      stacked: whether the weight has one more axis in front, of outputs, from which `Leaf` takes an element.

    Raises:
      ValueError: the shapes do not fit, or `axes` is None.
    """
    if axes is None:
        raise ValueError("axes must be those of a matrix, got None. Merge this adapter before.")
    before, after = axes.split("->")
    before = "*" * stacked + before  # no letter of a table
    inputs = [letter for letter in before if letter in after.rpartition(",")[2]]
    outputs = [letter for letter in before if letter not in inputs]
    size, rank = dict(zip(before, weight.shape, strict=True)), down.shape[-1]
    down = down.reshape([*(size[letter] for letter in inputs), rank]).astype(jnp.float32)
    up = up.reshape([rank, *(size[letter] for letter in outputs)]).astype(jnp.float32)
    product = jnp.tensordot(down, up, 1)  # axes: inputs, then outputs
    product = product.transpose([[*inputs, *outputs].index(letter) for letter in before])
    return (weight.astype(jnp.float32) + alpha / rank * product).astype(weight.dtype)


def adapter_alpha(model: Any) -> float | None:
    """Returns the alpha of the LoRA rules that qwix applied to a model of NNX; None if there are none to be found.

    The leaves do not hold it: qwix wraps `__call__` of the model's class, and the wrapper holds the rules.

    Raises:
      CheckpointError: rules have several alphas or dropout, or quantise the weights.
    """
    queue: list[Any] = [vars(type(model)).get("__call__")]
    seen, rules = set[int](), list[Any]()
    while queue:
        one = queue.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        rules += [rule for rule in getattr(one, "_rules", None) or () if hasattr(rule, "alpha")]
        queue += [cell.cell_contents for cell in getattr(one, "__closure__", None) or () if not _is_empty(cell)]
        queue.append(getattr(one, "__self__", None))
        if isinstance(one, functools.partial):
            queue += [one.func, *one.args, *one.keywords.values()]
    if len(alphas := sorted({float(rule.alpha) for rule in rules})) > 1:
        raise CheckpointError(f"model must have LoRA rules of one alpha, got {alphas}. Give every rule the same one.")
    if dropout := [rule.dropout for rule in rules if getattr(rule, "dropout", 0)]:
        raise CheckpointError(f"model must have LoRA rules without dropout, got {dropout[0]}. Set it to 0.")
    if any(getattr(rule, "weight_qtype", None) is not None for rule in rules):
        raise CheckpointError("model must have float weights under its adapters, got quantised ones (QLoRA). Use LoRA.")
    return alphas[0] if alphas else None


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True
