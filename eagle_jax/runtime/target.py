"""Holds a target model in memory: configuration, parameters and forward function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import jax
from jax.sharding import Mesh

from eagle_jax.checkpoints.files.mapping import expected_shapes
from eagle_jax.checkpoints.memory import (
    Names,
    gemma_config,
    gemma_names,
    leaves_by_path,
    maxtext_leaves,
    maxtext_names,
    tunix_config,
    tunix_names,
)
from eagle_jax.config import ConfigError, DecoderConfig
from eagle_jax.core import Params, TargetFn
from eagle_jax.devices import loading_errors, size_of
from eagle_jax.models import target_fn
from eagle_jax.models.quantised import activation_dtype
from eagle_jax.parallel import param_shardings, shard_target
from eagle_jax.runtime.importing import importer_of


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A loaded target model.

    Attributes:
      config: sizes and stop tokens. params: nested dict of arrays, where weights may be quantised (see
        `eagle_jax.models.quantised`). fn: the functions that the engine calls.
      name: its path or hub id. dtype: of activations, cache and weights that are not quantised.
      mesh: the ("data", "fsdp", "tensor") mesh of parameters and caches; None: a single device.
      source: directory or hub id with its tokenizer; None for a target made from parameters.
    """

    config: DecoderConfig = field(repr=False)
    params: Params = field(repr=False)
    fn: TargetFn = field(repr=False)
    name: str
    dtype: str
    mesh: Mesh | None = None
    source: str | None = field(default=None, repr=False)

    @classmethod
    def from_params(
        cls, config: DecoderConfig, params: Params, name: str = "target", mesh: Mesh | None = None
    ) -> Target:
        """Makes a target from parameters, such as a policy in training, and spreads them over `mesh`.

        Raises:
          ConfigError: a part of the parameters is missing or unknown, or the mesh does not divide the model.
          MemoryError: the parameters do not fit in device memory.
        """
        parts = {path.partition("/")[0] for path in expected_shapes(config)}
        given = set(params) if isinstance(params, Mapping) else {type(params).__name__}
        if not any(part.startswith("layers_") for part in given):  # without any, as training on stored features
            parts = {part for part in parts if not part.startswith("layers_")}
        missing, unknown = sorted(parts - given), sorted(given - parts)
        if missing or unknown:
            what = f"without {missing[0]!r}" if missing else f"with {unknown[0]!r}"
            raise ConfigError(
                f"params must have the parts of a {config.architecture}, got some {what}. Pass those of a Target, or "
                "import others by Target.from_tree."
            )
        dtype = activation_dtype(params)
        fn = on_mesh(config, dtype, mesh)  # first: it checks the axes of the mesh
        return cls(config, spread(params, mesh), fn, name, dtype, mesh)

    @classmethod
    def from_tree(
        cls, tree: Any, config: DecoderConfig, names: Names, *, name: str = "target", mesh: Mesh | None = None,
        dtype: str | None = None,
    ) -> Target:  # fmt: skip
        """Makes a target from another library's model in memory, by a table of names; the parameters are copies.

        Args:
          tree: a module of NNX or its state, parameters of Linen, or a nested dict of arrays.
          names: which leaf is which parameter, see `eagle_jax.checkpoints.memory.Leaf`.
          mesh: None keeps the shardings of the leaves. dtype: "float32", "bfloat16" or "float16"; None keeps that of
            every leaf.

        Raises:
          CheckpointError: a leaf is missing, is not in the table, or has another shape; or `dtype` is another one.
          ConfigError: the mesh does not divide the model. MemoryError: the parameters do not fit in device memory.
        """
        if not isinstance(names, Names) or not isinstance(config, DecoderConfig):
            raise ConfigError(
                f"config and names must be a DecoderConfig and a Names, got a {type(config).__name__} and a "
                f"{type(names).__name__}. Pass both, in this order."
            )
        params = importer_of(names, config, dtype, mesh)(leaves_by_path(tree))
        own = activation_dtype(params)
        return cls(config, params, on_mesh(config, own, mesh), name, own, mesh)

    @classmethod
    def from_tunix(
        cls, model: Any, *, max_position: int = 32768, eos_ids: Sequence[int] = (), lora_alpha: float | None = None,
        mesh: Mesh | None = None, dtype: str | None = None,
    ) -> Target:  # fmt: skip
        """Makes a target from a model of tunix: Llama 3, Qwen2, Qwen3 or Gemma 3, without experts.

        It computes what the model computes, not what its configuration states (`checkpoints.memory.tunix`).

        Args:
          max_position: longest context in tokens, and eos_ids: stop tokens; the model states neither.
          lora_alpha: alpha of the model's adapters (LoRA), which are merged into the copy; None reads it from the rules
            of qwix.
          mesh, dtype: as in `from_tree`.

        Raises:
          CheckpointError: the model is of another class, has experts, or has adapters that cannot be merged.
          ConfigError, MemoryError: as `from_tree`.
        """
        config, names = tunix_config(model, max_position, eos_ids), tunix_names(model, lora_alpha)
        return cls.from_tree(model, config, names, name=type(model).__name__, mesh=mesh, dtype=dtype)

    @classmethod
    def from_gemma(
        cls, params: Any, config: Any, *, max_position: int = 32768, eos_ids: Sequence[int] = (),
        mesh: Mesh | None = None, dtype: str | None = None,
    ) -> Target:  # fmt: skip
        """Makes a target from parameters of Gemma 3 of the library gemma.

        Args:
          params: the Linen parameters. config: of the model, such as `gm.nn.Gemma3_1B().config`.
          max_position, eos_ids: as in `from_tunix`. mesh, dtype: as in `from_tree`.

        Raises:
          CheckpointError: the configuration is not of Gemma 3, or a parameter is missing or unknown. ConfigError,
            MemoryError: as `from_tree`.
        """
        own = gemma_config(config, max_position, eos_ids)
        return cls.from_tree(params, own, gemma_names(config), name="gemma", mesh=mesh, dtype=dtype)

    @classmethod
    def from_maxtext(
        cls, state: Any, config: DecoderConfig, *, scan_axis: int = 1, mesh: Mesh | None = None,
        dtype: str | None = None,
    ) -> Target:  # fmt: skip
        """Makes a target from parameters of MaxText: Llama 2/3, Qwen2, Qwen3 or Gemma 3, without experts.

        Args:
          state: the parameters; layers may be stacked by `scan_layers`. config: of the same model in Hugging Face's
            format, such as `load_target(path).config`. scan_axis: `param_scan_axis` of MaxText.
          mesh, dtype: as in `from_tree`.

        Raises:
          CheckpointError: the family is not supported, or a parameter is missing, unknown or of another shape.
            ConfigError, MemoryError: as `from_tree`.
        """
        leaves, names = maxtext_leaves(state, config, scan_axis), maxtext_names(config)
        return cls.from_tree(leaves, config, names, name="maxtext", mesh=mesh, dtype=dtype)


def check_target(target: Target, name: str = "target") -> None:
    """Checks that the argument `name` is a `Target` with its weights.

    Raises:
      ValueError: it has another type, or its arrays were deleted, as by an update in their buffers.
    """
    if not isinstance(target, Target):
        raise ValueError(
            f"{name} must be a Target, got a {type(target).__name__}. Pass the result of eagle_jax.load_target, or "
            "of Target.from_params."
        )
    arrays = [leaf for leaf in jax.tree.leaves(target.params) if isinstance(leaf, jax.Array)]
    if any(not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted() for leaf in arrays):
        raise ValueError(
            f"{name} must have its weights, got {target.name!r}, whose arrays were deleted by a donation or an "
            "Importer(..., old=). Use the target with the new weights."
        )


def on_mesh(config: DecoderConfig, dtype: str, mesh: Mesh | None) -> TargetFn:
    """Returns the functions of a decoder that the engine calls, with shardings for a mesh.

    Raises:
      ConfigError: the mesh does not divide the model.
    """
    fn = target_fn(config, dtype)
    return fn if mesh is None else shard_target(fn, mesh)


def spread(params: Params, mesh: Mesh | None) -> Params:
    """Puts parameters on the devices of a mesh.

    Raises:
      MemoryError: they do not fit in device memory.
    """
    if mesh is None:
        return params
    with loading_errors("a model", size_of(params)):
        return jax.block_until_ready(jax.device_put(params, param_shardings(params, mesh)))
