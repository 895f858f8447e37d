"""Checks processors of logits and draws against slow versions, and the errors of bad settings."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eagle_jax.core import DraftTree
from eagle_jax.core.sampling import draw, first_largest, make_sampling, process_logits
from eagle_jax.core.verify import deterministic
from tests import oracles

LOGITS = hnp.arrays(np.float32, 9, elements=st.sampled_from([float(x) for x in np.linspace(-4, 4, 17)]))


@given(
    LOGITS,
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 2, 5, 50]),
    st.sampled_from([1.0, 0.93, 0.51, 1e-6]),
    st.sampled_from([0.0, 0.07, 0.6, 1.0]),
)
def test_processors_agree_with_the_oracle(logits, temperature, top_k, top_p, min_p):
    sampling = make_sampling(temperature, top_k, top_p, min_p)
    log_probs = np.asarray(jax.jit(process_logits)(jnp.asarray(logits), sampling))
    expected = oracles.processed_law(logits, temperature, top_k, top_p, min_p)
    # A cumulative probability that meets top_p to the last bit, or a probability that meets min_p, may fall either
    # way in float32.
    if not _on_the_edge(logits, temperature, top_k, top_p, min_p):
        np.testing.assert_allclose(np.exp(log_probs), expected, atol=2e-6)
    assert np.isfinite(log_probs).any()


def _on_the_edge(logits, temperature, top_k, top_p, min_p):
    around = [
        oracles.processed_law(logits, temperature, top_k, min(top_p * f, 1.0), min(min_p * f, 1.0)) > 0
        for f in (1 - 1e-5, 1.0, 1 + 1e-5)
    ]
    return any((mask != around[1]).any() for mask in around)


def test_ties_of_top_p_go_to_the_lower_index_in_float32():
    law = process_logits(jnp.zeros((4,), jnp.bfloat16), make_sampling(1.0, top_p=0.5))
    assert law.dtype == jnp.float32
    np.testing.assert_allclose(np.exp(law), [0.5, 0.5, 0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_p": 1e-37}, 1),
        ({"top_p": 1e-38}, 1),  # denormal: XLA takes it for 0
        ({"top_p": 2.2e-308}, 1),
        ({"top_k": 1, "temperature": 1e36}, 1),  # all logits are 0 after the division
        ({"top_k": 3, "temperature": 1e38}, 3),
        ({"top_p": 0.5, "temperature": 1e38}, 20),
    ],
)
def test_extreme_settings_keep_the_likeliest_tokens(settings, kept):
    logits = jnp.arange(40.0)
    law = process_logits(logits, make_sampling(**({"temperature": 1.0} | settings)))
    assert np.flatnonzero(np.isfinite(law)).tolist() == list(range(40 - kept, 40))


@pytest.mark.parametrize("vocab", [1, 2, 1000])
def test_a_large_vocabulary_of_any_logits(vocab):
    """Large and tiny numbers, equal ones, both zeros, minus infinity."""
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=vocab) * 10.0 ** rng.integers(-6, 1, vocab)).astype(np.float32)
    logits[rng.random(vocab) < 0.3] = np.float32(-0.0)
    logits[rng.random(vocab) < 0.2] = np.float32(0.0)
    logits[1:][rng.random(vocab - 1) < 0.1] = -np.inf
    for settings in (dict(top_k=7), dict(top_k=400), dict(top_p=0.3), dict(top_p=0.97), dict(top_k=30, top_p=0.6)):
        law = np.exp(np.asarray(process_logits(jnp.asarray(logits), make_sampling(0.8, **settings))))
        np.testing.assert_allclose(law, oracles.processed_law(logits, 0.8, **settings), atol=1e-6)


def test_draws_follow_the_law_and_depend_on_key_and_index_only():
    logits = jnp.array([1.0, 0.0, 2.0, -1.0])
    sampling = make_sampling(1.0, top_k=3)
    keys = jax.random.split(jax.random.key(5), 20000)
    drawn = jax.jit(jax.vmap(lambda key, index: draw(logits, key, index, sampling), (0, None)))
    tokens = np.asarray(drawn(keys, jnp.int32(3)))
    law = oracles.processed_law(np.asarray(logits), 1.0, 3)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / len(tokens), law, atol=0.012)
    again, other = drawn(keys, jnp.int32(3)), drawn(keys, jnp.int32(4))
    assert (tokens == again).all() and (tokens != other).any()
    assert int(draw(jnp.array([0.0, 3.0, 3.0]), keys[0], jnp.int32(0), make_sampling())) == 1  # the first of equal ones


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), 1e-40, 1e39, float("inf"))),
        *(("top_p", value) for value in (0.0, 1.2)), *(("top_k", value) for value in (-1, True, 2**40)),
        ("min_p", 1.5), ("min_p", float("nan")),
    ],
)  # fmt: skip
def test_bad_settings_raise_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must .*, got {re.escape(str(value))}\."):
        make_sampling(**({"temperature": 1.0} | {name: value}))


def random_sizes(jaxpr):
    """Sizes of the results of all hashes in a program, also inside its loops and calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("threefry2x32", "random_bits", "shift_left"):
            yield equation.outvars[0].aval.size
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                    yield from random_sizes(inner)


FLOATS = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan]))


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=6), elements=FLOATS))
def test_the_first_largest_is_the_argmax(values):
    """Of equal numbers it is the first, and of numbers with NaN the first of these, as everywhere in JAX."""
    found = jax.jit(first_largest)(values)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, jnp.argmax(values, axis=-1))


@pytest.mark.parametrize(("rows", "at_once"), [(3, 3), (4, 1), (8, 2), (16, 4)])
def test_noise_is_drawn_for_visited_nodes_alone(rows, at_once):
    """A walk draws for the roots, then for one node of a few rows at a time, and never B x (N + 1) x V numbers."""
    nodes, words = 7, 50
    parents = jnp.array([[-1, 0, 0, 1, 1, 3, 3]] * rows)
    tree = DraftTree(jnp.zeros((rows, nodes), jnp.int32), parents, jnp.zeros((rows, nodes)))
    keys = jax.random.split(jax.random.key(0), rows)
    walk = jax.make_jaxpr(lambda logits: deterministic(tree, logits, keys, jnp.arange(rows), make_sampling(0.8), 3))
    assert set(random_sizes(walk(jnp.zeros((rows, nodes, words))).jaxpr)) - set(range(rows + 1)) == {
        rows * words,
        at_once * words,
    }
