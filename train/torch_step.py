"""Computes an EAGLE-3 training step in PyTorch from the published formula; `train.bench_step` times it.

arXiv:2503.01840, section 3. Row p, step k: the head reads the embedding of token p+1+k and the target's fused states at
p (k = 0) or its own state of step k-1 at p. It attends to the keys of step 0 at rows <= p and of steps 1..k at row p.
Its target is the distribution of token p+2+k. `tests/parity/test_training_step.py` lists where public trainers differ.

This module does not import JAX: weights are a flat dict of tensors, kernels [out, in]. It covers plain EAGLE-3 heads
and Llama-like targets without biases. It needs torch: `pip install -e '.[test]'`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig, RopeConfig

Weights = Mapping[str, torch.Tensor]
Signals = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchTexts(NamedTuple):
    """`PackedTokens` as tensors; `whole` rows are one document without padding, so that the causal mask suffices."""

    tokens: torch.Tensor
    supervised: torch.Tensor
    segments: torch.Tensor
    positions: torch.Tensor
    whole: bool


def tensors(params: Any, dtype: torch.dtype = torch.float32, prefix: str = "") -> dict[str, torch.Tensor]:
    """Flattens nested arrays to tensors by name, `a.b.kernel`; kernels [in, out] become [out, in]."""
    found: dict[str, torch.Tensor] = {}
    for name, value in params.items():
        if hasattr(value, "items"):
            found |= tensors(value, dtype, f"{prefix}{name}.")
            continue
        array = np.asarray(value, np.float32)
        array = array.T if name == "kernel" else array
        found[prefix + name] = torch.from_numpy(np.array(array, order="C")).to(dtype)
    return found


def texts_of(texts: Any) -> TorchTexts:
    """Converts `PackedTokens` of JAX or NumPy."""
    tokens, supervised, segments, positions = (torch.from_numpy(np.array(x)) for x in texts)
    return TorchTexts(tokens.long(), supervised, segments, positions, bool((segments == segments[:, :1]).all()))


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Applies the bias-free projection of a name."""
    return F.linear(x, weights[name + ".kernel"])


def norm(weights: Weights, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Applies RMSNorm in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weights[name + ".scale"]


def angles(config: DecoderConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines and sines [B, 1, T, head_dim] of RoPE."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    turned = positions[:, None, :, None].float() * (1.0 / config.rope.theta**exponents)
    turned = torch.cat([turned, turned], -1)
    return turned.cos(), turned.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates dimension i with i + head_dim / 2."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def heads(
    config: DecoderConfig, weights: Weights, name: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns queries, and keys and values repeated to as many heads, [B, A, T, head_dim] each."""
    batch, length, _ = x.shape
    split = lambda part: linear(weights, name + part, x).view(batch, length, -1, config.head_dim).transpose(1, 2)  # noqa: E731
    query, keys, values = rotate(split(".q_proj"), cos, sin), rotate(split(".k_proj"), cos, sin), split(".v_proj")
    repeats = config.num_heads // config.num_kv_heads
    return query, keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)


def join(weights: Weights, name: str, mixed: torch.Tensor) -> torch.Tensor:
    """Applies the output projection to heads [B, A, T, head_dim]."""
    return linear(weights, name + ".o_proj", mixed.transpose(1, 2).flatten(2))


def gated_mlp(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Applies SwiGLU."""
    gate, up = (linear(weights, f"{name}.{part}_proj", x) for part in ("gate", "up"))
    return linear(weights, name + ".down_proj", F.silu(gate) * up)


def visible(texts: TorchTexts, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns the mask [B, 1, T, T] that is added to scores; None if the causal mask suffices."""
    if texts.whole:
        return None
    length = texts.segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    seen = (texts.segments[:, :, None] == texts.segments[:, None, :]) & causal
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]


class FusedDiagonal(torch.autograd.Function):
    """Joins fused attention to the keys of step 0 with attention to n keys of the own row.

    The kernel returns mixed values and their log-divisor, so that other keys can be joined afterwards. Its gradient,
    given the joint result and divisor, is that of the joint softmax.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        *own: torch.Tensor,
    ) -> torch.Tensor:
        """Returns [B, A, T, hd]; `own` are n keys, then n values, [B, A, T, hd] each."""
        count = len(own) // 2
        mixed, divisor = flash(query, keys, values, 0.0, bias is None, attn_mask=bias)
        scores = torch.stack([(query.float() * key.float()).sum(-1) for key in own[:count]]) * query.shape[-1] ** -0.5
        joint = torch.logaddexp(divisor, torch.logsumexp(scores, 0))
        result = mixed.float() * (divisor - joint).exp()[..., None]
        for score, value in zip(scores, own[count:], strict=True):
            result = result + (score - joint).exp()[..., None] * value.float()
        result = result.to(query.dtype)
        ctx.save_for_backward(query, keys, values, bias, result, joint, scores, *own)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of all inputs but the mask."""
        query, keys, values, bias, result, joint, scores, *own = ctx.saved_tensors
        count, scale = len(own) // 2, query.shape[-1] ** -0.5
        to_query, to_keys, to_values = flash_backward(
            grad, query, keys, values, result, joint, 0.0, bias is None, attn_mask=bias
        )
        wide, to_query = grad.float(), to_query.float()
        along = (wide * result.float()).sum(-1)
        own_keys, own_values = [], []
        for score, key, value in zip(scores, own[:count], own[count:], strict=True):
            weight = (score - joint).exp()
            to_score = (weight * ((wide * value.float()).sum(-1) - along) * scale)[..., None]
            to_query = to_query + to_score * key.float()
            own_keys.append((to_score * query.float()).to(key.dtype))
            own_values.append((weight[..., None] * wide).to(value.dtype))
        return to_query.to(query.dtype), to_keys, to_values, None, *own_keys, *own_values


def attend(
    query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """Attends to the keys of step 0 and, of the other steps, to those of the own row."""
    if len(keys) == 1:
        return F.scaled_dot_product_attention(query, keys[0], values[0], attn_mask=bias, is_causal=bias is None)
    return FusedDiagonal.apply(query, keys[0], values[0], bias, *keys[1:], *values[1:])


@dataclasses.dataclass(frozen=True)
class Formula:
    """Shapes of target and head, unrolled steps, weight of each further step, and attention of the head.

    Raises:
      ConfigError: this module has no formula for the head or target.
    """

    target: DecoderConfig
    head: HeadConfig
    steps: int = 7
    decay: float = 0.8
    attend: Callable[..., torch.Tensor] = attend

    def __post_init__(self) -> None:
        head = self.head
        if head != HeadConfig("eagle3", head.layer, head.draft_vocab_size, head.target_hidden_size, head.taps):
            raise ConfigError("the PyTorch step needs a plain EAGLE-3 head: kind eagle3 without any switch")
        for config in (self.target, head.layer):
            odd = config.qkv_bias or config.out_bias or config.mlp_bias or config.qk_norm
            if odd or config.rope != RopeConfig(theta=config.rope.theta):
                raise ConfigError("the PyTorch step needs layers without biases, q/k norms and scaled RoPE")


def observe(formula: Formula, weights: Weights, texts: TorchTexts) -> Signals:
    """Runs the frozen target; returns fused states [B, T, F], final states [B, T, H] and embeddings [B, T, E]."""
    config = formula.target
    cos, sin = angles(config, texts.positions)
    embeds = x = weights["embed_tokens.embedding"][texts.tokens]
    bias = visible(texts, x.dtype)
    states = {0: x}
    for i in range(config.num_layers):
        name = f"layers_{i}"
        normed = norm(weights, name + ".input_layernorm", x, config.rms_norm_eps)
        query, keys, values = heads(config, weights, name + ".self_attn", normed, cos, sin)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, is_causal=bias is None)
        x = x + join(weights, name + ".self_attn", mixed)
        normed = norm(weights, name + ".post_attention_layernorm", x, config.rms_norm_eps)
        x = x + gated_mlp(weights, name + ".mlp", normed)
        states[i + 1] = x
    states[config.num_layers] = hidden = norm(weights, "norm", x, config.rms_norm_eps)
    return torch.cat([states[tap] for tap in formula.head.taps], -1), hidden, embeds


def states_of(formula: Formula, head: Weights, signals: Signals, texts: TorchTexts) -> list[torch.Tensor]:
    """Returns the head's states [B, T, H] of every unrolled step."""
    features, _, embeddings = signals
    config = formula.head.layer
    eps, length = config.rms_norm_eps, texts.tokens.shape[1]
    bias = visible(texts, head["fc.kernel"].dtype)
    embeds = F.pad(norm(head, "input_layernorm", embeddings, eps), (0, 0, 0, formula.steps))
    states = linear(head, "fc", features)
    found, seen_keys, seen_values = [], [], []
    for k in range(formula.steps):
        cos, sin = angles(config, texts.positions + k)
        x = torch.cat([embeds[:, 1 + k : 1 + k + length], norm(head, "hidden_norm", states, eps)], -1)
        query, keys, values = heads(config, head, "self_attn", x, cos, sin)
        seen_keys.append(keys)
        seen_values.append(values)
        mixed = formula.attend(query, seen_keys, seen_values, bias)
        states = states + join(head, "self_attn", mixed)
        states = states + gated_mlp(head, "mlp", norm(head, "post_attention_layernorm", states, eps))
        found.append(states)
    return found


def step_losses(
    formula: Formula, head: Weights, signals: Signals, target: Weights, kept: torch.Tensor, texts: TorchTexts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean soft cross-entropy and accuracy of every step, [steps] each.

    Step k in row p guesses token p+2+k. A row counts if that token is supervised and of the row's document, and the
    target's likeliest token is in the draft vocabulary. For the accuracy, a likeliest token outside is a miss.

    Args:
      kept: [Vd], target ids of the draft vocabulary.
    """
    with torch.no_grad():
        name = "embed_tokens.embedding" if formula.target.tie_word_embeddings else "lm_head.kernel"
        logits = F.linear(signals[1], target[name]).float()
        inside = torch.isin(logits.argmax(-1), kept)
        law = logits[..., kept].softmax(-1)
        best = law.argmax(-1)
    length, losses, accuracies = texts.tokens.shape[1], [], []
    for k, states in enumerate(states_of(formula, head, signals, texts)):
        # A text too short for the step has no rows.
        rows, ahead = max(0, length - 2 - k), slice(1 + k, max(1 + k, length - 1))
        supervised, segments = texts.supervised[:, 2 + k :], texts.segments[:, :rows]
        supervised = supervised & (segments == texts.segments[:, 2 + k :]) & (segments > 0)
        counted = supervised & inside[:, ahead]
        guesses = linear(head, "lm_head", norm(head, "norm", states[:, :rows], formula.head.layer.rms_norm_eps)).float()
        # -sum p log softmax(z) = logsumexp(z) - sum p z, because p sums to one.
        loss = guesses.logsumexp(-1) - (law[:, ahead] * guesses).sum(-1)
        losses.append((loss * counted).sum() / counted.sum().clamp(min=1))
        hits = counted & (guesses.detach().argmax(-1) == best[:, ahead])
        accuracies.append(hits.sum() / supervised.sum().clamp(min=1))
    return torch.stack(losses), torch.stack(accuracies)


def head_loss(
    formula: Formula, head: Weights, target: Weights, kept: torch.Tensor, texts: TorchTexts, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns sum_k decay^k (loss of step k) and the accuracy of every step; `dtype` is of products and activations."""
    with torch.no_grad():
        features, hidden, embeds = (x.to(dtype) for x in observe(formula, target, texts))
    cast = {name: value.to(dtype) for name, value in head.items()}
    losses, accuracies = step_losses(formula, cast, (features, hidden, embeds), target, kept, texts)
    return (losses * formula.decay ** torch.arange(formula.steps)).sum(), accuracies
