"""Compilation for TPUs that are not there: whole programs over abstract weights, their memory and their costs.

`libtpu` compiles for a topology ("v6e:1x1") on any x86 Linux machine. Set `JAX_PLATFORMS=cpu`, `TPU_SKIP_MDS_QUERY=1`
and `TPU_WORKER_HOSTNAMES=localhost` before JAX is imported, or it looks for the chips, and for several at once
`ALLOW_MULTIPLE_LIBTPU_LOAD=1`. Weights are `ShapeDtypeStruct`s with shardings: a 70B model takes no memory here.
"""

from infer.aot.chips import (
    CHIPS,
    Chip,
    chip_of,
    compile_program,
    device_memory,
    local_bytes,
    mesh_for,
    topology_devices,
)
from infer.aot.generation import PAPER_TREE, Report, Workload, analyse, lower_generate, lower_step, trace_step
from infer.aot.training import TrainReport, TrainWorkload, analyse_training, lower_training, training_mesh

__all__ = [
    "CHIPS",
    "PAPER_TREE",
    "Chip",
    "Report",
    "TrainReport",
    "TrainWorkload",
    "Workload",
    "analyse",
    "analyse_training",
    "chip_of",
    "compile_program",
    "device_memory",
    "local_bytes",
    "lower_generate",
    "lower_step",
    "lower_training",
    "mesh_for",
    "topology_devices",
    "trace_step",
    "training_mesh",
]
