"""Exports meshes of devices, and `processes` for runs of several."""

from eagle_jax.parallel import processes
from eagle_jax.parallel.mesh import (
    FSDP,
    ROWS,
    TENSOR,
    by_device,
    by_rows,
    check_mesh,
    copies,
    embeds_by_rows,
    gathered,
    make_mesh,
    param_shardings,
    placer,
    row_groups,
    shard_drafter,
    shard_target,
)
from eagle_jax.parallel.processes import to_host

__all__ = [
    "FSDP",
    "ROWS",
    "TENSOR",
    "by_device",
    "by_rows",
    "check_mesh",
    "copies",
    "embeds_by_rows",
    "gathered",
    "make_mesh",
    "param_shardings",
    "placer",
    "processes",
    "row_groups",
    "shard_drafter",
    "shard_target",
    "to_host",
]  # fmt: skip
