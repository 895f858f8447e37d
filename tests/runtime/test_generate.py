"""Checks the text of `generate` and `stream` with every drafter and tree, and their compiled programs.

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
from eagle_jax.core import generate, prefill
from eagle_jax.runtime import generation, request
from eagle_jax.runtime.generation import request_of
from infer.aot.costs import Program
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
    drafter = DRAFTERS[name](tiny_target())
    assert eagle_jax.generate(tiny_target(), drafter, PROMPTS[:3], **run).tokens == plain[0.0].tokens[:3]


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


@pytest.mark.slow
@pytest.mark.parametrize("switch", [jax.enable_x64(True), jax.numpy_dtype_promotion("strict")])
def test_the_users_settings_of_jax_change_no_text(switch):
    """Python integers are 64 bits wide under the one, and mixed dtypes an error under the other."""
    head = tiny_head("eagle3", TREES["k2n6"])
    options = {"max_new_tokens": 8, "temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "key": 2}
    wanted = eagle_jax.generate(tiny_target(), None, PROMPTS[:2], **options).tokens
    with switch:
        assert eagle_jax.generate(tiny_target(), head, PROMPTS[:2], **options).tokens == wanted


def half_pair():
    """Returns the tiny target and its EAGLE-3 head in bfloat16."""
    head, half = tiny_head("eagle3", TREES["k2n6"]), lambda leaf: leaf.astype(jnp.bfloat16)
    low = eagle_jax.Target.from_params(tiny_target().config, jax.tree.map(half, tiny_target().params))
    params = {"head": jax.tree.map(half, head.params["head"]), "d2t": head.params["d2t"]}
    return low, eagle_jax.DraftHead.from_params(head.config, params, low, head.tree)


@pytest.mark.slow
def test_bfloat16_text_is_that_of_plain_decoding_except_at_rounding_ties():
    """The texts are equal up to the first tie of the two best logits within rounding."""
    low, low_head = half_pair()
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


def test_a_step_writes_into_the_donated_caches():
    request = request_of(tiny_target(), tiny_head("eagle3", TREES["k2n6"]), PROMPTS[:2], max_new_tokens=16)
    state = jax.eval_shape(lambda: prefill(*request))
    lowered = generation.step_program.lower(request.params, state, request.sampling, request.engine)
    memory = lowered.compile().memory_analysis()
    caches = (state.cache, state.drafter.cache)
    assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))


def test_prefill_computes_logits_of_the_last_prompt_position_only():
    """The prefill computes no array of (chunk positions) x (vocabulary)."""
    vocab = 41  # no other size of the model
    head = tiny_head("eagle3", TREES["k2n6"], vocab)
    request = request_of(tiny_target(vocab), head, PROMPTS[:2], max_new_tokens=16)
    jaxpr = jax.make_jaxpr(lambda *arrays: prefill(*arrays, request.engine, request.sizes))(*request[:3])
    shapes = [var.aval.shape for eqn in _equations(jaxpr.jaxpr) for var in eqn.outvars]
    assert (2, vocab) in shapes
    assert not [shape for shape in shapes if len(shape) > 2 and shape[-1] == vocab and shape[0] == 2]


def test_half_precision_weights_keep_float32_scores():
    """With bfloat16 weights every exponential, logarithm, root and ranking in the program is of float32 values."""
    target, head = half_pair()
    request = request_of(target, head, PROMPTS[:2], max_new_tokens=8, temperature=1.0, top_p=0.9, key=0)
    jaxpr = jax.make_jaxpr(lambda *arrays: generate(*arrays, request.engine, request.sizes))(*request[:3])
    seen = set()
    for eqn in _equations(jaxpr.jaxpr):
        if eqn.primitive.name in ("exp", "log", "log1p", "rsqrt", "top_k", "sort", "cos", "sin", "argmax"):
            kinds = {str(var.aval.dtype) for var in eqn.invars if jnp.issubdtype(var.aval.dtype, jnp.floating)}
            seen.add(eqn.primitive.name)
            assert kinds <= {"float32"}, eqn
    assert {"exp", "rsqrt", "top_k", "argmax"} <= seen
    hidden = jax.random.normal(jax.random.key(0), (4, 16), jnp.bfloat16)
    logits = target.fn.logits(target.params, hidden)
    assert (logits != logits.astype(jnp.bfloat16).astype(jnp.float32)).any(), "logits were rounded to bfloat16"


def _equations(jaxpr):
    """Yields all equations, also of nested programs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for closed in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(closed, "jaxpr", closed)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def test_prompts_of_a_bucket_share_one_compilation():
    """Budgets, stop tokens and sampling values do not compile a program; another bucket does."""
    count, prompts = generation.generate_program._cache_size, random_prompts([20, 9, 32, 1, 33], 12)
    eagle_jax.generate(tiny_target(), None, prompts[:2], max_new_tokens=20, temperature=0.7, top_p=0.9, key=1)
    before = count()
    run = dict(max_new_tokens=[31, 3], eos_ids=[1, 2], temperature=1.3, top_p=0.5, key=1)
    eagle_jax.generate(tiny_target(), None, prompts[2:4], **run)
    assert count() == before
    eagle_jax.generate(tiny_target(), None, prompts[3:], **run)
    assert count() == before + 1


def test_the_program_holds_no_host_call_and_no_weight():
    request = request_of(tiny_target(), tiny_head("eagle3", TREES["k2n6"]), PROMPTS[:2], max_new_tokens=16)
    lowered = generation.generate_program.lower(*request)
    text = lowered.as_text()
    assert Program(lowered.compile().as_text()).host_transfers() == []  # tests/programs/test_aot.py finds one
    largest = min(leaf.size for leaf in jax.tree.leaves(request.params) if leaf.ndim == 2)
    for line in text.splitlines():
        if "stablehlo.constant dense" in line and "tensor<" in line:
            shape = line.rsplit("tensor<", 1)[1].split(">")[0].split("x")[:-1]
            assert np.prod([int(size) for size in shape], initial=1) < largest, line[:200]
    assert text.count("stablehlo.while") >= 1
