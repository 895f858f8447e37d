"""What training on a CPU gains from the compiler and the allocator."""

from __future__ import annotations

import ctypes
import sys

import jax

_MMAP_MAX, _TRIM_THRESHOLD, _ARENA_MAX = -4, -1, -8  # names of malloc.h


def compiler_options() -> dict[str, str]:
    """`jax.jit(..., compiler_options=...)` of a training step on the default backend; empty but for CPUs.

    XLA for CPU drops `jax.lax.optimization_barrier` before it fuses, and then computes cheap but strided operations
    again in every place that reads them. Without the pass that drops them the barriers of this package hold.
    """
    return {"xla_disable_hlo_passes": "cse_barrier_expander"} if jax.default_backend() == "cpu" else {}


def keep_freed_memory() -> bool:
    """Lets this process keep what it frees, instead of giving it back to the system; whether that could be had.

    A compiled program's buffers are allocated anew for every call. Large ones come from the system page by page,
    zeroed: a tenth of the time of a training step on a CPU. Only the GNU C library can be asked; elsewhere nothing
    happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, 2**31 - 1), mallopt(_ARENA_MAX, 1)])
