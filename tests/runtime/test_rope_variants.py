"""Checks targets that rotate a part of each head (Phi-4-mini) or not every layer (SmolLM3) against plain decoding."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import ConfigError, DecoderConfig, RopeConfig
from eagle_jax.runtime.session import Session
from eagle_jax.runtime.target import Target
from tests.models import DRAFTERS, random_prompts, tiny_target

PROMPTS = random_prompts([5, 31, 1, 17, 8, 3], 12)
RUN = dict(max_new_tokens=[30, 7, 25, 1, 32, 12], eos_ids=[[3], [5], [], [1, 2], [0, 7, 9, 11, 10], [4]])
VARIANTS = {
    "phi": dict(rope=RopeConfig(50.0, partial=0.7), architecture="Phi3ForCausalLM"),  # 4 of 6 dimensions
    "longrope": dict(rope=RopeConfig(50.0, "longrope", 8.0, 64, short_factor=(1.0, 1.0, 1.0),
                                     long_factor=(1.5, 4.0, 9.0), is_long=True)),
    "smollm3": dict(nope_layers=(1,), architecture="SmolLM3ForCausalLM"),
}  # fmt: skip
FAST = "eagle3-k3n12"
SLOW = ["eagle3-k10n59", "eagle3-chain4", "eagle1-static", "medusa-static", "hydra++-static", "small-dynamic", "lookup",
        "lookahead"]  # fmt: skip


def target_of(variant):
    plain = tiny_target()
    return Target.from_params(dataclasses.replace(plain.config, **VARIANTS[variant]), plain.params)


@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_text_is_that_of_passes_over_the_whole_text(variant):
    target, length = target_of(variant), 20
    out = eagle_jax.generate(target, None, PROMPTS[:3], max_new_tokens=length, eos_ids=()).tokens
    usual = eagle_jax.generate(tiny_target(), None, PROMPTS[:3], max_new_tokens=length, eos_ids=()).tokens
    assert out != usual, "the variant changed nothing: the test would not see a wrong one"
    whole = np.zeros((3, 51), np.int32)
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, out, strict=False)):
        whole[row, : len(prompt) + length] = prompt + tokens
    positions = jnp.broadcast_to(jnp.arange(51)[None], (3, 51))
    hidden = target.fn.forward(target.params, jnp.asarray(whole), positions, jnp.tril(jnp.ones((51, 51), bool))).hidden
    logits = np.asarray(target.fn.logits(target.params, hidden))
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, out, strict=False)):
        assert logits[row, len(prompt) - 1 :][:length].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_text_is_that_of_plain_decoding(name, variant):
    target = target_of(variant)
    plain = eagle_jax.generate(target, None, PROMPTS, **RUN)
    out = eagle_jax.generate(target, DRAFTERS[name](target), PROMPTS, **RUN)
    assert out.tokens == plain.tokens
    assert out.tau > plain.tau, "nothing was ever accepted: the test would not see a wrong acceptance"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["phi", "smollm3"])
def test_streams_and_sessions_give_the_same_text(variant):
    target, options = target_of(variant), dict(max_new_tokens=8, eos_ids=())
    drafter, text = DRAFTERS[FAST](target), PROMPTS[1]
    talk = Session(target, drafter, context=100)
    for turn in range(2):
        wanted = eagle_jax.generate(target, None, [text], **options).tokens[0]
        for chunks in (eagle_jax.stream(target, drafter, text, **options), talk.stream(text, **options)):
            assert [token for chunk in chunks for token in chunk.tokens] == wanted
        text = [*text, *wanted, turn]


SIZES = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nope_layers": (2,)}, r"nope_layers must be layers 0 to 1, got \(2,\)"),
        ({"rope": RopeConfig(partial=0.5)}, r"head_dim \* rope\.partial \(0\.5\) must be even, got 3"),
        ({"rope": RopeConfig(partial=0.1)}, r"must be even, got 0"),
        (
            {"rope": RopeConfig(kind="longrope", short_factor=(1.0,), long_factor=(1.0, 1.0, 1.0))},
            "must hold 3 numbers each, one per rotated pair, got 1 and 3",
        ),
    ],
)
def test_a_wrong_variant_is_an_error(changes, message):
    with pytest.raises(ConfigError, match=message):
        DecoderConfig(**SIZES | changes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_of_such_a_target_rotates_whole_heads(variant):
    layer = target_of(variant).config.one_layer()
    assert layer.rope == RopeConfig(target_of(variant).config.rope.theta) and layer.nope_layers == ()
    jax.eval_shape(lambda: eagle_jax.models.init_params(layer, jax.random.key(0)))
