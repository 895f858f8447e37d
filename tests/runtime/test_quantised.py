"""Checks targets and heads with quantised weights: values, products, text, memory and shardings."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eagle_jax import DecoderConfig, Target, generate, load_demo, load_drafter, stream
from eagle_jax.assets import bundled
from eagle_jax.devices import size_of
from eagle_jax.models import Decoder, init_params
from eagle_jax.models.layers import Linear, product
from eagle_jax.models.quantised import (
    activation_dtype,
    dequantise,
    is_quantised,
    look_up,
    quantise,
    quantise_params,
    scheme_of,
)
from eagle_jax.parallel import make_mesh
from eagle_jax.parallel.mesh import param_shardings
from eagle_jax.training import fresh_draft_model
from eagle_jax.training.hardware import dense_gradients
from tests.models import TREES, random_prompts, tiny_head, tiny_target

SCHEMES = ("int8", "int4", "fp8")


@functools.cache
def quantised_target(scheme: str, vocab: int = 12) -> Target:
    target = tiny_target(vocab)
    return Target.from_params(target.config, quantise_params(target.params, scheme, "float32"), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_value_is_the_nearest_of_its_scheme(scheme):
    """Off by at most half a step; a step of e4m3 is 1/8 of the power of two below a value, at least scale / 2^9."""
    weight = np.random.default_rng(0).standard_normal((6, 192)).astype(np.float32)
    weight[2] = 0
    leaf = quantise(weight, scheme, "float32")
    values, scale = weight.reshape(leaf["q"].shape), leaf["scale"][..., None]
    assert leaf["q"].shape == ((6, 2, 96) if scheme == "int4" else (6, 192))
    assert leaf["scale"].shape == leaf["q"].shape[:-1]
    step = np.maximum(np.abs(values) / 8, scale / 2**6) if scheme == "fp8" else scale
    error = np.abs(dequantise(leaf) - weight).reshape(values.shape)
    assert (error <= step * 0.5001).all() and error.max() > 0.4 * step.min()
    assert not leaf["scale"][2].any() and not np.asarray(leaf["q"][2], np.float32).any()
    traced = jax.jit(lambda x: quantise(x, scheme, "float32"))(weight)
    assert (np.asarray(traced["q"], np.float32) != np.asarray(leaf["q"], np.float32)).mean() < 0.01


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("scheme", [*SCHEMES, "zero"])
def test_a_product_equals_that_with_the_dequantised_weight(scheme, rows):
    rng = np.random.default_rng(1)
    leaf = quantise(
        rng.standard_normal((24, 256)).astype(np.float32), "int4" if scheme == "zero" else scheme, "float32"
    )
    leaf = {name: jnp.asarray(part) for name, part in leaf.items()}
    if scheme == "zero":
        leaf["zero"] = jnp.asarray(rng.integers(-8, 8, leaf["scale"].shape), jnp.int8)
    x = jnp.asarray(rng.standard_normal((rows, 256)), jnp.float32)
    np.testing.assert_allclose(product(x, leaf), x @ dequantise(leaf).T, rtol=1e-5, atol=1e-4)
    assert product(x.astype(jnp.bfloat16), leaf).dtype == jnp.bfloat16
    assert product(x.astype(jnp.bfloat16), leaf, "float32").dtype == jnp.float32
    np.testing.assert_array_equal(look_up(leaf, jnp.asarray([[3, 1]])), dequantise(leaf)[jnp.asarray([[3, 1]])])


def test_gradients_for_cpu_leave_quantised_layers_alone():
    """A frozen target may be quantised while a head of float weights is trained."""
    leaf = {
        name: jnp.asarray(part) for name, part in quantise(np.eye(6, 16, dtype=np.float32), "int8", "float32").items()
    }
    x = jnp.ones((2, 16))
    with nn.intercept_methods(dense_gradients):
        found = Linear(6).apply({"params": {"weight": leaf}}, x)
    np.testing.assert_array_equal(found, product(x, leaf))


def test_a_small_model_starts_with_the_values_of_quantised_layers():
    target = quantised_target("int8")
    small = fresh_draft_model(target.config.with_layers(1), jax.random.key(0), target.params, (1,))
    assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(small))
    ours, theirs = (layer["mlp"]["up_proj"]["weight"] for layer in (small["layers_0"], target.params["layers_1"]))
    np.testing.assert_array_equal(ours, dequantise(theirs))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_decoder_computes_as_the_dequantised_one(scheme, tied):
    config = DecoderConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
        max_position=64, tie_word_embeddings=tied, qkv_bias=True,
    )  # fmt: skip
    params = quantise_params(init_params(config, jax.random.key(0)), scheme, "float32")
    assert is_quantised(params["embed_tokens"]["embedding"]) and not is_quantised(params["norm"])
    assert activation_dtype(params) == "float32"
    floats = jax.tree.map(dequantise, params, is_leaf=is_quantised)
    tokens = jnp.arange(12)[None]
    run = functools.partial(Decoder(config).apply, method="all_logits")
    np.testing.assert_allclose(run({"params": params}, tokens), run({"params": floats}, tokens), rtol=1e-4, atol=1e-5)


FAST = {("eagle3", "int8")}
CASES = [pytest.param(kind, scheme, marks=() if (kind, scheme) in FAST else pytest.mark.slow)
         for kind in ("eagle1", "eagle3") for scheme in SCHEMES]  # fmt: skip


@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_text_is_that_of_the_quantised_target(scheme, kind):
    """Lossless means equal to the quantised target, whatever the tree, the batch and the weights of the head."""
    target = quantised_target(scheme)
    head = tiny_head(kind, TREES["k3n12"], draft_vocab=10, seed=9 if kind == "eagle3" else 1).rebind(target)
    small = quantise_params(head.params["head"], scheme, "float32")
    drafter = dataclasses.replace(head, params={**head.params, "head": small})
    prompts = random_prompts([3, 9, 5], 12)
    plain = generate(target, None, prompts, max_new_tokens=24)
    out = generate(target, drafter, prompts, max_new_tokens=24)
    assert out.tokens == plain.tokens
    assert out.tau > 1
    chunks = stream(target, drafter, prompts[1], max_new_tokens=24)
    assert [token for chunk in chunks for token in chunk.tokens] == plain.tokens[1]


def test_loaders_quantise_by_name():
    target, _, _ = load_demo("hass", weights="int4")
    head = load_drafter(bundled("eagle3"), target, TREES["k2n6"], weights="int8")
    layer = target.params["layers_0"]
    assert layer["mlp"]["gate_up_proj"]["weight"]["q"].dtype == jnp.int4
    assert target.params["embed_tokens"]["embedding"]["q"].dtype == jnp.int8
    assert head.params["head"]["fc"]["weight"]["q"].dtype == jnp.int8
    assert head.params["head"]["norm"]["scale"].dtype == jnp.float32
    # The file of the EAGLE-1/2 head holds a copy of the embedding, which is that of the quantised target.
    assert "embed_tokens" not in load_drafter(bundled("hass"), target).params["head"]


def test_what_stays_as_it_is():
    paths = ("norm/scale", "layers_0/mlp/up_proj/bias", "embed_positions/embedding", "layers_0/mlp/router/weight")
    assert [scheme_of(path, "int8") for path in paths] == [None] * 4
    assert scheme_of("lm_head/weight", "int4") == scheme_of("embed_tokens/embedding", "int4") == "int8"
    assert scheme_of("layers_0/mlp/up_proj/weight", None) is None


def test_parts_are_split_as_the_weight():
    config = DecoderConfig(
        vocab_size=16, hidden_size=512, intermediate_size=512, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=64,
        max_position=64,
    )  # fmt: skip
    mesh = make_mesh(1, 2, 2)
    for scheme, row, column in (("int8", P("tensor"), P("fsdp")), ("int4", P("tensor", "fsdp"), P("fsdp", "tensor"))):
        tree = jax.eval_shape(
            lambda key, s=scheme: quantise_params(init_params(config, key), s, "bfloat16"), jax.random.key(0)
        )
        found = jax.tree.map(lambda one: one.spec, param_shardings(tree, mesh))
        mlp, table = found["layers_0"]["mlp"], found["embed_tokens"]["embedding"]
        assert mlp["up_proj"]["weight"]["scale"] == row and mlp["down_proj"]["weight"]["scale"] == column
        assert mlp["down_proj"]["weight"]["q"] == P("fsdp", "tensor", *[None] * (scheme == "int4"))
        assert table == {"q": P("tensor", "fsdp"), "scale": P("tensor")}


@pytest.mark.slow
def test_sharded_quantised_text_is_the_same():
    target = quantised_target("int8")
    mesh = make_mesh(2, 2)
    spread = Target.from_params(target.config, target.params, "spread", mesh)
    head = tiny_head("eagle3", TREES["k3n12"], draft_vocab=10, seed=9)
    prompts = random_prompts([3, 9], 12)
    plain = generate(target, None, prompts, max_new_tokens=16)
    assert generate(spread, head.rebind(spread), prompts, max_new_tokens=16).tokens == plain.tokens


def test_an_int4_is_half_a_byte_except_on_a_cpu():
    assert size_of(jax.ShapeDtypeStruct((8, 4), jnp.int4)) == 16
    assert size_of(jnp.zeros((8, 4), jnp.int4)) == 32
    assert size_of(jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)) == 64
