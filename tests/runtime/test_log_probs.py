"""Log-probabilities of the emitted tokens: those of a plain forward pass over the whole text, within 1e-5."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.core.loop import emitted_log_probs, emitted_tokens, generate, step
from eagle_jax.core.sampling import make_sampling, process_logits
from eagle_jax.core.types import Sampling
from eagle_jax.data.chat.tokenize import chat_ids
from tests.models import DRAFTERS, TREES, prepared, random_prompts, tiny_head, tiny_target

PROMPTS = random_prompts([5, 31, 1, 17], 12)
RUN = dict(max_new_tokens=[30, 7, 25, 1], eos_ids=[[3], [5], [], [1, 2]], key=7)
LAW = dict(temperature=0.7, top_k=9, top_p=0.9, min_p=0.02)
METHODS = ["eagle3-k3n12", "eagle1-static", "eagle3-tree-rejection", "small-traversal", "lookahead", "hydra++-static"]


@functools.partial(jax.jit, static_argnames="target")
def scores(target, params, tokens):
    """[T, V] logits of one text by a plain causal pass without a cache."""
    width = tokens.shape[0]
    out = target.forward(
        params, tokens[None], jnp.arange(width)[None], jnp.tril(jnp.ones((width, width), bool)),
        target.init_cache(1, 1), (),
    )  # fmt: skip
    return target.logits(params, out.hidden[0])


def expected(prompt: list[int], reply: list[int], sampling: Sampling) -> np.ndarray:
    """Of every token of the reply, after all before it."""
    target = tiny_target()
    logits = scores(target.fn, target.params, jnp.asarray([*prompt, *reply]))[len(prompt) - 1 : -1]
    return np.asarray(process_logits(logits, sampling))[np.arange(len(reply)), reply]


SLOW = {"eagle1-static", "hydra++-static", "lookahead", "small-traversal"}


@pytest.mark.parametrize(
    "name", [None, *(pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in METHODS)]
)
@pytest.mark.parametrize("options", [{}, LAW], ids=["greedy", "sampled"])
def test_they_are_those_of_a_plain_pass(name, options):
    drafter = None if name is None else DRAFTERS[name](tiny_target())
    both = {}
    for law, sampling in (("target", Sampling()), ("law", make_sampling(**options))):
        out = eagle_jax.generate(tiny_target(), drafter, PROMPTS, **RUN, **options, log_probs=law)
        both[law] = out
        for prompt, reply, told in zip(PROMPTS, out.tokens, out.log_probs, strict=True):
            assert told.shape == (len(reply),) and told.dtype == np.float32
            np.testing.assert_allclose(told, expected(prompt, reply, sampling), atol=1e-5)
    assert both["target"].tokens == both["law"].tokens
    assert eagle_jax.generate(tiny_target(), drafter, PROMPTS, **RUN, **options).log_probs is None
    same = all(np.array_equal(*pair) for pair in zip(both["target"].log_probs, both["law"].log_probs, strict=True))
    assert same == (not options)


@pytest.mark.parametrize("law", ["target", "law"])
def test_a_stream_tells_the_same(law):
    head = tiny_head("eagle3", TREES["k3n12"])
    options = dict(max_new_tokens=20, key=jax.random.key(3)[None], log_probs=law, **LAW)
    whole = eagle_jax.generate(tiny_target(), head, PROMPTS[:1], **options)
    chunks = list(eagle_jax.stream(tiny_target(), head, PROMPTS[0], **options))
    assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens[0]
    assert all(len(chunk.log_probs) == len(chunk.tokens) for chunk in chunks)
    told = [value for chunk in chunks for value in chunk.log_probs]
    np.testing.assert_allclose(told, whole.log_probs[0], atol=1e-6)


def test_inside_jit_and_vmap():
    head = tiny_head("eagle3", TREES["k2n6"])
    request = prepared(head, PROMPTS[:2], temperature=1.0)
    keys = request.batch.keys

    def run(keys):
        engine = request.engine._replace(log_probs="target")
        state = generate(*request._replace(batch=request.batch._replace(keys=keys), engine=engine))
        return emitted_tokens(state), emitted_log_probs(state), state.num_tokens

    several = jnp.stack([keys, jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)])
    tokens, told, counts = jax.jit(jax.vmap(run))(several)
    assert told.shape == tokens.shape
    for draw in range(2):
        for row, prompt in enumerate(PROMPTS[:2]):
            count = int(counts[draw, row])
            reply = tokens[draw, row, :count].tolist()
            np.testing.assert_allclose(told[draw, row, :count], expected(prompt, reply, Sampling()), atol=1e-5)
            assert (told[draw, row, count:] == 0).all()


def test_what_cannot_be_told_is_refused():
    with pytest.raises(ValueError, match=r"log_probs must be 'target' .* 'law' .* or None, got True"):
        eagle_jax.generate(tiny_target(), None, PROMPTS[:1], log_probs=True)
    with pytest.raises(ValueError, match=r"log_probs must be 'target' .* got 'draft'"):
        eagle_jax.stream(tiny_target(), None, PROMPTS[0], log_probs="draft")
    request = prepared(tiny_head("eagle3", TREES["k2n6"]), PROMPTS[:1])
    state = jax.eval_shape(lambda: generate(*request))  # fmt: skip
    with pytest.raises(ValueError, match="state has no log-probabilities: use Engine"):
        emitted_log_probs(state)
    with pytest.raises(ValueError, match="log_probs must be the same in prefill and step"):
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
