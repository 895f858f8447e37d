"""Checks the compiled program: no host call, no constant weights, float32 scores, one compilation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core import generate, prefill
from eagle_jax.runtime import generation
from eagle_jax.runtime.generation import request_of
from infer.aot.costs import Program
from tests.models import random_prompts, tiny_head, tiny_target

TREE = TreeConfig(depth=3, top_k=2, num_nodes=6)
PROMPTS = random_prompts([5, 31], 12)


def test_a_step_writes_into_the_donated_caches():
    request = request_of(tiny_target(), tiny_head("eagle3", TREE), PROMPTS, max_new_tokens=16)
    state = jax.eval_shape(lambda: prefill(*request))
    lowered = generation.step_program.lower(request.params, state, request.sampling, request.engine)
    memory = lowered.compile().memory_analysis()
    caches = (state.cache, state.drafter.cache)
    assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))


def test_only_the_last_prompt_position_meets_the_lm_head():
    """The prefill computes no array of (chunk positions) x (vocabulary)."""
    vocab = 41  # no other size of the model
    head = tiny_head("eagle3", TREE, vocab)
    request = request_of(tiny_target(vocab), head, PROMPTS, max_new_tokens=16)
    jaxpr = jax.make_jaxpr(lambda *arrays: prefill(*arrays, request.engine, request.sizes))(*request[:3])
    shapes = [var.aval.shape for eqn in _equations(jaxpr.jaxpr) for var in eqn.outvars]
    assert (2, vocab) in shapes
    assert not [shape for shape in shapes if len(shape) > 2 and shape[-1] == vocab and shape[0] == 2]


def test_half_precision_weights_keep_float32_scores():
    """With bfloat16 weights every exponential, logarithm, root and ranking in the program is of float32 values."""
    target, head = (_half(which) for which in (tiny_target(), tiny_head("eagle3", TREE)))
    head = eagle_jax.DraftHead.from_params(head.config, head.params, target, head.tree)
    request = request_of(target, head, PROMPTS, max_new_tokens=8, temperature=1.0, top_p=0.9, key=0)
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
    assert (logits != logits.astype(jnp.bfloat16).astype(jnp.float32)).any(), "logits were rounded on the way"


def _half(which):
    halved = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, which.params
    )
    if isinstance(which, eagle_jax.Target):
        return eagle_jax.Target.from_params(which.config, halved)
    return dataclasses.replace(which, params=halved)


def _equations(jaxpr):
    """All equations, those of nested programs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for closed in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(closed, "jaxpr", closed)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def test_prompts_of_a_bucket_share_one_compilation():
    jitted = generation.generate_program
    eagle_jax.generate(tiny_target(), None, random_prompts([20, 9], 12), max_new_tokens=20)
    before = jitted._cache_size()
    eagle_jax.generate(tiny_target(), None, random_prompts([32, 1], 12), max_new_tokens=[31, 3], eos_ids=[1, 2])
    assert jitted._cache_size() == before
    eagle_jax.generate(tiny_target(), None, random_prompts([33, 1], 12), max_new_tokens=20)
    assert jitted._cache_size() == before + 1


def test_changing_a_sampling_value_does_not_recompile():
    run = dict(max_new_tokens=8, key=1)
    eagle_jax.generate(tiny_target(), None, PROMPTS[:1], temperature=0.7, top_p=0.9, **run)
    before = generation.generate_program._cache_size()
    eagle_jax.generate(tiny_target(), None, PROMPTS[:1], temperature=1.3, top_p=0.5, **run)
    assert generation.generate_program._cache_size() == before


def test_the_program_holds_no_host_call_and_no_weight():
    request = request_of(tiny_target(), tiny_head("eagle3", TREE), PROMPTS, max_new_tokens=16)
    lowered = generation.generate_program.lower(*request)
    text = lowered.as_text()
    assert Program(lowered.compile().as_text()).host_transfers() == []  # that it sees one: tests/programs/test_aot.py
    largest = min(leaf.size for leaf in jax.tree.leaves(request.params) if leaf.ndim == 2)
    for line in text.splitlines():
        if "stablehlo.constant dense" in line and "tensor<" in line:
            shape = line.rsplit("tensor<", 1)[1].split(">")[0].split("x")[:-1]
            assert np.prod([int(size) for size in shape], initial=1) < largest, line[:200]
    assert text.count("stablehlo.while") >= 1
