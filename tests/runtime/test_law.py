"""Whole models at temperature above 0: the law of the first two tokens is the target's, for every sampled method."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import eagle_jax
from tests import oracles
from tests.models import DRAFTERS, DRAWN, tiny_target

VOCAB, ROWS = 8, 16_384
PROMPT = [3, 1, 4]
LAW = dict(temperature=1.1, top_k=5, top_p=0.9, min_p=0.05)


@pytest.mark.slow  # tests/core/test_law.py draws every rule on tables
@pytest.mark.parametrize("name", ["eagle3-k3n12", *sorted(DRAWN)])
def test_joint_law_of_two_tokens_is_the_targets(name):
    target = tiny_target(VOCAB, sharpness=25.0)
    texts = jnp.asarray([[*PROMPT, word] for word in range(VOCAB)])
    causal, places = jnp.tril(jnp.ones((4, 4), bool)), jnp.tile(jnp.arange(4), (VOCAB, 1))
    logits = target.fn.logits(target.params, target.fn.forward(target.params, texts, places, causal, None).hidden)
    first = oracles.processed_law(logits[0, 2], **LAW)
    law = np.stack([first[word] * oracles.processed_law(logits[word, 3], **LAW) for word in range(VOCAB)])
    run = dict(max_new_tokens=3, eos_ids=(), key=0, **LAW)
    out = eagle_jax.generate(target, DRAFTERS[name](target), [PROMPT] * ROWS, **run)
    assert out.accepted[:, 1:].sum() > 0.1 * out.accepted.sum(), "too little is accepted to test acceptance"
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(np.array(out.tokens)[:, :2].T), 1)
    assert counts[law == 0].sum() == 0, "a token outside the processed law was emitted"
    big = law * ROWS >= 5
    wanted = law[big] / law[big].sum() * counts[big].sum()
    assert stats.chisquare(counts[big], wanted).pvalue > 1e-3
    assert 0.5 * np.abs(counts / ROWS - law).sum() < 0.02
