"""n-alpha against a count of what `stream` yields, chain by chain; tau against `generate`."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.evaluate.acceptance import measure_n_alpha, measure_tau, record_cycles
from eagle_jax.runtime.drafters import DraftHead
from eagle_jax.runtime.target import Target
from tests.models import random_prompts, tiny_head, tiny_target

VOCAB, DEPTH, TOKENS = 4, 3, 24


@pytest.fixture(scope="module")
def pair():
    """A head whose tree is no chain, of a target that stops."""
    target, head = tiny_target(VOCAB), tiny_head("eagle1", TreeConfig(2, 2, 4), VOCAB, seed=17)
    stopping = Target.from_params(dataclasses.replace(target.config, eos_ids=(3,)), target.params)
    return stopping, DraftHead.from_params(head.config, head.params, stopping, head.tree)


def counted(target, head, prompts, **options) -> tuple[np.ndarray, np.ndarray, int]:
    """Drafts looked at and accepted by position, and how many chains the end of a reply cut short."""
    tested, accepted, cut = np.zeros(DEPTH, int), np.zeros(DEPTH, int), 0
    for prompt in prompts:
        for chunk in list(eagle_jax.stream(target, head, prompt, max_new_tokens=TOKENS, **options))[1:]:
            accepted[: chunk.drafted] += 1
            tested[: len(chunk.tokens)] += 1
            cut += chunk.drafted == len(chunk.tokens)
    return tested, accepted, cut


def test_n_alpha_counts_the_drafts_that_the_text_goes_over(pair):
    target, head = pair
    prompts = random_prompts([5, 9, 3, 7, 6, 4, 8, 5], VOCAB)
    found = measure_n_alpha(target, head, prompts, depth=DEPTH, max_new_tokens=TOKENS)
    tested, accepted, cut = counted(target, head.with_tree(TreeConfig.chain(DEPTH)), prompts)
    assert cut > 0  # some reply ends inside a chain: the case that is easily got wrong
    assert 0 < accepted[1] < tested[1]
    assert found.tested == tested.tolist()
    assert found.accepted == accepted.tolist()
    assert found.alpha == [a / t if t else None for a, t in zip(accepted.tolist(), tested.tolist(), strict=True)]


def test_n_alpha_is_of_the_drafters_own_rule(pair):
    """Drafts that are sampled are accepted by p/q, and other texts come out than by the ranked chains."""
    target, head = pair
    sampled = head.with_tree(TreeConfig.chain(2, "rejection"))
    prompts = random_prompts([5, 9, 3, 7], VOCAB)
    options = dict(max_new_tokens=TOKENS, temperature=1.0, key=jax.random.split(jax.random.key(1), 4))
    found = measure_n_alpha(target, sampled, prompts, depth=DEPTH, **options)
    chain = head.with_tree(TreeConfig.chain(DEPTH, "rejection"))
    assert found.tested[0] == sum(measure_tau(target, chain, prompts, **options).cycles)
    assert found.tested != measure_n_alpha(target, head, prompts, depth=DEPTH, **options).tested


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda target, head: eagle_jax.prompt_lookup(target), "does not draft a tree that it is asked for: record"),
        (lambda target, head: head.with_tree(TreeConfig.chain(3, "block")), "'block' accepts a path as a whole"),
    ],
)
def test_n_alpha_of_what_has_none_is_refused(pair, make, message):
    target, head = pair
    with pytest.raises(ValueError, match=message):
        measure_n_alpha(target, make(target, head), [[1, 2, 3]])


def test_a_position_that_is_never_reached_has_no_rate(pair):
    target, head = pair
    found = measure_n_alpha(target, head, [[1, 2, 3]], depth=DEPTH, max_new_tokens=1)
    assert found == ([None] * DEPTH, [0] * DEPTH, [0] * DEPTH)


def test_tau_is_that_of_generate(pair):
    target, head = pair
    prompts = random_prompts([5, 9, 3], VOCAB)
    out = eagle_jax.generate(target, head, prompts, max_new_tokens=TOKENS)
    assert measure_tau(target, head, prompts, max_new_tokens=TOKENS) == (out.tau, out.cycles.tolist(), out.tokens)
    assert measure_tau(target, None, prompts, max_new_tokens=TOKENS).tau == 1.0
    with pytest.raises(ValueError, match="key must be given"):
        measure_n_alpha(target, head, prompts, temperature=1.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recorded_cycles_are_those_of_generate(pair, temperature):
    target, head = pair
    prompts = random_prompts([5, 9, 3, 7, 6, 4, 8, 5], VOCAB)
    options = {"max_new_tokens": TOKENS, "temperature": temperature, "key": 3}
    out = eagle_jax.generate(target, head, prompts, **options)
    found = record_cycles(target, head, prompts, **options)
    assert np.bincount(found.prompt, minlength=len(prompts)).tolist() == out.cycles.tolist()
    for row, reply in enumerate(out.tokens):
        written, last = [reply[0]], reply[0]
        for cycle in np.flatnonzero(found.prompt == row):
            assert found.tokens[cycle, 0] == last
            drafted = found.tokens[cycle][found.accepted[cycle]][1:].tolist()
            emitted = int(found.emitted[cycle])
            written += drafted[:emitted]
            assert len(drafted) in (emitted, emitted - 1)  # the rest is the target's own token
            if len(drafted) < emitted:
                written.append(reply[len(written)])
                nodes = np.flatnonzero(found.accepted[cycle])
                assert set(found.parents[cycle][found.reached[cycle]]) <= set(nodes)
                children = found.parents[cycle] == nodes[-1]  # of the last accepted node: looked at, none accepted
                assert np.all(found.reached[cycle][children])
                assert written[-1] not in found.tokens[cycle][children]
            last = written[-1]
        assert written == reply
    assert not np.any(found.accepted[:, 1:] & ~found.reached[:, 1:])


def test_plain_decoding_has_cycles_without_drafts(pair):
    found = record_cycles(pair[0], None, [[1, 2]], max_new_tokens=4)
    assert found.tokens.shape == (len(found.emitted), 1)
    assert np.all(found.accepted)
    assert record_cycles(pair[0], None, [[1, 2]], max_new_tokens=1).tokens.shape == (0, 1)
