"""Checks mixtures of experts: grouped products against a loop, and choices that no other row changes."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax import DecoderConfig, DraftHead, ExpertsConfig, HeadConfig, Target
from eagle_jax.models import init_head_params, init_params
from eagle_jax.models.experts import MoE, Stack, by_blocks, grouped_product, project_by
from tests.models import TREES, random_prompts

QWEN3_MOE = DecoderConfig(
    vocab_size=12, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
    max_position=512, qk_norm=True, architecture="Qwen3MoeForCausalLM",
    experts=ExpertsConfig(num_experts=10, top_k=3, intermediate_size=10, dense_layers=(0,)),
)  # fmt: skip
CONFIGS = {"qwen3_moe": QWEN3_MOE}


def scaled(params: dict, factor: float) -> dict:
    """Multiplies all matrices, so that the argmax and the chosen experts vary."""
    return jax.tree.map(lambda leaf: leaf * factor if leaf.ndim >= 2 else leaf, params)


@functools.cache
def pair(name: str) -> tuple[Target, DraftHead]:
    """A random target of a family, and an EAGLE-3 head that is right often enough."""
    config = CONFIGS[name]
    target = Target.from_params(config, scaled(init_params(config, jax.random.key(0)), 6.0))
    layer = config.one_layer(qk_norm=False, qkv_bias=False, out_bias=False, architecture="LlamaForCausalLM")
    head = HeadConfig("eagle3", layer, 10, config.hidden_size, (0, 1, config.num_layers))
    params = init_head_params(head, jax.random.key(9))
    params["head"] = scaled(params["head"], 4.0)
    params["d2t"] = jnp.arange(10, dtype=jnp.int32) % 2
    return target, DraftHead.from_params(head, params, target, TREES["k3n12"])


@pytest.mark.parametrize(
    "sizes", [(5, 0, 9, 1), (0, 0, 0, 3), (1, 1, 1, 1), (8, 16, 0, 0), (0, 33, 7, 40), (2, 0, 0, 0)], ids=str
)
@pytest.mark.parametrize("unused", [0, 3])
def test_a_grouped_product_is_that_of_a_loop(sizes, unused):
    rng = np.random.default_rng(sum(sizes))
    x, weight, bias = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((sum(sizes) + unused, 6), (len(sizes), 5, 6), (len(sizes), 5))
    )
    stack = Stack(jnp.array(weight), jnp.array(bias))

    @jax.jit
    def run(x, sizes):
        blocks = by_blocks(lambda rows, expert: project_by(stack, expert, rows, "float32"), x, sizes, 5)
        return blocks, grouped_product(x, stack, sizes, "float32")

    expert = np.repeat(np.arange(len(sizes)), sizes)
    wanted = np.einsum("mi,moi->mo", x[: len(expert)], weight[expert]) + bias[expert]
    for found in run(x, jnp.array(sizes)):
        np.testing.assert_allclose(found[: len(expert)], wanted, rtol=1e-5, atol=1e-5)


def layer_of(name: str, dtype: str = "float32") -> tuple[MoE, dict]:
    config = CONFIGS[name]
    moe = MoE(config)
    params = moe.init(jax.random.key(1), jnp.zeros((1, 1, config.hidden_size)))
    return moe, jax.tree.map(lambda leaf: (8 * jax.random.normal(jax.random.key(2), leaf.shape)).astype(dtype), params)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_is_the_sum_of_its_chosen_experts(name, dtype):
    moe, variables = layer_of(name, dtype)
    config = CONFIGS[name].experts
    x = jax.random.normal(jax.random.key(3), (2, 13, 16)).astype(dtype)
    chosen, weights = moe.apply(variables, x, method="route")
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), variables["params"])
    wide = np.asarray(x, np.float32)
    logits = wide @ params["router"]["weight"].T + params["router"].get("bias", 0)
    best = np.argsort(-logits, axis=-1)[..., : config.top_k]
    np.testing.assert_array_equal(chosen, best)
    share = np.exp(logits - logits.max(-1, keepdims=True))
    share /= np.take_along_axis(share, best, -1).sum(-1, keepdims=True) if config.normalise else share.sum(-1)
    np.testing.assert_allclose(weights, np.take_along_axis(share, best, -1), rtol=1e-4, atol=1e-6)
    wanted = np.zeros_like(wide)
    for at in np.ndindex(best.shape):
        gate, up = (
            params["experts"][f"{part}_proj"]["weight"][best[at]] @ wide[at[:2]]
            + params["experts"][f"{part}_proj"].get("bias", np.zeros(config.num_experts))[best[at]]
            for part in ("gate", "up")
        )
        if config.limit is None:
            inner = np.asarray(nn.silu(gate)) * up
        else:
            gate, up = np.minimum(gate, config.limit), np.clip(up, -config.limit, config.limit)
            inner = gate / (1 + np.exp(-config.alpha * gate)) * (up + 1)
        down = params["experts"]["down_proj"]
        wanted[at[:2]] += np.asarray(weights)[at] * (
            down["weight"][best[at]] @ inner + down.get("bias", np.zeros(config.num_experts))[best[at]]
        )
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(
        np.asarray(moe.apply(variables, x), np.float32) / scale,
        wanted / scale,
        atol=1e-6 if dtype == "float32" else 2e-2,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_no_other_row_changes_a_row(name):
    """On CPU the outputs are equal to the bit, from one row to more than the few of `layers.product`."""
    moe, variables = layer_of(name)
    x = jax.random.normal(jax.random.key(3), (1, 70, 16))
    chosen, weights = moe.apply(variables, x, method="route")
    experts = moe.bind(variables).experts
    whole = experts(x, chosen, weights)
    for first, count in ((0, 1), (7, 1), (3, 12), (5, 60)):
        part = (0, slice(first, first + count))
        alone = experts(x[part][None], chosen[part][None], weights[part][None])
        np.testing.assert_array_equal(alone[0], whole[part])


PROMPTS = random_prompts([5, 31, 1, 17], 12)
RUN = dict(max_new_tokens=[30, 7, 25, 32], eos_ids=[[3], [5], [], [7, 9]])


@functools.cache
def plain_text(name: str) -> list[list[int]]:
    return eagle_jax.generate(pair(name)[0], None, PROMPTS, **RUN).tokens


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tree", ["k3n12", pytest.param("k10n59", marks=pytest.mark.slow),
                                  pytest.param("chain4", marks=pytest.mark.slow)])  # fmt: skip
def test_text_is_that_of_plain_decoding(name, tree):
    target, head = pair(name)
    out = eagle_jax.generate(target, head.with_tree(TREES[tree]), PROMPTS, **RUN)
    assert out.tokens == plain_text(name)
    assert out.accepted[:, 2:].sum() > 0, "no path beyond one node was ever accepted"


def words(chunks) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


@pytest.mark.parametrize("name", CONFIGS)
def test_streams_and_sessions_yield_the_tokens_of_generate(name):
    target, head = pair(name)
    assert words(eagle_jax.stream(target, head, PROMPTS[0], max_new_tokens=30, eos_ids=[3])) == plain_text(name)[0]
    talk, options = eagle_jax.Session(target, head, context=200), dict(max_new_tokens=9, eos_ids=())
    history = [*PROMPTS[0], *words(talk.stream(PROMPTS[0], **options)), 4, 1, 4]
    again = words(talk.stream(history, **options))
    assert talk.read < len(history)
    assert again == eagle_jax.generate(target, None, [history], **options).tokens[0]
