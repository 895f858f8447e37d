"""TPU chips, slices of them that are not there, and programs compiled for those."""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
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
    """The chip of "v5e:2x2".

    Raises:
      ConfigError: no such chip; the message names the nearest.
    """
    name = topology.partition(":")[0]
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"topology {topology!r}: unknown chip {name!r}; the nearest of {', '.join(CHIPS)} is {near!r}"
        )
    return CHIPS[name]


def topology_devices(topology: str) -> list[Any]:
    """Compile-only devices of "v6e:1x1", "v5e:2x2", "v5p:2x2x1", ...

    Raises:
      ConfigError: libtpu is not installed, or it does not know the topology.
    """
    chip_of(topology)
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ConfigError("compiling for TPU needs libtpu: `pip install libtpu` (Linux, x86_64); no TPU is needed")
    try:
        return list(topologies.get_topology_desc(topology, platform="tpu").devices)
    except Exception as error:  # the plugin raises several kinds
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"libtpu gives no topology {topology!r} ({reason}); write v6e:1x1, v5e:2x2 or v5p:2x2x1 "
            "(v4 and v5p have three dimensions)"
        ) from error


def mesh_for(devices: list[Any], kv_heads: int, tensor: int | None = None) -> Mesh:
    """All devices as a ("data", "tensor") mesh, with the widest "tensor" axis that gives every device whole heads.

    Raises:
      ConfigError: `tensor` does not divide the number of devices.
    """
    tensor = math.gcd(len(devices), kv_heads) if tensor is None else tensor
    if tensor < 1 or len(devices) % tensor:
        raise ConfigError(f"tensor={tensor} does not divide the {len(devices)} devices of the topology")
    return make_mesh(len(devices) // tensor, tensor, devices=devices)


def compile_program(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, list[str]]:
    """Compiles, and returns with the program the optimised HLO of every module that it became.

    The compiler itself writes the HLO out: what jaxlib reads back from libtpu fails for v5p, where the SparseCores
    gather the embedding asynchronously ("async-update instruction should have 1 operands").
    """
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        written = sorted(Path(folder).glob("module_*.jit_*after_optimizations.txt"))
        if not written:
            names = sorted(path.name for path in Path(folder).iterdir())
            raise RuntimeError(
                f"the compiler wrote no optimised HLO, only {names or 'nothing'}; report it with libtpu's version"
            )
        return compiled, [path.read_text(encoding="utf-8") for path in written]


def device_memory(compiled: jax.stages.Compiled) -> float:
    """Bytes of one device that the program holds at once: arguments, results and temporaries, aliased ones once."""
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return float(held - memory.alias_size_in_bytes)


def local_bytes(params: Any) -> float:
    """Bytes of one device that abstract arrays take, by their shardings."""
    sizes = (math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    return float(sum(sizes))
