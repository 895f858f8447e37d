"""The losses of head training against slow, literal versions."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig
from eagle_jax.models import layers
from eagle_jax.models.decoder import init_params, target_fn
from eagle_jax.models.heads import EagleHead, init_head_params
from eagle_jax.packed import PackedTokens
from eagle_jax.training.losses import ahead, behind, count_rows
from eagle_jax.training.objective import PRESETS, Objective, Signals, unrolled_loss
from eagle_jax.training.step import (
    Frozen,
    HeadTrainState,
    feature_scale,
    fold_scale,
    head_loss,
    head_optimiser,
    head_train_step,
    observe,
)
from eagle_jax.training.unroll import causal_mask

B, T, V, H = 2, 9, 13, 8
KEPT = np.array([0, 2, 3, 5, 8, 9, 12])
VD = len(KEPT)
TARGET = DecoderConfig(V, H, 12, 4, num_heads=4, num_kv_heads=2, head_dim=6)
VARIANTS = {"plain": {}, "switched": {"fc_norm": True, "norm_output": True, "norm_before_residual": True}}


def head_config(kind: str = "eagle3", **switches) -> HeadConfig:
    layer = DecoderConfig(V, H, 10, 1, num_heads=4, num_kv_heads=2, head_dim=6)
    if kind == "eagle1":
        return HeadConfig("eagle1", layer, V, H, (4,), fc_bias=True)
    return HeadConfig("eagle3", layer, VD, H, (1, 2, 3), **switches)


def random_head(config: HeadConfig, seed: int = 0):
    """Weights large enough that attention and norms matter (NumPy: nothing to compile)."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init_head_params(config, jax.random.key(0)))["head"]
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.4, jnp.float32), shapes)


def random_target():
    rng = np.random.default_rng(5)
    shapes = jax.eval_shape(lambda: init_params(TARGET, jax.random.key(0)))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.3, jnp.float32), shapes)


LM_HEAD = np.random.default_rng(9).normal(size=(H, V)).astype(np.float32)


def target_logits(hidden):
    return hidden @ LM_HEAD


def random_signals(config: HeadConfig, seed: int = 3) -> Signals:
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(B, T, H)), jnp.float32)
    features = hidden if config.kind == "eagle1" else jnp.asarray(rng.normal(size=(B, T, 3 * H)), jnp.float32)
    return Signals(features, hidden, jnp.asarray(rng.normal(size=(B, T, H)), jnp.float32))


def texts_of(lengths: tuple[tuple[int, ...], ...] = ((5, 4), (9,)), seed: int = 4) -> PackedTokens:
    """Documents of these lengths packed into rows of T tokens; most tokens are supervised, none of a first."""
    rng = np.random.default_rng(seed)
    segments, positions = np.zeros((2, len(lengths), T), np.int32)
    for row, sizes in enumerate(lengths):
        start = 0
        for index, size in enumerate(sizes, 1):
            segments[row, start : start + size] = index
            positions[row, start : start + size] = np.arange(size)
            start += size
    supervised = (rng.random(segments.shape) < 0.8) & (segments > 0) & (positions > 0)
    tokens = rng.integers(0, V, segments.shape)
    return PackedTokens(*map(jnp.asarray, (tokens.astype(np.int32), supervised, segments, positions)))


@dataclasses.dataclass
class Slow:
    """The loss step by step and row by row, with the keys of all steps side by side and a mask over them."""

    config: HeadConfig
    objective: Objective
    signals: Signals
    texts: PackedTokens

    def states(self, head):
        module, texts, signals = EagleHead(self.config), jax.tree.map(np.asarray, self.texts), self.signals
        states = module.apply({"params": head}, signals.features, method="fuse")
        found, keys, values = [], [], []
        for k in range(self.objective.steps):
            mask = np.zeros((B, T, (k + 1) * T), bool)
            for b in range(B):
                for p in range(T):
                    mask[b, p, : p + 1] = texts.segments[b, : p + 1] == texts.segments[b, p]
                    for later in range(1, k + 1):
                        mask[b, p, later * T + p] = True
            embeds = jnp.stack([signals.embeds[:, min(p + 1 + k, T - 1)] * (p + 1 + k < T) for p in range(T)], 1)
            earlier = (jnp.concatenate(keys, 2), jnp.concatenate(values, 2)) if keys else None
            out = module.apply(
                {"params": head}, embeds, states, self.texts.positions + k, jnp.asarray(mask), None, earlier
            )
            keys.append(out.keys)
            values.append(out.values)
            states = jax.lax.stop_gradient(out.states) if self.objective.detach else out.states
            found.append(out.states)
        return found

    def __call__(self, head):
        """Total loss; and per step [loss, accuracy, counted]."""
        config, objective, texts = self.config, self.objective, jax.tree.map(np.asarray, self.texts)
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
                    speaks = full[b, guessed - 1]
                    wanted = np.asarray(self.signals.hidden)[b, guessed - 1]
                    if objective.feature_weight:
                        error = jnp.abs(states[b, p] - wanted)
                        feature += jnp.mean(jnp.where(error < 1, 0.5 * error**2, error - 0.5))
                    if speaks.argmax() not in kept:
                        continue
                    inside += 1
                    law = np.exp(speaks[kept] - speaks[kept].max())
                    law = law / law.sum()
                    hits += jnp.asarray(kept)[jnp.argmax(log_q[b, p])] == speaks.argmax()
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


def fast(config, objective, signals, texts):
    kept = jnp.asarray(KEPT) if config.kind == "eagle3" else None
    return lambda head: unrolled_loss(config, objective, head, signals, texts, target_logits, kept, jax.random.key(1))


CASES = {
    "eagle3": (head_config(), Objective(steps=3, chunk=4, remat=False)),
    "eagle3-switches": (head_config(**VARIANTS["switched"]), Objective(steps=2, chunk=9)),
    "lk": (head_config(), Objective(steps=2, token_loss="lk", chunk=5)),
    "lk-blend": (head_config(), Objective(steps=2, token_loss="lk_blend", chunk=20)),
    "eagle1": (head_config("eagle1"), dataclasses.replace(PRESETS["eagle1"], noise=0.0)),
    "hass": (head_config("eagle1"), dataclasses.replace(PRESETS["hass"], noise=0.0, best_count=3, chunk=4)),
}


@pytest.mark.parametrize(("config", "objective"), CASES.values(), ids=CASES)
def test_loss_and_gradients_are_those_of_the_literal_version(config, objective):
    head, signals, texts = random_head(config), random_signals(config), texts_of()
    (loss, metrics), grads = jax.jit(jax.value_and_grad(fast(config, objective, signals, texts), has_aux=True))(head)
    slow = Slow(config, objective, signals, texts)
    (wanted, rows), wanted_grads = jax.jit(jax.value_and_grad(slow, has_aux=True))(head)
    np.testing.assert_allclose(loss, wanted, rtol=2e-5)
    for name, index in (("loss", 0), ("accuracy", 1), ("counted", 2)):
        np.testing.assert_allclose(getattr(metrics, name), [float(row[index]) for row in rows], rtol=2e-5, err_msg=name)
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wanted_grads), strict=True
    ):
        scale = float(jnp.abs(want).max())
        assert scale > 0, f"{path} gets no gradient: the comparison would be empty"
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * scale, err_msg=str(path))


def test_long_texts_attend_block_by_block(monkeypatch):
    """Blocks of four queries, the last one padded: the same loss and gradients as with one block."""
    config, objective = CASES["eagle3"]
    head, signals, texts = random_head(config), random_signals(config), texts_of()
    run = lambda: jax.jit(jax.value_and_grad(fast(config, objective, signals, texts), has_aux=True))(head)  # noqa: E731
    whole = run()
    monkeypatch.setattr(layers, "QUERY_BLOCK", 4)
    np.testing.assert_allclose(*(part[0][0] for part in (run(), whole)), rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), run()[1], whole[1])


def test_noise_changes_the_loss_and_needs_a_key():
    config, objective = head_config("eagle1"), PRESETS["eagle1"]
    head, signals, texts = random_head(config), random_signals(config), texts_of()
    quiet = fast(config, dataclasses.replace(objective, noise=0.0), signals, texts)(head)[0]
    assert abs(float(fast(config, objective, signals, texts)(head)[0]) - float(quiet)) > 1e-6
    with pytest.raises(ValueError, match="key must be given for an objective with noise, got None"):
        unrolled_loss(config, objective, head, signals, texts, target_logits, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"steps": 0}, "steps must be an integer of at least 1, got 0"), ({"decay": -1.0}, "decay must not be negative"),
     ({"token_weight": 0.0}, "above 0, got only 0")],
)  # fmt: skip
def test_bad_objectives(values, message):
    with pytest.raises(ConfigError, match=message):
        Objective(**values)


def test_no_logits_of_a_whole_text_are_alive():
    """The largest array with a vocabulary axis in the gradient's program is that of one chunk."""
    config = head_config()
    objective = Objective(steps=3, chunk=3)
    head, signals, texts = random_head(config), random_signals(config), texts_of()
    jaxpr = jax.make_jaxpr(jax.grad(lambda head: fast(config, objective, signals, texts)(head)[0]))(head)
    sizes = [
        int(np.prod(shape)) for shape in shapes_of(jaxpr.jaxpr) if shape and shape[-1] in (V, VD) and len(shape) > 2
    ]
    assert max(sizes) <= B * 3 * V


def shapes_of(jaxpr):
    for equation in jaxpr.eqns:
        yield from (tuple(var.aval.shape) for var in equation.outvars)
        for value in equation.params.values():
            for inner in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                program = getattr(inner, "jaxpr", inner)
                if hasattr(program, "eqns"):
                    yield from shapes_of(program)


def test_shifts():
    x = jnp.arange(1, 6)[None]
    assert ahead(x, 2)[0].tolist() == [3, 4, 5, 0, 0]
    assert behind(x, 2)[0].tolist() == [0, 0, 1, 2, 3]
    assert ahead(x, 9)[0].tolist() == behind(x, 9)[0].tolist() == [0] * 5


def test_observe_is_the_target_itself():
    """Each document alone, without a mask of segments."""
    params, texts = random_target(), texts_of()
    signals = jax.jit(lambda params: observe(TARGET, params, texts, (0, 2, 4)))(params)
    fn = target_fn(TARGET)
    for row, start, size in ((0, 5, 4), (1, 0, 9)):
        tokens = texts.tokens[row : row + 1, start : start + size]
        mask = jnp.tril(jnp.ones((size, size), bool))
        positions = jnp.arange(size)[None]
        out = jax.jit(lambda params, *given: fn.forward(params, *given, None, (0, 2, 4)))(
            params, tokens, positions, mask
        )
        np.testing.assert_allclose(signals.features[row, start : start + size], out.features[0], atol=2e-5)
        np.testing.assert_allclose(signals.hidden[row, start : start + size], out.hidden[0], atol=2e-5)
    np.testing.assert_allclose(signals.embeds, fn.embed(params, texts.tokens))


def test_a_token_sees_its_document():
    mask = causal_mask(jnp.array([[1, 1, 2, 0]]))
    assert mask[0].astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_folding_the_scale_changes_nothing():
    config, params, texts = head_config(), random_target(), texts_of()
    head = random_head(config)
    given = jax.jit(lambda params: observe(TARGET, params, texts, config.taps))(params)
    scale = feature_scale(given.features, texts)
    assert float(scale.min()) > 0
    d2t = jnp.asarray(KEPT - np.arange(VD), jnp.int32)

    @functools.partial(jax.jit, static_argnames="stored")
    def loss(head, scale, stored):
        frozen, key = Frozen(params, d2t, scale), jax.random.key(0)
        signals = given._replace(embeds=None) if stored else None
        return head_loss(TARGET, config, Objective(steps=2, remat=False), head, frozen, texts, key, signals=signals)[0]

    scaled = loss(head, scale, False)
    np.testing.assert_allclose(scaled, loss(fold_scale(head, scale), None, False), rtol=1e-5)
    np.testing.assert_allclose(scaled, loss(head, scale, True), rtol=1e-6)


def test_micro_batches_make_the_update_of_the_whole_batch():
    """One half has most of the supervised tokens; the other has none for the last step."""
    config = dataclasses.replace(head_config(), draft_vocab_size=V)
    texts = texts_of()
    rare = texts.supervised.at[1].set(jnp.arange(T) == 2)
    texts = texts._replace(supervised=rare)
    frozen = Frozen(random_target(), jnp.zeros((V,), jnp.int32))
    tx = head_optimiser(1e-2, 1, 10)
    objective = Objective(steps=2, feature_weight=1.0, remat=False)
    head = random_head(config)

    def updated(parts):
        shaped = jax.tree.map(lambda x: x.reshape(parts, B // parts, *x.shape[1:]), texts)
        state = HeadTrainState(head, tx.init(head), jnp.int32(1), jax.random.key(0))
        return jax.jit(functools.partial(head_train_step, TARGET, config, objective, tx, "float32"))(
            state, frozen, shaped
        )

    (whole, report), (halves, other) = updated(1), updated(2)
    for a, b in zip(jax.tree.leaves(report), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert count_rows(jax.tree.map(lambda x: x[1:], texts), 2).tolist() == [1, 0]
    assert report.metrics.counted[0] == jnp.sum(rare[:, 1:] & (texts.positions[:, 1:] > 1))
    for a, b in zip(jax.tree.leaves(whole.head), jax.tree.leaves(halves.head), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
