"""Checks the weights that heads start with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import HeadConfig
from eagle_jax.models.decoder import DecoderLayer
from eagle_jax.models.heads import EagleHead
from eagle_jax.models.quantised import quantise_params
from eagle_jax.models.rope import rope_angles
from eagle_jax.training import fresh_head
from tests.models import tiny_target

SIZES = 2, 7, 16


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_a_copied_layer_computes_what_the_targets_layer_does(scheme):
    target = tiny_target(12, 3)
    layer = target.config.one_layer(tie_word_embeddings=False)
    config = HeadConfig("eagle3", layer, 8, 16, (0, 1, 2))
    params = quantise_params(target.params, scheme, jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4)
    scale = 0.5 + jax.random.uniform(keys[0], (48,))
    head = fresh_head(config, keys[1], params, jnp.arange(8) % 3, scale, copied_layer=2)
    drawn = fresh_head(config, keys[1], params, jnp.arange(8) % 3)
    assert jax.tree.map(jnp.shape, head) == jax.tree.map(jnp.shape, drawn)

    embeds, state = jax.random.normal(keys[2], SIZES), jax.random.normal(keys[3], SIZES)
    positions, mask = jnp.tile(jnp.arange(7), (2, 1)), jnp.tril(jnp.ones((7, 7), bool))
    cos, sin = rope_angles(layer.rope, layer.head_dim, positions)
    expected, *_ = DecoderLayer(target.config).apply({"params": params["layers_2"]}, state, cos, sin, mask, None)

    # Without what was drawn, and on the features as training scales them, the head is the layer.
    fc = head["fc"]["weight"] - 0.5 * drawn["fc"]["weight"]
    features = jnp.concatenate([embeds, embeds, state], axis=-1) / scale[None, None]
    head = {**head, "fc": {**head["fc"], "weight": fc}, "input_layernorm": {"scale": jnp.zeros(16)}}
    fused = EagleHead(config).apply({"params": head}, features, method="fuse")
    np.testing.assert_allclose(fused, state, atol=1e-6)
    found = EagleHead(config).apply({"params": head}, embeds, fused, positions, mask)
    np.testing.assert_allclose(found.states, expected, atol=1e-5)
