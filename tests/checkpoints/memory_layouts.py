"""Makes parameters of tiny models in the layouts of tunix, gemma and MaxText."""

from __future__ import annotations

import enum
import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from eagle_jax import DecoderConfig, RopeConfig
from eagle_jax.models import init_params

SIZES = dict(vocab_size=24, hidden_size=16, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6)
FAMILIES = {
    "Llama3": DecoderConfig(**SIZES, rope=RopeConfig(500000.0), wide_norms=True, max_position=64),
    "Qwen2": DecoderConfig(
        **SIZES, qkv_bias=True, wide_norms=True, max_position=64, tie_word_embeddings=True,
        architecture="Qwen2ForCausalLM",
    ),
    "Qwen3": DecoderConfig(
        **SIZES, qk_norm=True, wide_norms=True, max_position=64, architecture="Qwen3ForCausalLM", eos_ids=(3,)
    ),
}  # fmt: skip
GEMMA = DecoderConfig(
    **SIZES | dict(num_layers=7), rms_norm_eps=1e-6, rope=RopeConfig(1e6, "linear", 8.0), local_rope=RopeConfig(1e4),
    windows=(4, 4, 4, 4, 4, 0, 4), query_scalar=6, qk_norm=True, block="gemma3", tie_word_embeddings=True,
    architecture="Gemma3ForCausalLM", max_position=64,
)  # fmt: skip


def drawn(config, seed=0):
    """Parameters of which no two values are equal: a transposed or swapped one is seen."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype),
                        init_params(config, jax.random.key(0)))  # fmt: skip


def split_heads(weight, config):  # [NH, D] -> [D, N, H]
    return weight.T.reshape(config.hidden_size, -1, config.head_dim)


class QueryNorm(enum.Enum):
    BY_ONE_OVER_SQRT_HEAD_DIM = 1
    BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS = 2


def shared_sizes(config):
    return dict(
        num_layers=config.num_layers, embed_dim=config.hidden_size, hidden_dim=config.intermediate_size,
        num_heads=config.num_heads, head_dim=config.head_dim, num_kv_heads=config.num_kv_heads,
    )  # fmt: skip


def gemma_sizes(config, **changes):
    (window,) = set(config.windows) - {0}
    return types.SimpleNamespace(**{**shared_sizes(config), **dict(
        num_embed=config.vocab_size, sliding_window_size=window, global_base_frequency=1_000_000,
        local_base_frequency=10_000, global_scale_factor=8.0, local_scale_factor=1.0,
        query_pre_attn_norm=QueryNorm.BY_ONE_OVER_SQRT_HEAD_DIM,
    ), **changes})  # fmt: skip


def gemma_attention(config, flat, i):
    own = f"layers_{i}/self_attn"
    groups = {p: split_heads(flat[f"{own}/{p}_proj/weight"], config).transpose(1, 0, 2) for p in "qkv"}
    return {
        "q_einsum": {"w": groups["q"]},
        "kv_einsum": {"w": jnp.stack([groups["k"], groups["v"]])},
        "attn_vec_einsum": {"w": flat[f"{own}/o_proj/weight"].T.reshape(-1, config.head_dim, config.hidden_size)},
        "_query_norm": {"scale": flat[f"{own}/q_norm/scale"]},
        "_key_norm": {"scale": flat[f"{own}/k_norm/scale"]},
    }


def gemma_norms(flat, i):
    return {
        theirs: {"scale": flat[f"layers_{i}/{ours}/scale"]}
        for ours, theirs in (
            ("input_layernorm", "pre_attention_norm"), ("post_attention_layernorm", "post_attention_norm"),
            ("pre_feedforward_layernorm", "pre_ffw_norm"), ("post_feedforward_layernorm", "post_ffw_norm"),
        )
    }  # fmt: skip


def mlp(flat, i):
    return {f"{p}_proj": {"kernel": flat[f"layers_{i}/mlp/{p}_proj/weight"].T} for p in ("gate", "up", "down")}


def tunix_tree(kind, config, params):
    """The parameters in the layout of tunix, a list of layers included."""
    flat = flatten_dict(params, sep="/")
    tree = {"embedder": {"input_embedding": flat["embed_tokens/embedding"]}, "layers": []}
    if kind == "Gemma3":
        for i in range(config.num_layers):
            layer = {"attn": gemma_attention(config, flat, i), "mlp": mlp(flat, i), **gemma_norms(flat, i)}
            tree["layers"].append(layer)
        return tree | {"final_norm": {"scale": flat["norm/scale"]}}
    for i in range(config.num_layers):
        own = f"layers_{i}/self_attn"
        attention = {f"{p}_proj": {"w": split_heads(flat[f"{own}/{p}_proj/weight"], config)} for p in "qkv"}
        out = flat[f"{own}/o_proj/weight"].T.reshape(-1, config.head_dim, config.hidden_size)
        attention["o_proj"] = {"w": out}
        if config.qkv_bias:
            attention |= {f"{p}_bias": flat[f"{own}/{p}_proj/bias"] for p in "qkv"}
        if config.qk_norm:
            attention |= {f"{p}_norm": {"w": flat[f"{own}/{p}_norm/scale"]} for p in "qk"}
        norms = {f"{p}_layernorm": {"w": flat[f"layers_{i}/{p}_layernorm/scale"]} for p in ("input", "post_attention")}
        tree["layers"].append({"attn": attention, "mlp": mlp(flat, i), **norms})
    tree["final_norm"] = {"w": flat["norm/scale"]}
    return tree if config.tie_word_embeddings else tree | {"lm_head": {"w": flat["lm_head/weight"].T}}


class Node(nnx.Module):
    """A module of NNX with a tree's leaves as parameters."""

    def __init__(self, tree):
        for key, value in tree.items():
            setattr(self, key, as_module(value))


def as_module(tree):
    if isinstance(tree, dict):
        return Node(tree)
    return nnx.List([as_module(part) for part in tree]) if isinstance(tree, list) else nnx.Param(tree)


def tunix_model(kind, config, params, **changes):
    """A module with the class name, the configuration and the parameters of a model of tunix."""
    model = type(kind, (Node,), {})(tunix_tree(kind, config, params))
    sizes = shared_sizes(config) | dict(
        vocab_size=config.vocab_size, norm_eps=config.rms_norm_eps, rope_theta=config.rope.theta,
        weight_tying=config.tie_word_embeddings, use_tied_embedding=config.tie_word_embeddings,
    )  # fmt: skip
    given = gemma_sizes(config) if kind == "Gemma3" else types.SimpleNamespace(**sizes | changes)
    object.__setattr__(model, "config", given)
    return model


def maxtext_tree(config, params):
    """Unscanned parameters of MaxText: its values differ for Llama's queries and keys, and for Gemma."""
    flat, root = flatten_dict(params, sep="/"), np.float32(config.head_dim**0.5)
    gemma, llama = config.block == "gemma3", config.architecture == "LlamaForCausalLM"
    plus = float(gemma)

    def interleave(array):  # dimension k of the first half becomes 2k, of the second half 2k + 1
        half = array.shape[-1] // 2
        return jnp.stack([array[..., :half], array[..., half:]], axis=-1).reshape(array.shape)

    scale = np.float32(jnp.bfloat16(config.hidden_size**0.5)) if gemma else 1
    tree = {"token_embedder/embedding": flat["embed_tokens/embedding"] * scale}
    tree["decoder/decoder_norm/scale"] = flat["norm/scale"] + plus
    if not config.tie_word_embeddings:
        tree["decoder/logits_dense/kernel"] = flat["lm_head/weight"].T
    for i in range(config.num_layers):
        to, own = f"decoder/layers_{i}", f"layers_{i}"
        for short, name in zip("qkv", ("query", "key", "value"), strict=True):
            kernel = split_heads(flat[f"{own}/self_attn/{short}_proj/weight"], config)
            kernel = interleave(kernel) if llama and short != "v" else kernel
            tree[f"{to}/self_attention/{name}/kernel"] = kernel / root if llama and short == "q" else kernel
            if config.qkv_bias:
                bias = flat[f"{own}/self_attn/{short}_proj/bias"]
                tree[f"{to}/self_attention/{name}/bias"] = bias.reshape(-1, config.head_dim)
            if config.qk_norm and short != "v":
                tree[f"{to}/self_attention/{name}_norm/scale"] = flat[f"{own}/self_attn/{short}_norm/scale"] + plus
        out = flat[f"{own}/self_attn/o_proj/weight"].T
        tree[f"{to}/self_attention/out/kernel"] = out.reshape(-1, config.head_dim, config.hidden_size)
        for theirs, ours in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
            tree[f"{to}/mlp/{theirs}/kernel"] = flat[f"{own}/mlp/{ours}_proj/weight"].T
        norms = {"pre_self_attention_layer_norm": "input", "post_self_attention_layer_norm": "post_attention"}
        if gemma:
            norms = {
                "pre_self_attention_norm": "input", "post_self_attention_norm": "post_attention",
                "pre_ffw_norm": "pre_feedforward", "post_ffw_norm": "post_feedforward",
            }  # fmt: skip
        for theirs, ours in norms.items():
            tree[f"{to}/{theirs}/scale"] = flat[f"{own}/{ours}_layernorm/scale"] + plus
    return tree


def stacked(tree, config, period):
    """The tree with blocks of `period` layers stacked on axis 1, and the layers that remain beside them."""
    whole = config.num_layers - config.num_layers % period
    found = {name: leaf for name, leaf in tree.items() if "/layers_" not in name}
    for name in (name for name in tree if "/layers_0/" in name):
        of = lambda layer, name=name: tree[name.replace("layers_0", f"layers_{layer}")]  # noqa: E731
        for first in range(period):
            block = "layers" if period == 1 else f"layers/layers_{first}"
            stack = jnp.stack([of(layer) for layer in range(first, whole, period)], axis=1)
            found[name.replace("layers_0", block)] = stack
        for layer in range(whole, config.num_layers):
            found[name.replace("layers_0", f"layers_remainder/layers_{layer - whole}")] = of(layer)
    return found
