"""Provides random EAGLE heads as files: config.json and tensors under the names of the formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from eagle_jax.config import DecoderConfig

TARGET = DecoderConfig(
    vocab_size=53, hidden_size=24, intermediate_size=32, num_layers=9, num_heads=4, num_kv_heads=2, head_dim=6,
    max_position=128,
)  # fmt: skip

LAYER = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24, "intermediate_size": 40,
    "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "vocab_size": 53,
    "max_position_embeddings": 128, "hidden_act": "silu", "rope_theta": 300.0,
}  # fmt: skip


def _layer_tensors(config: dict[str, Any], prefix: str, width: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    sizes = {"q": queries, "k": keys, "v": keys}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (sizes[name], width) for name in sizes}
    shapes |= {
        "self_attn.o_proj.weight": (hidden, queries), "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden), "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    if config.get("qkv_bias") or config.get("attention_bias"):
        shapes |= {f"self_attn.{name}_proj.bias": (sizes[name],) for name in sizes}
    if config.get("attention_bias"):
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.get("qk_norm_tensors"):
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return {prefix + name: random_tensor(name, shape, rng) for name, shape in shapes.items()}


def random_tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    centre = 1.0 if "norm" in name else 0.0
    return (centre + 0.25 * rng.standard_normal(shape)).astype(np.float32)


def eagle1(seed: int = 0, **changes: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(config.json, tensors) of an EAGLE-1/2 head."""
    config = LAYER | {"bias": True} | changes
    rng = np.random.default_rng(seed)
    hidden = config["hidden_size"]
    shapes = {"embed_tokens.weight": (config["vocab_size"], hidden), "fc.weight": (hidden, 2 * hidden)}
    if config.get("bias") is not False:
        shapes["fc.bias"] = (hidden,)
    tensors = {name: random_tensor(name, shape, rng) for name, shape in shapes.items()}
    return config, tensors | _layer_tensors(config, "layers.0.", hidden, rng)


def eagle3(seed: int = 0, taps: int = 3, prefix: str = "midlayer.", **changes: Any):
    """(config.json, tensors) of an EAGLE-3 head; the config's own keys decide which variant."""
    config = LAYER | {"draft_vocab_size": 17} | changes
    rng = np.random.default_rng(seed)
    hidden, reads = config["hidden_size"], config.get("target_hidden_size", config["hidden_size"])
    vocab, draft_vocab = config["vocab_size"], config["draft_vocab_size"]
    shapes = {"fc.weight": (hidden, taps * reads), "norm.weight": (hidden,), "lm_head.weight": (draft_vocab, hidden)}
    shapes |= {f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")}
    if reads != hidden or config.get("own_embedding_tensor"):
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (reads,) for i in range(taps)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (taps * reads,)
    tensors = {name: random_tensor(name, shape, rng) for name, shape in shapes.items()}
    if draft_vocab != vocab:
        kept = np.sort(rng.choice(vocab, draft_vocab, replace=False))
        mask = np.zeros((vocab,), bool)
        mask[kept] = True
        tensors |= {"d2t": kept - np.arange(draft_vocab), "t2d": mask}
    return config, tensors | _layer_tensors(config, prefix, 2 * hidden, rng)


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """Writes config.json and model.safetensors. Keys that only steer this module are left out."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {key: value for key, value in config.items() if key not in ("qk_norm_tensors", "own_embedding_tensor")}
    (directory / "config.json").write_text(json.dumps(stored))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory
