"""Computes the loss of an EAGLE-3 step in PyTorch, from the formula (arXiv:2503.01840, section 3).

Row p, step k: the head reads the embedding of token p+1+k and the target's fused states at p (k = 0) or its own state
of step k-1 at p. It attends to the keys of step 0 at rows <= p and of steps 1..k at row p. Its target is the
distribution of token p+2+k. Weights are a flat dict of tensors; those of linear layers are [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.packed import PackedTokens

Weights = Mapping[str, torch.Tensor]


def tensors(params: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Flattens nested arrays to tensors by name, `a.b.weight`."""
    found: dict[str, torch.Tensor] = {}
    for name, value in params.items():
        if hasattr(value, "items"):
            found |= tensors(value, f"{prefix}{name}.")
        else:
            array = np.asarray(value, np.float32)
            found[prefix + name] = torch.from_numpy(array.copy())
    return found


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weights[name + ".weight"])


def norm(weights: Weights, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weights[name + ".scale"]


def gated_mlp(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = (linear(weights, f"{name}.{part}_proj", x) for part in ("gate", "up"))
    return linear(weights, name + ".down_proj", F.silu(gate) * up)


def rotate(config: DecoderConfig, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates dimension i of [B, A, T, head_dim] with i + head_dim / 2 (RoPE)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = positions[:, None, :, None].float() / config.rope.theta**exponents
    cos, sin = angles.cos().repeat(1, 1, 1, 2), angles.sin().repeat(1, 1, 1, 2)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def heads(
    config: DecoderConfig, weights: Weights, x: torch.Tensor, positions: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns queries, and keys and values repeated to as many heads, [B, A, T, head_dim] each."""
    split = lambda part: linear(weights, name + part, x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)  # noqa: E731
    query, keys = (rotate(config, split(part), positions) for part in (".q_proj", ".k_proj"))
    repeats = config.num_heads // config.num_kv_heads
    return query, keys.repeat_interleave(repeats, 1), split(".v_proj").repeat_interleave(repeats, 1)


def attend(
    query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], bias: torch.Tensor
) -> torch.Tensor:
    """One softmax over the keys of step 0 and, of the other steps, those of the own row; [B, T, A * head_dim]."""
    scale, length = query.shape[-1] ** -0.5, query.shape[2]
    scores = [(query @ keys[0].transpose(2, 3)) * scale + bias]
    scores += [(query * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
    weights = torch.cat(scores, -1).softmax(-1)
    mixed = weights[..., :length] @ values[0]
    for i, value in enumerate(values[1:]):
        mixed = mixed + weights[..., length + i, None] * value
    return mixed.transpose(1, 2).flatten(2)


def head_loss(
    target_config: DecoderConfig,
    config: HeadConfig,
    steps: int,
    decay: float,
    head: Weights,
    target: Weights,
    kept: torch.Tensor,
    texts: PackedTokens,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns sum_k decay^k (loss of step k) and the accuracy [steps].

    Step k in row p counts if token p+2+k is supervised and of the row's document, and the target's likeliest token is
    in the draft vocabulary `kept`. For the accuracy, a likeliest token outside is a miss.
    """
    tokens, supervised, segments, positions = (torch.from_numpy(np.array(x)) for x in texts)
    length, layer, eps = tokens.shape[1], config.layer, config.layer.rms_norm_eps
    seen = (segments[:, :, None] == segments[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
    with torch.no_grad():
        embeds = x = target["embed_tokens.embedding"][tokens.long()]
        states = {0: x}
        for i in range(target_config.num_layers):
            name, target_eps = f"layers_{i}", target_config.rms_norm_eps
            normed = norm(target, name + ".input_layernorm", x, target_eps)
            query, keys, values = heads(target_config, target, normed, positions, name + ".self_attn")
            x = x + linear(target, name + ".self_attn.o_proj", attend(query, [keys], [values], bias))
            x = x + gated_mlp(target, name + ".mlp", norm(target, name + ".post_attention_layernorm", x, target_eps))
            states[i + 1] = x
        states[target_config.num_layers] = hidden = norm(target, "norm", x, target_config.rms_norm_eps)
        logits = linear(target, "lm_head", hidden)
        inside, law = torch.isin(logits.argmax(-1), kept), logits[..., kept].softmax(-1)
    features = torch.cat([states[tap] for tap in config.taps], -1)
    embeds = F.pad(norm(head, "input_layernorm", embeds, eps), (0, 0, 0, steps))
    state = linear(head, "fc", features)
    all_keys, all_values, losses, accuracies = [], [], [], []
    for k in range(steps):
        x = torch.cat([embeds[:, 1 + k : 1 + k + length], norm(head, "hidden_norm", state, eps)], -1)
        query, keys, values = heads(layer, head, x, positions + k, "self_attn")
        all_keys.append(keys)
        all_values.append(values)
        state = state + linear(head, "self_attn.o_proj", attend(query, all_keys, all_values, bias))
        state = state + gated_mlp(head, "mlp", norm(head, "post_attention_layernorm", state, eps))
        rows, ahead = length - 2 - k, slice(1 + k, length - 1)
        taught = supervised[:, 2 + k :] & (segments[:, :rows] == segments[:, 2 + k :]) & (segments[:, :rows] > 0)
        counted = taught & inside[:, ahead]
        guesses = linear(head, "lm_head", norm(head, "norm", state[:, :rows], eps))
        loss = -(law[:, ahead] * guesses.log_softmax(-1)).sum(-1)
        losses.append((loss * counted).sum() / counted.sum().clamp(min=1))
        hits = counted & (guesses.argmax(-1) == law[:, ahead].argmax(-1))
        accuracies.append(hits.sum() / taught.sum().clamp(min=1))
    return (torch.stack(losses) * decay ** torch.arange(steps)).sum(), torch.stack(accuracies)
