"""TPU chips, and slices of them that are not there.

`libtpu` compiles for a topology ("v6e:1x1") on any x86 Linux machine. Set `ENVIRONMENT` before JAX is imported, or it
looks for the chips.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
from typing import Any, NamedTuple

from jax.experimental import topologies
from jax.sharding import Mesh

from eagle_jax.config import ConfigError
from eagle_jax.parallel.mesh import make_mesh


class Chip(NamedTuple):
    """One TPU chip, from the vendor's data sheet.

    Attributes:
      hbm: bytes. bandwidth: of the HBM, bytes per second. flops: bfloat16 operations per second.
    """

    hbm: float
    bandwidth: float
    flops: float


CHIPS = {
    "v4": Chip(32e9, 1228e9, 275e12),
    "v5e": Chip(16e9, 819e9, 197e12),
    "v5p": Chip(95e9, 2765e9, 459e12),
    "v6e": Chip(32e9, 1640e9, 918e12),
}


def chip_of(topology: str) -> Chip:
    """Returns the chip of "v5e:2x2".

    Raises:
      ConfigError: no such chip; the message names the nearest.
    """
    name = topology.partition(":")[0]
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"--topology must begin with one of {', '.join(CHIPS)}, got {topology!r}. The nearest is {near!r}."
        )
    return CHIPS[name]


def topology_devices(topology: str) -> list[Any]:
    """Returns compile-only devices of "v6e:1x1", "v5e:2x2", "v5p:2x2x1", ...

    Raises:
      ConfigError: libtpu is not installed, or it does not know the topology.
    """
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ConfigError("libtpu must be installed (`pip install libtpu`, Linux on x86_64). No TPU is needed.")
    try:
        return list(topologies.get_topology_desc(topology, platform="tpu").devices)
    except Exception as error:  # the plugin raises several kinds
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--topology must be a slice that libtpu knows, got {topology!r} ({reason}). Write v6e:1x1, v5e:2x2 or "
            "v5p:2x2x1: v4 and v5p have three dimensions."
        ) from error


def slice_mesh(devices: list[Any], data: int | None, fsdp: int | None, tensor: int) -> Mesh:
    """Returns a mesh over the devices; an axis of None takes the devices that the other two leave.

    Raises:
      ConfigError: the axes do not divide the devices, or need more.
    """
    given = math.prod(size for size in (data, fsdp, tensor) if size is not None)
    if None in (data, fsdp) and len(devices) % given:
        raise ConfigError(
            f"--data x --fsdp x --tensor must divide the {len(devices)} devices of the topology, got {given}."
        )
    rest = len(devices) // given
    return make_mesh(rest if data is None else data, tensor, rest if fsdp is None else fsdp, devices=devices)
