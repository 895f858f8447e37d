"""Lists the sizes of published models, for compilation ahead of time and cost estimates."""

from __future__ import annotations

from dataclasses import replace

from eagle_jax.config import ConfigError, DecoderConfig, ExpertsConfig, HeadConfig, RopeConfig

_LLAMA_8B = DecoderConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, rope=RopeConfig(500000.0, "llama3", factor=8.0, original_max_position=8192), max_position=131072,
)  # fmt: skip
_LLAMA_1B = replace(
    _LLAMA_8B, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64, tie_word_embeddings=True,
    rope=replace(_LLAMA_8B.rope, factor=32.0),
)  # fmt: skip
_QWEN_8B = DecoderConfig(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, num_kv_heads=8,
    head_dim=128, rms_norm_eps=1e-6, rope=RopeConfig(1000000.0), max_position=40960, qk_norm=True,
    architecture="Qwen3ForCausalLM",
)  # fmt: skip
_QWEN2_7B = DecoderConfig(
    vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4,
    head_dim=128, rms_norm_eps=1e-6, rope=RopeConfig(1000000.0), max_position=32768, qkv_bias=True,
    architecture="Qwen2ForCausalLM",
)  # fmt: skip
_MISTRAL_7B = DecoderConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, max_position=32768, windows=(4096,) * 32, architecture="MistralForCausalLM",
)  # fmt: skip
_QWEN_EXPERTS = ExpertsConfig(num_experts=128, top_k=8, intermediate_size=768)
_QWEN_30B_MOE = replace(
    _QWEN_8B, hidden_size=2048, intermediate_size=6144, num_layers=48, num_kv_heads=4,
    experts=_QWEN_EXPERTS, architecture="Qwen3MoeForCausalLM",
)  # fmt: skip
_GPT_OSS_EXPERTS = ExpertsConfig(num_experts=32, top_k=4, intermediate_size=2880, bias=True, limit=7.0)
_GPT_OSS_20B = DecoderConfig(
    vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_layers=24, num_heads=64, num_kv_heads=8,
    head_dim=64, rope=RopeConfig(150000.0, "yarn", factor=32.0, original_max_position=4096, truncate=False),
    max_position=131072, qkv_bias=True, out_bias=True, sinks=True, wide_norms=True, windows=(128, 0) * 12,
    experts=_GPT_OSS_EXPERTS, architecture="GptOssForCausalLM",
)  # fmt: skip
_VICUNA_7B = DecoderConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32, num_kv_heads=32,
    head_dim=128, rms_norm_eps=1e-6,
)  # fmt: skip
_SMOLLM2 = DecoderConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    rms_norm_eps=1e-5, rope=RopeConfig(theta=100000.0), max_position=8192, tie_word_embeddings=True,
)  # fmt: skip
_PHI4 = DecoderConfig(
    vocab_size=100352, hidden_size=5120, intermediate_size=17920, num_layers=40, num_heads=40, num_kv_heads=10,
    head_dim=128, rms_norm_eps=1e-5, rope=RopeConfig(theta=250000.0), max_position=16384,
    architecture="Phi3ForCausalLM",
)  # fmt: skip
_SMOLLM3 = DecoderConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_layers=36, num_heads=16, num_kv_heads=4,
    head_dim=128, rms_norm_eps=1e-6, rope=RopeConfig(theta=5000000.0), max_position=65536,
    nope_layers=tuple(range(3, 36, 4)), tie_word_embeddings=True, architecture="SmolLM3ForCausalLM",
)  # fmt: skip
_GPT2 = DecoderConfig(
    vocab_size=50257, hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12, num_kv_heads=12,
    head_dim=64, rope=RopeConfig(kind="none"), max_position=1024, block="gpt2", qkv_bias=True, out_bias=True,
    mlp_bias=True, tie_word_embeddings=True, architecture="GPT2LMHeadModel",
)  # fmt: skip


_GEMMA3 = DecoderConfig(
    vocab_size=262208, hidden_size=2560, intermediate_size=10240, num_layers=34, num_heads=8, num_kv_heads=4,
    head_dim=256, rms_norm_eps=1e-6, rope=RopeConfig(1000000.0, "linear", factor=8.0), local_rope=RopeConfig(10000.0),
    query_scalar=256, max_position=131072, qk_norm=True, block="gemma3", tie_word_embeddings=True,
    architecture="Gemma3ForCausalLM",
)  # fmt: skip
_GEMMA3_1B = replace(
    _GEMMA3, vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_layers=26, num_heads=4, num_kv_heads=1,
    rope=RopeConfig(1000000.0), max_position=32768,
)  # fmt: skip


def _with_windows(config: DecoderConfig, window: int) -> DecoderConfig:
    """Returns the config with a window in five of six layers (Gemma 3)."""
    return replace(config, windows=tuple(window * ((i + 1) % 6 > 0) for i in range(config.num_layers)))


MODELS: dict[str, DecoderConfig] = {
    "llama-3.2-1b": _LLAMA_1B,
    "llama-3.2-3b": replace(_LLAMA_1B, hidden_size=3072, num_layers=28, num_heads=24, head_dim=128),
    "llama-3.1-8b": _LLAMA_8B,
    "deepseek-r1-distill-llama-8b": _LLAMA_8B,
    "llama-3.3-70b": replace(_LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64),
    "mistral-7b-v0.1": _MISTRAL_7B,
    "qwen2.5-7b": _QWEN2_7B,
    "qwen3-8b": _QWEN_8B,
    "qwen3-32b": replace(_QWEN_8B, hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64),
    "qwen3-30b-a3b": _QWEN_30B_MOE,
    "qwen3-coder-30b-a3b": replace(_QWEN_30B_MOE, rope=RopeConfig(10000000.0), max_position=262144),
    "qwen3-235b-a22b": replace(
        _QWEN_30B_MOE, hidden_size=4096, intermediate_size=12288, num_layers=94, num_heads=64,
        experts=replace(_QWEN_EXPERTS, intermediate_size=1536),
    ),
    "gpt-oss-20b": _GPT_OSS_20B,
    "gpt-oss-120b": replace(
        _GPT_OSS_20B, num_layers=36, windows=(128, 0) * 18, experts=replace(_GPT_OSS_EXPERTS, num_experts=128)
    ),
    "vicuna-7b": _VICUNA_7B,
    "vicuna-13b": replace(
        _VICUNA_7B, hidden_size=5120, intermediate_size=13824, num_layers=40, num_heads=40, num_kv_heads=40,
        rms_norm_eps=1e-5,
    ),
    "smollm2-135m": _SMOLLM2,
    "gemma-3-270m": _with_windows(replace(_GEMMA3_1B, hidden_size=640, intermediate_size=2048, num_layers=18), 512),
    "gemma-3-1b": _with_windows(_GEMMA3_1B, 512),
    "gemma-3-4b": _with_windows(_GEMMA3, 1024),
    "gemma-3-12b": _with_windows(replace(
        _GEMMA3, hidden_size=3840, intermediate_size=15360, num_layers=48, num_heads=16, num_kv_heads=8
    ), 1024),
    "gemma-3-27b": _with_windows(replace(
        _GEMMA3, hidden_size=5376, intermediate_size=21504, num_layers=62, num_heads=32, num_kv_heads=16, head_dim=128,
        query_scalar=168,
    ), 1024),
    "smollm3-3b": _SMOLLM3,
    "phi-4": _PHI4,
    "gpt2": _GPT2,
    "gpt2-medium": replace(
        _GPT2, hidden_size=1024, intermediate_size=4096, num_layers=24, num_heads=16, num_kv_heads=16
    ),
}  # fmt: skip
"""Targets by name, with the values of their `config.json`."""


def model(name: str, num_layers: int | None = None) -> DecoderConfig:
    """Returns the sizes of a published model, optionally with fewer layers.

    Raises:
      ConfigError: the name is unknown.
    """
    if name not in MODELS:
        raise ConfigError(f"model must be one of {', '.join(MODELS)}, got {name!r}. Choose one.")
    return MODELS[name] if num_layers is None else MODELS[name].with_layers(num_layers)


def eagle3_head(target: DecoderConfig, draft_vocab_size: int = 32000) -> HeadConfig:
    """Returns an EAGLE-3 head as wide as its target, with taps entering layers 2, L/2 and L-3.

    For targets with fewer than six layers, the taps are clipped to existing layers.
    """
    layers = target.num_layers
    taps = (min(2, layers - 1), layers // 2, max(layers - 3, 0))
    plain = {"tie_word_embeddings": False, "qk_norm": False, "architecture": "LlamaForCausalLM"}
    if target.experts is not None:  # SpecForge's heads for Qwen3-MoE and gpt-oss
        plain |= {"intermediate_size": 6 * target.hidden_size, "qkv_bias": False, "out_bias": False}
    layer = target.one_layer(**plain)
    return HeadConfig("eagle3", layer, min(draft_vocab_size, target.vocab_size), target.hidden_size, taps)
