"""Log-probabilities of the emitted tokens: those of a plain forward pass over the whole text, within 1e-5."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.core import emitted_log_probs, generate, step
from eagle_jax.data.chat.tokenize import chat_ids
from tests.models import DRAFTERS, TREES, prepared, random_prompts, tiny_head, tiny_target

PROMPTS = random_prompts([5, 31, 1, 17], 12)
RUN = dict(max_new_tokens=[30, 7, 25, 1], eos_ids=[[3], [5], [], [1, 2]], key=7)
LAW = dict(temperature=0.7, top_k=9, top_p=0.9, min_p=0.02)
METHODS = [
    "eagle3-k3n12",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("eagle3-tree-rejection", "lookahead", "hydra++-static")),
]


@functools.partial(jax.jit, static_argnames="target")
def scores(target, params, tokens):
    """[T, V] logits of one text by a plain causal pass without a cache."""
    width = tokens.shape[0]
    out = target.forward(
        params, tokens[None], jnp.arange(width)[None], jnp.tril(jnp.ones((width, width), bool)),
        target.init_cache(1, 1), (),
    )  # fmt: skip
    return target.logits(params, out.hidden[0])


@pytest.mark.parametrize("name", METHODS)
def test_they_are_those_of_a_plain_pass(name):
    """At temperature 1; of the sampled law: tests/core/test_engine.py and, in a stream, test_session.py."""
    target = tiny_target()
    out = eagle_jax.generate(target, DRAFTERS[name](target), PROMPTS, **RUN, **LAW, log_probs="target")
    for prompt, reply, found in zip(PROMPTS, out.tokens, out.log_probs, strict=True):
        text = np.zeros(64, np.int32)
        text[: len(prompt) + len(reply)] = prompt + reply
        logits = scores(target.fn, target.params, jnp.asarray(text))[len(prompt) - 1 :][: len(reply)]
        assert found.shape == (len(reply),) and found.dtype == np.float32
        expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(reply)), reply]
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_another_law_is_refused():
    with pytest.raises(ValueError, match=r"log_probs must be 'target', 'law' or None, got True"):
        eagle_jax.generate(tiny_target(), None, PROMPTS[:1], log_probs=True)
    with pytest.raises(ValueError, match=r"log_probs must be 'target', 'law' or None, got 'draft'"):
        eagle_jax.stream(tiny_target(), None, PROMPTS[0], log_probs="draft")
    request = prepared(tiny_head("eagle3", TREES["k2n6"]), PROMPTS[:1])
    state = jax.eval_shape(lambda: generate(*request))
    with pytest.raises(ValueError, match=r"state must have log-probabilities, got none\. Use Engine"):
        emitted_log_probs(state)
    with pytest.raises(ValueError, match=r"engine\.log_probs must be the same in prefill and step, got "):
        step(request.params, state, request.sampling, request.engine._replace(log_probs="law"))


@pytest.mark.slow
def test_of_a_long_text_rounding_is_what_remains():
    """Of the bundled pair; it adds up with the length, in plain decoding no less: docs/lossless.md says how far."""
    target, drafter, tokenizer = eagle_jax.load_demo("eagle3")
    prompt = chat_ids(tokenizer, [{"role": "user", "content": "Tom has 3 boxes with 12 pencils. How many is that?"}])
    run = dict(max_new_tokens=900, temperature=1.0, key=3, eos_ids=[], log_probs="target")
    out = eagle_jax.generate(target, drafter, [prompt], **run)
    logits = scores(target.fn, target.params, jnp.asarray([*prompt, *out.tokens[0]]))[len(prompt) - 1 : -1]
    plain = np.asarray(jax.nn.log_softmax(logits))[np.arange(900), out.tokens[0]]
    difference = np.abs(out.log_probs[0] - plain)
    assert difference.max() < 2e-5
    assert np.quantile(difference, 0.99) < 1e-5
