"""Checks mixtures of experts that are spread over four devices: text, places of weights, and what moves."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

import eagle_jax
from eagle_jax.models import init_params
from eagle_jax.parallel.mesh import make_mesh, param_shardings
from tests.models import random_prompts
from tests.test_experts import CONFIGS, pair

PROMPTS = random_prompts([5, 9, 3, 7], 12)
OPTIONS = {"max_new_tokens": [12, 20, 20, 17], "eos_ids": (3,)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), [("qwen3_moe", None), ("gpt_oss", None), ("gpt_oss", "int8")])
def test_sharded_text_is_the_same(name, scheme):
    target, head = pair(name, scheme)
    spread, spread_head = eagle_jax.shard(target, head, make_mesh(2, 2))
    alone = eagle_jax.generate(target, head, PROMPTS, **OPTIONS)
    together = eagle_jax.generate(spread, spread_head, PROMPTS, **OPTIONS)
    assert together.tokens == alone.tokens


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("axes", "scheme"), [((2, 2, 1), None), ((1, 2, 2), None), ((1, 2, 2), "int8")])
def test_every_device_runs_the_experts_that_it_holds(name, axes, scheme):
    """A pass over the mesh is that of one device, and its program gathers no stack of experts over "tensor"."""
    target, _ = pair(name, scheme)
    spread, _ = eagle_jax.shard(target, None, make_mesh(*axes))
    weight = spread.params["layers_1"]["mlp"]["experts"]["up_proj"]["weight"]
    stack = weight if scheme is None else weight["q"]
    experts, inner, hidden = stack.shape
    assert stack.addressable_shards[0].data.shape == (experts // 2, inner, hidden // axes[2])
    tokens = jnp.asarray(random_prompts([7, 7, 7, 7], 12))
    positions, mask = jnp.broadcast_to(jnp.arange(7), (4, 7)), jnp.tril(jnp.ones((7, 7), bool))

    def run(of):
        return jax.jit(lambda params: of.fn.logits(params, of.fn.forward(params, tokens, positions, mask, None).hidden))

    program = run(spread).lower(spread.params).compile()
    found, wanted = program(spread.params), run(target)(target.params)
    assert float(jnp.max(jnp.abs(found - wanted))) < 1e-4 * float(jnp.max(jnp.abs(wanted)))
    gathered = re.findall(r"= \w+\[([0-9,]*)\]\S* all-gather", program.as_text())
    assert max((math.prod(map(int, shape.split(","))) for shape in gathered), default=0) < math.prod(stack.shape)


def test_experts_that_the_mesh_does_not_divide_are_an_error():
    config = dataclasses.replace(CONFIGS["gpt_oss"], num_kv_heads=4)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    with pytest.raises(ValueError, match=r"experts/\w+/\w+' of shape \[6, .*: 6 must be a multiple of tensor=4"):
        param_shardings(params, make_mesh(1, 4))
