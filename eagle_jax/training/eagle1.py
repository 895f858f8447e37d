"""The loss of an EAGLE-1/2 head (arXiv:2401.15077, section 4.2): next feature and next token.

Row p reads (feature at p plus noise, embedding of token p+1) and estimates the target's feature at p+1, from which the
target's own lm_head must give the distribution for token p+2. It counts where token p+2 is supervised.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle_jax.config import HeadConfig
from eagle_jax.models.heads import make_head
from eagle_jax.training.losses import ahead, masked_mean, smooth_l1, soft_cross_entropy
from eagle_jax.training.ttt import Signals, StepMetrics
from eagle_jax.types import Params


def eagle1_loss(
    config: HeadConfig,
    head: Params,
    signals: Signals,
    logits: Callable[[Array], Array],
    key: Array,
    *,
    noise: float = 0.1,
    token_weight: float = 0.1,
) -> tuple[Float[Array, ""], StepMetrics]:
    """SmoothL1(feature) + token_weight * soft cross-entropy.

    Args:
      signals: `features` are the final-normed states (tap L); `law` is over the whole vocabulary.
      logits: the target's lm_head, `[..., H] -> [..., V]`; not trained.
      noise: features are disturbed by U(-noise, noise), which stands for the head's own later mistakes.

    Returns:
      the loss, and as metrics the two parts [feature, token] and the accuracy [1].
    """
    module = make_head(config)
    batch, length = signals.supervised.shape
    positions = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    shaken = signals.features + jax.random.uniform(key, signals.features.shape, minval=-noise, maxval=noise)
    mask = jnp.tril(jnp.ones((length, length), bool))
    states = module.apply({"params": head}, ahead(signals.embeds, 1), shaken, positions, mask).states
    counted = ahead(signals.supervised, 2)
    predicted = logits(states)
    feature = masked_mean(smooth_l1(states, ahead(signals.features, 1)), counted)
    token = masked_mean(soft_cross_entropy(predicted, ahead(signals.law, 1)), counted)
    hit = jnp.argmax(predicted, axis=-1) == ahead(signals.best, 1)
    accuracy = masked_mean(hit.astype(jnp.float32), counted)
    return feature + token_weight * token, StepMetrics(jnp.stack([feature, token]), accuracy[None])
