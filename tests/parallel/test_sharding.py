"""Checks for equal text on four devices and one, and that a rule splits every matrix."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import eagle_jax
from eagle_jax import DecoderConfig, DraftHead, HeadConfig, Medusa, Target, TreeConfig
from eagle_jax.config import MedusaConfig
from eagle_jax.models import init_head_params, init_medusa_params, init_params
from eagle_jax.parallel.mesh import make_mesh, param_sharding, param_shardings, placer
from tests.models import TREES, near_model, random_prompts

TREE = TreeConfig(depth=3, top_k=2, num_nodes=6)
CONFIG = DecoderConfig(
    vocab_size=16, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=6,
    qkv_bias=True, qk_norm=True, max_position=256,
)  # fmt: skip


@functools.cache
def pair(kind: str = "eagle3") -> tuple[Target, DraftHead]:
    """A random pair with four key-value heads, biases and q/k norms; weights scaled up so that the argmax varies."""
    taps = (0, 1, 2) if kind == "eagle3" else (2,)
    layer = dataclasses.replace(CONFIG, num_layers=1)
    config = HeadConfig(kind, layer, 8 if kind == "eagle3" else 16, 16, taps, fc_bias=True)
    scale = functools.partial(jax.tree.map, lambda leaf: leaf * 6 if leaf.ndim == 2 else leaf)
    target = Target.from_params(CONFIG, scale(init_params(CONFIG, jax.random.key(0))))
    params = init_head_params(config, jax.random.key(1))
    params["head"] = scale(params["head"])
    if kind == "eagle3":
        params["d2t"] = jnp.arange(8, dtype=jnp.int32)  # draft id i is target id 2 i
    return target, DraftHead.from_params(config, params, target, TREE)


def wide_hydra(target: Target) -> Medusa:
    config = MedusaConfig("hydra", 16, 16, num_heads=3, prefix=target.config.one_layer())
    params = jax.tree.map(lambda leaf: 4 * leaf, init_medusa_params(config, jax.random.key(2)))
    return Medusa.from_params(config, params, target, TreeConfig.static([-1, -1, 0, 0, 2]))


METHODS = {
    "eagle3": lambda target: pair()[1], "eagle1": lambda target: pair("eagle1")[1], "hydra++": wide_hydra,
    "small": lambda target: near_model(target, TREES["k3n12"]), "lookup": eagle_jax.prompt_lookup,
    "lookahead": lambda target: eagle_jax.lookahead(target, ngram=3, window=4, guesses=3),
}  # fmt: skip
FAST = ("eagle3",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in METHODS])
def test_sharded_text_is_the_same(name):
    tensor = 4 if name == "eagle3" else 2
    target = pair()[0]
    drafter = METHODS[name](target)
    spread, spread_drafter = eagle_jax.shard(target, drafter, make_mesh(4 // tensor, tensor))
    weight = spread.params["layers_1"]["mlp"]["down_proj"]["weight"]
    assert weight.addressable_shards[0].data.shape == (16, 24 // tensor)
    prompts = random_prompts([5, 9, 3, 7], 16)
    options = {"max_new_tokens": [12, 20, 20, 17], "eos_ids": (3,)}
    alone = eagle_jax.generate(target, drafter, prompts, **options)
    together = eagle_jax.generate(spread, spread_drafter, prompts, **options)
    assert together.tokens == alone.tokens
    np.testing.assert_array_equal(together.accepted, alone.accepted)


@pytest.mark.slow
def test_sharded_sampling_and_plain_decoding_are_the_same():
    target, head = pair()
    spread, spread_head = eagle_jax.shard(target, head, make_mesh(2, 2))
    options = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "key": 3}
    prompts = random_prompts([6, 4], 16, seed=1)
    alone = eagle_jax.generate(target, None, prompts, **options)
    assert eagle_jax.generate(spread, spread_head, prompts, **options).tokens == alone.tokens


def test_caches_are_split():
    """Inside the program: rows over "data", key-value heads over "tensor", for target and head."""
    target, head = pair()
    spread, spread_head = eagle_jax.shard(target, head, make_mesh(2, 2))
    cache = jax.jit(lambda: spread.fn.init_cache(4, 32))()
    assert cache.keys[0].addressable_shards[0].data.shape == (2, 2, 6, 32)
    state = jax.jit(lambda: spread_head.drafter.init({}, 4, 32))()
    assert state.cache.values[0].addressable_shards[0].data.shape == (2, 2, 32, 6)


def test_equal_arguments_give_the_same_object():
    """Otherwise every call would compile again."""
    target, head = pair()
    spread, spread_head = eagle_jax.shard(target, head, make_mesh(2, 2))
    again, again_head = eagle_jax.shard(target, head, make_mesh(2, 2))
    assert spread.fn is again.fn
    assert spread_head.with_tree(TREE).drafter is again_head.drafter


def test_rules():
    for kind in ("eagle3", "eagle1"):
        target, head = pair(kind)
        params = {"target": target.params, "drafter": head.params}
        shardings = param_shardings(params, make_mesh(1, 4))
        for leaf, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True):
            assert leaf.ndim == 1 or "tensor" in sharding.spec
    for path, spec in (
        ("target/layers_3/self_attn/q_proj/weight", P("tensor", "fsdp")),
        ("layers_3/mlp/down_proj/weight", P("fsdp", "tensor")),
        ("embed_tokens/embedding", P("tensor", "fsdp")),
        ("head/fc_norm_2/scale", P(None)),
    ):
        assert param_sharding(path, (8,) * len(spec), make_mesh()).spec == spec
    array = placer(make_mesh(2, 2))("layers_0/mlp/up_proj/weight", np.ones((4, 6), np.float32))
    assert {shard.data.shape for shard in array.addressable_shards} == {(2, 6)}


def with_two_heads() -> Target:
    config = dataclasses.replace(CONFIG, num_kv_heads=2)
    return Target.from_params(config, init_params(config, jax.random.key(0)))


def other_axes() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), ("model",))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: param_sharding("head/mixer/weight", (8, 8), make_mesh()),
         r"'head/mixer/weight' of .* must match a sharding rule"),
        (lambda: placer(make_mesh(2, 2))("d/up_proj/weight", np.ones((5, 4), np.float32)),
         r"'d/up_proj/weight' of shape \[5, 4\]: 5 must be a multiple of tensor=2"),
        (lambda: eagle_jax.shard(with_two_heads(), None, make_mesh(1, 4)),
         "num_kv_heads must be a multiple of tensor=4, got 2"),
        (lambda: eagle_jax.generate(*eagle_jax.shard(*pair(), make_mesh(2, 2)), [[1, 2]] * 3, max_new_tokens=4),
         "number of prompts must be a multiple of data x fsdp = 2, got 3. Add 1 prompts"),
        (lambda: eagle_jax.shard(*pair(), other_axes()), r"got axes \('model',\).*Make it with .*parallel.make_mesh"),
        (lambda: eagle_jax.load_target("nowhere", mesh="x"), "mesh must be a jax.sharding.Mesh .*, got a str"),
        (lambda: make_mesh(3, 2), "data=3 times fsdp=1 times tensor=2 must be 1 to 4, the number of devices"),
        (lambda: eagle_jax.generate(eagle_jax.shard(*pair(), make_mesh(1, 4))[0], pair()[1], [[1, 2]]),
         "another target"),
    ],
)  # fmt: skip
def test_meshes_that_do_not_fit_raise(run, message):
    with pytest.raises(ValueError, match=message):
        run()


def test_files_load_straight_onto_the_mesh(golden):
    """The drafter takes the mesh of its target, and shares the sharded embedding."""
    target = eagle_jax.load_target(golden / "target", mesh=make_mesh(2, 2))
    assert target.params["layers_0"]["mlp"]["up_proj"]["weight"].sharding.spec == P("tensor", "fsdp")
    for name in ("eagle3", "eagle1"):
        head = eagle_jax.load_drafter(golden / name, target, TREE)
        assert head.target is target
        assert head.params["head"]["fc"]["weight"].sharding.spec == P("fsdp", "tensor")
        assert not head.config.own_embedding
