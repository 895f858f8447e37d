"""Losses of Medusa and Hydra heads and of distilled draft models, against loops over rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import DecoderConfig, MedusaConfig
from eagle_jax.models.decoder import init_params, target_fn
from eagle_jax.models.medusa import MedusaHeads, init_medusa_params
from eagle_jax.training.distill import distillation_loss
from eagle_jax.training.losses import count_rows
from eagle_jax.training.medusa import medusa_loss
from eagle_jax.training.objective import Signals
from tests.training.tiny import packed_texts, random_params

T, V, H, HEADS = 11, 13, 8, 3
TARGET = DecoderConfig(V, H, 12, 2, num_heads=4, num_kv_heads=2, head_dim=6)
SMALL = DecoderConfig(V, H, 12, 1, num_heads=2, num_kv_heads=1, head_dim=4)
KINDS = ["medusa", "hydra", "hydra++"]


TEXTS = packed_texts(((6, 4), (T,)), T, V)


def by_document(states_of):
    """[2, T, H]: `states_of(row, places, positions, causal mask)` of every document, zeros elsewhere."""
    found = np.zeros((2, T, H), np.float32)
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        places = np.flatnonzero(np.asarray(TEXTS.segments[row]) == segment)
        causal = jnp.tril(jnp.ones((len(places), len(places)), bool))
        found[row, places] = states_of(row, places, jnp.arange(len(places))[None], causal)[0]
    return jnp.asarray(found)


@functools.cache
def target():
    params, fn = random_params(init_params, TARGET, 1), target_fn(TARGET)

    def hidden_of(row, places, positions, causal):
        return fn.forward(params, TEXTS.tokens[row, places][None], positions, causal, None).hidden

    hidden = by_document(hidden_of)
    return params, Signals(hidden, hidden, fn.embed(params, TEXTS.tokens))


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
    """Loss and counted rows of every head, row by row; Hydra++'s layer runs over each document alone."""
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


@pytest.mark.parametrize("teacher", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_medusa_loss_is_that_of_a_loop_over_rows(kind, teacher):
    (config, params), (_, signals) = heads(kind), target()
    loss_of = functools.partial(medusa_loss, config, params, signals, TEXTS, judge, teacher=teacher, decay=0.5)
    wanted = slow(kind, teacher)
    for loss, metrics in (loss_of(chunk=0), loss_of(chunk=4)):
        np.testing.assert_allclose(metrics.loss, [mean for mean, _ in wanted], rtol=1e-5)
        np.testing.assert_array_equal(metrics.counted, [count for _, count in wanted])
        np.testing.assert_array_equal(metrics.counted, count_rows(TEXTS, HEADS))
        assert float(loss) == pytest.approx(sum(0.5**head * mean for head, (mean, _) in enumerate(wanted)), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_no_gradient_and_the_target_gets_none(kind):
    (config, params), (weights, signals) = heads(kind), target()

    def loss(params, weights, signals, chunk):
        logits = functools.partial(target_fn(TARGET).logits, weights)
        return medusa_loss(config, params, signals, TEXTS, logits, chunk=chunk)[0]

    whole, parts = (jax.grad(loss)(params, weights, signals, chunk) for chunk in (0, 4))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), whole, parts)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(whole)), "a parameter that learns nothing"
    for frozen in jax.tree.leaves(jax.grad(loss, argnums=(1, 2))(params, weights, signals, 4)):
        assert np.abs(frozen).max() == 0


def divergence_of(log_p, log_q, name):
    p, q = np.exp(log_p), np.exp(log_q)
    alpha = np.minimum(p, q).sum(-1)
    return {"kl": (p * (log_p - log_q)).sum(-1), "tv": 1 - alpha, "lk": -np.log(alpha)}[name], alpha


@pytest.mark.parametrize("name", ["kl", "tv", "lk"])
def test_distillation_loss_is_that_of_its_definition(name):
    signals, small = target()[1], random_params(init_params, SMALL, 7)
    fn, given = target_fn(SMALL), TEXTS

    def hidden_of(row, places, positions, causal):
        return fn.forward(small, given.tokens[row, places][None], positions, causal, None).hidden

    log_q = np.asarray(jax.nn.log_softmax(fn.logits(small, by_document(hidden_of))), np.float64)
    loss, alpha = divergence_of(law(signals.hidden), log_q, name)
    segments = np.asarray(given.segments)  # the distribution at a place is of the token behind it
    counted = np.asarray(given.supervised)[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    losses, alphas = loss[:, :-1][counted], alpha[:, :-1][counted]
    for chunk in (0, 4):
        loss, seen = distillation_loss(SMALL, small, given, signals.hidden, judge, divergence=name, chunk=chunk)
        assert float(loss) == pytest.approx(np.mean(losses), rel=1e-4)
        assert float(seen.accuracy[0]) == pytest.approx(np.mean(alphas), rel=1e-4)
        assert float(seen.counted[0]) == len(losses) == float(count_rows(given, 1, first=1)[0])


def test_padding_behind_the_vocabulary_is_left_out():
    """Models of one tokenizer often have more rows than it has tokens, and not the same number."""
    signals, small = target()[1], random_params(init_params, SMALL, 7)

    def padded(hidden):
        logits = judge(hidden)
        return jnp.concatenate([logits, jnp.full((*logits.shape[:-1], 3), 5.0)], axis=-1)

    embedding = jnp.pad(small["embed_tokens"]["embedding"], ((0, 2), (0, 0)))
    kernel = jnp.pad(small["lm_head"]["kernel"], ((0, 0), (0, 2)), constant_values=4.0)
    more = {**small, "embed_tokens": {"embedding": embedding}, "lm_head": {"kernel": kernel}}
    larger = dataclasses.replace(SMALL, vocab_size=V + 2)
    expected, _ = distillation_loss(SMALL, small, TEXTS, signals.hidden, judge)
    for config, params, teacher in ((SMALL, small, padded), (larger, more, judge)):
        loss, _ = distillation_loss(config, params, TEXTS, signals.hidden, teacher)
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
