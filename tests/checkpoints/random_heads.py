"""Provides random EAGLE heads: as files under the names of the formats, and in memory for exports."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from eagle_jax.checkpoints import export_head
from eagle_jax.config import DecoderConfig, HeadConfig, RopeConfig
from tests.checkpoints.common import random_params

TARGET = DecoderConfig(
    vocab_size=53, hidden_size=24, intermediate_size=32, num_layers=9, num_heads=4, num_kv_heads=2, head_dim=6,
    max_position=128,
)  # fmt: skip

LAYER = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24, "intermediate_size": 40,
    "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "vocab_size": 53,
    "max_position_embeddings": 128, "hidden_act": "silu", "rope_theta": 300.0,
}  # fmt: skip


def _with_layer(
    config: dict[str, Any], prefix: str, width: int, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Returns random tensors of these shapes and of a layer whose projections read `width` features."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, width), "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width), "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner), "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    biased = "qkvo" if config.get("attention_bias") else "qkv" if config.get("qkv_bias") else ""
    layer |= {f"self_attn.{x}_proj.bias": layer[f"self_attn.{x}_proj.weight"][:1] for x in biased}
    shapes = shapes | {prefix + name: shape for name, shape in layer.items()}
    noise = {name: 0.25 * rng.standard_normal(shape) for name, shape in shapes.items()}
    return {name: (value + ("norm" in name)).astype(np.float32) for name, value in noise.items()}


def eagle1(**changes: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns (config.json, tensors) of an EAGLE-1/2 head."""
    config = LAYER | {"bias": True} | changes
    hidden = config["hidden_size"]
    shapes = {"embed_tokens.weight": (config["vocab_size"], hidden), "fc.weight": (hidden, 2 * hidden)}
    if config["bias"]:
        shapes["fc.bias"] = (hidden,)
    return config, _with_layer(config, "layers.0.", hidden, shapes, np.random.default_rng(0))


def eagle3(
    taps: int = 3, qk_norm_tensors: bool = False, **changes: Any
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns (config.json, tensors) of an EAGLE-3 head; the keys of the config choose the variant."""
    config = LAYER | {"draft_vocab_size": 17} | changes
    rng = np.random.default_rng(0)
    hidden, reads = config["hidden_size"], config.get("target_hidden_size", config["hidden_size"])
    vocab, draft_vocab = config["vocab_size"], config["draft_vocab_size"]
    shapes = {"fc.weight": (hidden, taps * reads), "norm.weight": (hidden,), "lm_head.weight": (draft_vocab, hidden)}
    shapes |= {f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")}
    if reads != hidden:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (reads,) for i in range(taps)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (taps * reads,)
    if qk_norm_tensors:
        head_dim = hidden // config["num_attention_heads"]
        shapes |= {f"midlayer.self_attn.{x}_norm.weight": (head_dim,) for x in "qk"}
    tensors = _with_layer(config, "midlayer.", 2 * hidden, shapes, rng)
    if draft_vocab != vocab:
        kept = np.sort(rng.choice(vocab, draft_vocab, replace=False))
        tensors |= {"d2t": kept - np.arange(draft_vocab), "t2d": np.isin(np.arange(vocab), kept)}
    return config, tensors


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """Writes config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 64, 1.0, 4.0)
LAYER_CONFIG = dataclasses.replace(
    TARGET, num_layers=1, intermediate_size=20, num_heads=6, num_kv_heads=3, head_dim=8, eos_ids=(3,), bos_id=1
)
HEAD = HeadConfig("eagle3", LAYER_CONFIG, 17, 24, (2, 4, 6))
EAGLE1 = HeadConfig("eagle1", LAYER_CONFIG, 53, 24, (9,), fc_bias=True)
EMBEDDING = np.arange(53 * 24, dtype=np.float32).reshape(53, 24) % 7


def head(layer=None, **changes):
    """Returns `HEAD` with other values of its layer and of itself."""
    return dataclasses.replace(HEAD, layer=dataclasses.replace(LAYER_CONFIG, **(layer or {})), **changes)


VARIANTS = {
    "plain": HEAD,
    "norms": head(fc_norm=True, norm_output=True, taps=(1, 3, 5, 8)),
    "full vocabulary": head(draft_vocab_size=53),
    "llama3": head({"rope": LLAMA3}),
    "another width": head({"hidden_size": 36}, own_embedding=True),
    "residual": head(norm_before_residual=True, norm_before_fc=True),
    "own embedding": head(own_embedding=True),
    "qwen3": head({"qk_norm": True}),
    "biases": head({"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
    "fc bias": head(fc_bias=True),
    "eagle1": dataclasses.replace(EAGLE1, own_embedding=True, fc_bias=False),
    "eagle1 biases": dataclasses.replace(
        EAGLE1, own_embedding=True, layer=dataclasses.replace(LAYER_CONFIG, qkv_bias=True, eos_ids=(3, 4))
    ),
}


def export(config, directory, layout, dtype="float32", target=TARGET, **options):
    if layout == "speculators":
        options = {"verifier": "somebody/model", "embedding": EMBEDDING} | options
    return export_head(config, random_params(config, dtype=dtype), target, directory, layout, dtype, **options)
