"""Checks that a head's pass whose last state alone is computed is the whole pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.core import empty_cache
from eagle_jax.drafters.eagle import HeadFns
from tests.models import tiny_head, tiny_target


@pytest.mark.parametrize("method", ["eagle1", "eagle3"])
def test_the_last_state_is_that_of_the_whole_pass(method):
    """Keys and values are of all tokens: drafts read them."""
    target, head = tiny_target(), tiny_head(method, TreeConfig.chain(2))
    fns, layer = HeadFns(head.config, target.fn), head.config.layer
    params = {"target": target.params, "drafter": head.params}
    tokens = jax.random.randint(jax.random.key(0), (3, 5), 0, layer.vocab_size)
    states = jax.random.normal(jax.random.key(1), (3, 5, layer.hidden_size))
    cache = empty_cache(1, 3, layer.num_kv_heads, 8, layer.head_dim, "float32", layer.windows)
    positions, causal = jnp.broadcast_to(jnp.arange(5), (3, 5)), jnp.tril(jnp.ones((5, 5), bool))
    whole, new = fns.run(params, tokens, states, positions, causal, cache)
    only = jnp.array([0, 4, 2])
    last, same = fns.run(params, tokens, states, positions, causal, cache, only=only)
    assert last.shape == (3, 1, layer.hidden_size)
    np.testing.assert_allclose(last[:, 0], whole[jnp.arange(3), only], atol=1e-5)
    np.testing.assert_allclose(same.keys[0], new.keys[0], atol=1e-6)
    np.testing.assert_allclose(same.values[0], new.values[0], atol=1e-6)
