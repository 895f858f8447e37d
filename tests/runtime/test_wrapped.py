"""Checks `target_from_layers`: a model whose layers write a cache before they attend gives the texts of `Decoder`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.models import target_from_layers
from eagle_jax.runtime.drafters import DraftHead
from eagle_jax.runtime.target import Target
from tests.models import TREES, random_prompts, tiny_head, tiny_target


def rms_norm(x, scale, eps):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * scale[None, None]


def rotate(x, positions, theta):  # [B, T, N, hd]
    half = x.shape[-1] // 2
    angles = positions[..., None] / (theta ** (jnp.arange(half) / half))[None, None]
    sin, cos = jnp.sin(angles)[:, :, None], jnp.cos(angles)[:, :, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def wrapped(config, params):
    """The tiny Llama with layers in the manner of tunix: one offset for all rows, a mask over slots."""

    def layer(index):
        def run(params, x, positions, cache, mask):
            own, eps = params[f"layers_{index}"], config.rms_norm_eps
            normed = rms_norm(x, own["input_layernorm"]["scale"], eps)

            def heads(name):
                projected = normed @ own["self_attn"][name]["weight"].T
                return projected.reshape(*x.shape[:2], -1, config.head_dim)

            query, key = (rotate(heads(name), positions, config.rope.theta) for name in ("q_proj", "k_proj"))
            start = (0, cache["end_index"][0], 0, 0)
            keys = jax.lax.dynamic_update_slice(cache["k"], key, start)
            values = jax.lax.dynamic_update_slice(cache["v"], heads("v_proj"), start)
            query = query.reshape(*x.shape[:2], config.num_kv_heads, -1, config.head_dim)
            scores = jnp.einsum("BTKGH,BSKH->BKGTS", query, keys) * config.head_dim**-0.5
            weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), axis=-1)
            mixed = jnp.einsum("BKGTS,BSKH->BTKGH", weights, values).reshape(*x.shape[:2], -1)
            x = x + mixed @ own["self_attn"]["o_proj"]["weight"].T
            normed = rms_norm(x, own["post_attention_layernorm"]["scale"], eps)
            gate, up, down = (own["mlp"][f"{name}_proj"]["weight"].T for name in ("gate", "up", "down"))
            return {"k": keys, "v": values}, x + (jax.nn.silu(normed @ gate) * (normed @ up)) @ down

        return run

    fn = target_from_layers(
        lambda params, tokens: params["embed_tokens"]["embedding"][tokens],
        [layer(index) for index in range(config.num_layers)],
        lambda params, x: rms_norm(x, params["norm"]["scale"], config.rms_norm_eps),
        lambda params, hidden: hidden @ params["lm_head"]["weight"].T,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    return Target(config, params, fn, "wrapped", "float32")


PROMPTS = random_prompts([5, 31, 1, 17], 12)


@pytest.mark.parametrize("method", ["plain", "EAGLE-3", "prompt lookup"])
def test_texts_are_those_of_the_decoder(method):
    own, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    target = wrapped(own.config, own.params)
    make = {
        "plain": lambda to: None,
        "EAGLE-3": lambda to: DraftHead.from_params(head.config, head.params, to, head.tree),
        "prompt lookup": eagle_jax.prompt_lookup,
    }[method]
    options = dict(max_new_tokens=[30, 7, 25, 32], eos_ids=[[3], [5], [], [1]], log_probs="target")
    ours = eagle_jax.generate(target, make(target), PROMPTS, **options)
    theirs = eagle_jax.generate(own, make(own), PROMPTS, **options)
    assert ours.tokens == theirs.tokens
    np.testing.assert_array_equal(ours.accepted, theirs.accepted)
    for found, expected in zip(ours.log_probs, theirs.log_probs, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_text_needs_no_cache():
    """A loss of a policy runs over whole texts, without a cache, as with the decoder."""
    own = tiny_target()
    target = wrapped(own.config, own.params)
    tokens = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], jnp.int32)
    positions, causal = jnp.broadcast_to(jnp.arange(5), (2, 5)), jnp.tril(jnp.ones((5, 5), bool))
    found, wanted = (one.fn.forward(one.params, tokens, positions, causal, None, (1, 2)) for one in (target, own))
    np.testing.assert_allclose(found.hidden, wanted.hidden, atol=1e-4)
    np.testing.assert_allclose(found.features, wanted.features, atol=1e-4)
