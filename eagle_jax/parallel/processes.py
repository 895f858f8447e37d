"""Several processes that train as one: joining them, and arrays that span them."""

from __future__ import annotations

import functools
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

from eagle_jax.config import ConfigError
from eagle_jax.parallel.mesh import ROWS, TENSOR

T = TypeVar("T")
LONGEST_WAIT = 24 * 3600
"""Seconds that a process waits for another."""
NAMED = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialise(environment: Mapping[str, str] = os.environ) -> bool:
    """Joins the processes of a run, where the environment says that there are several; call it before any array exists.

    `JAX_COORDINATOR_ADDRESS` (host:port), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` name them explicitly. Otherwise JAX
    finds them itself on TPU slices (plain VMs and GKE), under SLURM and under Open MPI.

    Returns:
      whether there are several.

    Raises:
      ConfigError: only some of the three variables are set, or they are no numbers; there are several processes, and
        nothing says how to join them.
    """
    given = [name for name in NAMED if environment.get(name)]
    if given:
        if missing := [name for name in NAMED if name not in given]:
            raise ConfigError(f"{', '.join(given)} set without {', '.join(missing)}: all three describe a run, or none")
        try:
            count, index = int(environment[NAMED[1]]), int(environment[NAMED[2]])
        except ValueError:
            raise ConfigError(
                f"{NAMED[1]}={environment[NAMED[1]]!r} and {NAMED[2]}={environment[NAMED[2]]!r} must be numbers"
            ) from None
        if not 0 <= index < count:
            raise ConfigError(f"{NAMED[2]}={index} must be below {NAMED[1]}={count}")
        jax.distributed.initialize(environment[NAMED[0]], count, index)
    elif _is_cluster(environment):
        jax.distributed.initialize()
    count = jax.process_count()
    if count > 1 and not jax.distributed.is_initialized():  # the runtime of a TPU counts for itself
        raise ConfigError(
            f"this is one of {count} processes, and JAX found no way to join them: set {', '.join(NAMED)} on each"
        )
    return count > 1


def _is_cluster(environment: Mapping[str, str]) -> bool:
    """Whether a scheduler started this process as one of several, or this machine is one of several of a TPU slice."""
    counts = [environment.get(name, "1") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")]
    if "MEGASCALE_COORDINATOR_ADDRESS" in environment or any(count != "1" for count in counts):
        return True
    addresses = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    if addresses:  # GKE
        return len([address for address in addresses.split(",") if address]) > 1
    platforms = environment.get("JAX_PLATFORMS")
    return (not platforms or "tpu" in platforms.split(",")) and _vms_of_slice() > 1


def _vms_of_slice() -> int:
    """How many plain TPU VMs the slice has that this machine belongs to; 1 where it is none.

    Only their metadata server knows. JAX asks it where it found TPU chips in this machine and libtpu installed, so that
    no other machine waits for an answer.
    """
    try:
        from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster  # what `jax.distributed.initialize` asks

        return GceTpuCluster.get_process_count() if GceTpuCluster.is_env_present() else 1
    except (ImportError, OSError):  # JAX has moved it; no such server, as where TPUs are lent in other ways
        return 1


def leader_first(make: Callable[[], T], name: str) -> T:
    """`make()` of every process, that of process 0 before the others begin: it may leave something on disk for them.

    Args:
      name: of the place in the program, the same on all processes.
    """
    made = make() if jax.process_index() == 0 else None
    if jax.process_count() > 1:
        import orbax.checkpoint as ocp  # seconds to import

        # Not a collective over devices: those give up after seconds.
        ocp.multihost.sync_global_processes(name, timeout=LONGEST_WAIT, processes=set(range(jax.process_count())))
    return make() if made is None else made


def by_rows(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Rows of a batch over the mesh's "data" and "fsdp" axes; `axis` is which axis of the array they are."""
    return NamedSharding(mesh, P(*[None] * axis, ROWS))


def global_rows(mesh: Mesh, local: Any, axis: int = 0) -> Any:
    """Arrays of all processes' rows from a tree of each one's own, in the order of the processes.

    Every process has as many rows.

    Raises:
      ConfigError: the mesh has the processes in another order, or gives one row to two of them.
    """
    _check_order(mesh)
    sharding = by_rows(mesh, axis)

    def join(own: Any) -> jax.Array:
        own = np.asarray(own)
        shape = (*own.shape[:axis], own.shape[axis] * jax.process_count(), *own.shape[axis + 1 :])
        return jax.make_array_from_process_local_data(sharding, own, shape)  # without the shape it takes any layout

    return jax.tree.map(join, local)


@functools.lru_cache(maxsize=16)
def _check_order(mesh: Mesh) -> None:
    owners = np.array([device.process_index for device in mesh.devices.flat]).reshape(-1, mesh.shape[TENSOR])
    if np.any(owners != owners[:, :1]) or np.any(np.diff(owners[:, 0]) < 0):
        raise ConfigError(
            f"the devices of the mesh belong to the processes {owners.tolist()}, one list per 'tensor' group: each "
            "process must have whole groups, one behind the other; make it with eagle_jax.parallel.mesh.make_mesh"
        )


def to_host(tree: Any) -> Any:
    """A tree of arrays as NumPy, on every process, whole: parts that lie with other processes are fetched."""

    def fetch(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
            x = multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(fetch, tree)


def everyones(value: Any) -> list[Any]:
    """`value` (JSON) of every process, in their order."""
    if jax.process_count() == 1:
        return [value]
    text = json.dumps(value).encode()
    longest = int(np.max(multihost_utils.process_allgather(np.int32(len(text)))))
    padded = np.frombuffer(text.ljust(longest), np.uint8)
    return [json.loads(row.tobytes()) for row in np.asarray(multihost_utils.process_allgather(padded))]


def fingerprint(params: Mapping[str, Any], layers: bool = True) -> str:
    """16 letters that another training of a model changes, at little cost: from some numbers of every array.

    They are the same in whichever dtype of at least bfloat16's precision the weights were loaded.

    Args:
      layers: False leaves the layers out, which a target for training on stored features has not.
    """
    chosen = {name: part for name, part in params.items() if layers or not name.startswith("layers_")}
    first = lambda leaf: leaf[(0,) * (leaf.ndim - 1)][:16].astype("bfloat16")  # noqa: E731
    few = jax.jit(lambda tree: jax.tree.map(first, tree))(chosen)
    numbers = [leaf.tobytes() for leaf in jax.tree.leaves(to_host(few))]
    return hashlib.sha256(b"".join(numbers)).hexdigest()[:16]
