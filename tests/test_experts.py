"""Checks mixtures of experts: grouped products against a loop, and choices that no other row changes."""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax import DecoderConfig, DraftHead, ExpertsConfig, HeadConfig, RopeConfig, Target
from eagle_jax.models import Decoder, init_head_params, init_params
from eagle_jax.models.experts import MoE, Stack, by_blocks, grouped_product, project_by
from eagle_jax.models.quantised import dequantise_params, is_quantised, quantise, quantise_params
from eagle_jax.models.quantised import scaled as values_of
from eagle_jax.runtime.routing import routing_changes
from tests.models import TREES, random_prompts, tiny_target

QWEN3_MOE = DecoderConfig(
    vocab_size=12, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
    max_position=512, qk_norm=True, architecture="Qwen3MoeForCausalLM",
    experts=ExpertsConfig(num_experts=10, top_k=3, intermediate_size=10, dense_layers=(0,)),
)  # fmt: skip
GPT_OSS = dataclasses.replace(
    QWEN3_MOE, qk_norm=False, qkv_bias=True, out_bias=True, sinks=True, wide_norms=True, windows=(5, 0),
    experts=ExpertsConfig(num_experts=6, top_k=2, intermediate_size=10, bias=True, limit=1.5), rms_norm_eps=1e-5,
    rope=RopeConfig(1500.0, "yarn", 4.0, 128, truncate=False), architecture="GptOssForCausalLM",
)  # fmt: skip
CONFIGS = {"qwen3_moe": QWEN3_MOE, "gpt_oss": GPT_OSS}


def scaled(params: dict, factor: float) -> dict:
    """Multiplies all matrices, so that the argmax and the chosen experts vary."""
    return jax.tree.map(lambda leaf: leaf * factor if leaf.ndim >= 2 else leaf, params)


@functools.cache
def pair(name: str, scheme: str | None = None) -> tuple[Target, DraftHead]:
    """A random target of a family, and an EAGLE-3 head that is right often enough."""
    config = CONFIGS[name]
    params = scaled(init_params(config, jax.random.key(0)), 6.0)
    target = Target.from_params(config, quantise_params(params, scheme, "float32"))
    layer = config.one_layer(qk_norm=False, qkv_bias=False, out_bias=False, architecture="LlamaForCausalLM")
    head = HeadConfig("eagle3", layer, 10, config.hidden_size, (0, 1, config.num_layers))
    params = init_head_params(head, jax.random.key(9))
    params["head"] = scaled(params["head"], 4.0)
    params["d2t"] = jnp.arange(10, dtype=jnp.int32) % 2
    return target, DraftHead.from_params(head, params, target, TREES["k3n12"])


@pytest.mark.parametrize(
    "sizes", [(5, 0, 9, 1), (0, 0, 0, 3), (1, 1, 1, 1), (8, 16, 0, 0), (0, 33, 7, 40), (2, 0, 0, 0)], ids=str
)
@pytest.mark.parametrize(("unused", "scheme"), [(0, None), (3, None), (3, "int8"), (0, "fp8")])
def test_a_grouped_product_is_that_of_a_loop(sizes, unused, scheme):
    rng = np.random.default_rng(sum(sizes))
    x, weight, bias = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((sum(sizes) + unused, 6), (len(sizes), 5, 6), (len(sizes), 5))
    )
    stored = jnp.array(weight) if scheme is None else quantise(jnp.array(weight), scheme, "float32")
    stack, weight = Stack(stored, jnp.array(bias)), weight if scheme is None else np.array(values_of(stored))

    @jax.jit
    def run(x, sizes):
        blocks = by_blocks(lambda rows, expert: project_by(stack, expert, rows, "float32"), x, sizes, 5)
        return blocks, grouped_product(x, stack, sizes, "float32")

    expert = np.repeat(np.arange(len(sizes)), sizes)
    wanted = np.einsum("mi,moi->mo", x[: len(expert)], weight[expert]) + bias[expert]
    for found in run(x, jnp.array(sizes)):
        np.testing.assert_allclose(found[: len(expert)], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_quantised_experts_compute_as_the_dequantised_ones(scheme):
    target, _ = pair("gpt_oss", scheme)
    experts = target.params["layers_0"]["mlp"]["experts"]
    assert all(is_quantised(experts[f"{name}_proj"]["weight"]) for name in ("gate", "up", "down"))
    assert not is_quantised(target.params["layers_0"]["mlp"]["router"]["weight"])
    floats, tokens = dequantise_params(target.params), jnp.arange(12)[None]
    run = jax.jit(functools.partial(Decoder(target.config).apply, method="all_logits"))
    found, wanted = run({"params": target.params}, tokens), run({"params": floats}, tokens)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert floats["layers_0"]["mlp"]["experts"]["up_proj"]["weight"].shape == (6, 10, 16)


def test_experts_in_int4_are_an_error():
    with pytest.raises(eagle_jax.ConfigError, match=r"must be int8 or fp8 for a model with experts, got 'int4'\."):
        pair("qwen3_moe", "int4")


@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_other_row_changes_a_row(name, scheme):
    """On CPU the outputs are equal to the bit, for fewer and for more rows than `layers.FEW_ROWS`."""
    moe = MoE(CONFIGS[name])
    x, key = jax.random.normal(jax.random.key(3), (1, 70, 16)), jax.random.key(2)
    shapes = jax.eval_shape(moe.init, key, x)
    variables = jax.tree.map(lambda leaf: 8 * jax.random.normal(key, leaf.shape), shapes)
    variables = {"params": quantise_params(variables["params"], scheme, "float32")}
    chosen, weights = moe.apply(variables, x, method="route")
    run = jax.jit(lambda *rows: moe.bind(variables).experts(*rows))
    whole = run(x, chosen, weights)
    for part in (slice(0, 1), slice(7, 8), slice(3, 15), slice(5, 65)):
        np.testing.assert_array_equal(run(x[:, part], chosen[:, part], weights[:, part]), whole[:, part])


def test_the_router_multiplies_in_float32_whatever_the_default_precision():
    moe, x = MoE(QWEN3_MOE), jnp.ones((1, 3, 16))
    variables = moe.init(jax.random.key(0), x)
    with jax.default_matmul_precision("bfloat16"):
        program = str(jax.make_jaxpr(lambda x: moe.apply(variables, x, method="route"))(x))
    products = program.count("dot_general[")
    assert products and program.count("Precision.HIGHEST") == 2 * products, program


PROMPTS = random_prompts([5, 31, 1, 17], 12)
RUN = dict(max_new_tokens=[30, 7, 25, 32], eos_ids=[[3], [5], [], [7, 9]])


@functools.cache
def plain_text(name: str, scheme: str | None = None) -> list[list[int]]:
    return eagle_jax.generate(pair(name, scheme)[0], None, PROMPTS, **RUN).tokens


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("tree", "scheme"), [("k3n12", None), *(pytest.param(*case, marks=pytest.mark.slow) for case in
    (("k10n59", None), ("chain4", None), ("k3n12", "int8"), ("k3n12", "fp8")))])  # fmt: skip
def test_text_is_that_of_plain_decoding(name, tree, scheme):
    target, head = pair(name, scheme)
    out = eagle_jax.generate(target, head.with_tree(TREES[tree]), PROMPTS, **RUN)
    assert out.tokens == plain_text(name, scheme)
    assert out.accepted[:, 2:].sum() > 0, "no path beyond one node was ever accepted"


def words(chunks) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_streams_and_sessions_yield_the_tokens_of_generate(name):
    target, head = pair(name)
    assert words(eagle_jax.stream(target, head, PROMPTS[0], max_new_tokens=30, eos_ids=[3])) == plain_text(name)[0]
    talk, options = eagle_jax.Session(target, head, context=200), dict(max_new_tokens=9, eos_ids=())
    history = [*PROMPTS[0], *words(talk.stream(PROMPTS[0], **options)), 4, 1, 4]
    again = words(talk.stream(history, **options))
    assert talk.read < len(history)
    assert again == eagle_jax.generate(target, None, [history], **options).tokens[0]


def test_float32_routes_a_token_alike_in_every_pass():
    """One token at a time and 60 at once. In bfloat16 rounding changes a few choices."""
    config = dataclasses.replace(QWEN3_MOE, experts=dataclasses.replace(QWEN3_MOE.experts, dense_layers=()))
    texts = np.random.default_rng(0).integers(0, 12, (8, 100))
    rates = {}
    for dtype in ("float32", "bfloat16"):
        params = scaled(init_params(config, jax.random.key(0)), 6.0)
        target = Target.from_params(config, jax.tree.map(operator.methodcaller("astype", dtype), params))
        changed = routing_changes(target, texts)
        assert changed.shape == (2, 8, 60)
        rates[dtype] = changed.mean()
    print("choices that differ between passes of 1 and of 60 tokens:", rates)
    assert rates["float32"] == 0
    assert 0 < rates["bfloat16"] < 0.1


def test_float32_routes_alike_where_windows_have_wrapped():
    changed = routing_changes(pair("gpt_oss")[0], np.random.default_rng(0).integers(0, 12, (2, 40)), width=12)
    assert changed.size and not changed.any()


def test_routing_of_a_target_without_experts_is_an_error():
    with pytest.raises(ValueError, match="target must have experts, got LlamaForCausalLM"):
        routing_changes(tiny_target(), np.zeros((1, 9), int))
    with pytest.raises(ValueError, match=r"width must be from 1 to 8, .* got 60"):
        routing_changes(pair("gpt_oss")[0], np.zeros((1, 9), int))
