"""Checks n-alpha and recorded cycles against `generate` and `stream`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.evaluate.acceptance import measure_n_alpha, record_cycles
from eagle_jax.runtime.drafters import DraftHead
from eagle_jax.runtime.target import Target
from tests.models import random_prompts, tiny_head, tiny_target

VOCAB, DEPTH, TOKENS = 4, 6, 24
PROMPTS = random_prompts([5, 9, 3, 7, 6, 4, 8, 5], VOCAB)


@pytest.fixture(scope="module")
def pair():
    """A target with a stop token, and a head whose tree is not a chain."""
    target, head = tiny_target(VOCAB), tiny_head("eagle1", TreeConfig(2, 2, 4), VOCAB, seed=17)
    stopping = Target.from_params(dataclasses.replace(target.config, eos_ids=(3,)), target.params)
    return stopping, DraftHead.from_params(head.config, head.params, stopping, head.tree)


@pytest.mark.parametrize("rule", ["deterministic", "rejection"])
def test_n_alpha_counts_the_drafts_inside_the_reply(pair, rule):
    """Against the chunks of `stream`, chain by chain. Sampled drafts use the drafter's own rule."""
    target, head = pair
    chain = TreeConfig.chain(DEPTH, rule)
    options = {"max_new_tokens": TOKENS, **({} if rule == "deterministic" else {"temperature": 1.0, "key": 1})}
    prompts = PROMPTS if rule == "deterministic" else PROMPTS[:1]
    shorter = head.with_tree(TreeConfig.chain(2, rule))
    found = measure_n_alpha(target, shorter, prompts, **options)
    tested, accepted, cut = np.zeros(DEPTH, int), np.zeros(DEPTH, int), 0
    for prompt in prompts:
        for chunk in list(eagle_jax.stream(target, head.with_tree(chain), prompt, **options))[1:]:
            accepted[: chunk.drafted] += 1
            tested[: len(chunk.tokens)] += 1
            cut += chunk.drafted == len(chunk.tokens)
    assert found == (
        [a / t if t else None for a, t in zip(accepted.tolist(), tested.tolist(), strict=True)],
        tested.tolist(), accepted.tolist(),
    )  # fmt: skip
    if rule == "deterministic":
        assert cut > 0  # a reply ends inside a chain: the case that is easily got wrong
        assert 0 < accepted[1] < tested[1]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda target, head: head.with_tree(TreeConfig.chain(3, "block")), {}, "got 'block', which accepts whole"),
        (lambda target, head: head, {"temperature": 1.0}, "key must be given"),
    ],
)
def test_n_alpha_is_refused(pair, make, options, message):
    target, head = pair
    with pytest.raises(ValueError, match=message):
        measure_n_alpha(target, make(target, head), [[1, 2, 3]], **options)


def test_recorded_cycles_are_those_of_generate(pair):
    target, head = pair
    out = eagle_jax.generate(target, head, PROMPTS, max_new_tokens=TOKENS)
    found = record_cycles(target, head, PROMPTS, max_new_tokens=TOKENS)
    assert np.bincount(found.prompt, minlength=len(PROMPTS)).tolist() == out.cycles.tolist()
    for row, reply in enumerate(out.tokens):
        written, last = [reply[0]], reply[0]
        for cycle in np.flatnonzero(found.prompt == row):
            assert found.tokens[cycle, 0] == last
            drafted = found.tokens[cycle][found.accepted[cycle]][1:].tolist()
            emitted = int(found.emitted[cycle])
            written += drafted[:emitted]
            assert len(drafted) in (emitted, emitted - 1)  # the last token may be the target's own
            if len(drafted) < emitted:
                written.append(reply[len(written)])
                nodes = np.flatnonzero(found.accepted[cycle])
                assert set(found.parents[cycle][found.reached[cycle]]) <= set(nodes)
                children = found.parents[cycle] == nodes[-1]  # of the last accepted node: verified, none accepted
                assert np.all(found.reached[cycle][children])
                assert written[-1] not in found.tokens[cycle][children]
            last = written[-1]
        assert written == reply
    assert not np.any(found.accepted[:, 1:] & ~found.reached[:, 1:])


def test_replies_without_drafts(pair):
    """Plain decoding records roots only; a reply of one token has no cycle, and n-alpha no rate."""
    target, head = pair
    found = record_cycles(target, None, [[1, 2]], max_new_tokens=4)
    assert found.tokens.shape == (len(found.emitted), 1)
    assert np.all(found.accepted)
    none = measure_n_alpha(target, head, [[1, 2, 3]], max_new_tokens=1)
    assert none == ([None] * DEPTH, [0] * DEPTH, [0] * DEPTH)
