"""Checks that `generate` and `stream` give the tokens of plain decoding with every drafter and tree.

Tabular targets prove the engine (tests/core/test_engine.py): stops, budgets, batches, chunks, laws. Models add the
states of every method, the host wrapper and half precision.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import eagle_jax
from eagle_jax.runtime import request
from tests import oracles
from tests.models import DRAFTERS, DRAWN, TREES, random_prompts, tiny_head, tiny_target

# Rows that stop at different times: by budget, by a stop token of their own, in the first token, never.
PROMPTS = random_prompts([5, 31, 1, 17, 8, 3], 12)
RUN = dict(max_new_tokens=[30, 7, 25, 1, 32, 12], eos_ids=[[3], [5], [], [1, 2], [0, 7, 9, 11, 10], [4]])
# One of every kind of state and of draft; all others run in `make test-all`.
FAST = {
    "eagle1-static", "eagle3-k3n12", "medusa-static", "hydra++-static", "small-dynamic", "lookup", "lookahead",
    "eagle3-tree-rejection", "small-block", "medusa-traversal",
}  # fmt: skip
FAST_SAMPLED = {"eagle3-law", "hydra++-static", "lookup"}


@pytest.fixture(scope="module")
def plain():
    """Text of plain decoding at temperatures 0 and 1."""
    target = tiny_target()
    return {
        temperature: eagle_jax.generate(target, None, PROMPTS, temperature=temperature, key=7, **RUN)
        for temperature in (0.0, 1.0)
    }


def cases():
    """Every method at temperatures 0 and 1; the text of sampled drafts above 0 differs (its law: tests/core)."""
    for name in DRAFTERS:
        for temperature, fast in ((0.0, FAST), (1.0, FAST_SAMPLED)):
            if name not in DRAWN or not temperature:
                yield pytest.param(name, temperature, marks=() if name in fast else pytest.mark.slow)


@pytest.mark.parametrize(("name", "temperature"), list(cases()))
def test_text_is_that_of_plain_decoding(name, temperature, plain):
    drafter = DRAFTERS[name](tiny_target())
    out = eagle_jax.generate(tiny_target(), drafter, PROMPTS, temperature=temperature, key=7, **RUN)
    assert out.tokens == plain[temperature].tokens
    assert out.accepted.shape == (len(PROMPTS), drafter.drafter.depth + 1)
    assert out.accepted.sum(1).tolist() == out.cycles.tolist()
    assert out.tau > plain[temperature].tau, "nothing was ever accepted: the test would not see a wrong acceptance"
    if drafter.drafter.depth > 1 and temperature == 0:
        assert out.accepted[:, 2:].sum() > 0, "no path beyond one node was ever accepted"


KINDS = {name.partition("-")[0]: name for name in [*DRAFTERS, *FAST] if name not in DRAWN}
"""One method of every kind."""
EVERY = [pytest.param(name, marks=() if kind == "eagle3" else pytest.mark.slow) for kind, name in KINDS.items()]


@pytest.mark.parametrize("name", EVERY)
def test_fewer_rows_and_smaller_chunks_change_no_text(name, plain, monkeypatch):
    monkeypatch.setattr(request, "PREFILL_CHUNK", 16)
    run = {name: values[:3] for name, values in RUN.items()}
    assert (
        eagle_jax.generate(tiny_target(), DRAFTERS[name](tiny_target()), PROMPTS[:3], **run).tokens
        == (plain[0.0].tokens[:3])
    )


@pytest.mark.parametrize("name", EVERY)
def test_streams_yield_the_tokens_of_generate(name, plain):
    """Two at once: they share no cache."""
    head, rows = DRAFTERS[name](tiny_target()), (0, 2)
    streams = [
        eagle_jax.stream(tiny_target(), head, PROMPTS[row], **{name: values[row] for name, values in RUN.items()})
        for row in rows
    ]
    texts = [[], []]
    for number, chunks in enumerate(itertools.zip_longest(*streams)):
        for text, chunk in zip(texts, chunks, strict=True):
            text.extend(chunk.tokens if chunk else [])
            assert not chunk or 0 <= chunk.drafted <= len(chunk.tokens)
            assert number or (chunk.drafted == 0 and len(chunk.tokens) == 1)
    assert texts == [plain[0.0].tokens[row] for row in rows]


@pytest.mark.parametrize(
    "switch", [jax.enable_x64(True), pytest.param(jax.numpy_dtype_promotion("strict"), marks=pytest.mark.slow)]
)
def test_the_users_settings_of_jax_change_no_text(switch):
    """Python integers are 64 bits wide under the one, and mixed dtypes an error under the other."""
    head = tiny_head("eagle3", TREES["k2n6"])
    options = {"max_new_tokens": 8, "temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "key": 2}
    wanted = eagle_jax.generate(tiny_target(), None, PROMPTS[:2], **options).tokens
    with switch:
        assert eagle_jax.generate(tiny_target(), head, PROMPTS[:2], **options).tokens == wanted


def test_bfloat16_agrees_except_at_rounding_ties():
    """bfloat16 text is that of plain bfloat16 decoding up to the first tie of the two best logits within rounding."""
    head, half = tiny_head("eagle3", TREES["k2n6"]), lambda leaf: leaf.astype(jnp.bfloat16)
    low = eagle_jax.Target.from_params(tiny_target().config, jax.tree.map(half, tiny_target().params))
    params = {"head": jax.tree.map(half, head.params["head"]), "d2t": head.params["d2t"]}
    low_head = eagle_jax.DraftHead.from_params(head.config, params, low, head.tree)
    run = dict(max_new_tokens=24, eos_ids=())
    plain = eagle_jax.generate(low, None, PROMPTS, **run)
    fast = eagle_jax.generate(low, low_head, PROMPTS, **run)
    assert fast.tau > 1.05, "nothing was accepted: the comparison would be empty"
    equal = 0
    for prompt, tokens, expected in zip(PROMPTS, fast.tokens, plain.tokens, strict=True):
        agree = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), len(tokens))
        equal += agree == len(tokens)
        if agree < len(tokens):
            text = jnp.asarray([prompt + expected[:agree]])
            mask = jnp.tril(jnp.ones((text.shape[1],) * 2, bool))
            out = low.fn.forward(low.params, text, jnp.arange(text.shape[1])[None], mask, None)
            logits = np.asarray(low.fn.logits(low.params, out.hidden[0, -1]))
            best = np.sort(logits)[::-1]
            assert best[0] - best[1] < 4 * 2.0**-8 * np.abs(logits).max(), "more than four roundings of bfloat16 apart"
    assert equal >= len(PROMPTS) // 2, "ties are rare: most rows agree to the end"


@pytest.mark.slow  # tests/core/test_law.py draws every rule on tables
@pytest.mark.parametrize("name", ["eagle3-k3n12", *sorted(DRAWN)])
def test_joint_law_of_two_tokens_is_the_targets(name):
    vocab, rows, prompt = 8, 16_384, [3, 1, 4]
    settings = dict(temperature=1.1, top_k=5, top_p=0.9, min_p=0.05)
    target = tiny_target(vocab, sharpness=25.0)
    texts = jnp.asarray([[*prompt, word] for word in range(vocab)])
    causal, places = jnp.tril(jnp.ones((4, 4), bool)), jnp.tile(jnp.arange(4), (vocab, 1))
    logits = target.fn.logits(target.params, target.fn.forward(target.params, texts, places, causal, None).hidden)
    first = oracles.processed_law(logits[0, 2], **settings)
    law = np.stack([first[word] * oracles.processed_law(logits[word, 3], **settings) for word in range(vocab)])
    run = dict(max_new_tokens=3, eos_ids=(), key=0, **settings)
    out = eagle_jax.generate(target, DRAFTERS[name](target), [prompt] * rows, **run)
    assert out.accepted[:, 1:].sum() > 0.1 * out.accepted.sum(), "too little is accepted to test acceptance"
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(np.array(out.tokens)[:, :2].T), 1)
    assert counts[law == 0].sum() == 0, "a token outside the processed law was emitted"
    big = law * rows >= 5
    wanted = law[big] / law[big].sum() * counts[big].sum()
    assert stats.chisquare(counts[big], wanted).pvalue > 1e-3
    assert 0.5 * np.abs(counts / rows - law).sum() < 0.02
