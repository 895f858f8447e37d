"""Checks joined projections: one product in the place of three or two, the same values, and the way back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.assets import bundled
from eagle_jax.checkpoints import load_target_checkpoint, save_target_checkpoint
from eagle_jax.config import ExpertsConfig
from eagle_jax.models import Decoder, init_params
from eagle_jax.models.projections import JOINED, join_projections, split_projections
from eagle_jax.models.quantised import quantise_params
from eagle_jax.parallel import make_mesh, processes
from eagle_jax.training.initialisation import fresh_draft_model, fresh_head
from tests.models import TREES, tiny_head, tiny_target

LLAMA = tiny_target().config
CONFIGS = {
    "llama": LLAMA,
    "biases": dataclasses.replace(LLAMA, qkv_bias=True, mlp_bias=True),
    "norms of heads": dataclasses.replace(LLAMA, qk_norm=True),
}


def names_of(params):
    return {part.key for path, _ in jax.tree_util.tree_leaves_with_path(params) for part in path}


def drawn(config, scheme=None):
    noise = iter(jax.random.split(jax.random.key(1), 200))
    params = init_params(config, jax.random.key(0))  # biases are drawn as zeros
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(noise), leaf.shape), params)
    return quantise_params(params, scheme, "float32")


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_joined_projections_compute_the_same_and_split_into_what_they_were(name, scheme):
    config = CONFIGS[name]
    params = drawn(config, scheme)
    joined = join_projections(params)
    separate = {part for parts in JOINED.values() for part in parts}
    assert set(JOINED) <= names_of(joined) and not names_of(joined) & separate
    run = functools.partial(Decoder(config).apply, method="all_logits")
    tokens = jnp.arange(12)[None]
    np.testing.assert_allclose(run({"params": joined}, tokens), run({"params": params}, tokens), rtol=1e-5, atol=1e-5)
    back = split_projections(joined, config)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_projections_that_are_quantised_unlike_one_another_stay_separate():
    params = drawn(LLAMA)
    attention = params["layers_0"]["self_attn"]
    attention["k_proj"] = quantise_params({"k_proj": attention["k_proj"]}, "int8", "float32")["k_proj"]
    joined = join_projections(params)
    assert "q_proj" in joined["layers_0"]["self_attn"] and "qkv_proj" in joined["layers_1"]["self_attn"]
    assert "gate_up_proj" in joined["layers_0"]["mlp"]


def test_experts_stay_separate():
    """A quantised stack of experts looks like a matrix with groups."""
    config = dataclasses.replace(LLAMA, experts=ExpertsConfig(4, 2, 20))
    params = drawn(config, "int8")
    joined = join_projections(params)
    jax.tree.map(np.testing.assert_array_equal, joined["layers_0"]["mlp"], params["layers_0"]["mlp"])
    assert "qkv_proj" in joined["layers_0"]["self_attn"]


def test_a_loaded_target_is_joined_without_a_mesh_and_its_files_are_not(tmp_path, monkeypatch):
    target, _, _ = eagle_jax.load_demo("hass")
    config, separate = load_target_checkpoint(bundled("target"), "float32")
    jax.tree.map(np.testing.assert_array_equal, target.params, join_projections(separate))
    with monkeypatch.context() as on_tpu:
        on_tpu.setattr("eagle_jax.runtime.loading.jax.default_backend", lambda: "tpu")
        on_tpu.setattr("eagle_jax.runtime.loading.unused_accelerator", lambda: None)
        jax.tree.map(np.testing.assert_array_equal, eagle_jax.load_target(bundled("target")).params, separate)

    save_target_checkpoint(config, target.params, tmp_path / "saved", "float32")
    jax.tree.map(np.testing.assert_array_equal, load_target_checkpoint(tmp_path / "saved", "float32")[1], separate)
    mesh = make_mesh(data=1, tensor=2)
    spread, _ = eagle_jax.shard(target, None, mesh)
    jax.tree.map(np.testing.assert_array_equal, spread.params, separate)
    assert "q_proj" in names_of(eagle_jax.load_target(bundled("target"), mesh=mesh).params)


def test_a_draft_model_begins_with_separate_projections_of_the_targets_layers():
    target, _, _ = eagle_jax.load_demo("hass")
    small = fresh_draft_model(target.config.with_layers(1), jax.random.key(0), target.params, (1,))
    _, separate = load_target_checkpoint(bundled("target"), "float32")
    jax.tree.map(np.testing.assert_array_equal, small["layers_0"], separate["layers_1"])


def test_a_head_begins_with_the_same_layer_of_either_layout():
    config, params = tiny_head("eagle3", TREES["k2n6"]).config, drawn(LLAMA)
    heads = [
        fresh_head(config, jax.random.key(2), target, jnp.zeros(12, jnp.int32), copied_layer=1)
        for target in (params, join_projections(params))
    ]
    jax.tree.map(np.testing.assert_array_equal, *heads)


def test_a_fingerprint_does_not_depend_on_the_form():
    """`train.features` has projections joined, and `train.head` on a mesh has them separate."""
    config = LLAMA
    params = init_params(config, jax.random.key(0))
    joined = join_projections(params)
    assert "qkv_proj" in joined["layers_0"]["self_attn"]
    assert processes.fingerprint(joined, config) == processes.fingerprint(params, config)
    other = init_params(config, jax.random.key(1))
    ends = [processes.fingerprint(part, config, layers=False) for part in (params, joined, other)]
    assert ends[0] == ends[1] != ends[2]
    assert processes.fingerprint(other, config) != processes.fingerprint(params, config) != ends[0]
