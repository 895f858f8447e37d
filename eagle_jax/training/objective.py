"""What a draft head is taught: the losses of EAGLE-1/2, HASS and EAGLE-3 over an unrolled head, chunk by chunk.

Row t of a text stands for the target's distribution of token t + 1. Step k of the head guesses it in row t - 1 - k, so
all steps are judged by one row of the target's logits. The rows are taken in chunks, computed again for their gradient:
neither the target's nor the head's logits ever exist for more than one chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import ConfigError, HeadConfig
from eagle_jax.core.types import Params
from eagle_jax.models.heads import make_head
from eagle_jax.packed import PackedTokens
from eagle_jax.parallel.mesh import DATA, FSDP, by_rows, copies, row_groups
from eagle_jax.training.losses import (
    ahead,
    behind,
    best_of,
    blended_divergence,
    by_chunks,
    likelihood_of_acceptance,
    rowwise_dot,
    smooth_l1,
    soft_cross_entropy,
)
from eagle_jax.training.unroll import unroll


@dataclasses.dataclass(frozen=True)
class Objective:
    """How a head is taught; `eagle1`, `hass` and `eagle3` are the papers' settings.

    Attributes:
      steps: unrolled steps, n. decay: weight of each further step; the sum is not normalised.
      token_loss: "ce" soft cross-entropy, "lk" -log alpha, "lk_blend" lambda KL + (1 - lambda) TV (arXiv:2602.23881).
      eta: of lk_blend, how soon TV takes over. token_weight: of the token loss.
      feature_weight: of SmoothL1 between the head's state and the target's final-normed one at the next token.
      best_weight, best_count: of HASS's loss over the target's likeliest tokens, and how many.
      noise: width of the uniform noise U(-noise, noise) on the target's features.
      detach: states that a step starts from count as given (HASS).
      chunk: rows of a text whose logits exist at once.
      remat: steps and chunks are computed again for their gradient; without, all logits stay in memory.

    Raises:
      ConfigError: a count below 1, a negative weight, or no loss at all.
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
        for name in ("steps", "best_count", "chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Objective.{name}={getattr(self, name)} must be at least 1")
        for name in ("decay", "eta", "token_weight", "feature_weight", "best_weight", "noise"):
            if getattr(self, name) < 0:
                raise ConfigError(f"Objective.{name}={getattr(self, name)} must not be negative")
        if self.token_weight == self.feature_weight == self.best_weight == 0:
            raise ConfigError("Objective: token_weight, feature_weight and best_weight are all 0; nothing is taught")


def eagle1() -> Objective:
    """EAGLE-1/2: one step, SmoothL1(feature) + 0.1 cross-entropy, noisy features (arXiv:2401.15077, section 4.2)."""
    return Objective(steps=1, token_weight=0.1, feature_weight=1.0, noise=0.1)


def hass() -> Objective:
    """HASS: EAGLE-1's loss over three aligned steps, and the target's ten best tokens (arXiv:2408.15766)."""
    return Objective(steps=3, decay=1.0, token_weight=0.1, feature_weight=1.0, best_weight=1.0, noise=0.1, detach=True)


def eagle3() -> Objective:
    """EAGLE-3: seven steps of training-time test, cross-entropy alone (arXiv:2503.01840, section 3)."""
    return Objective()


PRESETS: dict[str, Callable[[], Objective]] = {"eagle1": eagle1, "hass": hass, "eagle3": eagle3}
"""The papers' objectives by name."""


class Signals(NamedTuple):
    """What the frozen target says about a batch of texts.

    Attributes:
      features: [B, T, F], tapped states that the head reads. hidden: [B, T, H], final-normed, what its lm_head reads.
      embeds: [B, T, E], token embeddings; None where they are still to be looked up.
    """

    features: Float[Array, "B T F"]
    hidden: Float[Array, "B T H"]
    embeds: Float[Array, "B T E"] | None = None


class StepMetrics(NamedTuple):
    """Per unrolled step, [steps] each.

    Attributes:
      loss: mean over the counted rows, all parts weighted. accuracy: how often the head's favourite is the target's,
        over all supervised rows; a favourite outside the draft vocabulary is a miss. counted: supervised rows.
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
    """sum_k decay^k (mean loss of step k over its counted rows).

    A row counts where the guessed token is supervised and of the same document, and the target's favourite for it is in
    the draft vocabulary.

    Args:
      target_logits: the target's lm_head, [.., H] -> [.., V]; an EAGLE-1/2 head is judged through it, too.
      kept: target ids of the draft vocabulary, ascending; None is all of V.
      key: of the noise.
      mesh: every group of devices with rows of their own computes with a copy of the head (`sharding.copies`).
      shares: weight of every step's mean; of a micro-batch, its share of the rows that step judges.

    Raises:
      ConfigError: the mesh does not divide the rows.
    """
    features = signals.features
    if objective.noise > 0:
        if key is None:
            raise ValueError("an objective with noise needs a key")
        noise = jax.random.uniform(key, features.shape, jnp.float32, -objective.noise, objective.noise)
        features = features + noise.astype(features.dtype)

    def judged(head: Params, signals: Signals, texts: PackedTokens) -> _Sums:
        return _judged(config, objective, head, signals, texts, target_logits, kept)

    signals, groups = signals._replace(features=features), row_groups(mesh)
    if mesh is None or groups == 1:
        sums = judged(head, signals, texts)
    else:
        rows = texts.tokens.shape[0]
        if rows % groups:
            raise ConfigError(
                f"{rows} rows are not a multiple of data={mesh.shape[DATA]} times fsdp={mesh.shape[FSDP]}"
            )
        parts = jax.tree.map(lambda x: by_rows(x.reshape(groups, rows // groups, *x.shape[1:]), mesh), (signals, texts))
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.vmap(judged)(copies(head, mesh), *parts))
    loss = sums.loss / jnp.maximum(sums.inside, 1)
    if objective.feature_weight > 0:
        loss += objective.feature_weight * sums.feature / jnp.maximum(sums.counted, 1)
    metrics = StepMetrics(loss, sums.hits / jnp.maximum(sums.counted, 1), sums.counted)
    weighed = loss if shares is None else loss * shares
    return jnp.sum(objective.decay ** jnp.arange(objective.steps) * weighed), metrics


def judged_rows(texts: PackedTokens, steps: int) -> Float[Array, " steps"]:
    """Rows of packed texts, [B, T], that each unrolled step is judged by; those outside a draft vocabulary included."""
    return jnp.sum(_judged_rows(texts, steps), axis=(1, 2), dtype=jnp.float32)


def _judged_rows(texts: PackedTokens, steps: int) -> Bool[Array, "n B T"]:
    """Whether row t holds a guess of step k that is to be judged: token t + 1 is supervised, of the row's document."""
    supervised, segments = ahead(texts.supervised, 1), ahead(texts.segments, 1)
    origins = [behind(texts.segments, 1 + k) for k in range(steps)]
    return jnp.stack([supervised & (origin == segments) & (origin > 0) for origin in origins])


class _Sums(NamedTuple):
    """Over rows, [steps]: token losses, rows inside the draft vocabulary, hits, supervised rows, feature losses."""

    loss: Array
    inside: Array
    hits: Array
    counted: Array
    feature: Array


def _judged(
    config: HeadConfig,
    objective: Objective,
    head: Params,
    signals: Signals,
    texts: PackedTokens,
    target_logits: Logits,
    kept: Int[Array, " Vd"] | None,
) -> _Sums:
    if signals.embeds is None:
        raise ValueError("signals without token embeddings: head_loss looks them up")
    states = unroll(
        config,
        head,
        signals.features,
        signals.embeds,
        texts,
        objective.steps,
        detach=objective.detach,
        remat=objective.remat,
    )
    if config.kind == "eagle3":
        module = make_head(config)
        head_logits: Logits = lambda states: module.apply({"params": head}, states, method="logits")  # noqa: E731
    else:
        head_logits = target_logits
    guessed = jnp.stack([behind(state, 1 + k) for k, state in enumerate(states)])
    supervised = _judged_rows(texts, objective.steps)
    sums = _judge_rows(objective, guessed, signals.hidden, supervised, target_logits, head_logits, kept)
    if objective.feature_weight == 0:
        return sums
    feature = [
        jnp.sum(jnp.where(supervised[k], smooth_l1(guessed[k], signals.hidden), 0.0)) for k in range(objective.steps)
    ]
    return sums._replace(feature=jnp.stack(feature))


def _judge_rows(
    objective: Objective,
    guessed: Float[Array, "n B T H"],
    hidden: Float[Array, "B T Ht"],
    supervised: Bool[Array, "n B T"],
    target_logits: Logits,
    head_logits: Logits,
    kept: Int[Array, " Vd"] | None,
) -> _Sums:
    def judge(guessed: Array, hidden: Array, supervised: Array) -> _Sums:
        law, best, inside = jax.lax.stop_gradient(target_law(target_logits(hidden), kept))
        found = []
        for states, wanted in zip(guessed, supervised, strict=True):
            logits = head_logits(states)
            counted = wanted & inside
            loss = jnp.where(counted, _token_loss(objective, logits, law), 0.0)
            # Not argmax, which XLA for CPU does one number at a time; the maximum is computed for the loss anyway.
            hits = counted & (jnp.take_along_axis(logits, best[..., None], -1)[..., 0] >= jnp.max(logits, axis=-1))
            rows = [jnp.sum(x, dtype=jnp.float32) for x in (counted, hits, wanted)]
            found.append(_Sums(jnp.sum(loss), rows[0], rows[1], rows[2], jnp.zeros(())))
        return jax.tree.map(lambda *steps: jnp.stack(steps), *found)

    return by_chunks(judge, (guessed, hidden, supervised), (2, 1, 2), objective.chunk, remat=objective.remat)


def _token_loss(objective: Objective, logits: Float[Array, "*b V"], p: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    if objective.token_loss == "ce" and objective.best_weight == 0:
        # Of probabilities that sum to one: -sum p log softmax(z) = log sum exp z - sum p z.
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
    """The target's distribution as a head is taught it.

    Returns:
      probabilities renormalised over the draft vocabulary; the likeliest of its tokens as an index into it; and whether
      that is the target's own favourite, which may lie outside.
    """
    if kept is None:
        best = jnp.argmax(logits, axis=-1)
        return jax.nn.softmax(logits, axis=-1), best, jnp.ones(best.shape, bool)
    inner = logits.at[..., kept].get(mode="promise_in_bounds", indices_are_sorted=True, unique_indices=True)
    inside = jnp.max(inner, axis=-1) >= jnp.max(logits, axis=-1)
    return jax.nn.softmax(inner, axis=-1), jnp.argmax(inner, axis=-1), inside
