"""The rules for sampled drafts: what they do at temperature 0, and what they refuse (their law: test_law)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import ConfigError, TreeConfig
from eagle_jax.core import DraftTree, deterministic, make_sampling
from eagle_jax.drafters.rejection import block, rejection, traversal

VOCAB = 4


def verify(rule, temperature, parents=(-1, 0), depth=2, drafts_known=True):
    nodes = len(parents) + 1
    law = jnp.full((2, nodes, VOCAB), -np.log(VOCAB), jnp.float32) if drafts_known else None
    rows = jnp.tile(jnp.asarray([-1, *(parent + 1 for parent in parents)], jnp.int32), (2, 1))
    tree = DraftTree(jnp.tile(jnp.arange(nodes) % VOCAB, (2, 1)), rows, jnp.zeros((2, nodes)), law)
    logits, keys = jax.random.normal(jax.random.key(2), (2, nodes, VOCAB)), jax.random.split(jax.random.key(0), 2)
    return rule(tree, logits, keys, jnp.zeros((2,), jnp.int32), make_sampling(temperature), depth)


@pytest.mark.parametrize("rule", [rejection, block, traversal])
def test_greedy_they_do_what_the_engine_does(rule):
    for left, right in zip(verify(rule, 0.0), verify(deterministic, 0.0), strict=True):
        np.testing.assert_array_equal(left, right)
    with pytest.raises(ValueError, match=r"draft_log_probs .*got None.*TreeConfig\(verification=\.\.\.\)"):
        verify(rule, 1.0, drafts_known=False)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="tree must be a chain of 2 nodes, got 3"):
        verify(block, 1.0, (-1, -1, 0))
    for make, message in (
        (lambda: TreeConfig.static([-1, -1, 0], verification="block"), "'block'"),
        (lambda: TreeConfig(verification="rejection"), "verification"),
        (lambda: TreeConfig.chain(3, verification="typical"), "must be one of 'deterministic', 'rejection'"),
        (lambda: TreeConfig(depth=2, top_k=1, num_nodes=2, top_p=0.5, verification="rejection"), "top_p"),
        (lambda: TreeConfig(top_p=0.0), "top_p"),
        (lambda: TreeConfig(top_p=1.5), "top_p"),
        (lambda: TreeConfig(top_p=float("nan")), "top_p"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
