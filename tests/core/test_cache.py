"""Checks that commits are plain concatenation, and that no compiled loop copies a cache."""

import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_jax.core.cache import commit
from eagle_jax.core.costs import CycleCost
from eagle_jax.core.types import NewKV, empty_cache
from eagle_jax.runtime.generation import generate_program, request_of
from eagle_jax.runtime.request import with_taps
from tests import oracles
from tests.models import DRAFTERS, random_prompts, tiny_target

BATCH, GROUPS, SLOTS, WIDTH, NEW = 3, 2, 40, 4, 6


@st.composite
def histories(draw):
    """A few commits: for each, per row, which of the NEW tokens are kept, in order."""
    picks = st.lists(st.integers(0, NEW - 1), min_size=0, max_size=5)
    return draw(st.lists(st.tuples(*[picks] * BATCH), min_size=1, max_size=5))


@given(histories(), st.integers(0, 100))
def test_commit_is_the_naive_concatenation(history, seed):
    rng = np.random.default_rng(seed)
    cache = empty_cache(2, BATCH, GROUPS, SLOTS, WIDTH, "float32")
    expected = [np.zeros((GROUPS, 0, WIDTH), np.float32)] * BATCH
    for picks in history:
        fresh = rng.normal(size=(BATCH, GROUPS, NEW, WIDTH)).astype(np.float32)
        rows = np.array([(pick + [0] * 5)[:5] for pick in picks], np.int32)
        new = NewKV((jnp.asarray(fresh), jnp.asarray(2 * fresh)), (jnp.asarray(-fresh), jnp.asarray(fresh + 1)))
        cache = jax.jit(commit)(cache, new, jnp.array([len(pick) for pick in picks]), jnp.asarray(rows))
        expected = oracles.naive_commit(expected, fresh, [list(pick) for pick in picks])
    for b in range(BATCH):
        length = int(cache.length[b])
        assert length == expected[b].shape[1]
        for got, want in [
            (cache.keys[0].swapaxes(2, 3), expected[b]), (cache.keys[1].swapaxes(2, 3), 2 * expected[b]),
            (cache.values[0], -expected[b]), (cache.values[1], expected[b] + 1),
        ]:  # fmt: skip
            np.testing.assert_array_equal(np.asarray(got)[b, :, :length], want)


commit_in_rings = jax.jit(commit, static_argnames="windows")


@given(histories(), st.integers(0, 100), st.sampled_from([1, 2, 4, 5, 6, 12]), st.sampled_from([0, 3, 5, 12]))
def test_a_ring_holds_the_last_tokens(history, seed, window, done):
    """Windows below, at and above the five tokens of a commit; texts of which `done` tokens are already in the ring."""
    rng = np.random.default_rng(seed)
    start = np.stack([np.arange(GROUPS * done * WIDTH).reshape(GROUPS, done, WIDTH) for _ in range(BATCH)])
    start = start.astype(np.float32)
    cache = empty_cache(2, BATCH, GROUPS, SLOTS, WIDTH, "float32", (window, 0))
    assert [layer.shape[2] for layer in cache.values] == [window, SLOTS]
    committing = functools.partial(commit_in_rings, windows=(window, 0))
    old = NewKV((jnp.asarray(start),) * 2, (jnp.asarray(-start),) * 2)
    cache = committing(cache, old, jnp.full(BATCH, done)) if done else cache
    expected = list(start)
    for picks in history:
        fresh = rng.normal(size=(BATCH, GROUPS, NEW, WIDTH)).astype(np.float32)
        rows = np.array([(pick + [0] * 5)[:5] for pick in picks], np.int32)
        new = NewKV((jnp.asarray(fresh),) * 2, (jnp.asarray(-fresh),) * 2)
        cache = committing(cache, new, jnp.array([len(pick) for pick in picks]), jnp.asarray(rows))
        expected = oracles.naive_commit(expected, fresh, [list(pick) for pick in picks])
    for b in range(BATCH):
        length = expected[b].shape[1]
        held = np.arange(max(0, length - window), length)
        np.testing.assert_array_equal(np.asarray(cache.keys[0])[b][..., held % window].swapaxes(1, 2),
                                      expected[b][:, held])  # fmt: skip
        np.testing.assert_array_equal(np.asarray(cache.values[0])[b][:, held % window], -expected[b][:, held])
        np.testing.assert_array_equal(np.asarray(cache.values[1])[b][:, :length], -expected[b])


SLOW = ("plain", "eagle1-chain4", "small-chain", "hydra++-k3n12", "lookup")


@pytest.mark.parametrize("windows", [pytest.param((), marks=pytest.mark.slow), (280, 0)])
@pytest.mark.parametrize("method", ["eagle3-k3n12", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_no_loop_copies_a_cache(method, windows):
    """Prefill and cycles: a cache that XLA thinks is written before it is read is copied there, all of it.

    Fails for every method without `result` in `commit`.
    """
    check_copies(method, windows, None)


def test_no_branch_copies_a_cache():
    """Passes over trees of several sizes."""
    check_copies("eagle3-k3n12", (280, 0), CycleCost((1, 5, 13), (1.0, 1.5, 2.0), 0.1))


def test_no_loop_copies_kept_features():
    """The buffer of `taps` is as large as a cache, and written in place as it is."""
    found = check_copies("eagle3-k3n12", (), None, taps=(0, 1, 2))
    assert any(name.endswith(",48]") for name in found), "the buffer was not among the arrays that were checked"


def check_copies(method, windows, cycle_cost, taps=None):
    if "EAGLE_JAX_TESTS_KERNELS" in os.environ:
        pytest.skip("the interpreter of kernels copies what they read; tests/programs/test_aot.py compiles them")
    target = tiny_target(windows=windows)
    drafter = None if method == "plain" else DRAFTERS[method](target)
    request = request_of(target, drafter, random_prompts([300, 290], 12), max_new_tokens=8, cycle_cost=cycle_cost)
    request = with_taps(request, taps, target.config)
    lowered = generate_program.lower(*request)
    computations = re.split(r"\n(?=(?:%|ENTRY)[^\n]*\{\n)", lowered.compile().as_text())
    loops = [text for text in computations if not text.startswith(("ENTRY", "%fused", "HloModule"))]
    slots = max(windows, default=request.sizes.slots)
    of_two = re.compile(r"(f32\[2,[\d,]+\])\S* (?:get-tuple-element|parameter)\(")
    held = {name for text in loops for name in of_two.findall(text)}
    caches = {name for name in held if max(map(int, re.findall(r"\d+", name)[1:])) >= slots}
    assert caches
    copied = [name for text in loops for name in re.findall(r"= (f32\[[\d,]+\])\S* copy\(", text) if name in caches]
    assert not copied
    return caches
