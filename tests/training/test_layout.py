"""Checks that a mesh does not change loss and gradients, and shards gradients as their parameters."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.models import init_head_params, init_params
from eagle_jax.parallel import ROWS, make_mesh, param_shardings
from eagle_jax.runtime.target import Target
from eagle_jax.training import Frozen, Objective, head_loss
from tests.training.common import packed_texts, random_params
from train.loop.setup import generation_mesh, respread

T, V, H = 9, 16, 8
TARGET = DecoderConfig(V, H, 12, 3, num_heads=4, num_kv_heads=2, head_dim=8, tie_word_embeddings=True)
LAYER = DecoderConfig(V, H, 12, 1, num_heads=4, num_kv_heads=2, head_dim=8)
HEAD = HeadConfig("eagle3", LAYER, 8, H, (1, 2, 3))
OBJECTIVE = Objective(steps=2, chunk=4, noise=0.1, feature_weight=0.5)


@functools.cache
def parts():
    """Returns head, frozen target and packed texts. Rows differ in their numbers of supervised tokens."""
    head, target = random_params(init_head_params, HEAD, 1)["head"], random_params(init_params, TARGET, 2)
    return head, Frozen(target, jnp.arange(8, dtype=jnp.int32)), packed_texts(((T,), (5, 4), (T,), (6,)), T, V)


def run(mesh, head, frozen, texts):
    @jax.jit
    def loss(head, frozen, texts):
        of = lambda head: head_loss(TARGET, HEAD, OBJECTIVE, head, frozen, texts, jax.random.key(1), mesh=mesh)  # noqa: E731
        return jax.value_and_grad(of, has_aux=True)(head)

    return loss(head, frozen, texts)


@pytest.mark.parametrize(("data", "fsdp", "tensor"), [(1, 2, 2), pytest.param(2, 2, 1, marks=pytest.mark.slow)])
def test_a_mesh_does_not_change_loss_and_gradients(data, fsdp, tensor):
    head, frozen, texts = parts()
    mesh = make_mesh(data, tensor, fsdp)
    place = lambda tree: jax.device_put(tree, param_shardings(tree, mesh))  # noqa: E731
    spread = Frozen(place(frozen.target), jax.device_put(frozen.d2t, NamedSharding(mesh, P())))
    alone = run(None, head, frozen, texts)
    together = run(mesh, place(head), spread, jax.device_put(texts, NamedSharding(mesh, P(ROWS))))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), together, alone)
    for gradient, home in zip(*map(jax.tree.leaves, (together[1], param_shardings(head, mesh))), strict=True):
        assert gradient.sharding.is_equivalent_to(home, gradient.ndim)


def target_of(kv_heads: int, vocab: int = V) -> Target:
    config = DecoderConfig(vocab, H, 16, 1, num_heads=2 * kv_heads, num_kv_heads=kv_heads, head_dim=8)
    return Target.from_params(config, jax.eval_shape(lambda: init_params(config, jax.random.key(0))))


def test_generation_mesh_has_no_fsdp_and_respread_keeps_values():
    mesh, fsdp = make_mesh(1, 2, 2), make_mesh(1, 1, 4)
    assert generation_mesh(make_mesh(2, 2), target_of(2)) == make_mesh(2, 2)
    other = generation_mesh(mesh, target_of(2))
    assert dict(other.shape) == {"data": 2, "fsdp": 1, "tensor": 2}
    assert dict(generation_mesh(fsdp, target_of(8)).shape) == {"data": 1, "fsdp": 1, "tensor": 4}
    assert dict(generation_mesh(fsdp, target_of(3)).shape) == {"data": 4, "fsdp": 1, "tensor": 1}
    assert dict(generation_mesh(fsdp, target_of(8, vocab=17)).shape) == {"data": 4, "fsdp": 1, "tensor": 1}
    assert dict(generation_mesh(fsdp, target_of(8, vocab=18)).shape) == {"data": 2, "fsdp": 1, "tensor": 2}
    params = {"q_proj": {"weight": jnp.arange(32.0).reshape(4, 8)}, "norm": {"scale": jnp.ones(4)}}
    spread = jax.device_put(params, param_shardings(params, mesh))
    found = respread(spread, other)
    assert "fsdp" in str(spread["q_proj"]["weight"].sharding.spec)
    assert found["q_proj"]["weight"].sharding == param_shardings(params, other)["q_proj"]["weight"]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, params))
