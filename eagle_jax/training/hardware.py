"""Counts operations, looks up the peak of devices, and speeds up training on CPUs.

CPUs get compiler options, an allocator that keeps memory, and own gradients of products and norms. These gradients have
the same numbers as JAX's own. With JAX's own, XLA for CPU fuses an activation's derivative into a transposing copy,
column by column. It also recomputes the input of a product for the gradient of the weight.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import timeit
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

from eagle_jax.models import Linear, Norm
from eagle_jax.models.quantised import is_quantised
from eagle_jax.training.losses import rowwise_dot

PEAK = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12,
    "TPU v6 lite": 918e12, "TPU v6e": 918e12, "NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12,
}  # fmt: skip
"""FLOP/s of one device in bfloat16 by the beginning of its `device_kind` (data sheets, dense)."""
_MMAP_MAX, _TRIM_THRESHOLD, _ARENA_MAX = -4, -1, -8  # names of malloc.h


def product_flops(fn: Callable[..., Any], *args: Any) -> float:
    """Counts the floating-point operations of all matrix products of `fn(*args)`, without running it.

    Counts every turn of a loop of known length (`scan`), and of code by platform that of accelerators. The compiler's
    own count takes a loop body once. The body of a `while_loop` counts once here as well.

    Args:
      args: arrays or `ShapeDtypeStruct`s.
    """
    return _flops(jax.make_jaxpr(fn)(*args).jaxpr)


def _flops(jaxpr: Any) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        numbers = eqn.params.get("dimension_numbers")
        if grouped := eqn.params.get("ragged_dot_dimension_numbers"):  # every row has one expert
            numbers = grouped.dot_dimension_numbers
        if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
            (contracted, _), _ = numbers
            shape = eqn.invars[0].aval.shape
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = [_flops(leaf) for leaf in jax.tree.leaves(eqn.params) if hasattr(leaf, "eqns")]
        if eqn.params.get("branches_platforms"):  # `platform_dependent`; the last is that of accelerators
            inner = inner[-1:]
        total += turns * (max(inner, default=0.0) if eqn.primitive.name == "cond" else sum(inner))
    return total


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


def compiler_options() -> dict[str, str]:
    """Returns `compiler_options` for `jax.jit` of a training step; empty except on CPUs.

    XLA for CPU removes every `jax.lax.optimization_barrier` before fusion, and then computes cheap but strided
    operations again at every use. The option disables that pass.
    """
    return {"xla_disable_hlo_passes": "cse_barrier_expander"} if jax.default_backend() == "cpu" else {}


def keep_freed_memory() -> None:
    """Makes the allocator of the GNU C library keep freed memory; does nothing elsewhere.

    Every call of a compiled program allocates its buffers again, and the system clears large ones page by page.
    """
    if sys.platform == "linux":
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
            ctypes.CDLL(None).mallopt(option, value)


@jax.custom_vjp
def _product(x: Array, weight: Array) -> Array:
    """Returns `x @ weight.T`."""
    return jnp.dot(x, weight.T)


def _product_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    # Without the barrier `x` is computed twice, here and for the weight's gradient.
    x = jax.lax.optimization_barrier(x)
    return jnp.dot(x, weight.T), (x, weight)


def _product_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, weight = saved
    grad = jax.lax.optimization_barrier(grad)
    # The gradient is transposed beforehand: products whose first factor is transposed are slower. The factor behind a
    # barrier makes XLA transpose in a separate pass.
    transposed = grad.reshape(-1, grad.shape[-1]).T * jax.lax.optimization_barrier(jnp.ones((), grad.dtype))
    return jnp.dot(grad, weight), jnp.dot(transposed, x.reshape(-1, x.shape[-1]))


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _normed(x: Array, scale: Array, eps: float) -> Array:
    """Computes `Norm`, not centred."""
    return _normed_forward(x, scale, eps)[0]


def _normed_forward(x: Array, scale: Array, eps: float) -> tuple[Array, tuple[Array, Array, Array]]:
    size = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * size * jnp.broadcast_to(scale, x.shape), (x, scale, size)


def _normed_backward(eps: float, saved: tuple[Array, Array, Array], grad: Array) -> tuple[Array, Array]:
    x, scale, size = saved
    grad = jax.lax.optimization_barrier(grad)
    to_normed = grad * jnp.broadcast_to(scale, x.shape)
    along = rowwise_dot(to_normed, x)[..., None]
    to_scale = jnp.sum(grad * x * size, axis=tuple(range(x.ndim - 1)))
    return size * (to_normed - x * (along * size * size / x.shape[-1])), to_scale.astype(scale.dtype)


_normed.defvjp(_normed_forward, _normed_backward)


def dense_gradients(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
    """Intercepts Linen calls: `Linear` of floats without bias and RMSNorm, in float32, get the gradients above."""
    module = context.module
    if isinstance(module, Norm | Linear) and args[0].dtype == jnp.float32 and not module.is_initializing():
        if isinstance(module, Norm) and not module.centred:
            return _normed(args[0], module.get_variable("params", "scale"), module.eps)
        weight = module.get_variable("params", "weight")
        if isinstance(module, Linear) and not module.use_bias and not is_quantised(weight):
            return _product(args[0], weight)
    return call(*args, **kwargs)
