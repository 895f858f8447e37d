"""Whole models at temperature above 0: the joint law of the first three tokens is the target's processed law."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from eagle_jax.core import Batch, Engine, Sizes, emitted_tokens, generate, make_sampling
from eagle_jax.core.verify import VerifyFn, deterministic
from tests import oracles
from tests.models import DRAFTERS, DRAWN, tiny_target

pytestmark = pytest.mark.slow  # tests/core/test_law.py draws every rule on tables
VOCAB, ROWS, ROUNDS = 8, 8192, 12  # 98,304 draws
SHARPNESS = 25.0  # of the target: a flat law has 512 likely outcomes, whose counts alone would vary by more than 0.01
PROMPT = [3, 1, 4]
SETTINGS = {
    "temperature": dict(temperature=0.4),
    "top_k": dict(temperature=1.2, top_k=3),
    "top_p": dict(temperature=1.2, top_p=0.8),
    "min_p": dict(temperature=1.0, min_p=0.1),
    "all": dict(temperature=1.1, top_k=5, top_p=0.9, min_p=0.05),
}
OPTIMISED = {"xla_backend_optimization_level": 3}


def exact_law(settings):
    """[8, 8, 8] joint probabilities of the next three tokens: one causal pass over all 64 texts of two more tokens."""
    target = tiny_target(VOCAB, sharpness=SHARPNESS)
    texts = jnp.asarray([[*PROMPT, a, b] for a in range(VOCAB) for b in range(VOCAB)])
    positions = jnp.broadcast_to(jnp.arange(5)[None], texts.shape)
    out = jax.jit(target.fn.forward, static_argnums=5)(
        target.params, texts, positions, jnp.tril(jnp.ones((5, 5), bool)), None, ()
    )
    logits = np.asarray(target.fn.logits(target.params, out.hidden)).reshape(VOCAB, VOCAB, 5, VOCAB)
    law = np.zeros((VOCAB,) * 3)
    first = oracles.processed_law(logits[0, 0, 2], **settings)
    for a in range(VOCAB):
        second = oracles.processed_law(logits[a, 0, 3], **settings)
        for b in range(VOCAB):
            law[a, b] = first[a] * second[b] * oracles.processed_law(logits[a, b, 4], **settings)
    return law


def draws(name, settings, verify: VerifyFn | None = None):
    """[ROUNDS * ROWS, 3] tokens from independent rows of the same prompt, through the drafter's trees."""
    target = tiny_target(VOCAB, sharpness=SHARPNESS)
    head = DRAFTERS[name](target)
    sampling = make_sampling(**settings)
    batch = (
        jnp.tile(jnp.asarray(PROMPT), (ROWS, 1)),
        jnp.full((ROWS,), 3),
        jnp.full((ROWS,), 4),
        jnp.full((ROWS, 1), -1),
    )
    params = {"target": target.params, "drafter": head.params}

    # The batch is an argument: as a constant XLA would evaluate the prefill at compile time. Optimised, unlike the rest
    # of the suite: here the time goes into the draws.
    @functools.partial(jax.jit, compiler_options=OPTIMISED)
    def run(params, batch, keys):
        engine = Engine(target.fn, head.drafter, verify=verify)
        state = generate(params, Batch(*batch, keys), sampling, engine, Sizes(max_tokens=4, chunk=3))
        return emitted_tokens(state)[:, :3], state.accepted.sum(0)

    results = [run(params, batch, jax.random.split(jax.random.key(seed), ROWS)) for seed in range(ROUNDS)]
    accepted = sum(np.asarray(hist) for _, hist in results)
    assert accepted[1:].sum() > 0.1 * accepted.sum(), "too little is accepted to test acceptance"
    return np.concatenate([np.asarray(tokens) for tokens, _ in results])


def compare(tokens, law):
    """p-value of the chi-square test over cells with expected count >= 5 (the rest pooled), and total variation."""
    counts = np.zeros((VOCAB,) * 3)
    np.add.at(counts, tuple(tokens.T), 1)
    expected = law.ravel() * len(tokens)
    assert counts.ravel()[expected == 0].sum() == 0, "a token outside the processed law was emitted"
    big = expected >= 5
    observed = np.append(counts.ravel()[big], counts.ravel()[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1] * observed[:-1].sum() / wanted[:-1].sum()
    return stats.chisquare(observed, wanted).pvalue, 0.5 * np.abs(counts / len(tokens) - law).sum()


@pytest.mark.parametrize("name", SETTINGS)
def test_joint_law_of_three_tokens_is_the_targets(name):
    method = "eagle1-k3n12" if name == "top_p" else "eagle3-k3n12"
    pvalue, variation = compare(draws(method, SETTINGS[name]), exact_law(SETTINGS[name]))
    assert pvalue > 1e-3
    assert variation < 0.01


# What is decided by the target's own draws needs no more than the text's identity (test_generate).
@pytest.mark.parametrize("name", sorted(DRAWN))
def test_joint_law_of_every_sampled_method_is_the_targets(name):
    pvalue, variation = compare(draws(name, SETTINGS["all"]), exact_law(SETTINGS["all"]))
    assert pvalue > 1e-3
    assert variation < 0.01


def keep_a_rejected_node(tree, logits, keys, index, sampling, depth):
    """A broken rule: the best child of the root is taken even when the target drew something else."""
    result = deterministic(tree, logits, keys, index, sampling, depth)
    rejected = result.count == 0
    path = jnp.where(rejected[:, None], jnp.minimum(jnp.arange(depth + 1), 1)[None], result.path)
    return result._replace(count=jnp.where(rejected, 1, result.count), path=path)


def test_a_broken_rule_is_seen():
    settings = SETTINGS["temperature"]
    pvalue, variation = compare(draws("eagle3-k3n12", settings, keep_a_rejected_node), exact_law(settings))
    assert pvalue < 1e-6
    assert variation > 0.02
