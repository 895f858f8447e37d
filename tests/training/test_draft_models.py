"""Checks losses of Medusa and Hydra heads and of small draft models against loops over rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import DecoderConfig, MedusaConfig
from eagle_jax.models import MedusaHeads, init_medusa_params, init_params, target_fn
from eagle_jax.training import TargetOutputs, count_rows, distillation_loss, medusa_loss
from tests.training.common import packed_texts, random_params

T, V, H, HEADS = 11, 13, 8, 3
TARGET = DecoderConfig(V, H, 12, 2, num_heads=4, num_kv_heads=2, head_dim=6)
SMALL = DecoderConfig(V, H, 12, 1, num_heads=2, num_kv_heads=1, head_dim=4)
# Hydra is Hydra++ without a layer.
KINDS = [*(pytest.param(name, marks=pytest.mark.slow) for name in ("medusa", "hydra")), "hydra++"]
TEXTS = packed_texts(((6, 4), (T,)), T, V)


def by_document(states_of):
    """Returns [2, T, H]: `states_of(row, places, positions, causal mask)` of every document, zeros elsewhere."""
    found = np.zeros((2, T, H), np.float32)
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        places = np.flatnonzero(np.asarray(TEXTS.segments[row]) == segment)
        causal = jnp.tril(jnp.ones((len(places), len(places)), bool))
        found[row, places] = states_of(row, places, jnp.arange(len(places))[None], causal)[0]
    return jnp.asarray(found)


def hidden_of(config, params):
    forward = functools.partial(target_fn(config).forward, params)
    return by_document(lambda row, places, *rest: forward(TEXTS.tokens[row, places][None], *rest, None).hidden)


@functools.cache
def target():
    params = random_params(init_params, TARGET, 1)
    hidden = hidden_of(TARGET, params)
    return params, TargetOutputs(hidden, hidden, target_fn(TARGET).embed(params, TEXTS.tokens))


def judge(hidden):
    return target_fn(TARGET).logits(target()[0], hidden)


def law(hidden):
    return np.asarray(jax.nn.log_softmax(judge(hidden)), np.float64)


@functools.cache
def heads(kind):
    prefix = TARGET.one_layer() if kind == "hydra++" else None
    config = MedusaConfig("medusa" if kind == "medusa" else "hydra", H, V, HEADS, 2, prefix)
    return config, random_params(init_medusa_params, config, 4)["heads"]


def slow(kind, teacher):
    """Returns (loss, counted rows) of every head, row by row. Hydra++'s layer runs over each document alone."""
    config, params = heads(kind)
    run = functools.partial(MedusaHeads(config).apply, {"params": params})
    signals, (tokens, supervised, segments, _) = target()[1], map(np.asarray, TEXTS)
    states = np.asarray(signals.hidden)
    if kind == "hydra++":
        prefix = lambda row, places, *rest: run(signals.hidden[row, places][None], *rest, method="prefix").states  # noqa: E731
        states = np.asarray(by_document(prefix))
    found = []
    for head in range(HEADS):
        losses = []
        for row in range(2):
            for t in range(T - head - 2):
                label = t + head + 2
                if segments[row, t] == 0 or segments[row, t] != segments[row, label] or not supervised[row, label]:
                    continue
                read = [states[row, t]]
                if kind != "medusa":
                    read += [np.asarray(signals.embeds[row, t + 1 + step]) for step in range(head + 1)]
                log_q = np.asarray(jax.nn.log_softmax(run(jnp.concatenate(read), head)), np.float64)
                if teacher:
                    losses.append(-np.exp(law(signals.hidden[row, label - 1])) @ log_q)
                else:
                    losses.append(-log_q[tokens[row, label]])
        found.append((np.mean(losses), len(losses)))
    return found


@pytest.mark.parametrize("teacher", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_medusa_loss_equals_a_loop_over_rows(kind, teacher):
    (config, params), (_, signals) = heads(kind), target()
    loss_of = functools.partial(medusa_loss, config, params, signals, TEXTS, judge, teacher=teacher, decay=0.5)
    wanted = slow(kind, teacher)
    for loss, metrics in (loss_of(chunk=0), loss_of(chunk=4)):
        np.testing.assert_allclose(metrics.loss, [mean for mean, _ in wanted], rtol=1e-5)
        np.testing.assert_array_equal(metrics.counted, [count for _, count in wanted])
        np.testing.assert_array_equal(metrics.counted, count_rows(TEXTS, HEADS))
        assert float(loss) == pytest.approx(sum(0.5**head * mean for head, (mean, _) in enumerate(wanted)), rel=1e-5)


@pytest.mark.parametrize(
    "kind", ["medusa", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("hydra", "hydra++"))]
)
def test_chunks_do_not_change_gradients_and_the_target_has_none(kind):
    (config, params), (weights, signals) = heads(kind), target()

    def loss(params, weights, signals, chunk):
        logits = functools.partial(target_fn(TARGET).logits, weights)
        return medusa_loss(config, params, signals, TEXTS, logits, chunk=chunk)[0]

    whole, parts = (jax.grad(loss)(params, weights, signals, chunk) for chunk in (0, 4))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), whole, parts)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(whole)), "a parameter that learns nothing"
    for frozen in jax.tree.leaves(jax.grad(loss, argnums=(1, 2))(params, weights, signals, 4)):
        assert np.abs(frozen).max() == 0


@pytest.mark.parametrize("name", ["kl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tv", "lk"))])
def test_distillation_loss_equals_its_definition(name):
    signals, small = target()[1], random_params(init_params, SMALL, 7)
    logits = target_fn(SMALL).logits(small, hidden_of(SMALL, small))
    log_p, log_q = law(signals.hidden), np.asarray(jax.nn.log_softmax(logits), np.float64)
    p, alpha = np.exp(log_p), np.minimum(np.exp(log_p), np.exp(log_q)).sum(-1)
    loss = {"kl": (p * (log_p - log_q)).sum(-1), "tv": 1 - alpha, "lk": -np.log(alpha)}[name]
    segments = np.asarray(TEXTS.segments)  # the distribution at a place is of the next token
    counted = np.asarray(TEXTS.supervised)[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    losses, alphas = loss[:, :-1][counted], alpha[:, :-1][counted]
    for chunk in (0, 4):
        loss, seen = distillation_loss(SMALL, small, TEXTS, signals.hidden, judge, divergence=name, chunk=chunk)
        assert float(loss) == pytest.approx(np.mean(losses), rel=1e-4)
        assert float(seen.accuracy[0]) == pytest.approx(np.mean(alphas), rel=1e-4)
        assert float(seen.counted[0]) == len(losses) == float(count_rows(TEXTS, 1, first=1)[0])


def test_distillation_loss_ignores_padding_of_vocabularies():
    """Models of one tokenizer may pad their vocabularies to different sizes."""
    signals, small = target()[1], random_params(init_params, SMALL, 7)

    def padded(hidden):
        logits = judge(hidden)
        return jnp.concatenate([logits, jnp.full((*logits.shape[:-1], 3), 5.0)], axis=-1)

    embedding = jnp.pad(small["embed_tokens"]["embedding"], ((0, 2), (0, 0)))
    weight = jnp.pad(small["lm_head"]["weight"], ((0, 2), (0, 0)), constant_values=4.0)
    more = {**small, "embed_tokens": {"embedding": embedding}, "lm_head": {"weight": weight}}
    larger = dataclasses.replace(SMALL, vocab_size=V + 2)
    expected, _ = distillation_loss(SMALL, small, TEXTS, signals.hidden, judge)
    for config, params, teacher in ((SMALL, small, padded), (larger, more, judge)):
        loss, _ = distillation_loss(config, params, TEXTS, signals.hidden, teacher)
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
