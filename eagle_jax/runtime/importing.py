"""Compiles the import of parameters from memory: onto a mesh, and into the buffers of older parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from eagle_jax.checkpoints.files.mapping import check_dtype
from eagle_jax.checkpoints.memory import Names, check_leaves, import_params
from eagle_jax.config import DecoderConfig
from eagle_jax.core import Params
from eagle_jax.devices import loading_errors, size_of
from eagle_jax.parallel import check_mesh, param_shardings


class Importer:
    """Imports parameters of one layout. Calls with equal shapes and shardings share a compiled program.

    Attributes:
      names: the table. config: of the decoder. dtype: of the result; None keeps that of every leaf.
      mesh: of the result; None keeps the shardings of the leaves, as XLA passes them on through reshapes.
      local_program, first_program: `(leaves) -> params`, on the devices of the leaves, and on the mesh.
      update_program: `(old params, leaves) -> params`, on the mesh, in the old buffers.

    Raises:
      CheckpointError: the dtype is no float. ConfigError: the mesh has other axes.
    """

    def __init__(self, names: Names, config: DecoderConfig, dtype: str | None = None, mesh: Mesh | None = None) -> None:
        if mesh is not None:
            check_mesh(mesh)
        if dtype is not None:
            check_dtype(dtype)
        self.names, self.config, self.dtype, self.mesh = names, config, dtype, mesh
        self._checked: set[frozenset[tuple[str, tuple[int, ...]]]] = set()  # shapes of leaves that passed

        def local(leaves: Mapping[str, Any]) -> Params:
            return import_params(names, leaves, config, dtype)

        def first(leaves: Mapping[str, Any]) -> Params:
            params = local(leaves)
            return params if mesh is None else jax.lax.with_sharding_constraint(params, param_shardings(params, mesh))

        def update(old: Params, leaves: Mapping[str, Any]) -> Params:
            del old  # only its buffers are used
            return first(leaves)

        self.local_program = jax.jit(local)
        self.first_program = jax.jit(first)
        # `keep_unused` passes the old parameters to the program, which writes the new ones into their buffers.
        self.update_program = jax.jit(update, donate_argnums=0, keep_unused=True)

    def __call__(self, leaves: Mapping[str, Any], old: Params | None = None) -> Params:
        """Returns the parameters of a decoder; copies, so the source may change or be donated afterwards.

        Args:
          leaves: {path: array}, see `leaves_by_path`; those on other devices than the mesh are converted there, and
            copied. old: parameters of an earlier call, which are deleted.

        Raises:
          CheckpointError: a leaf is missing, unknown or has another shape; raised before anything is compiled.
          ConfigError: the mesh does not divide a parameter. MemoryError: the parameters do not fit in device memory.
        """
        shapes = frozenset((path, tuple(leaf.shape)) for path, leaf in leaves.items())
        if shapes not in self._checked:  # the check traces every rule, which an update of a policy need not wait for
            check_leaves(self.names, leaves, self.config)
            self._checked.add(shapes)
        with loading_errors("a model", size_of(dict(leaves))):
            if self.mesh is not None and not _are_on(leaves, self.mesh):
                params = self.local_program(leaves)  # a program runs on one set of devices
                jax.tree.map(lambda leaf: leaf.delete(), old)  # makes room for the new ones
                return jax.device_put(params, param_shardings(params, self.mesh))
            return self.first_program(leaves) if old is None else self.update_program(old, leaves)


@functools.lru_cache(maxsize=16)
def importer_of(names: Names, config: DecoderConfig, dtype: str | None, mesh: Mesh | None) -> Importer:
    """Returns an importer; equal arguments give the same object, so a second import compiles nothing."""
    return Importer(names, config, dtype, mesh)


def _are_on(leaves: Mapping[str, Any], mesh: Mesh) -> bool:
    """Returns whether every leaf that has devices has those of the mesh, in their order."""
    wanted = tuple(mesh.devices.flat)
    for leaf in leaves.values():
        if isinstance(leaf, jax.Array) and leaf.committed:
            own = leaf.sharding
            found = tuple(own.mesh.devices.flat) if isinstance(own, NamedSharding) else tuple(own.device_set)
            if found != wanted:
                return False
    return True
