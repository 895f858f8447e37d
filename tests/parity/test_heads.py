"""Checks draft heads against a slow NumPy version that reads the stored tensors itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoints import load_head_checkpoint
from eagle_jax.models import EagleHead
from tests.checkpoints.random_heads import TARGET, eagle1, eagle3, write
from tests.parity.slow_heads import SlowEagle1, SlowEagle3

WIDE = {"hidden_size": 30, "target_hidden_size": 24, "num_attention_heads": 5, "num_key_value_heads": 1}

CASES = {
    "eagle1": eagle1(),
    "eagle1_no_fc_bias": eagle1(bias=False),
    "eagle1_qkv_bias": eagle1(qkv_bias=True, head_dim=10),
    "eagle3": eagle3(),
    "eagle3_fc_norm": eagle3(fc_norm=True),
    "eagle3_norm_before_fc": eagle3(norm_before_fc=True),
    "eagle3_norm_output": eagle3(norm_output=True),
    "eagle3_norm_before_residual": eagle3(norm_before_residual=True),
    "eagle3_all_norms": eagle3(fc_norm=True, norm_output=True, norm_before_residual=True),
    "eagle3_other_width": eagle3(**WIDE, fc_norm=True),
    "eagle3_five_taps": eagle3(taps=5, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4, 6, 7]}),
    "eagle3_head_dim": eagle3(head_dim=10),
    "eagle3_qk_norm": eagle3(qk_norm_tensors=True),
    "eagle3_biases": eagle3(attention_bias=True),
    "eagle3_full_vocabulary": eagle3(draft_vocab_size=53),
}

ROWS, OWN = 7, 1
"""Rows of target features, then steps on the head's own state."""


def random_inputs(config):
    rng = np.random.default_rng(1)
    embeds = rng.standard_normal((ROWS + OWN, config.layer.hidden_size)).astype(np.float32)
    return embeds, rng.standard_normal((ROWS, len(config.taps) * config.target_hidden_size)).astype(np.float32)


def slow_states(slow, embeds, features):
    """Target features first, then steps on the head's own state."""
    states = [slow.row(embeds[i], slow.fuse(features[i]), i) for i in range(ROWS)]
    for i in range(ROWS, ROWS + OWN):
        states.append(slow.row(embeds[i], states[-1], i))
    return np.stack(states)


def fast_states(head, variables, embeds, features):
    """The same in three kinds of pass: causal, then own states against a committed cache and uncommitted rows."""
    causal = jnp.tril(jnp.ones((ROWS, ROWS), bool))
    fused = head.apply(variables, features[None], method="fuse")
    out = head.apply(variables, embeds[None, :ROWS], fused, jnp.arange(ROWS)[None], causal)
    states, keys, values = [out.states], out.keys, out.values
    half = ROWS // 2
    blank = jnp.full((1, keys.shape[1], 2, keys.shape[3]), 1e3)  # slots beyond the length hold garbage
    old_keys, old_values = (jnp.concatenate([part[:, :, :half], blank], axis=2) for part in (keys, values))
    cache = (old_keys.swapaxes(2, 3), old_values, jnp.array([half]))
    for i in range(ROWS, ROWS + OWN):
        earlier = (keys[:, :, half:], values[:, :, half:])
        mask = jnp.ones((1, earlier[0].shape[2] + 1), bool)
        at = jnp.array([[i]])
        out = head.apply(variables, embeds[None, i : i + 1], states[-1][:, -1:], at, mask, cache, earlier)
        states.append(out.states)
        keys = jnp.concatenate([keys, out.keys], axis=2)
        values = jnp.concatenate([values, out.values], axis=2)
    joined = jnp.concatenate(states, axis=1)
    logits = head.apply(variables, joined, method="logits")[0] if head.config.kind == "eagle3" else None
    return joined[0], logits


def slow_head(values, tensors):
    return (
        SlowEagle3(tensors, values, "midlayer.")
        if "norm.weight" in tensors
        else SlowEagle1(tensors, values, "layers.0.")
    )


@pytest.mark.parametrize("case", CASES)
def test_head_equals_the_slow_version(case, tmp_path):
    values, tensors = CASES[case]
    config, params = load_head_checkpoint(write(tmp_path, values, tensors), TARGET)
    embeds, features = random_inputs(config)
    slow = slow_head(values, tensors)
    expected = slow_states(slow, embeds, features)
    run = jax.jit(functools.partial(fast_states, EagleHead(config)))
    states, logits = run({"params": params["head"]}, embeds, features)
    np.testing.assert_allclose(states, expected, rtol=0, atol=1e-4)
    if config.kind == "eagle3":
        np.testing.assert_allclose(logits, np.stack([slow.logits(row) for row in expected]), rtol=0, atol=1e-4)


def test_own_embedding_is_read(tmp_path):
    values, tensors = CASES["eagle3_other_width"]
    config, params = load_head_checkpoint(write(tmp_path, values, tensors), TARGET)
    tokens = jnp.array([[3, 0, 52]])
    looked_up = EagleHead(config).apply({"params": params["head"]}, tokens, method="embed")
    np.testing.assert_array_equal(looked_up[0], tensors["embed_tokens.weight"][[3, 0, 52]])
