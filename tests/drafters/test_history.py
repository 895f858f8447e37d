"""Checks prompt lookup in earlier samples: its drafts against lists, its text, its programs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle_jax
from eagle_jax.core import PADDING, ROOT, RowRandomness, Sampling, Sizes, make_sampling
from eagle_jax.drafters import pack_history, prompt_lookup_drafter
from eagle_jax.drafters.pld import LookupState
from eagle_jax.parallel import make_mesh
from eagle_jax.runtime import generation
from tests import tables
from tests.models import random_prompts, tiny_target

NGRAM, LENGTH = 6, 5
PROMPTS = random_prompts([9, 4, 17, 6], 12)
OPTIONS = dict(max_new_tokens=31, eos_ids=(), temperature=1.0, key=5)


def matches(text, place, most):
    """How many tokens of `place` end as the text does."""
    width = 0
    while width < min(len(text), len(place), most) and text[-1 - width] == place[-1 - width]:
        width += 1
    return width


def looked_up(text, samples, ngram, length, latest, shortest):
    """The longest match that has a continuation; among equal ones the text's own, then the last of the last sample.

    Samples of the text's own prompt come before others: `samples` are pairs of a prompt and a sample.
    """
    own = [(matches(text, text[:end], ngram), text[end:]) for end in range(1, len(text))]
    theirs = [
        (matches(text, sample[:end], ngram), sample[end:])
        for prompt, sample in sorted(samples, key=lambda pair: text[: len(pair[0])] == pair[0])  # stable
        for end in range(1, len(sample))
    ]
    ranked = [*(own[::-1] if latest else own), *theirs[::-1]]
    width, following = max(ranked, key=lambda pair: pair[0], default=(0, []))  # the first of equal ones
    return following[:length] if width >= shortest else []


texts = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@functools.cache
def draft_jit(*settings):
    return jax.jit(prompt_lookup_drafter(*settings, history=True).draft)


prompts_of = st.lists(st.integers(0, 1), max_size=3)


@given(texts, st.lists(st.tuples(prompts_of, texts), max_size=4), st.booleans(), st.integers(1, 4), st.booleans(),
       st.integers(1, 3))  # fmt: skip
def test_the_longest_match_is_drafted_and_the_texts_own_before_a_sample(
    text, samples, with_prompts, ngram, latest, shortest
):
    """Of samples the one of the text's own prompt comes first."""
    shortest = min(shortest, ngram)
    prompts = [np.asarray(prompt, int) for prompt, _ in samples] if with_prompts else None
    samples = [(prompt if with_prompts else [], sample) for prompt, sample in samples]
    garbage = np.random.default_rng(len(text)).integers(0, 3, 16 - len(text) + 1)
    state = LookupState(jnp.asarray([text[:-1] + garbage.tolist()], jnp.int32), jnp.asarray([len(text) - 1]))
    randomness = RowRandomness(jax.random.split(jax.random.key(0), 1), jnp.zeros((1,), jnp.int32))
    params = {"drafter": {"history": pack_history([np.asarray(sample) for _, sample in samples], prompts)}}
    root = jnp.asarray(text[-1:], jnp.int32)
    tree, _ = draft_jit(ngram, 5, latest, shortest)(params, state, root, randomness, Sampling())
    wanted = looked_up(text, samples, ngram, 5, latest, shortest)
    assert np.asarray(tree.tokens)[0, : len(wanted) + 1].tolist() == [text[-1], *wanted]
    assert np.asarray(tree.parents)[0].tolist() == [ROOT, *range(len(wanted)), *[PADDING] * (5 - len(wanted))]


@pytest.mark.parametrize(
    ("prompt", "sample", "other", "following"),
    [
        ([1], [2, 7], [0, 2, 8], 8),  # the longer n-gram, although of another prompt
        ([1], [2, 7], [2, 8], 7),
        ([1, 0, 2], [2, 7], [2, 8], 7),  # the prompt is the whole text
        ([1, 0, 2, 4], [2, 7], [2, 8], 8),  # a longer prompt
    ],
)
def test_own_samples_come_first_among_equal_matches(prompt, sample, other, following):
    history = pack_history([np.asarray(sample), np.asarray(other)], [np.asarray(prompt), np.asarray([3])])
    state = LookupState(jnp.asarray([[1, 0, 9, 9, 9, 9, 9, 9]], jnp.int32), jnp.asarray([2]))
    randomness = RowRandomness(jax.random.split(jax.random.key(0), 1), jnp.zeros((1,), jnp.int32))
    params = {"drafter": {"history": history}}
    tree, _ = draft_jit(3, 5, False, 1)(params, state, jnp.asarray([2]), randomness, Sampling())
    assert int(tree.tokens[0, 1]) == following and int(tree.parents[0, 1]) == 0


def test_a_full_history_and_one_of_an_array_are_searched_to_their_ends():
    """The last sample ends where the array ends, once with its separator and once without."""
    long = np.arange(1023) % 1000
    packed, longer = pack_history([long]), pack_history([np.arange(1024)])
    assert len(packed.tokens) == 1024 and packed.tokens[-1] == -1 and len(longer.tokens) == 2048
    bare = packed._replace(tokens=jnp.append(long, 5)[1:].astype(jnp.int32), owner=packed.owner[1:])
    for history, text, following in (
        (packed, [17, 18, 19], [20, 21, 22]),
        (bare, [17, 18, 19], [20, 21, 22, 5]),
        (bare, [21, 22, 5], [6, 7, 8, 9, 10]),  # nothing follows the last entry: the 5 before it is found
    ):
        state = LookupState(jnp.asarray([text + [0] * 8], jnp.int32), jnp.asarray([2]))
        randomness = RowRandomness(jax.random.split(jax.random.key(0), 1), jnp.zeros((1,), jnp.int32))
        params = {"drafter": {"history": history}}
        tree, _ = draft_jit(3, 5, False, 1)(params, state, jnp.asarray(text[-1:]), randomness, Sampling())
        assert np.asarray(tree.tokens)[0, 1 : 1 + len(following)].tolist() == following
        assert (np.asarray(tree.parents)[0] >= 0).sum() == len(following)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_a_slow_loop(temperature):
    table, sizes = tables.random_table(7), Sizes(max_tokens=24, chunk=4)
    prompts = [[1], [2, 3, 4, 5, 6], [3, 1], [5, 6, 0]]
    batch = tables.batch_of(prompts, [24, 20, 9, 24], [[], [], [], [4]], sizes.chunk)
    slow = tables.slow_texts(table, batch, 24, temperature=temperature)
    samples = [[*prompt, *text] for prompt, text in zip(prompts, slow, strict=True)]
    kept = {"drafter": {"history": pack_history([np.asarray(one) for one in samples[:2]])}}
    drafter = tables.watched(prompt_lookup_drafter(4, 6, history=True))
    state = tables.run(tables.parameters(table) | kept, batch, make_sampling(temperature), drafter, sizes)
    assert tables.texts_of(state) == slow
    assert state.accepted[:, 6].sum() > 3, "no whole draft was ever accepted"


@functools.cache
def replies():
    return eagle_jax.generate(tiny_target(), None, PROMPTS, **OPTIONS).tokens


def samples_of(prompts, texts):
    return [[*prompt[-NGRAM:], *text] for prompt, text in zip(prompts, texts, strict=True)]


def test_a_repeated_sample_is_drafted_at_full_length_without_a_new_program():
    """31 tokens are one of the prompt, then five drafts of five and the target's own token behind each."""
    drafter, samples = eagle_jax.prompt_lookup(tiny_target(), ngram=NGRAM, length=LENGTH, history=[]), replies()
    before = eagle_jax.generate(tiny_target(), drafter, PROMPTS, **OPTIONS)
    programs = generation.generate_program._cache_size()
    told = drafter.with_history(samples_of(PROMPTS, samples))
    out = eagle_jax.generate(tiny_target(), told, PROMPTS, **OPTIONS)
    assert generation.generate_program._cache_size() == programs
    assert before.tokens == out.tokens == samples
    assert before.tau < 2 and out.tau > 0.9 * (LENGTH + 1)
    other = told.with_history([range(12)])  # replaced, not added
    assert eagle_jax.generate(tiny_target(), other, PROMPTS, **OPTIONS).tau < 2


def test_a_sample_of_the_own_prompt_comes_before_one_of_another_prompt():
    """Later samples to other prompts begin as the replies do, and go on differently."""
    target = tiny_target()
    prompts = [[*prompt, *range(1, 7)] for prompt in random_prompts([3, 70, 2, 5], 12)]
    texts = eagle_jax.generate(target, None, prompts, **OPTIONS).tokens
    samples = [*texts, *([text[0], *[(token + 1) % 12 for token in text[1:]]] for text in texts)]
    drafter = eagle_jax.prompt_lookup(target, ngram=NGRAM, length=LENGTH, history=[])
    alike = drafter.with_history(samples_of(prompts * 2, samples))
    apart = drafter.with_history(samples, [*prompts, *[[7, *prompt] for prompt in prompts]])
    short = OPTIONS | {"max_new_tokens": 7}
    out = eagle_jax.generate(target, alike, prompts, **short), eagle_jax.generate(target, apart, prompts, **short)
    assert out[1].cycles.tolist() == [1] * 4  # the first token, a draft of five, and the token behind it
    assert (out[0].cycles > 1).all() and out[0].tokens == out[1].tokens
    left_out = drafter.with_history([[], texts[0]], prompts[:2]).params["history"]
    assert left_out.owner.max() == 0 and (left_out.prompts[0, :9] == jnp.asarray(prompts[1][:9])).all()


@pytest.mark.slow
def test_streams_sessions_rollouts_and_meshes_draft_from_the_history():
    drafter = eagle_jax.prompt_lookup(tiny_target(), ngram=NGRAM, length=LENGTH, history=samples_of(PROMPTS, replies()))
    tau = eagle_jax.generate(tiny_target(), drafter, PROMPTS, **OPTIONS).tau
    one = dict(OPTIONS)
    one["key"] = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(5), jnp.arange(1))
    for chunks in (
        eagle_jax.stream(tiny_target(), drafter, PROMPTS[0], **one),
        eagle_jax.Session(tiny_target(), drafter, context=64).stream(PROMPTS[0], **one),
    ):
        found = list(chunks)
        assert [token for chunk in found for token in chunk.tokens] == replies()[0]
        assert len(found) < 9
    out = eagle_jax.rollout(tiny_target(), drafter, PROMPTS, lanes=2, **OPTIONS)
    assert out.tokens == replies() and out.tau == tau
    target, spread = eagle_jax.shard(tiny_target(), drafter, make_mesh(data=2, tensor=2))
    assert spread.with_history([]).target is target
    assert all(leaf.sharding.is_fully_replicated for leaf in spread.params["history"])
    out = eagle_jax.generate(target, spread, PROMPTS, **OPTIONS)
    assert out.tokens == replies() and out.tau == tau


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ("abc", "(history|samples) must be a list of lists of token ids, got 'abc'"),
        (7, "(history|samples) must be a list of lists of token ids, got 7"),
        ([[1], "ab"], r"(history|samples)\[1\] must be a flat list of token ids, got 'ab'"),
        ([3, 4], r"(history|samples)\[0\] must be a flat list of token ids, got 3"),
        ([[1, [2]]], r"(history|samples)\[0\] must be a flat list of token ids"),
        ([[1.5]], r"(history|samples)\[0\] must be a flat list of token ids"),
        ([[], [4, 12]], r"(history|samples)\[1\]\[1\] must be 0 to 11, got 12"),
        ([[-1]], r"(history|samples)\[0\]\[0\] must be 0 to 11, got -1"),
    ],
)
def test_bad_samples_raise(history, message):
    with pytest.raises(ValueError, match=message):
        eagle_jax.prompt_lookup(tiny_target(), history=history)
    with pytest.raises(ValueError, match=message):
        eagle_jax.prompt_lookup(tiny_target()).with_history(history)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], [2]], "prompts must have one prompt for each of the 1 samples, got 2"),
        ("abc", "prompts must be a list of lists of token ids, got 'abc'"),
        ([[12]], r"prompts\[0\]\[0\] must be 0 to 11, got 12"),
    ],
)
def test_bad_prompts_of_samples_raise(prompts, message):
    with pytest.raises(ValueError, match=message):
        eagle_jax.prompt_lookup(tiny_target()).with_history([[3]], prompts)
