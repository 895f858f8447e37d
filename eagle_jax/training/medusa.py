"""Computes the losses of Medusa-1, Hydra and Hydra++ heads on a frozen target."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle_jax.config import MedusaConfig
from eagle_jax.core.types import Params
from eagle_jax.models.medusa import MedusaHeads
from eagle_jax.packed import PackedTokens
from eagle_jax.training.host import dense_gradients
from eagle_jax.training.losses import ahead, by_chunks, soft_cross_entropy, supervised_ahead
from eagle_jax.training.objective import Logits, Signals, StepMetrics
from eagle_jax.training.unrolling import causal_mask


def medusa_loss(
    config: MedusaConfig,
    heads: Params,
    signals: Signals,
    texts: PackedTokens,
    target_logits: Logits,
    *,
    dtype: str = "float32",
    decay: float = 0.8,
    teacher: bool = True,
    chunk: int = 256,
    remat: bool = True,
    shares: Float[Array, " heads"] | float = 1.0,
) -> tuple[Float[Array, ""], StepMetrics]:
    """Returns sum_i decay^i (mean loss of head i over its counted rows), and metrics per head.

    Head i predicts token t + i + 2 in row t. The row counts if that token is supervised and in the same document.

    Args:
      heads: `params["heads"]`.
      signals: `hidden`, and for Hydra `embeds`, of the target; they get no gradient.
      target_logits: the target's lm_head, [..., H] -> [..., V].
      dtype: of the heads' products and activations; losses are float32.
      decay: base of the weights (Medusa, section 2.2.1: 0.8).
      teacher: labels are the target's law (Hydra++, section 4.2); False: the tokens of the texts (Medusa-1, Hydra).
      chunk, remat: as in `by_chunks`.
      shares: weight of every head's mean: the share of a micro-batch in the rows of that head.
    """
    model = MedusaHeads(config)
    heads = jax.tree.map(lambda leaf: leaf.astype(dtype), heads)
    hidden = jax.lax.stop_gradient(signals.hidden).astype(dtype)
    with nn.intercept_methods(dense_gradients):
        states = hidden
        if config.prefix is not None:
            mask = causal_mask(texts.segments)
            states = model.apply({"params": heads}, hidden, texts.positions, mask, method="prefix").states
        parts = []
        for head in range(config.num_heads):
            inputs = [states]
            if config.kind == "hydra":
                assert signals.embeds is not None, "Hydra heads read embeddings"
                embeds = jax.lax.stop_gradient(signals.embeds).astype(states.dtype)
                inputs += [ahead(embeds, step + 1) for step in range(head + 1)]
            counted = supervised_ahead(texts, head + 2)

            def sums_of(
                inputs: Array, following: Array, labels: Array, counted: Array, head: int = head
            ) -> tuple[Array, Array]:
                logits = model.apply({"params": heads}, inputs, head)
                log_q = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
                if teacher:
                    p = jax.nn.softmax(jax.lax.stop_gradient(target_logits(following)).astype(jnp.float32), axis=-1)
                    loss, best = soft_cross_entropy(log_q, p), jnp.argmax(p, axis=-1)
                else:
                    loss, best = -jnp.take_along_axis(log_q, labels[..., None], axis=-1)[..., 0], labels
                hit = jnp.argmax(logits, axis=-1) == best
                return jnp.sum(jnp.where(counted, loss, 0.0)), jnp.sum(hit & counted).astype(jnp.float32)

            rows = (jnp.concatenate(inputs, axis=-1), ahead(hidden, head + 1), ahead(texts.tokens, head + 2), counted)
            loss, hits = by_chunks(sums_of, rows, (1, 1, 1, 1), chunk, remat=remat)
            count = jnp.sum(counted).astype(jnp.float32)
            parts.append(StepMetrics(loss / jnp.maximum(count, 1.0), hits / jnp.maximum(count, 1.0), count))
    metrics: StepMetrics = jax.tree.map(lambda *each: jnp.stack(each), *parts)
    return jnp.sum(decay ** jnp.arange(config.num_heads) * metrics.loss * shares), metrics
