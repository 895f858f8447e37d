"""Computes the losses of EAGLE-1/2, HASS and EAGLE-3 over an unrolled head, by chunks of rows.

Row t of the target's logits is its distribution of token t + 1. Step k of the head predicts that token in row
t - 1 - k, so one row of the target's logits serves all steps. Chunks are recomputed for the gradient: logits of target
and head exist for one chunk at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import ConfigError, HeadConfig, check_fields
from eagle_jax.core.types import Params
from eagle_jax.models.heads import EagleHead
from eagle_jax.packed import PackedTokens
from eagle_jax.parallel.mesh import DATA, FSDP, by_rows, copies, row_groups
from eagle_jax.training.losses import (
    behind,
    best_of,
    blended_divergence,
    by_chunks,
    likelihood_of_acceptance,
    rowwise_dot,
    smooth_l1,
    soft_cross_entropy,
    supervised_ahead,
)
from eagle_jax.training.unroll import unroll


@dataclasses.dataclass(frozen=True)
class Objective:
    """Loss of a draft head; `PRESETS` has the papers' settings.

    Attributes:
      steps: unrolled steps, n.
      decay: step k has weight decay^k; the sum is not normalised.
      token_loss: "ce" soft cross-entropy, "lk" -log alpha, "lk_blend" lambda KL + (1 - lambda) TV (arXiv:2602.23881).
      eta: for lk_blend: a larger value gives TV more weight at the same acceptance, lambda = exp(-eta alpha).
      token_weight: weight of the token loss.
      feature_weight: weight of SmoothL1 between the head's state and the target's final-normed state.
      best_weight, best_count: weight of HASS's loss over the target's likeliest tokens, and their number.
      noise: bound of the uniform noise U(-noise, noise) on the target's features.
      detach: no gradient flows from a step into the step before it (HASS).
      chunk: rows of a text whose logits exist at once.
      remat: recomputes steps and chunks for the gradient; False keeps all logits in memory.

    Raises:
      ConfigError: a count is below 1, a weight is negative, or all weights are 0.
    """

    steps: int = 7
    decay: float = 0.8
    token_loss: Literal["ce", "lk", "lk_blend"] = "ce"
    eta: float = 3.0
    token_weight: float = 1.0
    feature_weight: float = 0.0
    best_weight: float = 0.0
    best_count: int = 10
    noise: float = 0.0
    detach: bool = False
    chunk: int = 256
    remat: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "steps", "best_count", "chunk")
        for name in ("decay", "eta", "token_weight", "feature_weight", "best_weight", "noise"):
            if getattr(self, name) < 0:
                raise ConfigError(f"Objective.{name} must not be negative, got {getattr(self, name)}.")
        if self.token_weight == self.feature_weight == self.best_weight == 0:
            raise ConfigError("Objective must have a token_weight, feature_weight or best_weight above 0, got only 0.")


PRESETS: dict[str, Objective] = {
    # One step, SmoothL1(feature) + 0.1 cross-entropy, noise (EAGLE, arXiv:2401.15077, section 4.2).
    "eagle1": Objective(steps=1, token_weight=0.1, feature_weight=1.0, noise=0.1),
    # EAGLE-1's loss over three aligned steps, and the target's ten best tokens (HASS, arXiv:2408.15766).
    "hass": Objective(
        steps=3, decay=1.0, token_weight=0.1, feature_weight=1.0, best_weight=1.0, noise=0.1, detach=True
    ),
    # Seven steps of training-time test, cross-entropy (EAGLE-3, arXiv:2503.01840, section 3).
    "eagle3": Objective(),
}
"""The papers' objectives by name."""


class Signals(NamedTuple):
    """Outputs of the frozen target for a batch of texts.

    Attributes:
      features: [B, T, F], tapped states.
      hidden: [B, T, H], final-normed states, the input of the lm_head.
      embeds: [B, T, E], token embeddings; None if they are looked up later.
    """

    features: Float[Array, "B T F"]
    hidden: Float[Array, "B T H"]
    embeds: Float[Array, "B T E"] | None = None


class StepMetrics(NamedTuple):
    """Metrics per unrolled step (or head), [steps] each.

    Attributes:
      loss: mean token loss over supervised rows inside the draft vocabulary, plus mean feature loss over supervised.
      accuracy: share of supervised rows in which head and target have the same likeliest token. If the target's is
        outside the draft vocabulary, the row is a miss.
      counted: number of supervised rows.
    """

    loss: Float[Array, " steps"]
    accuracy: Float[Array, " steps"]
    counted: Float[Array, " steps"]


Logits = Callable[[Array], Array]


def unrolled_loss(
    config: HeadConfig,
    objective: Objective,
    head: Params,
    signals: Signals,
    texts: PackedTokens,
    target_logits: Logits,
    kept: Int[Array, " Vd"] | None,
    key: Array | None = None,
    mesh: Mesh | None = None,
    shares: Float[Array, " steps"] | None = None,
) -> tuple[Float[Array, ""], StepMetrics]:
    """Returns sum_k decay^k (mean loss of step k over its rows), and metrics per step.

    A row is supervised if the predicted token is supervised and in the same document. The token loss also requires
    that the draft vocabulary has the target's likeliest token.

    Args:
      target_logits: the target's lm_head, [.., H] -> [.., V]; EAGLE-1/2 heads use it, too.
      kept: target ids of the draft vocabulary, ascending; None is all of V.
      key: of the noise.
      mesh: every group of devices with its own rows uses a copy of the head (`mesh.copies`).
      shares: weight of every step's mean: the share of a micro-batch in the rows of that step.

    Raises:
      ConfigError: the mesh does not divide the rows.
    """
    features = signals.features
    if objective.noise > 0:
        if key is None:
            raise ValueError("key must be given for an objective with noise, got None. Pass jax.random.key(seed).")
        noise = jax.random.uniform(key, features.shape, jnp.float32, -objective.noise, objective.noise)
        features = features + noise.astype(features.dtype)

    def sums_of(head: Params, signals: Signals, texts: PackedTokens) -> _Sums:
        return _sums(config, objective, head, signals, texts, target_logits, kept)

    signals, groups = signals._replace(features=features), row_groups(mesh)
    if mesh is None or groups == 1:
        sums = sums_of(head, signals, texts)
    else:
        rows = texts.tokens.shape[0]
        if rows % groups:
            raise ConfigError(
                f"the number of rows must be a multiple of data={mesh.shape[DATA]} times fsdp={mesh.shape[FSDP]}, got "
                f"{rows}."
            )
        parts = jax.tree.map(lambda x: by_rows(x.reshape(groups, rows // groups, *x.shape[1:]), mesh), (signals, texts))
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.vmap(sums_of)(copies(head, mesh), *parts))
    loss = sums.loss / jnp.maximum(sums.inside, 1)
    if objective.feature_weight > 0:
        loss += objective.feature_weight * sums.feature / jnp.maximum(sums.counted, 1)
    metrics = StepMetrics(loss, sums.hits / jnp.maximum(sums.counted, 1), sums.counted)
    weighted = loss if shares is None else loss * shares
    return jnp.sum(objective.decay ** jnp.arange(objective.steps) * weighted), metrics


class _Sums(NamedTuple):
    """Sums over rows, [steps]; `inside` counts supervised rows inside the draft vocabulary."""

    loss: Array
    inside: Array
    hits: Array
    counted: Array
    feature: Array


def _sums(
    config: HeadConfig,
    objective: Objective,
    head: Params,
    signals: Signals,
    texts: PackedTokens,
    target_logits: Logits,
    kept: Int[Array, " Vd"] | None,
) -> _Sums:
    assert signals.embeds is not None, "head_loss looks up embeddings"
    states = unroll(
        config, head, signals.features, signals.embeds, texts, objective.steps, detach=objective.detach,
        remat=objective.remat,
    )  # fmt: skip
    head_logits = target_logits
    if config.kind == "eagle3":
        module = EagleHead(config)
        head_logits = lambda states: module.apply({"params": head}, states, method="logits")  # noqa: E731
    predicted = jnp.stack([behind(state, 1 + k) for k, state in enumerate(states)])
    supervised = jnp.stack([behind(supervised_ahead(texts, 2 + k), 1 + k) for k in range(objective.steps)])

    def sums_of(predicted: Array, hidden: Array, supervised: Array) -> _Sums:
        law, best, inside = jax.lax.stop_gradient(target_law(target_logits(hidden), kept))
        found = []
        for states, labelled in zip(predicted, supervised, strict=True):
            logits = head_logits(states)
            used = labelled & inside
            loss = jnp.where(used, _token_loss(objective, logits, law), 0.0)
            # Not argmax, which XLA for CPU does not vectorise. The loss needs the maximum anyway.
            hits = used & (jnp.take_along_axis(logits, best[..., None], -1)[..., 0] >= jnp.max(logits, axis=-1))
            rows = [jnp.sum(x, dtype=jnp.float32) for x in (used, hits, labelled)]
            found.append(_Sums(jnp.sum(loss), rows[0], rows[1], rows[2], jnp.zeros(())))
        return jax.tree.map(lambda *steps: jnp.stack(steps), *found)

    rows = (predicted, signals.hidden, supervised)
    sums = by_chunks(sums_of, rows, (2, 1, 2), objective.chunk, remat=objective.remat)
    if objective.feature_weight == 0:
        return sums
    feature = [
        jnp.sum(jnp.where(supervised[k], smooth_l1(predicted[k], signals.hidden), 0.0)) for k in range(objective.steps)
    ]
    return sums._replace(feature=jnp.stack(feature))


def _token_loss(objective: Objective, logits: Float[Array, "*b V"], p: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    if objective.token_loss == "ce" and objective.best_weight == 0:
        # p sums to one: -sum p log softmax(z) = log sum exp z - sum p z.
        return objective.token_weight * (jax.nn.logsumexp(logits, axis=-1) - rowwise_dot(p, logits))
    log_q = jax.nn.log_softmax(logits)
    if objective.token_loss == "ce":
        loss = soft_cross_entropy(log_q, p)
    elif objective.token_loss == "lk":
        loss = likelihood_of_acceptance(log_q, p)
    else:
        loss = blended_divergence(log_q, p, objective.eta)
    loss = objective.token_weight * loss
    if objective.best_weight > 0:
        loss += objective.best_weight * best_of(log_q, p, min(objective.best_count, p.shape[-1]))
    return loss


def target_law(
    logits: Float[Array, "*b V"], kept: Int[Array, " Vd"] | None
) -> tuple[Float[Array, "*b Vd"], Int[Array, "*b"], Bool[Array, "*b"]]:
    """Computes the target's distribution over the draft vocabulary.

    Returns:
      probabilities, normalised over the draft vocabulary; the index of its likeliest token; and whether that token is
      also the likeliest of the whole vocabulary.
    """
    if kept is None:
        best = jnp.argmax(logits, axis=-1)
        return jax.nn.softmax(logits, axis=-1), best, jnp.ones(best.shape, bool)
    inner = logits.at[..., kept].get(mode="promise_in_bounds", indices_are_sorted=True, unique_indices=True)
    inside = jnp.max(inner, axis=-1) >= jnp.max(logits, axis=-1)
    return jax.nn.softmax(inner, axis=-1), jnp.argmax(inner, axis=-1), inside
