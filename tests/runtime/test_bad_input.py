"""Checks that an invalid argument raises an error with its name and a remedy, before anything is compiled."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from transformers import BatchEncoding

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core import Batch, Engine, Sizes, emitted_log_probs, generate, make_sampling, prefill, step
from eagle_jax.runtime import generation
from eagle_jax.runtime.generation import request_of
from tests.models import TREES, tiny_head, tiny_target

GOOD = [[1, 2, 3]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: jax.jit(lambda x: run(x).tokens)(jnp.array(GOOD)), "prompts must be a concrete value"),
        (lambda run: jax.jit(lambda: run(GOOD).tokens)(), "arrays must be a concrete value"),
        (lambda run: jax.jit(lambda k: run(GOOD, key=k).tokens)(jax.random.key(0)), "key must be a concrete value"),
        (lambda run: jax.vmap(lambda k: run(GOOD, key=k).tokens)(jax.random.split(jax.random.key(0))), "JAX tracer"),
        (lambda run: jax.jit(lambda t: run(GOOD, temperature=t).tokens)(0.5), "temperature must be a concrete value"),
    ],
)
def test_tracers_raise_an_error_that_names_the_pure_function(call, message):
    target = tiny_target()
    with pytest.raises(ValueError, match=f"{message}.*eagle_jax.core.generate"):
        call(lambda prompts, **options: eagle_jax.generate(target, None, prompts, max_new_tokens=4, **options))


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    before = generation.generate_program._cache_size()
    yield
    assert generation.generate_program._cache_size() == before


def test_a_target_whose_arrays_were_donated_is_named():
    target = dataclasses.replace(tiny_target(), params=jax.tree.map(jnp.copy, tiny_target().params))
    jax.tree.leaves(target.params)[0].delete()
    with pytest.raises(
        ValueError, match=r"target must have its weights, got '.*', whose arrays were deleted by a donat"
    ):
        eagle_jax.generate(target, None, GOOD, max_new_tokens=4)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "non-empty list of lists"),
        (None, "non-empty list of lists"),
        ("hello", r"prompts must be .*, got 'hello'\. Tokenize the text first"),
        ([1, 2], r"prompts\[0\] must be a non-empty flat list of token ids, got 1\. generate and rollout take a list"),
        (["hello"], r"prompts\[0\] must be .*, got 'hello'\. Tokenize the text first"),
        ([BatchEncoding({"input_ids": [1]})], r"prompts\[0\] must be .*, got {.*\. Pass its \['input_ids'\]"),
        ([[1], []], r"prompts\[1\] must be a non-empty .*, got \[\]"),
        ([[1, 12]], r"prompts\[0\]\[1\] must be 0 to 11, got 12"),
        ([[-1]], r"prompts\[0\]\[0\] must be 0 to 11, got -1"),
        ([[0.5]], r"prompts\[0\] must be .*, got \[0.5\]"),
        ([[[1]]], r"prompts\[0\] must be .* flat list .*, got \[\[1\]\]"),
        ([[1, [2, 3]]], "flat list"),
        ([[1] * 600], r"at most 0 after the 600 tokens of row 0 .max_position is 512., got 128\. Shorten the prompt\."),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_invalid_prompts_raise_errors(prompts, message):
    with pytest.raises(ValueError, match=message):
        eagle_jax.generate(tiny_target(), None, prompts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(max_new_tokens=510),
            r"max_new_tokens must be at most 509 after the 3 tokens of row 0 .max_position is 512., got 510\. Lower it",
        ),
        (dict(log_probs="draft"), "log_probs must be 'target', 'law' or None, got 'draft'"),
        (dict(max_new_tokens=0), "max_new_tokens must be .*at least 1, got 0"),
        (dict(max_new_tokens=[3, 3]), r"a number, or one per prompt \(1\), got 2"),
        (dict(temperature=-1.0), "temperature must be .*, got -1.0"),
        (dict(temperature=1.0), "Pass key="),
        (dict(eos_ids=[12]), "eos_ids must be 0 to 11, got 12"),
        (dict(eos_ids=[[1], [2]]), r"a list per prompt \(1\), got 2 lists"),
        (dict(eos_ids=3.5), "eos_ids must be a token id, a list, .*, got 3.5"),
        (dict(eos_ids=[None]), r"eos_ids must be .*, got \[None\]"),
        (dict(eos_ids="2"), "eos_ids must be .*, got '2'"),
        (dict(temperature=1.0, key=2**70), "JAX keeps 32 bits of a seed"),
        (dict(temperature=1.0, key=-1), "key must be a seed from 0 to .*, got -1"),
        (dict(max_new_tokens=2.5), "max_new_tokens must be an integer .*, got 2.5"),
        (dict(max_new_tokens=[[2]]), r"max_new_tokens\[0\] must be an integer .*, got \[2\]"),
        (dict(temperature="1"), "temperature must be a number, got '1'"),
        (dict(temperature=1.0, key=0, top_p=None), "top_p must be a number, got None"),
        (dict(temperature=1.0, key="a"), "key must be jax.random.key.*, got 'a'"),
        (dict(temperature=1.0, key=True), "key must be jax.random.key.*, got True"),
        (
            dict(temperature=1.0, key=jax.random.split(jax.random.key(0))),
            r"key must be one key.*got an array of key<fry>\[2\]",
        ),
    ],
)
def test_invalid_options_raise_errors(options, message):
    with pytest.raises(ValueError, match=message):
        eagle_jax.generate(tiny_target(), None, GOOD, **options)


def test_objects_of_another_type_or_target_raise_errors():
    head, target = tiny_head("eagle3", TreeConfig.chain(2)), tiny_target()
    generate = functools.partial(eagle_jax.generate, prompts=GOOD)
    for call, message in (
        (lambda: generate("path", None), r"target must be a Target, got a str\. Pass .* eagle_jax\.load_target"),
        (lambda: eagle_jax.stream("path", None, [1]), r"target must be a Target, got a str"),
        (lambda: eagle_jax.load_drafter("head", "path"), r"target must be a Target, got a str"),
        (lambda: generate(target, "path"), r"drafter must be .* eagle_jax\.load_drafter.*, got 'path'"),
        (lambda: generate(target, "atuo", profile="p.yaml"), r"drafter must be .*, got 'atuo'"),
        (lambda: generate(target, head.drafter), r"must be bound to a target, got a Drafter\. Pass BoundDrafter"),
        (lambda: generate(tiny_target(vocab=13), head), r"got one for another target"),
        (lambda: head.with_tree(59), r"tree must be an eagle_jax\.TreeConfig, .*got 59"),
        (lambda: head.with_tree(TreeConfig(2, 13, 20)), "at most the draft vocabulary, 12, got 13"),
        (lambda: eagle_jax.prompt_lookup(target).with_tree(head.tree), "drafter must have a tree, got prompt lookup"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_arrays_may_replace_lists():
    arrays = dict(max_new_tokens=jnp.array([4]), eos_ids=jnp.array([5, 2]))
    request = request_of(tiny_target(), None, jnp.array([[1, 2, 3]]), **arrays)
    prompts, _, budget, stops, _ = request.batch
    assert prompts[0, :3].tolist() == [1, 2, 3]
    assert budget.tolist() == [4]
    assert stops.tolist() == [[5, 2, -1, -1]]


def test_stream_checks_its_prompt_at_the_call():
    for prompt in ([], "hi", [[1]], 7):
        with pytest.raises(ValueError, match="prompt must be a non-empty flat list of token ids, got"):
            eagle_jax.stream(tiny_target(), None, prompt)


def test_invalid_arguments_of_the_pure_functions_raise_errors():
    """Calls the check directly, because the type checks of the tests would raise first."""
    from eagle_jax.core.checked import check_arguments

    head, keys = tiny_head("eagle3", TreeConfig.chain(2)), jax.random.split(jax.random.key(0), 1)
    target, row = tiny_target(), jnp.array([4])
    batch = Batch(jnp.ones((1, 4), jnp.int32), row, row, jnp.array([[-1]]), keys)
    engine = Engine(target.fn, head.drafter)
    good = {
        "params": {"target": target.params, "drafter": head.params}, "batch": batch, "engine": engine,
        "sampling": make_sampling(1.0), "sizes": Sizes(max_tokens=4, chunk=4),
    }  # fmt: skip
    check_arguments(**good)
    state = jax.eval_shape(lambda: generate(**good))
    with pytest.raises(ValueError, match=r"state must have log-probabilities, got none\. Use Engine"):
        emitted_log_probs(state)
    with pytest.raises(ValueError, match=r"engine\.log_probs must be the same in prefill and step, got "):
        step(good["params"], state, good["sampling"], engine._replace(log_probs="law"))
    for change, message in (
        ({"engine": engine._replace(target=target)}, r"engine.target must be a TargetFn, got a Target. Pass target.fn"),
        ({"engine": engine._replace(drafter=head)}, r"engine.drafter must be a Drafter, got a DraftHead"),
        ({"sampling": 1.0}, r"sampling must be a Sampling, got a float. Pass eagle_jax.core.make_sampling"),
        ({"params": target.params}, 'params must be {"target": ..., "drafter": ...}'),
        ({"batch": batch._replace(prompts=[[1, 2], [3]])}, r"batch.prompts must be an array \[B, P\] .*, got a list"),
        ({"batch": batch._replace(prompts=row)}, r"batch.prompts must be an array \[B, P\] .*, got shape \[1\]"),
        ({"batch": batch._replace(keys=keys[0])}, r"batch.keys must be an array \[B\] .*, got shape \[\]"),
        ({"batch": batch._replace(lengths=jnp.array([4, 4]))}, r"batch.lengths must be .*, got shape \[2\]"),
        ({"batch": batch._replace(eos_ids=row)}, r"batch.eos_ids must be an array \[B, E\] .*, got shape \[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            check_arguments(**{**good, **change})


def test_a_cache_smaller_than_the_run_raises_an_error():
    request = request_of(tiny_target(), None, GOOD, max_new_tokens=8)
    with pytest.raises(ValueError, match="slots must be at least required_slots, 65, got 16"):
        prefill(*request._replace(sizes=request.sizes._replace(slots=16)))


def test_parameters_of_another_layout_are_named():
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    shorter = {name: part for name, part in target.params.items() if name != "layers_0"}
    for params, message in (
        ({"params": target.params}, "params must have the parts of a .*, got some without 'embed_tokens'"),
        (shorter, "got some without 'layers_0'"),
        ({**target.params, "layers_9": {}}, "got some with 'layers_9'"),
        (None, "got some without"),
    ):
        with pytest.raises(eagle_jax.ConfigError, match=message):
            eagle_jax.Target.from_params(target.config, params)
    for params, message in (
        (head.params["head"], "got .*'fc'"),
        ({"head": None}, r"got \['head'\]"),
        (None, "got NoneType"),
    ):
        with pytest.raises(eagle_jax.ConfigError, match=rf"params must be .*, {message}.*Pass params of a DraftHead"):
            eagle_jax.DraftHead.from_params(head.config, params, target)
