"""The losses of head training against slow, literal versions of facts that are easy to get wrong by one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.models.decoder import init_params, target_fn
from eagle_jax.models.heads import init_head_params, make_head
from eagle_jax.training.eagle1 import eagle1_loss
from eagle_jax.training.losses import smooth_l1, target_law
from eagle_jax.training.step import Frozen, Objective, feature_scale, fold_scale, head_loss, observe
from eagle_jax.training.ttt import Signals, ttt_loss

B, T, V, VD, H = 2, 9, 13, 7, 8
TARGET = DecoderConfig(V, H, 12, 4, num_heads=4, num_kv_heads=2, head_dim=6)
VARIANTS = {"plain": {}, "switched": {"fc_norm": True, "norm_output": True, "norm_before_residual": True}}


def eagle3_config(**switches) -> HeadConfig:
    layer = DecoderConfig(V, H, 10, 1, num_heads=4, num_kv_heads=2, head_dim=6)
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


def random_signals(config: HeadConfig, vocab: int, seed: int = 3) -> Signals:
    rng = np.random.default_rng(seed)
    law = np.exp(rng.normal(size=(B, T, vocab)))
    return Signals(
        features=jnp.asarray(rng.normal(size=(B, T, len(config.taps) * H)), jnp.float32),
        embeds=jnp.asarray(rng.normal(size=(B, T, H)), jnp.float32),
        law=jnp.asarray(law / law.sum(-1, keepdims=True), jnp.float32),
        best=jnp.asarray(rng.integers(0, vocab, (B, T)), jnp.int32),
        inside=jnp.asarray(rng.random((B, T)) < 0.7),
        supervised=jnp.asarray(rng.random((B, T)) < 0.6),
    )


@functools.partial(jax.jit, static_argnums=(0, 3))
def run_ttt(config, head, signals, steps):
    return ttt_loss(config, head, signals, steps=steps)


def slow_ttt(config, head, signals, steps, decay):
    """One step after the other: every step's keys side by side, and a [T, (k+1) T] mask that says who sees whom."""
    module, numbers = make_head(config), jax.tree.map(np.asarray, signals)
    states = module.apply({"params": head}, signals.features, method="fuse")
    total, keys, values = 0.0, [], []
    for k in range(steps):
        embeds, labels = np.zeros((B, T, H), np.float32), np.zeros((B, T, VD), np.float32)
        mask, counted = np.zeros((T, (k + 1) * T), bool), np.zeros((B, T), bool)
        for p in range(T):
            mask[p, : p + 1] = True
            for later in range(1, k + 1):
                mask[p, later * T + p] = True
            if p + 1 + k < T:
                embeds[:, p] = numbers.embeds[:, p + 1 + k]
            token = p + 2 + k
            for b in range(B):
                if token < T and numbers.supervised[b, token] and numbers.inside[b, token - 1]:
                    labels[b, p], counted[b, p] = numbers.law[b, token - 1], True
        earlier = (jnp.concatenate(keys, 2), jnp.concatenate(values, 2)) if keys else None
        positions = jnp.tile(jnp.arange(T)[None] + k, (B, 1))
        out = module.apply({"params": head}, jnp.asarray(embeds), states, positions, jnp.asarray(mask), None, earlier)
        keys.append(out.keys)
        values.append(out.values)
        states = out.states
        log_probs = jax.nn.log_softmax(module.apply({"params": head}, states, method="logits"), -1)
        total += decay**k * -jnp.sum(labels * log_probs) / max(counted.sum(), 1)
    return total


@pytest.mark.parametrize("switches", VARIANTS.values(), ids=VARIANTS)
def test_ttt_equals_the_masked_reference(switches):
    config = eagle3_config(**switches)
    head, signals = random_head(config), random_signals(config, VD)
    fast = jax.jit(jax.value_and_grad(lambda head: ttt_loss(config, head, signals, steps=3, decay=0.8)[0]))
    loss, grads = fast(head)
    slow = jax.jit(jax.value_and_grad(lambda head: slow_ttt(config, head, signals, 3, 0.8)))
    wanted, wanted_grads = slow(head)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wanted_grads), strict=True
    ):
        scale = float(jnp.abs(want).max())
        assert scale > 0, f"{path} gets no gradient: the comparison would be empty"
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * scale, err_msg=str(path))


def test_gradients_reach_through_all_steps():
    """The last step alone already moves `fuse`, whose output only step 0 reads: nothing is cut in between."""
    config = eagle3_config()
    head, signals = random_head(config), random_signals(config, VD)
    grads = jax.jit(jax.grad(lambda head: ttt_loss(config, head, signals, steps=2)[1].loss[1]))(head)
    assert float(jnp.abs(grads["fc"]["kernel"]).max()) > 1e-6


def test_the_label_of_row_p_step_k_is_token_p_2_k():
    """One token is supervised: step k then counts row token - 2 - k alone, against row token - 1 of the law."""
    config, token = eagle3_config(), 6
    head, signals = random_head(config), random_signals(config, VD)
    only = jnp.zeros((B, T), bool).at[0, token].set(True)
    signals = signals._replace(supervised=only, inside=jnp.ones((B, T), bool))
    losses = run_ttt(config, head, signals, 3)[1].loss
    for step, log_probs in enumerate(_log_probs(config, head, signals, 3)):
        by_row = -np.sum(np.asarray(signals.law[0, token - 1])[None] * np.asarray(log_probs[0]), axis=-1)
        row = token - 2 - step
        np.testing.assert_allclose(losses[step], by_row[row], rtol=1e-5)
        assert min(abs(by_row[row - 1] - by_row[row]), abs(by_row[row + 1] - by_row[row])) > 1e-3


@functools.partial(jax.jit, static_argnums=(0, 3))
def _log_probs(config, head, signals, steps):
    """Of every step, by the slow masks (labels play no part)."""
    module, positions = make_head(config), jnp.tile(jnp.arange(T)[None], (B, 1))
    states = module.apply({"params": head}, signals.features, method="fuse")
    keys, values, found = [], [], []
    for k in range(steps):
        embeds = jnp.pad(signals.embeds, ((0, 0), (0, k + 1), (0, 0)))[:, k + 1 :]
        mask = jnp.concatenate([jnp.tril(jnp.ones((T, T), bool))] + [jnp.eye(T, dtype=bool)] * k, axis=1)
        earlier = (jnp.concatenate(keys, 2), jnp.concatenate(values, 2)) if keys else None
        out = module.apply({"params": head}, embeds, states, positions + k, mask, None, earlier)
        keys.append(out.keys)
        values.append(out.values)
        states = out.states
        found.append(jax.nn.log_softmax(module.apply({"params": head}, states, method="logits")))
    return found


def test_accuracy_counts_a_favourite_outside_the_draft_vocabulary_as_a_miss():
    config = eagle3_config()
    head, signals = random_head(config), random_signals(config, VD)
    everything = signals._replace(supervised=jnp.ones((B, T), bool), inside=jnp.zeros((B, T), bool))
    loss, metrics = run_ttt(config, head, everything, 2)
    assert float(metrics.accuracy.max()) == 0.0
    assert float(loss) == 0.0


def test_eagle1_loss_equals_the_literal_one():
    layer = DecoderConfig(V, H, 10, 1, num_heads=4, num_kv_heads=2, head_dim=6)
    config = HeadConfig("eagle1", layer, V, H, (4,), fc_bias=True)
    head, signals = random_head(config), random_signals(config, V)
    lm_head = jnp.asarray(np.random.default_rng(9).normal(size=(H, V)), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(noise):
        return eagle1_loss(config, head, signals, lambda x: x @ lm_head, jax.random.key(1), noise=noise)

    loss, metrics = run(0.0)
    embeds = jnp.pad(signals.embeds, ((0, 0), (0, 1), (0, 0)))[:, 1:]
    out = make_head(config).apply(
        {"params": head},
        embeds,
        signals.features,
        jnp.tile(jnp.arange(T)[None], (B, 1)),
        jnp.tril(jnp.ones((T, T), bool)),
    )
    numbers, states = jax.tree.map(np.asarray, signals), np.asarray(out.states)
    log_probs = np.asarray(jax.nn.log_softmax(out.states @ lm_head))
    regression, token, counted = 0.0, 0.0, 0
    for b in range(B):
        for p in range(T - 2):
            if numbers.supervised[b, p + 2]:
                error = np.abs(states[b, p] - numbers.features[b, p + 1])
                regression += np.mean(np.where(error < 1, 0.5 * error**2, error - 0.5))
                token -= np.sum(numbers.law[b, p + 1] * log_probs[b, p])
                counted += 1
    np.testing.assert_allclose(metrics.loss, [regression / counted, token / counted], rtol=1e-5)
    np.testing.assert_allclose(loss, (regression + 0.1 * token) / counted, rtol=1e-5)
    assert abs(float(run(0.1)[0]) - float(loss)) > 1e-6


def test_target_law_is_renormalised_and_says_what_is_outside():
    logits = jnp.array([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 1.0, 2.0]])
    law, best, inside = target_law(logits, jnp.array([1, 3]))
    np.testing.assert_allclose(law, jax.nn.softmax(logits[:, jnp.array([1, 3])]), rtol=1e-6)
    assert best[0] == 0
    assert inside.tolist() == [True, False]


def test_observe_is_the_target_itself():
    params = random_target()
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, T)), jnp.int32)
    signals = observe(TARGET, params, tokens, jnp.ones((B, T), bool), (1, 2), None)
    fn = target_fn(TARGET)
    out = fn.forward(
        params, tokens, jnp.tile(jnp.arange(T)[None], (B, 1)), jnp.tril(jnp.ones((T, T), bool)), None, (1, 2)
    )
    np.testing.assert_allclose(signals.features, out.features, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(signals.law, jax.nn.softmax(fn.logits(params, out.hidden)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_only_the_head_is_trained(kind):
    target_params = random_target()
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, T)), jnp.int32)
    layer = DecoderConfig(V, H, 10, 1, num_heads=4, num_kv_heads=2, head_dim=6)
    config = eagle3_config() if kind == "eagle3" else HeadConfig("eagle1", layer, V, H, (4,))
    d2t = jnp.arange(VD, dtype=jnp.int32) if kind == "eagle3" else None  # keeps 0, 2, 4, ...
    head = random_head(config)

    def loss(head, target):
        arguments = (tokens, jnp.ones((B, T), bool), jax.random.key(2))
        return head_loss(TARGET, config, Objective(steps=2), head, Frozen(target, d2t), *arguments)[0]

    grads = jax.jit(jax.grad(loss))(head, target_params)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(grads))
    if kind == "eagle3":  # the EAGLE-1 loss reads the target's lm_head, which simply is not differentiated in training
        frozen = jax.jit(jax.grad(loss, argnums=1))(head, target_params)
        assert all(float(jnp.abs(leaf).max()) == 0 for leaf in jax.tree.leaves(frozen))


def test_a_head_trained_on_divided_features_is_saved_for_raw_ones():
    config, target = eagle3_config(), random_target()
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, T)), jnp.int32)
    scale = jax.jit(feature_scale, static_argnums=(0, 3))(TARGET, target, tokens, config.taps)
    features = observe(TARGET, target, tokens, jnp.ones((B, T), bool), config.taps, None).features
    np.testing.assert_allclose(scale, np.sqrt(np.mean(np.square(features), (0, 1))), rtol=1e-4)
    head, d2t = random_head(config), jnp.arange(VD, dtype=jnp.int32)
    loss = jax.jit(functools.partial(head_loss, TARGET, config, Objective(steps=2)))
    arguments = (tokens, jnp.ones((B, T), bool), jax.random.key(2))
    divided, raw = loss(head, Frozen(target, d2t, scale), *arguments)[0], loss(head, Frozen(target, d2t), *arguments)[0]
    folded = loss(fold_scale(head, scale), Frozen(target, d2t), *arguments)[0]
    np.testing.assert_allclose(folded, divided, rtol=1e-5)
    assert abs(float(raw) - float(divided)) > 1e-3, "the scale made no difference: the comparison would be empty"
    there_and_back = fold_scale(fold_scale(head, scale), 1 / scale)
    np.testing.assert_allclose(there_and_back["fc"]["kernel"], head["fc"]["kernel"], rtol=1e-5)


def test_smooth_l1_is_huber():
    got = smooth_l1(jnp.array([[0.5, 3.0]]), jnp.zeros((1, 2)))
    np.testing.assert_allclose(got, [(0.125 + 2.5) / 2])
