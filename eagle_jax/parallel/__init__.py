"""Exports meshes of devices, and `processes` for runs of several."""

from eagle_jax.parallel import processes
from eagle_jax.parallel.mesh import (
    DATA,
    FSDP,
    ROWS,
    TENSOR,
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

__all__ = [
    "DATA", "FSDP", "ROWS", "TENSOR", "by_rows", "check_mesh", "copies", "embeds_by_rows", "gathered", "make_mesh",
    "param_shardings", "placer", "processes", "row_groups", "shard_drafter", "shard_target",
]  # fmt: skip
