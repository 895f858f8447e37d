"""Training-time test: the loss of an EAGLE-3 head (arXiv:2503.01840, section 3.2).

The head is unrolled on its own outputs as it will be used. Row p, step k:

    input    embedding of token p+1+k, with the target's fused features at p (k = 0) or the head's state of step k-1
             at the same row
    sees     the keys of step 0 at rows <= p, and those of steps 1..k at row p alone; RoPE position p + k
    label    the target's distribution for token p+2+k, renormalised over the draft vocabulary
    counts   where token p+2+k is supervised and the target's favourite for it is in the draft vocabulary

Gradients flow through all steps. The second kind of keys is one dot product per step and row: no [T, k T] score matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import HeadConfig
from eagle_jax.models.heads import make_head
from eagle_jax.training.losses import ahead, masked_mean, soft_cross_entropy
from eagle_jax.types import Params


class Signals(NamedTuple):
    """What the frozen target says about a batch of texts.

    Attributes:
      features: [B, T, F], tapped states. embeds: [B, T, E], token embeddings.
      law: [B, T, Vd], row t the distribution for token t + 1 over the draft vocabulary.
      best: [B, T] int32, its favourite as a draft id. inside: [B, T], whether the favourite is in the draft vocabulary.
      supervised: [B, T], whether token t itself is one to learn.
    """

    features: Float[Array, "B T F"]
    embeds: Float[Array, "B T E"]
    law: Float[Array, "B T Vd"]
    best: Int[Array, "B T"]
    inside: Bool[Array, "B T"]
    supervised: Bool[Array, "B T"]


class StepMetrics(NamedTuple):
    """Per step k: mean loss over the counted rows, and how often the head's favourite is the target's.

    Attributes:
      loss: [steps]. accuracy: [steps], over all supervised rows; a favourite outside the draft vocabulary is a miss.
    """

    loss: Float[Array, " steps"]
    accuracy: Float[Array, " steps"]


def diagonal_mixer(first: tuple[Array, Array], diagonal: list[tuple[Array, Array]]) -> Callable[..., Array]:
    """Attention of a later step, to be used in place of `attend`.

    Args:
      first: keys and values [B, G, T, hd] of step 0, seen causally.
      diagonal: those of steps 1..k-1, each seen by its own row; the step's own are appended.
    """

    def mix(
        query: Float[Array, "B T A hd"],
        keys: Float[Array, "B G T hd"],
        values: Float[Array, "B G T hd"],
        mask: Bool[Array, "T T"],
        *cache: None,
    ) -> Float[Array, "B T A*hd"]:
        batch, length, heads, head_dim = query.shape
        groups = keys.shape[1]
        grouped = query.reshape(batch, length, groups, heads // groups, head_dim).transpose(0, 2, 3, 1, 4)
        grouped = grouped.astype(jnp.float32) * (head_dim**-0.5)
        causal = jnp.einsum("bgrtd,bgsd->bgrts", grouped, first[0].astype(jnp.float32))
        causal = jnp.where(mask[None, None, None], causal, jnp.finfo(jnp.float32).min)
        chain = [*diagonal, (keys, values)]
        alone = jnp.stack([jnp.einsum("bgrtd,bgtd->bgrt", grouped, k.astype(jnp.float32)) for k, _ in chain], axis=-1)
        top = jnp.maximum(jnp.max(causal, axis=-1, keepdims=True), jnp.max(alone, axis=-1, keepdims=True))
        top = jax.lax.stop_gradient(top)
        causal, alone = jnp.exp(causal - top), jnp.exp(alone - top)
        total = jnp.sum(causal, axis=-1, keepdims=True) + jnp.sum(alone, axis=-1, keepdims=True)
        mixed = jnp.einsum("bgrts,bgsd->bgrtd", causal, first[1].astype(jnp.float32))
        for index, (_, v) in enumerate(chain):
            mixed = mixed + alone[..., index : index + 1] * v.astype(jnp.float32)[:, :, None]
        mixed = (mixed / total).astype(query.dtype)
        return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * head_dim)

    return mix


def ttt_loss(
    config: HeadConfig, head: Params, signals: Signals, *, steps: int = 7, decay: float = 0.8
) -> tuple[Float[Array, ""], StepMetrics]:
    """sum_k decay^k * (mean soft cross-entropy of step k over its counted rows)."""
    module = make_head(config)
    batch, length = signals.supervised.shape
    mask = jnp.tril(jnp.ones((length, length), bool))
    states = module.apply({"params": head}, signals.features, method="fuse")
    losses, accuracies = [], []
    first: tuple[Array, Array] | None = None
    diagonal: list[tuple[Array, Array]] = []
    for k in range(steps):
        positions = jnp.broadcast_to(k + jnp.arange(length)[None], (batch, length))
        later = {} if first is None else {"mixer": diagonal_mixer(first, diagonal)}
        out = module.apply({"params": head}, ahead(signals.embeds, 1 + k), states, positions, mask, **later)
        if first is None:
            first = (out.keys, out.values)
        else:
            diagonal.append((out.keys, out.values))
        states = out.states
        logits = module.apply({"params": head}, states, method="logits")
        # Row t of `law` speaks of token t + 1: token p+2+k is row p+1+k. The mask goes by the token itself.
        supervised = ahead(signals.supervised, 2 + k)
        inside = ahead(signals.inside, 1 + k)
        losses.append(masked_mean(soft_cross_entropy(logits, ahead(signals.law, 1 + k)), supervised & inside))
        hit = inside & (jnp.argmax(logits, axis=-1) == ahead(signals.best, 1 + k))
        accuracies.append(masked_mean(hit.astype(jnp.float32), supervised))
    weights = decay ** jnp.arange(steps, dtype=jnp.float32)
    metrics = StepMetrics(jnp.stack(losses), jnp.stack(accuracies))
    return jnp.sum(weights * metrics.loss), metrics
