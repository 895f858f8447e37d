"""The rules for sampled drafts on laws given by tables: the emitted law is the target's, and what is accepted known."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from eagle_jax.config import ConfigError, TreeConfig
from eagle_jax.core.sampling import make_sampling, process_logits
from eagle_jax.core.types import DraftTree, NewKV, RowRandomness
from eagle_jax.core.verify import deterministic
from eagle_jax.drafters.grow import Expander, grow
from eagle_jax.drafters.rejection import RULES, block, rejection, traversal

VOCAB, ROWS, WORDS = 4, 100_000, 3
CHAIN = (-1, 0)
TREE = (-1, -1, -1, 0, 0, 1)  # as the drafts of a Medusa-like tree: three children, of which two have their own
LAWS = {"plain": dict(temperature=1.0), "cut": dict(temperature=0.8, top_k=3, top_p=0.9)}


def tables(seed=0, sharpness=1.5):
    """Logits of target and draft after every text of up to two tokens: [V + 1, V + 1, V], V for "no token yet"."""
    target, draft = np.random.default_rng(seed).normal(0, sharpness, (2, VOCAB + 1, VOCAB + 1, VOCAB))
    return jnp.asarray(target, jnp.float32), jnp.asarray(0.5 * target + 0.7 * draft, jnp.float32)


def expander(table, batch):
    """A draft model that looks its logits up; its state is the text before a token, as two numbers."""

    def extend(tokens, states, level, mask, earlier):
        first = level == 2
        text = jnp.stack([jnp.where(first, tokens, states[..., 0]), jnp.where(first, VOCAB, tokens)], axis=-1)
        return text.astype(jnp.float32), NewKV((), ())

    def logits(states, level):
        at = states.astype(jnp.int32)
        return table[at[..., 0], at[..., 1]]

    start = jnp.full((batch, 2), float(VOCAB))
    return Expander(start, extend, logits, lambda ids: ids, VOCAB, lambda entries: NewKV((), ()))


@functools.cache
def outcome(rule, parents, law, seed=0, rows=ROWS):
    """Three tokens of every row, drafted and verified once and then drawn on; and the accepted counts."""
    target, draft = tables(seed)
    sampling = make_sampling(**LAWS[law])
    shape = TreeConfig.static(parents, verification=rule)
    keys = jax.random.split(jax.random.key(1), rows)

    @jax.jit
    def run(keys):
        chance = RowRandomness(keys, jnp.zeros(keys.shape, jnp.int32))
        tree = grow(expander(draft, rows), shape, jnp.zeros(keys.shape, jnp.int32), chance, sampling)
        text = [jnp.full((rows, len(parents) + 1), VOCAB)] * 2
        for node, parent in enumerate(parents, 1):
            if parent < 0:
                text[0] = text[0].at[:, node].set(tree.tokens[:, node])
            else:
                text[0] = text[0].at[:, node].set(tree.tokens[:, parent + 1])
                text[1] = text[1].at[:, node].set(tree.tokens[:, node])
        found = RULES[rule](tree, target[text[0], text[1]], *chance, sampling, shape.depth)
        words = jnp.pad(jnp.take_along_axis(tree.tokens, found.path, axis=1)[:, 1:], ((0, 0), (0, 1)))
        for word in range(WORDS):  # what this cycle has not emitted is drawn from the target
            before = jnp.concatenate([words[:, :word], jnp.full((rows, 2), VOCAB)], axis=1)[:, :2]
            law = process_logits(target[before[:, 0], before[:, 1]], sampling)
            fresh = jax.vmap(lambda key, law, at=word: jax.random.categorical(jax.random.fold_in(key, 77 + at), law))
            own = jnp.where(found.count == word, found.next_token, fresh(keys, law))
            words = words.at[:, word].set(jnp.where(found.count > word, words[:, word], own))
        return words, found.count

    return tuple(np.asarray(part) for part in run(keys))


def exact(table, law):
    """[V, V, V] joint law of three tokens."""
    after = np.exp(np.asarray(process_logits(table, make_sampling(**LAWS[law]))))
    joint = np.zeros((VOCAB,) * WORDS)
    for a, b in itertools.product(range(VOCAB), repeat=2):
        joint[a, b] = after[VOCAB, VOCAB, a] * after[a, VOCAB, b] * after[a, b]
    return joint


def distance(words, joint):
    """p-value of a chi-square test over the cells expected at least five times."""
    counts = np.zeros(joint.shape)
    np.add.at(counts, tuple(words.T), 1)
    assert counts[joint == 0].sum() == 0, "a token outside the processed law was emitted"
    big = joint * len(words) >= 5
    wanted = joint[big] / joint[big].sum() * counts[big].sum()
    return stats.chisquare(counts[big], wanted).pvalue


CASES = [("rejection", CHAIN), ("block", CHAIN), ("traversal", CHAIN), ("rejection", TREE), ("traversal", TREE)]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("rule", "parents"), CASES)
@pytest.mark.parametrize("seed", [0, 2])  # on some tables some faults hardly show
def test_the_emitted_law_is_the_targets(rule, parents, law, seed):
    words, count = outcome(rule, parents, law, seed)
    assert distance(words, exact(tables(seed)[0], law)) > 1e-3
    assert 0.05 < (count == 2).mean() < 0.95, "too little is decided to test the decisions"


def test_what_a_chain_accepts_is_what_theory_says():
    """The first token with the overlap of the laws; whole blocks for longer than token by token, on average."""
    law = {name: np.exp(np.asarray(jax.nn.log_softmax(table))) for name, table in zip("pq", tables(), strict=True)}
    first = np.minimum(law["p"], law["q"])[VOCAB, VOCAB]
    second = np.minimum(law["p"], law["q"])[:VOCAB, VOCAB].sum(-1)
    both = (first * second).sum()
    counts = {rule: outcome(rule, CHAIN, "plain")[1] for rule in ("rejection", "block", "traversal")}
    assert (counts["rejection"] >= 1).mean() == pytest.approx(first.sum(), abs=0.006)
    assert (counts["rejection"] == 2).mean() == pytest.approx(both, abs=0.006)
    # Both at once: what the ratio of the laws, cut at one after every token, allows.
    ratio = np.minimum((law["p"] / law["q"])[VOCAB, VOCAB], 1.0)[:, None] * (law["p"] / law["q"])[:VOCAB, VOCAB]
    joint = law["q"][VOCAB, VOCAB][:, None] * law["q"][:VOCAB, VOCAB]
    for rule in ("block", "traversal"):
        assert (counts[rule] == 2).mean() == pytest.approx((joint * np.minimum(ratio, 1.0)).sum(), abs=0.006)
        assert counts[rule].mean() > counts["rejection"].mean() + 0.005


def test_traversal_accepts_more_of_a_tree_than_rejection():
    """Where branches are chains; where every node has several children there is little left to gain."""
    branches = (-1, -1, -1, 0, 1, 2)
    means = {rule: outcome(rule, branches, "plain")[1].mean() for rule in ("rejection", "traversal")}
    assert means["traversal"] > means["rejection"] + 0.02
    assert means["rejection"] > outcome("rejection", CHAIN, "plain")[1].mean() + 0.05


def test_a_rule_without_the_residual_is_seen(monkeypatch):
    monkeypatch.setattr("eagle_jax.drafters.rejection._residual", lambda target, draft: target)
    words, _ = outcome.__wrapped__("rejection", CHAIN, "plain")
    assert distance(words, exact(tables()[0], "plain")) < 1e-6


def test_a_traversal_that_forgets_which_siblings_were_rejected_is_seen(monkeypatch):
    monkeypatch.setattr("eagle_jax.drafters.rejection._without", lambda draft, token: draft)
    words, _ = outcome.__wrapped__("traversal", TREE, "plain", 2)
    assert distance(words, exact(tables(2)[0], "plain")) < 1e-6


def sampled_tree(parents=CHAIN, rows=2):
    nodes = len(parents) + 1
    law = jnp.full((rows, nodes, VOCAB), -np.log(VOCAB), jnp.float32)
    at = jnp.asarray([-1, *(parent + 1 for parent in parents)], jnp.int32)
    tokens = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32) % VOCAB, (rows, nodes))
    return DraftTree(tokens, jnp.broadcast_to(at, (rows, nodes)), jnp.zeros((rows, nodes)), law)


@pytest.mark.parametrize("rule", [rejection, block, traversal])
def test_greedy_they_do_what_the_engine_does(rule):
    tree, keys = sampled_tree(), jax.random.split(jax.random.key(0), 2)
    logits = jax.random.normal(jax.random.key(2), (2, 3, VOCAB))
    zero = jnp.zeros((2,), jnp.int32)
    found = (way(tree, logits, keys, zero, make_sampling(), 2) for way in (rule, deterministic))
    for left, right in zip(*found, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("rule", [rejection, block, traversal])
def test_a_ranked_tree_is_refused(rule):
    tree, keys = sampled_tree()._replace(draft_log_probs=None), jax.random.split(jax.random.key(0), 2)
    with pytest.raises(ValueError, match=r"TreeConfig\(verification=\.\.\.\)"):
        rule(tree, jnp.zeros((2, 3, VOCAB)), keys, jnp.zeros((2,), jnp.int32), make_sampling(1.0), 2)


def test_settings_that_contradict_each_other_are_refused():
    zero, keys = jnp.zeros((2,), jnp.int32), jax.random.split(jax.random.key(0), 2)
    with pytest.raises(ValueError, match="3 nodes in 2 levels"):
        block(sampled_tree((-1, -1, 0)), jnp.zeros((2, 4, VOCAB)), keys, zero, make_sampling(1.0), 2)
    with pytest.raises(ConfigError, match="'block' is for chains: for a tree, take 'traversal'"):
        TreeConfig.static([-1, -1, 0], verification="block")
    with pytest.raises(ConfigError, match="is for drafts whose shape does not depend on the tokens drawn"):
        TreeConfig(verification="rejection")
    with pytest.raises(ConfigError, match="must be one of deterministic, rejection, block, traversal"):
        TreeConfig.chain(3, verification="typical")
    with pytest.raises(ConfigError, match="wants sampled ones"):
        TreeConfig(depth=2, top_k=1, num_nodes=2, top_p=0.5, verification="rejection")
    for bad in (0.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"TreeConfig\.top_p"):
            TreeConfig(top_p=bad)
