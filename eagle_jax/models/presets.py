"""Sizes of published models, for what needs shapes and no weights: compilation ahead of time, cost estimates."""

from __future__ import annotations

import dataclasses
import difflib

from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig, RopeConfig


def _llama3(factor: float) -> RopeConfig:
    return RopeConfig(500000.0, "llama3", factor, original_max_position=8192)


_LLAMA_8B = DecoderConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, rope=_llama3(8.0), max_position=131072,
)  # fmt: skip
_LLAMA_70B = dataclasses.replace(_LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)
_LLAMA_1B = dataclasses.replace(
    _LLAMA_8B, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64, rope=_llama3(32.0),
    tie_word_embeddings=True,
)  # fmt: skip
_LLAMA_3B = dataclasses.replace(
    _LLAMA_1B, hidden_size=3072, num_layers=28, num_heads=24, head_dim=128,
)  # fmt: skip
_QWEN_8B = DecoderConfig(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, num_kv_heads=8,
    head_dim=128, rms_norm_eps=1e-6, rope=RopeConfig(1000000.0), max_position=40960, qk_norm=True,
    architecture="Qwen3ForCausalLM",
)  # fmt: skip
_VICUNA_7B = DecoderConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32, num_kv_heads=32,
    head_dim=128, rms_norm_eps=1e-6,
)  # fmt: skip
_GPT2 = DecoderConfig(
    vocab_size=50257, hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12, num_kv_heads=12,
    head_dim=64, rope=RopeConfig(kind="none"), max_position=1024, block="gpt2", qkv_bias=True, out_bias=True,
    mlp_bias=True, tie_word_embeddings=True, architecture="GPT2LMHeadModel",
)  # fmt: skip

MODELS: dict[str, DecoderConfig] = {
    "llama-3.2-1b": _LLAMA_1B,
    "llama-3.2-3b": _LLAMA_3B,
    "llama-3.1-8b": _LLAMA_8B,
    "deepseek-r1-distill-llama-8b": _LLAMA_8B,
    "llama-3.3-70b": _LLAMA_70B,
    "qwen3-8b": _QWEN_8B,
    "qwen3-32b": dataclasses.replace(
        _QWEN_8B, hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64
    ),
    "vicuna-7b": _VICUNA_7B,
    "vicuna-13b": dataclasses.replace(
        _VICUNA_7B, hidden_size=5120, intermediate_size=13824, num_layers=40, num_heads=40, num_kv_heads=40,
        rms_norm_eps=1e-5,
    ),
    "gpt2": _GPT2,
    "gpt2-medium": dataclasses.replace(
        _GPT2, hidden_size=1024, intermediate_size=4096, num_layers=24, num_heads=16, num_kv_heads=16
    ),
}  # fmt: skip
"""Targets by name; what their `config.json` says."""


def model(name: str, num_layers: int | None = None) -> DecoderConfig:
    """The sizes of a published model, optionally with fewer layers.

    Raises:
      ConfigError: no such name; the message names the nearest.
    """
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown model {name!r}; the nearest known one is {near!r} of {', '.join(MODELS)}")
    return MODELS[name] if num_layers is None else dataclasses.replace(MODELS[name], num_layers=num_layers)


def eagle3_head(target: DecoderConfig, draft_vocab_size: int = 32000) -> HeadConfig:
    """An EAGLE-3 head as wide as its target, the largest there is: taps entering layers 2, L/2 and L-3.

    Targets with fewer than six layers, which no published head has, are tapped where they can be.
    """
    layers = target.num_layers
    taps = (min(2, layers - 1), layers // 2, max(layers - 3, 0))
    layer = target.one_layer(tie_word_embeddings=False, qk_norm=False, architecture="LlamaForCausalLM")
    return HeadConfig("eagle3", layer, min(draft_vocab_size, target.vocab_size), target.hidden_size, taps)
