"""Checks losses and updates of head training against slow, literal versions."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import training
from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig
from eagle_jax.models import EagleHead, attention, init_head_params, init_params
from eagle_jax.training import PRESETS, Frozen, HeadTrainState, Objective, TargetOutputs
from eagle_jax.training.losses import ahead, count_rows
from eagle_jax.training.objective import unrolled_loss
from tests.training.common import packed_texts, random_params

B, T, V, H = 2, 9, 13, 8
KEPT = np.array([0, 2, 3, 5, 8, 9, 12])
VD = len(KEPT)
TARGET = DecoderConfig(V, H, 12, 4, num_heads=4, num_kv_heads=2, head_dim=6)


def head_config(kind: str = "eagle3", **switches) -> HeadConfig:
    layer = DecoderConfig(V, H, 10, 1, num_heads=4, num_kv_heads=2, head_dim=6)
    if kind == "eagle1":
        return HeadConfig("eagle1", layer, V, H, (4,), fc_bias=True)
    return HeadConfig("eagle3", layer, VD, H, (1, 2, 3), **switches)


def with_window(config: HeadConfig, window: int) -> HeadConfig:
    return dataclasses.replace(config, layer=dataclasses.replace(config.layer, windows=(window,)))


def random_head(config: HeadConfig):
    return random_params(init_head_params, config)["head"]


TEXTS = packed_texts(((5, 4), (9,)), T, V)
LM_HEAD = np.random.default_rng(9).normal(size=(H, V)).astype(np.float32)


def random_target():
    return random_params(init_params, TARGET, 5, 0.3)


def target_logits(hidden):
    return hidden @ LM_HEAD


def random_signals(config: HeadConfig) -> TargetOutputs:
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(B, T, H)), jnp.float32)
    features = hidden if config.kind == "eagle1" else jnp.asarray(rng.normal(size=(B, T, 3 * H)), jnp.float32)
    return TargetOutputs(features, hidden, jnp.asarray(rng.normal(size=(B, T, H)), jnp.float32))


@dataclasses.dataclass
class Slow:
    """Computes the loss step by step and row by row, with one mask over the keys of all steps."""

    config: HeadConfig
    objective: Objective
    signals: TargetOutputs

    def states(self, head):
        module, signals, segments = EagleHead(self.config), self.signals, np.asarray(TEXTS.segments)
        states = module.apply({"params": head}, signals.features, method="fuse")
        found, keys, values = [], [], []
        for k in range(self.objective.steps):
            mask = np.zeros((B, T, (k + 1) * T), bool)
            for b in range(B):
                for p in range(T):
                    mask[b, p, : p + 1] = segments[b, : p + 1] == segments[b, p]
                    mask[b, p, T + p :: T] = True
            embeds = jnp.stack([signals.embeds[:, min(p + 1 + k, T - 1)] * (p + 1 + k < T) for p in range(T)], 1)
            earlier = (jnp.concatenate(keys, 2), jnp.concatenate(values, 2)) if keys else None
            positions = TEXTS.positions + k
            out = module.apply({"params": head}, embeds, states, positions, jnp.asarray(mask), None, earlier)
            keys.append(out.keys)
            values.append(out.values)
            states = jax.lax.stop_gradient(out.states) if self.objective.detach else out.states
            found.append(out.states)
        return found

    def __call__(self, head):
        """Returns the total loss, and of each step (loss, accuracy, counted)."""
        config, objective, texts = self.config, self.objective, jax.tree.map(np.asarray, TEXTS)
        kept = KEPT if config.kind == "eagle3" else np.arange(V)
        full = np.asarray(self.signals.hidden) @ LM_HEAD
        total, rows = 0.0, []
        for k, states in enumerate(self.states(head)):
            if config.kind == "eagle3":
                logits = EagleHead(config).apply({"params": head}, states, method="logits")
            else:
                logits = target_logits(states)
            log_q = jax.nn.log_softmax(logits, -1)
            token, feature, inside, hits, counted = 0.0, 0.0, 0, 0, 0
            for b in range(B):
                for p in range(T):
                    guessed = p + 2 + k
                    same = guessed < T and texts.segments[b, p] == texts.segments[b, guessed] > 0
                    if not (same and texts.supervised[b, guessed]):
                        continue
                    counted += 1
                    taught = full[b, guessed - 1]
                    wanted = np.asarray(self.signals.hidden)[b, guessed - 1]
                    if objective.feature_weight:
                        error = jnp.abs(states[b, p] - wanted)
                        feature += jnp.mean(jnp.where(error < 1, 0.5 * error**2, error - 0.5))
                    if taught.argmax() not in kept:
                        continue
                    inside += 1
                    law = np.exp(taught[kept] - taught[kept].max())
                    law = law / law.sum()
                    hits += jnp.asarray(kept)[jnp.argmax(log_q[b, p])] == taught.argmax()
                    token += self.token(log_q[b, p], law)
            loss = token / max(inside, 1) + objective.feature_weight * feature / max(counted, 1)
            total += objective.decay**k * loss
            rows.append((loss, hits / max(counted, 1), counted))
        return total, rows

    def token(self, log_q, law):
        objective, q = self.objective, jnp.exp(log_q)
        alpha = 1.0 - 0.5 * jnp.sum(jnp.abs(law - q))
        if objective.token_loss == "ce":
            loss = -jnp.sum(law * log_q)
        elif objective.token_loss == "lk":
            loss = -jnp.log(alpha)
        else:
            share = jax.lax.stop_gradient(jnp.exp(-objective.eta * alpha))
            loss = share * jnp.sum(law * (np.log(law) - log_q)) + (1 - share) * 0.5 * jnp.sum(jnp.abs(law - q))
        loss = objective.token_weight * loss
        if objective.best_weight:
            best = np.argsort(-law, kind="stable")[: objective.best_count]
            loss = loss - objective.best_weight * jnp.sum(law[best] * log_q[best])
        return loss


def fast(config, objective, signals):
    kept = jnp.asarray(KEPT) if config.kind == "eagle3" else None
    return lambda head: unrolled_loss(config, objective, head, signals, TEXTS, target_logits, kept, jax.random.key(1))


SWITCHES = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
CASES = {
    "eagle3": (head_config(), Objective(steps=3, chunk=4, remat=False)),
    "eagle3-switches": (head_config(**SWITCHES), Objective(steps=2, chunk=9)),
    "lk": (head_config(), Objective(steps=2, token_loss="lk", chunk=5)),
    "lk-blend": (head_config(), Objective(steps=2, token_loss="lk_blend", chunk=20)),
    "window": (with_window(head_config(), 3), Objective(steps=5, chunk=4, remat=False)),
    "eagle1": (head_config("eagle1"), dataclasses.replace(PRESETS["eagle1"], noise=0.0)),
    "hass": (head_config("eagle1"), dataclasses.replace(PRESETS["hass"], noise=0.0, best_count=3, chunk=4)),
}


SLOW = ("lk-blend", "eagle1")  # the others have their parts


@pytest.mark.parametrize(
    ("config", "objective"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in CASES.items()],
)
def test_loss_and_gradients_are_those_of_the_literal_version(config, objective):
    head, signals = random_head(config), random_signals(config)
    (loss, metrics), grads = jax.jit(jax.value_and_grad(fast(config, objective, signals), has_aux=True))(head)
    slow = Slow(config, objective, signals)
    (wanted, rows), wanted_grads = jax.jit(jax.value_and_grad(slow, has_aux=True))(head)
    np.testing.assert_allclose(loss, wanted, rtol=2e-5)
    for name, index in (("loss", 0), ("accuracy", 1), ("counted", 2)):
        np.testing.assert_allclose(getattr(metrics, name), [float(row[index]) for row in rows], rtol=2e-5, err_msg=name)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        scale = float(jnp.abs(want).max())
        assert scale > 0, "without a gradient the comparison would be empty"
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * scale)


def test_long_texts_attend_block_by_block(monkeypatch):
    """Blocks of four queries, the last one padded, give the loss and gradients of one block."""
    config, objective = CASES["eagle3"]
    head, signals = random_head(config), random_signals(config)
    run = lambda: jax.jit(jax.value_and_grad(fast(config, objective, signals), has_aux=True))(head)  # noqa: E731
    whole = run()
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    np.testing.assert_allclose(*(part[0][0] for part in (run(), whole)), rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), run()[1], whole[1])


def test_noise_changes_the_loss():
    config, objective = head_config("eagle1"), PRESETS["eagle1"]
    head, signals = random_head(config), random_signals(config)
    quiet = fast(config, dataclasses.replace(objective, noise=0.0), signals)(head)[0]
    assert abs(float(fast(config, objective, signals)(head)[0]) - float(quiet)) > 1e-6


def test_an_objective_needs_a_weight():
    with pytest.raises(ConfigError, match="above 0, got only 0"):
        Objective(token_weight=0.0)


def test_the_gradient_keeps_no_logits_of_a_whole_text():
    """The largest array with a vocabulary axis in the gradient's program is that of one chunk."""
    config = head_config()
    loss = fast(config, Objective(steps=3, chunk=3), random_signals(config))
    program = str(jax.make_jaxpr(jax.grad(lambda head: loss(head)[0]))(random_head(config)))
    shapes = [[*map(int, found.split(","))] for found in re.findall(r"f32\[([\d,]+)\]", program)]
    assert max(math.prod(shape) for shape in shapes if shape[-1] in (V, VD) and len(shape) > 2) <= B * 3 * V


def test_ahead_shifts_and_fills_with_zeros():
    x = jnp.arange(1, 6)[None]
    assert ahead(x, 2)[0].tolist() == [3, 4, 5, 0, 0]
    assert ahead(x, -2)[0].tolist() == [0, 0, 1, 2, 3]
    assert ahead(x, 9)[0].tolist() == ahead(x, -9)[0].tolist() == [0] * 5


def test_fold_scale_does_not_change_the_loss():
    config, params = head_config(), random_target()
    head = random_head(config)
    given = jax.jit(lambda params: training.observe(TARGET, params, TEXTS, config.taps))(params)
    scale = training.feature_scale(given.features, TEXTS)
    assert float(scale.min()) > 0
    d2t = jnp.asarray(KEPT - np.arange(VD), jnp.int32)

    @functools.partial(jax.jit, static_argnames="stored")
    def loss(head, scale, stored):
        frozen, key = Frozen(params, d2t, scale), jax.random.key(0)
        signals = given._replace(embeds=None) if stored else None
        objective = Objective(steps=2, remat=False)
        return training.head_loss(TARGET, config, objective, head, frozen, TEXTS, key, target_outputs=signals)[0]

    scaled = loss(head, scale, False)
    np.testing.assert_allclose(scaled, loss(training.fold_scale(head, scale), None, False), rtol=1e-5)
    np.testing.assert_allclose(scaled, loss(head, scale, True), rtol=1e-6)


def test_micro_batches_give_the_update_of_the_whole_batch():
    """One half has most of the supervised tokens. The other has none for the last step."""
    config = dataclasses.replace(head_config(), draft_vocab_size=V)
    rare = TEXTS.supervised.at[1].set(jnp.arange(T) == 2)
    texts = TEXTS._replace(supervised=rare)
    frozen = Frozen(random_target(), jnp.zeros((V,), jnp.int32))
    tx = training.head_optimiser(1e-2, 1, 10)
    objective = Objective(steps=2, feature_weight=1.0, remat=False)
    head = random_head(config)

    update = jax.jit(functools.partial(training.head_train_step, TARGET, config, objective, tx, "float32"))

    def updated(parts):
        shaped = jax.tree.map(lambda x: x.reshape(parts, B // parts, *x.shape[1:]), texts)
        return update(HeadTrainState(head, tx.init(head), jnp.int32(1), jax.random.key(0)), frozen, shaped)

    (whole, report), (halves, other) = updated(1), updated(2)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), report, other)
    assert count_rows(jax.tree.map(lambda x: x[1:], texts), 2).tolist() == [1, 0]
    assert report.metrics.counted[0] == jnp.sum(rare[:, 1:] & (texts.positions[:, 1:] > 1))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), whole.head, halves.head)
