"""Holds a target model in memory: configuration, parameters and forward function."""

from __future__ import annotations

import dataclasses
from dataclasses import field

import jax
from jax.sharding import Mesh

from eagle_jax.config import DecoderConfig
from eagle_jax.core import Params, TargetFn
from eagle_jax.devices import loading_errors, size_of
from eagle_jax.models import target_fn
from eagle_jax.models.quantised import activation_dtype
from eagle_jax.parallel import param_shardings, shard_target


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
          ConfigError: the mesh does not divide the model. MemoryError: the parameters do not fit in device memory.
        """
        dtype = activation_dtype(params)
        fn = on_mesh(config, dtype, mesh)  # first: it checks the axes of the mesh
        return cls(config, spread(params, mesh), fn, name, dtype, mesh)


def check_target(target: Target, name: str = "target") -> None:
    """Checks that the argument `name` is a `Target`.

    Raises:
      ValueError: it has another type.
    """
    if not isinstance(target, Target):
        raise ValueError(
            f"{name} must be a Target, got a {type(target).__name__}. Pass the result of eagle_jax.load_target."
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
