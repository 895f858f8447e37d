"""Maps the parameters of another library's model to ours, by a table of names: pure functions that run under `jit`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.meta import AxisMetadata
from flax.traverse_util import unflatten_dict
from jaxtyping import Array

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.checkpoints.files.mapping import expected_shapes, template_pattern
from eagle_jax.checkpoints.memory.adapters import adapter_paths, merge_adapter
from eagle_jax.config import DecoderConfig
from eagle_jax.core.types import Params


class Leaf(NamedTuple):
    """The correspondence of one of our parameters and a leaf of another model's tree.

    Attributes:
      path: of our parameter, keys joined by "/"; `{i}` stands for a number and `{name}` for a word.
      source: of the leaf, in the same form.
      axes: "DNH->NH,D" names the axes of the leaf, a letter each, and groups them in the order of our axes, which
        become [N * H, D]. None keeps the shape.
      element: takes this one of the leaf's first axis, before `axes`.
      convert: `(array, config) -> array`, before `axes`, for leaves whose values differ.
    """

    path: str
    source: str
    axes: str | None = None
    element: int | None = None
    convert: Callable[[Array, DecoderConfig], Array] | None = None


class Names(NamedTuple):
    """The table of a layout.

    Attributes:
      leaves: of the rules whose `path` matches one of our parameters, the first counts whose source exists.
      ignored: patterns of leaves that are not read.
      lora_alpha: of adapters, which are merged into their weights (`checkpoints.memory.adapters`). With None they are
        unknown leaves.
    """

    leaves: tuple[Leaf, ...]
    ignored: tuple[str, ...] = ()
    lora_alpha: float | None = None


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns {path: array} of a module of NNX or of its state, of Linen parameters, or of any nested dict.

    Keys are joined by "/", and elements of a list have their number. Arrays are not copied.
    """
    found: dict[str, Any] = {}

    def visit(prefix: str, node: Any) -> None:
        if isinstance(node, nnx.Module):
            node = nnx.state(node, nnx.Param)
        if isinstance(node, nnx.Variable):
            node = node.get_value()
        if isinstance(node, AxisMetadata):
            node = node.unbox()
        if isinstance(node, Mapping):
            for key, value in node.items():
                visit(f"{prefix}/{key}", value)
        elif isinstance(node, list | tuple):
            for index, value in enumerate(node):
                visit(f"{prefix}/{index}", value)
        elif node is not None:
            found[prefix[1:]] = node

    visit("", tree)
    return found


def check_leaves(names: Names, leaves: Mapping[str, Any], config: DecoderConfig, where: str = "model") -> None:
    """Checks that the leaves are those of the table, with the shapes that the configuration gives.

    Args:
      leaves: {path: array or `ShapeDtypeStruct`}. where: the source, for messages.

    Raises:
      CheckpointError: a leaf is missing, is not in the table or has another shape.
    """
    kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    if odd := next((path for path, leaf in leaves.items() if not isinstance(leaf, kinds)), None):
        raise CheckpointError(
            f"{where}: {odd} must be an array, got a {type(leaves[odd]).__name__}. Weights that another library has "
            "quantised (QLoRA) cannot be imported: pass those of the float model."
        )
    matches, shapes = _matches(names, leaves, config, where), expected_shapes(config)
    used = {source for _, source, _ in matches}
    if names.lora_alpha is not None:
        used |= {path for source in used if _adapter(names, source, leaves) for path in adapter_paths(source)}
    ignored = [path for path in leaves if any(re.fullmatch(pattern, path) for pattern in names.ignored)]
    if unused := sorted(set(leaves) - used - set(ignored)):
        raise CheckpointError(
            f"{where}: parameters must be those of {config.architecture}, got {unused[0]!r} ({len(unused)} unknown). "
            "Pass lora_alpha if these are adapters (LoRA), or add the name to the table."
        )
    for path, source, leaf in matches:
        expected = shapes[path]
        if _converted_shape(leaf, leaves[source], config) != expected:
            how = "the shape" if leaf.axes is None else f"a shape that the axes {leaf.axes} turn into"
            raise CheckpointError(
                f"{where}: {source} must have {how} {list(expected)}, got {list(leaves[source].shape)}. Pass the "
                "configuration of this model."
            )
        pair = _adapter(names, source, leaves)
        if pair and _converted_shape(leaf, leaves[source], config, pair) != expected:
            raise CheckpointError(
                f"{where}: {source} {list(leaves[source].shape)} needs adapters [inputs, rank] and [rank, outputs], "
                f"got {list(pair[0].shape)} and {list(pair[1].shape)}. Merge them into the weight."
            )


def import_params(
    names: Names, leaves: Mapping[str, Array], config: DecoderConfig, dtype: str | None = None, where: str = "model"
) -> Params:
    """Returns our parameters of a decoder; a pure function of the leaves. Under `jit` they are copies.

    Args:
      leaves: {path: array}, see `leaves_by_path`; call `check_leaves` before. dtype: of the result, None keeps each.

    Raises:
      CheckpointError: a leaf is missing.
    """
    found, alpha = {}, 1.0 if names.lora_alpha is None else names.lora_alpha
    for path, source, leaf in _matches(names, leaves, config, where):
        pair = jax.tree.map(jnp.asarray, _adapter(names, source, leaves))
        array = _converted(leaf, jnp.asarray(leaves[source]), config, pair, alpha)
        found[path] = array if dtype is None else array.astype(dtype)
    return unflatten_dict(found, sep="/")


def rearrange(array: Array, axes: str) -> Array:
    """Transposes and merges axes: "DNH->NH,D" returns [N * H, D] of an array [D, N, H].

    Raises:
      ValueError: the array has another number of axes.
    """
    before, after = axes.split("->")
    size = dict(zip(before, array.shape, strict=True))
    order = [before.index(letter) for letter in after.replace(",", "")]
    return array.transpose(order).reshape([math.prod(size[letter] for letter in group) for group in after.split(",")])


def _converted(
    leaf: Leaf, array: Array, config: DecoderConfig, adapter: tuple[Array, Array] | None, alpha: float = 1.0
) -> Array:
    """Returns our parameter of a leaf, with the adapter merged if there is one."""
    if adapter:
        array = merge_adapter(array, *adapter, leaf.axes, leaf.element is not None, alpha)
    if leaf.element is not None:
        array = array[leaf.element]
    if leaf.convert is not None:
        array = leaf.convert(array, config)
    return array if leaf.axes is None else rearrange(array, leaf.axes)


def _matches(names: Names, leaves: Mapping[str, Any], config: DecoderConfig, where: str) -> list[tuple[str, str, Leaf]]:
    """Returns (our path, path of the leaf, rule) for each of our parameters."""
    found = []
    for path in expected_shapes(config):
        sources = [
            (leaf.source.format(**match.groupdict()), leaf)
            for leaf in names.leaves
            if (match := template_pattern(leaf.path).fullmatch(path))
        ]
        if not sources:
            raise CheckpointError(f"names must have a rule for the parameter {path!r}, got none. Add a Leaf for it.")
        present = next((one for one in sources if one[0] in leaves), None)
        if present is None:
            stated = " or ".join(source for source, _ in sources)
            raise CheckpointError(
                f"{where}: must have the parameter {stated} (named {path} in this library), got none. Pass all "
                "parameters of the model, and the configuration with its number of layers."
            )
        found.append((path, *present))
    return found


def _adapter(names: Names, source: str, leaves: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Returns both parts of the adapter of a leaf, if it has one that is merged."""
    down, up = adapter_paths(source)
    both = names.lora_alpha is not None and down in leaves and up in leaves
    return (leaves[down], leaves[up]) if both else None


def _converted_shape(
    leaf: Leaf, array: Any, config: DecoderConfig, adapter: tuple[Any, Any] | None = None
) -> tuple[int, ...] | None:
    """Returns the shape that `_converted` gives, or None if it cannot convert arrays of these shapes."""
    shapes = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), (array, adapter))
    try:
        return jax.eval_shape(lambda one, pair: _converted(leaf, one, config, pair), *shapes).shape
    except (TypeError, ValueError, IndexError):
        return None
