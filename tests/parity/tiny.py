"""Writes tiny random `transformers` models of awkward shape to disk, as real ones are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

# head_dim is not H / A, groups of three heads share a key, no size is a multiple of a vector register.
SIZES: dict[str, Any] = {
    "vocab_size": 89, "hidden_size": 42, "intermediate_size": 50, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def tiny_model(family: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A float32 model whose weights are large enough for every part of it to matter to the logits."""
    sizes = SIZES | changes
    if sizes["head_dim"] is None:
        del sizes["head_dim"]  # Qwen2 knows no head_dim of None
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")(**sizes)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the default needs strides of 16 bytes
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return randomise(getattr(transformers, kind)(config).eval(), seed)


def randomise(model: transformers.PreTrainedModel, seed: int) -> transformers.PreTrainedModel:
    """Draws weights that are large enough for every part to matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.15 if weight.ndim >= 2 else 0.3
            weight.copy_(
                torch.randn(weight.shape, generator=generator) * scale
                + (1.0 if "norm" in name or "ln_" in name else 0.0)
            )
    return model


def random_tokens(length: int, rows: int = 2, seed: int = 0) -> np.ndarray:
    """[rows, length] token ids."""
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], (rows, length)).astype(np.int32)


def torch_outputs(model: transformers.PreTrainedModel, tokens: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [B, T, V] and all hidden states (L + 1 of [B, T, H]) of a plain forward pass."""
    with torch.no_grad():
        out = model(torch.tensor(tokens, dtype=torch.long), output_hidden_states=True, use_cache=False)
    return out.logits.numpy(), [state.numpy() for state in out.hidden_states]


def save(model: transformers.PreTrainedModel, directory: Path, shards: bool = False) -> Path:
    """`save_pretrained`, into one file or several."""
    model.save_pretrained(directory, max_shard_size="20KB" if shards else "1GB")
    count = len(list(directory.glob("*.safetensors")))
    assert (count > 1) == shards, f"{count} weight files"
    return directory
