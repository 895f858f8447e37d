"""Computes the losses of EAGLE-1/2, HASS and EAGLE-3 over an unrolled head, by chunks of rows.

Row t of the target's logits is its distribution of token t + 1. Step k of the head predicts that token in row
t - 1 - k, so one row of the target's logits serves all steps. Chunks are recomputed for the gradient: logits of target
and head exist for one chunk at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import ConfigError, HeadConfig, check_fields
from eagle_jax.core import largest
from eagle_jax.core.types import Params
from eagle_jax.models import EagleHead
from eagle_jax.packed import PackedTokens
from eagle_jax.parallel import by_rows, copies, row_groups
from eagle_jax.training.losses import (
    ahead,
    by_chunks,
    likelihood_of_acceptance,
    overlap,
    rowwise_dot,
    soft_cross_entropy,
    supervised_ahead,
)
from eagle_jax.training.unrolling import unroll


@dataclasses.dataclass(frozen=True)
class Objective:
    """Loss of a draft head; `PRESETS` has the papers' settings.

    Raises:
      ConfigError: a count is below 1, or all weights are 0.
    """

    steps: int = 7  # unrolled steps, n
    decay: float = 0.8  # step k has weight decay^k; the sum is not normalised
    # Soft cross-entropy, -log alpha, or lambda KL + (1 - lambda) TV with lambda = exp(-eta alpha) (arXiv:2602.23881).
    token_loss: Literal["ce", "lk", "lk_blend"] = "ce"
    eta: float = 3.0
    token_weight: float = 1.0
    feature_weight: float = 0.0  # weight of SmoothL1 between the head's state and the target's final-normed state
    best_weight: float = 0.0  # weight of HASS's loss over the target's `best_count` likeliest tokens
    best_count: int = 10
    noise: float = 0.0  # bound of the uniform noise on the target's features
    detach: bool = False  # no gradient flows from a step into the step before it (HASS)
    chunk: int = 256  # positions of a text whose logits exist at once
    remat: bool = True  # recomputes steps and chunks for the gradient; False keeps all logits in memory

    def __post_init__(self) -> None:
        check_fields(self, "steps", "best_count", "chunk")
        if self.token_weight == self.feature_weight == self.best_weight == 0:
            raise ConfigError("token_weight, feature_weight or best_weight must be above 0, got only 0. Raise one.")


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


class TargetOutputs(NamedTuple):
    """Outputs of the frozen target for a batch of texts."""

    features: Float[Array, "B T F"]  # tapped states
    hidden: Float[Array, "B T H"]  # final-normed states, the input of the lm_head
    embeds: Float[Array, "B T E"] | None = None  # input embeddings; None if they are looked up later


class StepMetrics(NamedTuple):
    """Metrics per unrolled step (or head)."""

    # Of an EAGLE head, the weighted sum of means that `Objective` names: token loss (and HASS's best tokens) over
    # supervised rows inside the draft vocabulary, feature loss over all supervised rows.
    loss: Float[Array, " steps"]
    # Share of supervised rows where head and target have the same likeliest token. A row whose target argmax is outside
    # the draft vocabulary counts as wrong. `medusa_loss(teacher=False)` compares with the text's token instead, and
    # `distillation_loss` returns the mean alpha.
    accuracy: Float[Array, " steps"]
    counted: Float[Array, " steps"]  # number of supervised rows


Logits = Callable[[Array], Array]


def unrolled_loss(
    config: HeadConfig,
    objective: Objective,
    head: Params,
    target_outputs: TargetOutputs,
    texts: PackedTokens,
    target_logits: Logits,
    kept: Int[Array, " Vd"] | None,
    key: Array,
    mesh: Mesh | None = None,
    shares: Float[Array, " steps"] | float = 1.0,
) -> tuple[Float[Array, ""], StepMetrics]:
    """Returns sum_k decay^k (mean loss of step k over its rows), and metrics per step.

    A row is supervised if the predicted token is supervised and in the same document. The token loss also requires
    that the draft vocabulary has the target's likeliest token.

    Args:
      target_logits: the target's lm_head, [.., H] -> [.., V]; EAGLE-1/2 heads use it, too.
      kept: target ids of the draft vocabulary, ascending; None is all of V.
      key: of the noise.
      mesh: divides the rows over groups of devices, each with a copy of the head; None does not divide.
      shares: factor of every step's mean: the micro-batch's share of all supervised rows of that step.
    """
    if objective.noise > 0:
        features = target_outputs.features
        noise = jax.random.uniform(key, features.shape, jnp.float32, -objective.noise, objective.noise)
        target_outputs = target_outputs._replace(features=features + noise.astype(features.dtype))
    sums_of, groups = functools.partial(_sums, config, objective, target_logits, kept), row_groups(mesh)
    if mesh is None or groups == 1:
        sums = sums_of(head, target_outputs, texts)
    else:
        grouped = lambda x: by_rows(x.reshape(groups, -1, *x.shape[1:]), mesh)  # noqa: E731
        parts = jax.tree.map(grouped, (target_outputs, texts))
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.vmap(sums_of)(copies(head, mesh), *parts))
    loss = sums.loss / jnp.maximum(sums.inside, 1)
    if objective.feature_weight > 0:
        loss += objective.feature_weight * sums.feature / jnp.maximum(sums.counted, 1)
    metrics = StepMetrics(loss, sums.hits / jnp.maximum(sums.counted, 1), sums.counted)
    return jnp.sum(objective.decay ** jnp.arange(objective.steps) * loss * shares), metrics


class _Sums(NamedTuple):
    """Sums over rows, [steps]; `inside` counts supervised rows inside the draft vocabulary."""

    loss: Array
    inside: Array
    hits: Array
    counted: Array
    feature: Array


def _sums(
    config: HeadConfig, objective: Objective, target_logits: Logits, kept: Int[Array, " Vd"] | None, head: Params,
    target_outputs: TargetOutputs, texts: PackedTokens,
) -> _Sums:  # fmt: skip
    assert target_outputs.embeds is not None, "embeds must be set, got None"
    states = unroll(
        config, head, target_outputs.features, target_outputs.embeds, texts, objective.steps, detach=objective.detach,
        remat=objective.remat,
    )  # fmt: skip
    head_logits = target_logits
    if config.kind == "eagle3":
        module = EagleHead(config)
        head_logits = lambda states: module.apply({"params": head}, states, method="logits")  # noqa: E731
    predicted = jnp.stack([ahead(state, -1 - k) for k, state in enumerate(states)])
    supervised = jnp.stack([ahead(supervised_ahead(texts, 2 + k), -1 - k) for k in range(objective.steps)])

    def sums_of(predicted: Array, hidden: Array, supervised: Array) -> _Sums:
        law, best, inside = jax.lax.stop_gradient(target_law(target_logits(hidden), kept))
        found = []
        for states, labelled in zip(predicted, supervised, strict=True):
            logits = head_logits(states)
            used = labelled & inside
            loss = jnp.where(used, _token_loss(objective, logits, law), 0.0)
            # Compares with the maximum, which the loss needs anyway: XLA for CPU does not vectorise argmax.
            hits = used & (jnp.take_along_axis(logits, best[..., None], -1)[..., 0] >= jnp.max(logits, axis=-1))
            feature = jnp.zeros(())
            if objective.feature_weight > 0:
                errors = optax.huber_loss(states.astype(jnp.float32) - hidden.astype(jnp.float32))  # SmoothL1
                feature = jnp.where(labelled, jnp.mean(errors, axis=-1), 0.0)
            found.append(_Sums(*(jnp.sum(x, dtype=jnp.float32) for x in (loss, used, hits, labelled, feature))))
        return jax.tree.map(lambda *steps: jnp.stack(steps), *found)

    rows = (predicted, target_outputs.hidden, supervised)
    return by_chunks(sums_of, rows, (2, 1, 2), objective.chunk, remat=objective.remat)


def _token_loss(objective: Objective, logits: Float[Array, "*b V"], p: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    if objective.token_loss == "ce" and objective.best_weight == 0:
        # p sums to one: -sum p log softmax(z) = log sum exp z - sum p z.
        return objective.token_weight * (jax.nn.logsumexp(logits, axis=-1) - rowwise_dot(p, logits))
    log_q = jax.nn.log_softmax(logits)
    if objective.token_loss == "ce":
        loss = soft_cross_entropy(log_q, p)
    elif objective.token_loss == "lk":
        loss = likelihood_of_acceptance(log_q, p)
    else:  # far from the target KL dominates, whose gradient never vanishes; near it TV = 1 - alpha
        alpha = overlap(log_q, p)
        share = jax.lax.stop_gradient(jnp.exp(-objective.eta * alpha))
        divergence = soft_cross_entropy(log_q, p) - jnp.sum(jax.scipy.special.entr(p), axis=-1)
        loss = share * divergence + (1.0 - share) * (1.0 - alpha)
    loss = objective.token_weight * loss
    if objective.best_weight > 0:  # cross-entropy over the likeliest tokens (HASS, section 3.1)
        mass, index = largest(p, min(objective.best_count, p.shape[-1]))
        loss -= objective.best_weight * jnp.sum(mass * jnp.take_along_axis(log_q, index, axis=-1), axis=-1)
    return loss


def target_law(
    logits: Float[Array, "*b V"], kept: Int[Array, " Vd"] | None
) -> tuple[Float[Array, "*b Vd"], Int[Array, "*b"], Bool[Array, "*b"]]:
    """Returns the target's distribution over draft tokens, its argmax, and whether V has the same argmax."""
    if kept is None:
        best = jnp.argmax(logits, axis=-1)
        return jax.nn.softmax(logits, axis=-1), best, jnp.ones(best.shape, bool)
    inner = logits.at[..., kept].get(mode="promise_in_bounds", indices_are_sorted=True, unique_indices=True)
    inside = jnp.max(inner, axis=-1) >= jnp.max(logits, axis=-1)
    return jax.nn.softmax(inner, axis=-1), jnp.argmax(inner, axis=-1), inside
