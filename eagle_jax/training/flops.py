"""Counts the floating-point operations of programs, and looks up the peak of devices."""

from __future__ import annotations

import functools
import math
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

PEAK = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12,
    "TPU v6 lite": 918e12, "TPU v6e": 918e12, "NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12,
}  # fmt: skip
"""FLOP/s of one device in bfloat16 by the beginning of its `device_kind` (data sheets, dense)."""


def product_flops(fn: Callable[..., Any], *args: Any) -> float:
    """Counts the floating-point operations of all matrix products of `fn(*args)`, without running it.

    Counts every turn of a loop; the compiler's own count takes a loop body once.

    Args:
      args: arrays or `ShapeDtypeStruct`s.
    """
    return _flops(jax.make_jaxpr(fn)(*args).jaxpr)


def _flops(jaxpr: Any) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = [_flops(sub) for value in eqn.params.values() for sub in _jaxprs(value)]
        total += turns * (max(inner, default=0.0) if eqn.primitive.name == "cond" else sum(inner))
    return total


def _jaxprs(value: Any) -> Iterator[Any]:
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _jaxprs(entry)


@functools.cache
def peak_flops(dtype: str = "bfloat16") -> float:
    """Returns the FLOP/s of all devices together.

    By the data sheet in bfloat16; for unknown devices, such as CPUs, the speed of a large product.
    """
    kind = jax.devices()[0].device_kind
    known = [name for name in PEAK if kind.startswith(name)]  # "TPU v5 lite" starts with "TPU v5"
    if known:
        return PEAK[max(known, key=len)] * jax.device_count()
    x = jnp.ones((2048, 2048), dtype)
    product = jax.jit(lambda x: jnp.dot(x, x))
    # The minimum leaves out compilation and other work on the machine.
    seconds = min(timeit.repeat(lambda: product(x).block_until_ready(), number=1, repeat=5))
    return 2.0 * 2048**3 / seconds / jax.local_device_count() * jax.device_count()
