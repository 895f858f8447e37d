"""Checks that a random number depends on its key and number alone, and that the tail is right."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.random import threefry2x32_p
from scipy import stats

from eagle_jax.config import TreeConfig
from eagle_jax.core import Engine, Sizes, emitted_tokens, generate
from eagle_jax.core.randomness import _fraction, _threefry, gumbel, row_keys, threefry_keys, uniform
from eagle_jax.core.sampling import draw, make_sampling
from eagle_jax.runtime.generation import request_of
from tests.models import tiny_target
from tests.tables import TARGET, batch_of, parameters, random_table, slow_texts, table_drafter

GENERATORS = ["threefry2x32", "rbg", "unsafe_rbg"]
NUMBERS = jnp.arange(5)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_number_depends_on_its_own_key_and_number_alone(name):
    keys = jnp.stack([jax.random.key(seed, impl=name) for seed in (3, 4, 5)])
    together = jax.vmap(lambda key: gumbel(key, NUMBERS))(keys)
    alone = [gumbel(key, NUMBERS) for key in keys]
    assert (together == jnp.stack(alone)).all()
    assert len(np.unique(together)) == together.size
    assert (gumbel(keys[1], NUMBERS[3:]) == alone[1][3:]).all()
    derived = jax.random.key_data(row_keys(keys[0], jnp.array([7, 0, 9])))
    assert (derived[0] == jax.random.key_data(row_keys(keys[0], jnp.array([7])))[0]).all()
    assert len(np.unique(derived, axis=0)) == 3


def test_keys_of_threefry_stay_and_raw_words_are_read():
    key = jax.random.key(3)
    assert (jax.random.key_data(threefry_keys(key)) == jax.random.key_data(key)).all()
    for name in GENERATORS:
        key = jax.random.key(3, impl=name)
        raw = threefry_keys(jax.random.key_data(key))
        assert (jax.random.key_data(raw) == jax.random.key_data(threefry_keys(key))).all()
    with pytest.raises(ValueError, match="must have an even number of 32-bit words, got 3"):
        threefry_keys(jnp.zeros((3,), jnp.uint32))


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9))
def test_the_hash_is_threefry(seed, numbers):
    words = jax.random.key_data(jax.random.key(seed))
    low = jnp.array(numbers, jnp.uint32)
    inputs = jnp.broadcast_arrays(words[0], words[1] ^ jnp.uint32(seed), jnp.uint32(7), low)
    for own, theirs in zip(
        _threefry(*(part[0] for part in inputs[:3]), low), threefry2x32_p.bind(*inputs), strict=True
    ):
        assert (own == theirs).all()


def test_uniform_numbers_are_uniform():
    values = np.asarray(uniform(jax.random.key(0), jnp.arange(200_000)))
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    noise = np.asarray(gumbel(jax.random.key(1), jnp.arange(200_000)))
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3


def test_a_fraction_is_as_fine_as_float32_near_zero_and_never_one():
    most = 2**32 - 1
    words = [(0, 0), (0, 1), (0, most), (1, 0), (5, 2**31), (2**31, 0), (most, most)]
    high, low = (jnp.array(part, jnp.uint32) for part in zip(*words, strict=True))
    exact = np.array([(one * 2.0**32 + other + 0.5) * 2.0**-64 for one, other in words])
    np.testing.assert_allclose(np.asarray(_fraction(high, low), np.float64), np.minimum(exact, 1 - 2.0**-24), rtol=2e-7)


@pytest.mark.slow
def test_the_law_holds_in_the_tail_of_a_real_vocabulary():
    """Qwen's vocabulary: one token has 98.5 percent, the others 1e-7 each. Coarse noise draws half as many of them."""
    vocab, mass, draws = 151_936, 0.015, 6000
    law = np.full(vocab, mass / (vocab - 1))
    law[vocab // 2] = 1 - mass
    logits, sampling = jnp.asarray(np.log(law), jnp.float32), make_sampling(1.0)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})
    def count(logits):
        at = jnp.arange(draws)
        drawn = jax.lax.map(lambda index: draw(logits, jax.random.key(0), index, sampling), at)
        return jnp.sum(drawn != vocab // 2)

    low, high = stats.binom.interval(0.999, draws, mass)  # 61 to 122; coarse noise: about 45
    assert low <= int(count(logits)) <= high


VOCAB, SIZES = 6, Sizes(max_tokens=12, chunk=3)
TABLE = random_table(VOCAB)
ENGINE = Engine(TARGET, table_drafter(TreeConfig(depth=2, top_k=2, num_nodes=4), VOCAB))


def batch_with(keys):
    rows = keys.shape[0]
    return batch_of([[3, 1, 4]] * rows, [12] * rows, [[]] * rows, 3)._replace(keys=keys)


def texts(params, keys):
    return emitted_tokens(generate(params, batch_with(keys), make_sampling(1.5), ENGINE, SIZES))


@pytest.mark.parametrize("name", [*GENERATORS[:2], pytest.param(GENERATORS[2], marks=pytest.mark.slow)])
def test_a_rows_text_depends_on_its_own_key_alone(name):
    keys, params = jnp.stack([jax.random.key(seed, impl=name) for seed in range(4)]), parameters(TABLE)
    wanted = slow_texts(TABLE, batch_with(keys), SIZES.max_tokens, temperature=1.5)
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",)), jax.sharding.PartitionSpec
    specs = {"in_specs": (spec(), spec("data")), "out_specs": spec("data")}
    run = {
        "threefry2x32": texts,
        "unsafe_rbg": jax.vmap(lambda params, key: texts(params, key[None])[0], (None, 0)),
        "rbg": jax.shard_map(texts, mesh=mesh, check_vma=False, **specs),
    }[name]
    assert jax.jit(run)(params, keys).tolist() == wanted
    assert len(np.unique(wanted, axis=0)) == 4


def test_the_default_generator_does_not_change_the_keys_of_a_seed():
    def data(key):
        return jax.random.key_data(
            request_of(tiny_target(), None, [[1], [2]], max_new_tokens=9, temperature=1.0, key=key).batch.keys
        )

    wanted = data(3)
    typed = data(jax.random.key(3, impl="rbg"))
    with jax.default_prng_impl("rbg"):
        assert (data(3) == wanted).all()
        assert (data(jax.random.PRNGKey(3)) == typed).all()
