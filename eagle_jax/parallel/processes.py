"""Joins the processes of a run, and moves arrays and values between them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eagle_jax.config import ConfigError, DecoderConfig
from eagle_jax.models.projections import split_projections
from eagle_jax.parallel.mesh import ROWS

T = TypeVar("T")
LONGEST_WAIT = 24 * 3600
"""Seconds that a process waits for another."""
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialise(environment: Mapping[str, str] = os.environ) -> bool:
    """Joins the processes of a run; call it before any array exists.

    `JAX_COORDINATOR_ADDRESS` (host:port), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` describe the processes. Without
    them, JAX finds the processes on TPU slices (plain VMs and GKE), under SLURM and under Open MPI.

    Returns:
      True if there are several processes.

    Raises:
      ConfigError: the three variables are incomplete or not numbers, or JAX cannot join the processes without them.
    """
    address, number, index = given = [environment.get(name, "") for name in VARIABLES]
    if any(given):
        if not all(given):
            raise ConfigError(f"{', '.join(VARIABLES)} must be set together. Set all three or none.")
        if not number.isdecimal() or not index.isdecimal() or int(index) >= int(number):
            raise ConfigError(
                f"{VARIABLES[2]} must be a number below {VARIABLES[1]}={number}, got {index}. Count from 0."
            )
        jax.distributed.initialize(address, int(number), int(index))
    elif _is_cluster(environment):
        jax.distributed.initialize()
    count = jax.process_count()
    if count > 1 and not jax.distributed.is_initialized():  # the TPU runtime counts processes that JAX has not joined
        raise ConfigError(
            f"{', '.join(VARIABLES)} must be set on each of the {count} processes: JAX found no way to join them."
        )
    return count > 1


def _is_cluster(environment: Mapping[str, str]) -> bool:
    """Returns whether a scheduler started several processes, or a TPU slice has several machines."""
    counts = [environment.get(name, "1") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")]
    if "MEGASCALE_COORDINATOR_ADDRESS" in environment or any(count != "1" for count in counts):
        return True
    addresses = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    if addresses:  # GKE
        return len([address for address in addresses.split(",") if address]) > 1
    platforms = environment.get("JAX_PLATFORMS")
    return (not platforms or "tpu" in platforms.split(",")) and _vms_of_slice() > 1


def _vms_of_slice() -> int:
    """Returns the number of plain TPU VMs of this slice, from the metadata server; 1 on other machines.

    JAX sends a request only from a machine with TPU chips and libtpu, so other machines do not wait.
    """
    try:
        from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster  # as `jax.distributed.initialize` does

        return GceTpuCluster.get_process_count() if GceTpuCluster.is_env_present() else 1
    except (ImportError, OSError):  # JAX moved the class, or the machine has chips and no metadata server
        return 1


def leader_first(make: Callable[[], T], name: str) -> T:
    """Returns `make()` of every process. Process 0 finishes first, and may leave files for the others.

    Args:
      name: identifies this call on all processes.
    """
    made = make() if jax.process_index() == 0 else None
    if jax.process_count() > 1:
        import orbax.checkpoint as ocp  # seconds to import

        # A collective over devices would time out after seconds.
        ocp.multihost.sync_global_processes(name, timeout=LONGEST_WAIT, processes=set(range(jax.process_count())))
    return make() if made is None else made


def global_rows(mesh: Mesh, local: Any, axis: int = 0) -> Any:
    """Joins the rows of all processes, in order, into global arrays over the "data" and "fsdp" axes.

    Args:
      mesh: from `make_mesh`, which has the devices in the order of the processes.
      local: tree of this process's arrays, with as many rows as every other process has.
      axis: axis of the rows.
    """
    sharding = NamedSharding(mesh, P(*[None] * axis, ROWS))

    def join(own: Any) -> jax.Array:
        own = np.asarray(own)
        shape = (*own.shape[:axis], own.shape[axis] * jax.process_count(), *own.shape[axis + 1 :])
        return jax.make_array_from_process_local_data(sharding, own, shape)  # without the shape it takes any layout

    return jax.tree.map(join, local)


def to_host(tree: Any) -> Any:
    """Returns a tree of whole NumPy arrays on every process; fetches the parts of other processes."""

    def fetch(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
            x = multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(fetch, tree)


def gather_values(value: Any) -> list[Any]:
    """Returns the value (JSON) of every process, in their order."""
    if jax.process_count() == 1:
        return [value]
    text = json.dumps(value).encode()
    longest = int(np.max(multihost_utils.process_allgather(np.int32(len(text)))))
    padded = np.frombuffer(text.ljust(longest), np.uint8)
    return [json.loads(row.tobytes()) for row in np.asarray(multihost_utils.process_allgather(padded))]


def fingerprint(params: Mapping[str, Any], config: DecoderConfig, layers: bool = True) -> str:
    """Returns 16 hex digits that differ between models, from a few numbers of every array.

    The result is the same for float32 and bfloat16 weights, unless they are quantised, and for joined and separate
    projections: a program on a mesh has them separate.

    Args:
      config: of the decoder. layers: False leaves out the layers, which are not loaded for training on stored features.
    """
    chosen = {name: part for name, part in params.items() if layers or not name.startswith("layers_")}
    separate = lambda tree: split_projections(tree, config)  # noqa: E731
    first = lambda leaf: leaf[(0,) * (leaf.ndim - 1)][:16].astype("bfloat16")  # noqa: E731
    few = jax.jit(lambda tree: jax.tree.map(first, separate(tree)))(chosen)
    numbers = [leaf.tobytes() for leaf in jax.tree.leaves(to_host(few))]
    return hashlib.sha256(b"".join(numbers)).hexdigest()[:16]
