"""A target model in memory, with what the engine needs to run it."""

from __future__ import annotations

import dataclasses
from dataclasses import field

import jax
from jax.sharding import Mesh

from eagle_jax.config import DecoderConfig
from eagle_jax.core.types import Params, TargetFn
from eagle_jax.devices import loading
from eagle_jax.models.decoder import target_fn
from eagle_jax.parallel.mesh import param_shardings, shard_target


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A loaded target model.

    Attributes:
      config: sizes and stop tokens. params: plain nested dict of arrays. fn: the model as the engine sees it.
      name: where it came from. dtype: of its weights and cache.
      mesh: the ("data", "tensor") mesh that parameters and caches are spread over; None is one device.
      source: directory or hub id that it was read from, with its tokenizer; None where it was made from parameters.
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
        """Wraps parameters that are already in memory, e.g. a policy in training; with a mesh, spreads them over it."""
        dtype = str(jax.tree.leaves(params)[0].dtype)
        fn = on_mesh(config, dtype, mesh)
        return cls(config, spread(params, mesh), fn, name, dtype, mesh)


def check_target(target: Target, name: str = "target") -> None:
    """Refuses what is no target.

    Raises:
      ValueError: saying what it is.
    """
    if not isinstance(target, Target):
        raise ValueError(f"{name} is a {type(target).__name__}: pass what eagle_jax.load_target returns")


def on_mesh(config: DecoderConfig, dtype: str, mesh: Mesh | None) -> TargetFn:
    """A decoder as the engine sees it, held to a mesh.

    Raises:
      ConfigError: the mesh does not divide the model.
    """
    fn = target_fn(config, dtype)
    return fn if mesh is None else shard_target(fn, mesh)


def spread(params: Params, mesh: Mesh | None) -> Params:
    """Parameters where the mesh wants them.

    Raises:
      MemoryError: a device is too small, saying how large they are.
    """
    if mesh is None:
        return params
    with loading("a model", sum(leaf.nbytes for leaf in jax.tree.leaves(params))):
        return jax.block_until_ready(jax.device_put(params, param_shardings(params, mesh)))
