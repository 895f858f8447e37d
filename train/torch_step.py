"""One EAGLE-3 training step in PyTorch, from the published formula: what `train.bench_step` times ours against.

arXiv:2503.01840, section 3. Row p, step k: the head reads the embedding of token p+1+k beside the target's fused states
at p (k = 0) or its own state of step k-1 at p, attends to the keys of step 0 at rows <= p and to those of steps 1..k at
row p alone, and is judged by the target's distribution of token p+2+k. Where the public trainers of EAGLE and SpecForge
differ from it, `tests/parity/test_training_step.py` says how.

Nothing here knows JAX: weights are a flat dict of tensors, kernels [out, in]. Only plain EAGLE-3 heads and Llama-like
targets without biases are covered. Importing this module needs torch: `pip install -e '.[test]'`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig, RopeConfig

Weights = Mapping[str, torch.Tensor]
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchTexts(NamedTuple):
    """`eagle_jax.core.types.Texts` as tensors, and whether every row is one document without padding.

    Such rows need no mask beside the causal one, which fused attention skips half of its work for.
    """

    tokens: torch.Tensor
    supervised: torch.Tensor
    segments: torch.Tensor
    positions: torch.Tensor
    whole: bool


class TorchSignals(NamedTuple):
    """What the frozen target says: tapped states [B, T, F], final-normed states [B, T, H], embeddings [B, T, E]."""

    features: torch.Tensor
    hidden: torch.Tensor
    embeds: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Formula:
    """What is computed.

    Attributes:
      target, head: shapes. steps, decay: unrolled steps and the weight of each further one.
      fused: attention by PyTorch's fused kernel; False is the literal softmax over all keys.

    Raises:
      ConfigError: a head or target this module has no formula for.
    """

    target: DecoderConfig
    head: HeadConfig
    steps: int = 7
    decay: float = 0.8
    fused: bool = True

    def __post_init__(self) -> None:
        plain_head = HeadConfig(
            "eagle3", self.head.layer, self.head.draft_vocab_size, self.head.target_hidden_size, self.head.taps
        )
        if self.head != plain_head:
            raise ConfigError("the PyTorch step is written for plain EAGLE-3 heads: kind eagle3 without any switch")
        for config in (self.target, self.head.layer):
            odd = config.qkv_bias or config.out_bias or config.mlp_bias or config.qk_norm
            if odd or config.rope != RopeConfig(theta=config.rope.theta):
                raise ConfigError("the PyTorch step is written for layers without biases, q/k-norm or scaled RoPE")


def tensors(params: Any, dtype: torch.dtype = torch.float32, prefix: str = "") -> dict[str, torch.Tensor]:
    """A nested dict of arrays as a flat dict of tensors, `a.b.kernel`; kernels [in, out] become [out, in]."""
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
    """`Texts` (of JAX or NumPy) as tensors."""
    tokens, supervised, segments, positions = (torch.from_numpy(np.array(x)) for x in texts)
    return TorchTexts(tokens.long(), supervised, segments, positions, bool((segments == segments[:, :1]).all()))


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """`x` through the bias-free projection of that name."""
    return F.linear(x, weights[name + ".kernel"])


def norm(weights: Weights, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm, computed in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weights[name + ".scale"]


def angles(config: DecoderConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [B, 1, T, head_dim] of RoPE."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    turned = positions[:, None, :, None].float() * (1.0 / config.rope.theta**exponents)
    turned = torch.cat([turned, turned], -1)
    return turned.cos(), turned.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns dimension i against i + head_dim / 2."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def heads(
    config: DecoderConfig, weights: Weights, name: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, and keys and values repeated to as many heads, [B, A, T, head_dim] each."""
    batch, length, _ = x.shape
    split = lambda part: linear(weights, name + part, x).view(batch, length, -1, config.head_dim).transpose(1, 2)  # noqa: E731
    query, keys, values = rotate(split(".q_proj"), cos, sin), rotate(split(".k_proj"), cos, sin), split(".v_proj")
    repeats = config.num_heads // config.num_kv_heads
    return query, keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)


def join(config: DecoderConfig, weights: Weights, name: str, mixed: torch.Tensor) -> torch.Tensor:
    """Heads [B, A, T, head_dim] through the output projection."""
    return linear(weights, name + ".o_proj", mixed.transpose(1, 2).flatten(2))


def gated_mlp(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """SwiGLU."""
    return linear(
        weights,
        name + ".down_proj",
        F.silu(linear(weights, name + ".gate_proj", x)) * linear(weights, name + ".up_proj", x),
    )


def visible(texts: TorchTexts, dtype: torch.dtype) -> torch.Tensor | None:
    """What is added to the scores, [B, 1, T, T]; None where causality is all there is to see to."""
    if texts.whole:
        return None
    length = texts.segments.shape[1]
    seen = (texts.segments[:, :, None] == texts.segments[:, None, :]) & torch.ones(
        length, length, dtype=torch.bool
    ).tril()
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]


def observe(formula: Formula, weights: Weights, texts: TorchTexts) -> TorchSignals:
    """Runs the frozen target."""
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
        x = x + join(config, weights, name + ".self_attn", mixed)
        normed = norm(weights, name + ".post_attention_layernorm", x, config.rms_norm_eps)
        x = x + gated_mlp(weights, name + ".mlp", normed)
        states[i + 1] = x
    states[config.num_layers] = hidden = norm(weights, "norm", x, config.rms_norm_eps)
    return TorchSignals(torch.cat([states[tap] for tap in formula.head.taps], -1), hidden, embeds)


class FusedDiagonal(torch.autograd.Function):
    """Attention over the keys of step 0 by the fused kernel, joined with n keys that only their own row sees.

    The kernel gives the mixed values and the log of what it divided them by, so the other keys can be joined
    afterwards; and its gradient, given the joint result and the joint divisor, is that of the joint softmax.
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
        """[B, A, T, hd]; `own` are n keys, then n values, [B, A, T, hd] each."""
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
        """Gradients of all but the mask."""
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


def literal_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    own: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """One softmax over the keys of step 0 and those of the row itself, written out; as the public trainers have it."""
    scale, length = query.shape[-1] ** -0.5, query.shape[2]
    if bias is None:
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        bias = torch.zeros(length, length).masked_fill(ahead, torch.finfo(torch.float32).min)
    scores = [(query @ keys.transpose(2, 3)).float() * scale + bias]
    scores += [(query * key).sum(-1, keepdim=True).float() * scale for key, _ in own]
    weights = torch.cat(scores, -1).softmax(-1).to(query.dtype)
    mixed = weights[..., :length] @ values
    for i, (_, value) in enumerate(own):
        mixed = mixed + weights[..., length + i, None] * value
    return mixed


def states_of(formula: Formula, head: Weights, signals: TorchSignals, texts: TorchTexts) -> list[torch.Tensor]:
    """The head's states [B, T, H] of every unrolled step."""
    config = formula.head.layer
    eps, length = config.rms_norm_eps, texts.tokens.shape[1]
    bias = visible(texts, head["fc.kernel"].dtype)
    embeds = F.pad(norm(head, "input_layernorm", signals.embeds, eps), (0, 0, 0, formula.steps))
    states = linear(head, "fc", signals.features)
    found: list[torch.Tensor] = []
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for k in range(formula.steps):
        cos, sin = angles(config, texts.positions + k)
        x = torch.cat([embeds[:, 1 + k : 1 + k + length], norm(head, "hidden_norm", states, eps)], -1)
        query, keys, values = heads(config, head, "self_attn", x, cos, sin)
        seen.append((keys, values))
        if not formula.fused:
            mixed = literal_attention(query, *seen[0], bias, seen[1:])
        elif k == 0:
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, is_causal=bias is None)
        else:
            own = [pair[i] for i in (0, 1) for pair in seen[1:]]
            mixed = FusedDiagonal.apply(query, *seen[0], bias, *own)
        states = states + join(config, head, "self_attn", mixed)
        states = states + gated_mlp(head, "mlp", norm(head, "post_attention_layernorm", states, eps))
        found.append(states)
    return found


def step_losses(
    formula: Formula, head: Weights, signals: TorchSignals, target: Weights, kept: torch.Tensor, texts: TorchTexts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean soft cross-entropy of every step over the rows that count, and accuracy, [steps] each.

    Step k in row p guesses token p+2+k. The row counts where that token is supervised and of the row's document, and
    the target's favourite for it is in the draft vocabulary; for the accuracy, a favourite outside is a miss.

    Args:
      kept: [Vd], target ids of the draft vocabulary.
    """
    with torch.no_grad():
        name = "embed_tokens.embedding" if formula.target.tie_word_embeddings else "lm_head.kernel"
        logits = F.linear(signals.hidden, target[name]).float()
        inside = torch.isin(logits.argmax(-1), kept)
        law = logits[..., kept].softmax(-1)
        best = law.argmax(-1)
    length, losses, accuracies = texts.tokens.shape[1], [], []
    for k, states in enumerate(states_of(formula, head, signals, texts)):
        # Rows and what they guess; a text too short for the step has none.
        rows, ahead = max(0, length - 2 - k), slice(1 + k, max(1 + k, length - 1))
        supervised, segments = texts.supervised[:, 2 + k :], texts.segments[:, :rows]
        supervised = supervised & (segments == texts.segments[:, 2 + k :]) & (segments > 0)
        counted = supervised & inside[:, ahead]
        guesses = linear(head, "lm_head", norm(head, "norm", states[:, :rows], formula.head.layer.rms_norm_eps)).float()
        # Of probabilities that sum to one: -sum p log softmax(z) = logsumexp(z) - sum p z.
        loss = guesses.logsumexp(-1) - (law[:, ahead] * guesses).sum(-1)
        losses.append((loss * counted).sum() / counted.sum().clamp(min=1))
        hits = counted & (guesses.detach().argmax(-1) == best[:, ahead])
        accuracies.append(hits.sum() / supervised.sum().clamp(min=1))
    return torch.stack(losses), torch.stack(accuracies)


def head_loss(
    formula: Formula, head: Weights, target: Weights, kept: torch.Tensor, texts: TorchTexts, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_k decay^k (loss of step k), and the accuracy of every step.

    Args:
      dtype: of the head's products and activations, whatever its weights are.
    """
    with torch.no_grad():
        signals = TorchSignals(*(x.to(dtype) for x in observe(formula, target, texts)))
    cast = {name: value.to(dtype) for name, value in head.items()}
    losses, accuracies = step_losses(formula, cast, signals, target, kept, texts)
    return (losses * formula.decay ** torch.arange(formula.steps)).sum(), accuracies
