"""Describes TPU chips and slices, for which libtpu compiles on any x86 Linux machine."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, NamedTuple

from jax.experimental import topologies

from eagle_jax.config import ConfigError
from eagle_jax.training.flops import PEAK


class Chip(NamedTuple):
    """Holds the numbers of one TPU chip, from the vendor's data sheet.

    Attributes:
      hbm: bytes. bandwidth: of the HBM, bytes per second. flops: bfloat16 operations per second.
    """

    hbm: float
    bandwidth: float
    flops: float


CHIPS = {
    "v4": Chip(32e9, 1228e9, PEAK["TPU v4"]),
    "v5e": Chip(16e9, 819e9, PEAK["TPU v5e"]),
    "v5p": Chip(95e9, 2765e9, PEAK["TPU v5p"]),
    "v6e": Chip(32e9, 1640e9, PEAK["TPU v6e"]),
}


def chip_and_devices(topology: str) -> tuple[Chip, list[Any]]:
    """Returns the chip and compile-only devices of "v6e:1x1", "v5e:2x2", "v5p:2x2x1", ...

    Raises:
      ConfigError: libtpu is not installed, or it does not know the topology.
    """
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise ConfigError(f"--topology must begin with one of {', '.join(CHIPS)}, got {topology!r}. Write v6e:1x1.")
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ConfigError("libtpu must be installed, got none. Run `pip install libtpu` (x86_64 Linux).")
    try:
        return CHIPS[name], list(topologies.get_topology_desc(topology, platform="tpu").devices)
    except Exception as error:  # the plugin raises several kinds
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--topology must be a slice that libtpu knows, got {topology!r} ({reason}). Write two dimensions, as "
            "v5e:2x2, or three for v4 and v5p, as v5p:2x2x1."
        ) from error
