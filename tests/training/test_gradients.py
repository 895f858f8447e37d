"""The hand-written gradients for CPUs equal those of the layers."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.models.layers import Linear, Norm
from eagle_jax.training.host import dense_gradients


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Linear(7, name="down")(nn.silu(Linear(11, name="up")(Norm(1e-5, name="norm")(x))))


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_value_and_gradients(scale_dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    x, wanted = jax.random.normal(keys[0], (2, 3, 5)), jax.random.normal(keys[1], (2, 3, 7))
    params = Block().init(keys[2], x)["params"]
    params["norm"] = {"scale": (1 + 0.3 * jax.random.normal(keys[3], (5,))).astype(scale_dtype)}

    def loss(params, x):
        return jnp.sum(jnp.square(Block().apply({"params": params}, x) - wanted))

    def measured(params, x):
        with nn.intercept_methods(dense_gradients):
            return loss(params, x)

    given, found = (jax.value_and_grad(f, (0, 1))(params, x) for f in (loss, measured))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), given) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), found
    )
    tolerance = 1e-5 if scale_dtype == "float32" else 1e-2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), given, found)
    text = jax.jit(jax.grad(measured)).lower(params, x).as_text()
    assert text.count("optimization_barrier") > 0  # the interceptor ran
    assert jax.jit(jax.grad(loss)).lower(params, x).as_text().count("optimization_barrier") == 0
