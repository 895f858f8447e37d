"""Checks `taps=`: the hidden states that come back are those of a plain pass over the whole text."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.parallel import make_mesh
from eagle_jax.runtime import errors, generation, rollouts
from eagle_jax.runtime.request import with_taps
from tests.models import DRAFTERS, random_prompts, tiny_target

PROMPTS = random_prompts([5, 31, 1, 17, 8, 3], 12)
RUN = dict(max_new_tokens=[30, 7, 25, 1, 32, 12], eos_ids=[[3], [5], [], [1, 2], [0, 7, 9, 11, 10], [4]])
WIDTH = 64


@functools.partial(jax.jit, static_argnames=("fn", "taps"))
def passes(fn, params, texts, taps):
    """[B, WIDTH, F] features of padded texts, by a plain causal pass."""
    positions = jnp.broadcast_to(jnp.arange(WIDTH)[None], texts.shape)
    return fn.forward(params, texts, positions, jnp.tril(jnp.ones((WIDTH, WIDTH), bool)), None, taps).features


def check(out, prompts, taps):
    target = tiny_target()
    texts = [[*prompt, *text] for prompt, text in zip(prompts, out.tokens, strict=True)]
    padded = np.zeros((len(texts), WIDTH), np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    expected = np.asarray(passes(target.fn, target.params, jnp.asarray(padded), taps))
    assert len(out.features) == len(texts)
    for row, (text, features) in enumerate(zip(texts, out.features, strict=True)):
        assert features.shape == (len(text) - 1, 16 * len(taps)) and features.dtype == np.float32
        np.testing.assert_allclose(features, expected[row, : len(text) - 1], atol=1e-4)


@pytest.mark.parametrize(("name", "taps", "temperature"), [
    (None, (0, 1, 2), 0.0), ("eagle3-k3n12", (2, 0), 1.0), ("lookup", (2,), 0.0),
    pytest.param("eagle1-static", (1,), 0.0, marks=pytest.mark.slow),
])  # fmt: skip
def test_features_are_those_of_a_pass_over_the_text(name, taps, temperature):
    drafter = None if name is None else DRAFTERS[name](tiny_target())
    options = dict(temperature=temperature, key=7, **RUN)
    out = eagle_jax.generate(tiny_target(), drafter, PROMPTS, taps=taps, **options)
    check(out, PROMPTS, taps)
    plain = eagle_jax.generate(tiny_target(), drafter, PROMPTS, **options)
    assert plain.tokens == out.tokens and plain.features is None
    assert name is None or out.accepted[:, 1:].sum() > 0


def test_rollouts_return_them_for_every_reply():
    drafter = DRAFTERS["eagle3-k3n12"](tiny_target())
    options = dict(lanes=3, samples_per_prompt=2, temperature=1.0, key=3, **RUN)
    out = eagle_jax.rollout(tiny_target(), drafter, PROMPTS, taps=np.array([0, 2]), **options)
    check(out, [prompt for prompt in PROMPTS for _ in range(2)], (0, 2))
    target, spread = eagle_jax.shard(tiny_target(), drafter, make_mesh(data=2, tensor=2))
    other = eagle_jax.rollout(target, spread, PROMPTS, taps=(0, 2), **options)
    assert other.tokens == out.tokens
    for ours, theirs in zip(other.features, out.features, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_memory_of_features_is_counted(monkeypatch):
    target = tiny_target()
    kept = dict(max_new_tokens=32, taps=(0, 1, 2))
    request = with_taps(generation.request_of(target, None, PROMPTS, max_new_tokens=32), (0, 1, 2), target.config)
    features = 4 * 48 * request.sizes.slots  # of a row, float32
    least = errors.size_of(request.params) + errors.size_of(errors.cache_shapes(request)) + 6 * features
    monkeypatch.setattr(errors, "_limit", lambda _: least)
    errors.check_fits(request)
    monkeypatch.setattr(errors, "_limit", lambda _: least - 1)
    with pytest.raises(MemoryError, match=r"where 5 of 6 rows fit.* features of 6 rows 0\.00 GB .leave out taps"):
        errors.check_fits(request)
    errors.check_fits(request._replace(engine=request.engine._replace(taps=None)))
    monkeypatch.setattr(generation, "generate_program", lambda *_, **__: pytest.fail("went on to compile"))
    with pytest.raises(MemoryError, match="features of 6 rows"):
        eagle_jax.generate(target, None, PROMPTS, **kept)
    seen = []
    monkeypatch.setattr(rollouts, "check_fits", lambda held, replies: seen.append((len(held.batch.prompts), replies)))
    monkeypatch.setattr(rollouts, "start_program", lambda *_, **__: pytest.fail("went on to compile"))
    with pytest.raises(pytest.fail.Exception):
        eagle_jax.rollout(target, None, PROMPTS * 4, lanes=8, samples_per_prompt=3, **kept)
    assert seen == [(12, 32 * 3)], "rows of lanes and room, and the replies to a bucket of prompts"


@pytest.mark.parametrize("taps", [(), (3,), (-1,), "012", 2, (0.5,), True, [[0]]])
def test_bad_taps_raise(taps, monkeypatch):
    monkeypatch.setattr(generation, "generate_program", lambda *_, **__: pytest.fail("went on to compile"))
    with pytest.raises(ValueError, match="taps must be hidden states 0 to 2, or None, got"):
        eagle_jax.generate(tiny_target(), None, PROMPTS, taps=taps)
    with pytest.raises(ValueError, match="taps must be hidden states 0 to 2, or None, got"):
        eagle_jax.rollout(tiny_target(), None, PROMPTS, taps=taps)


def test_a_stream_keeps_no_features():
    with pytest.raises(TypeError, match="unexpected keyword argument 'taps'"):
        eagle_jax.stream(tiny_target(), None, PROMPTS[0], taps=(0,))
    with pytest.raises(TypeError, match="unexpected keyword argument 'taps'"):
        eagle_jax.Session(tiny_target()).stream(PROMPTS[0], taps=(0,))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", r"\. Did you mean 'temperature'\?"),
        ("cycle_costs", r"\. Did you mean 'cycle_cost'\?"),
        ("fits", ""),
    ],
)
def test_an_unknown_option_is_named_with_what_it_is_like(name, hint):
    with pytest.raises(TypeError, match=rf"^generate\(\) got an unexpected keyword argument '{name}'{hint}$"):
        eagle_jax.generate(tiny_target(), None, PROMPTS, **{name: 1})


def test_streams_refuse_a_cost_that_they_would_ignore():
    target = tiny_target()
    with pytest.raises(TypeError, match=r"^stream\(\) got an unexpected keyword argument 'cycle_cost'$"):
        eagle_jax.stream(target, None, PROMPTS[0], cycle_cost=2.0)
    with pytest.raises(TypeError, match=r"^rollout\(\) got an unexpected keyword argument 'fits'$"):
        eagle_jax.rollout(target, None, PROMPTS, fits=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'cycle_cost'"):
        eagle_jax.Session(target).stream(PROMPTS[0], cycle_cost=2.0)
