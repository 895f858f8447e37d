"""Checks the trees of an EAGLE head against a slow NumPy EAGLE-2, with every switch of the ablations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core import KVCache, RowRandomness, make_sampling
from eagle_jax.core.randomness import gumbel
from eagle_jax.drafters.eagle import HeadFns
from eagle_jax.drafters.tree_growth import Expander, blank_entries, grow
from eagle_jax.runtime import generation
from eagle_jax.runtime.generation import request_of
from tests import oracles
from tests.models import random_prompts, tiny_head, tiny_target

SWITCHES = {
    "eagle2": {},
    "confidence": {"rank_by": "confidence"},
    "no-rerank": {"rerank": False},
    "law": {"sampled_ranking": "law"},
    "untempered": {"sampled_ranking": "untempered"},
    "top-p": {"top_p": 0.7},
    "confidence-top-p": {"rank_by": "confidence", "top_p": 0.5},
}
TEMPERATURE = 0.3
SHAPE = dict(depth=4, top_k=4)


def drafted(head, seed=0, temperature=TEMPERATURE):
    """The head's first tree after a prompt, and what a slow version needs to grow the same one."""
    prompts = random_prompts([9], 12, seed=seed)
    request = request_of(tiny_target(), head, prompts, max_new_tokens=8, temperature=temperature, eos_ids=(), key=0)
    state = generation.prefill_program(*request)
    draft = jax.jit(head.drafter.draft)
    randomness = RowRandomness(state.keys, state.num_tokens)
    tree, _ = draft(request.params, state.drafter, state.root, randomness, request.sampling)
    return jax.device_get(tree), request.params, state


def path_log_probs(head, params, whole):
    """Log-confidence of every next token after a path of target ids: one head pass per token, no tree and no mask."""
    fns = HeadFns(head.config, head.target.fn)
    model = fns.expander(params, whole.drafter, whole.root)
    known = {}

    def run(path):
        if path not in known:
            if not path:
                hidden, earlier = model.root, blank_entries(model.cache, 0)
            else:
                parent, earlier = run(path[:-1])[:2]
                ones = jnp.ones((1, 1, len(path)), bool)
                states, new = model.extend(jnp.array([[path[-1]]]), parent[:, None], len(path) + 1, ones, earlier)
                hidden = states[:, 0]
                earlier = jax.tree.map(lambda old, part: jnp.concatenate([old, part], axis=2), earlier, new)
            logits = np.asarray(fns.logits(params, hidden), np.float64)[0]
            tokens = np.asarray(fns.to_target(params, jnp.arange(logits.size)))
            law = oracles.log_softmax(logits if head.tree.sampled_ranking == "untempered" else logits / TEMPERATURE)
            if head.tree.sampled_ranking == "draw":  # with the noise that the target's draw at this depth will have
                key = jax.random.fold_in(whole.keys[0], int(whole.num_tokens[0]) + len(path))
                noise = np.asarray(gumbel(key, jnp.asarray(tokens)))
                law = oracles.log_softmax((law + noise) / head.tree.noise_scale)
            known[path] = (hidden, earlier, dict(zip(tokens.tolist(), law.tolist(), strict=True)))
        return known[path]

    return lambda path: run(path)[2]


FAST = ("eagle2", "confidence", "top-p")
CASES = [pytest.param("eagle3", name, marks=() if name in FAST else pytest.mark.slow) for name in SWITCHES]


@pytest.mark.parametrize(("kind", "name"), [pytest.param("eagle1", "eagle2", marks=pytest.mark.slow), *CASES])
def test_dynamic_trees_are_those_of_the_slow_version(kind, name):
    nodes = 16 if name == "no-rerank" else 28
    head = tiny_head(kind, TreeConfig(**SHAPE, num_nodes=nodes, **SWITCHES[name]), draft_vocab=10)
    matters = False
    for seed in (0, 1):
        tree, params, state = drafted(head, seed)
        grown = functools.partial(oracles.grow_eagle2, path_log_probs(head, params, state), **SHAPE, num_nodes=nodes)
        expected = grown(by_confidence=name.startswith("confidence"), rerank=name != "no-rerank", top_p=head.tree.top_p)
        got = oracles.paths_of(tree.tokens[0], tree.parents[0])
        assert set(got) == set(expected)
        assert dict(zip(got, tree.scores[0][1:][tree.parents[0][1:] >= 0], strict=True)) == pytest.approx(
            expected, abs=1e-4
        )
        matters |= set(expected) != set(grown())
    # Those of the ranking change the law that the slow version reads.
    assert matters == (name not in ("eagle2", "law", "untempered")), "an ignored switch would not show"


@pytest.mark.parametrize(("rows", "passes"), [(["sure"], 5), (["unsure"], 2), (["sure", "unsure"], 5)])
def test_a_dynamic_tree_stops_when_no_further_level_can_enter_it(rows, passes):
    """The best six of an unsure model are those of two levels: the third shows it, and there is no fourth."""
    laws = {"sure": [0.9, 0.06, 0.04], "unsure": [0.4, 0.35, 0.25]}
    logits = jnp.log(jnp.array([laws[name] for name in rows]))
    levels, roots, keys = [], jnp.zeros((len(rows),), jnp.int32), jax.random.split(jax.random.key(0), len(rows))

    def extend(tokens, states, level, mask, earlier):
        levels.append(int(level))
        return states, earlier

    def draft(rerank, nodes, pays=None, running=None):
        levels.clear()
        model = Expander(
            root=jnp.zeros((len(rows), 1)), extend=extend, logits=lambda states, level: logits[:, None],
            to_target=lambda ids: ids, vocab=3, cache=KVCache((), (), roots),
        )  # fmt: skip
        tree = TreeConfig(depth=6, top_k=2, num_nodes=nodes, rerank=rerank)
        with jax.disable_jit():  # the loop runs in Python, and passes can be counted
            return grow(model, tree, roots, RowRandomness(keys, roots), make_sampling(0.0), pays, running)

    tree = draft(rerank=True, nodes=6)
    assert levels == list(range(2, 2 + passes))
    # Scores of the best six of all levels: 1, 2, ... times the sure token, or the unsure model's first two levels.
    for row, name in enumerate(rows):
        first, second = np.log(laws[name][:2])
        sure = [first * n for n in range(1, 7)]
        unsure = [first, second, 2 * first, first + second, first + second, 2 * second]
        np.testing.assert_allclose(sorted(tree.scores[row, 1:]), sorted(sure if name == "sure" else unsure), rtol=1e-5)
    whole = draft(rerank=False, nodes=12)
    assert levels == list(range(2, 7))
    # A row that is over does not decide: an unsure row beside it is drafted as if it were alone.
    if len(rows) > 1:
        alone = draft(rerank=True, nodes=6, running=jnp.array([name == "unsure" for name in rows]))
        assert levels == [2, 3]
        row = rows.index("unsure")
        np.testing.assert_array_equal(alone.scores[row], tree.scores[row])
    # Level 4 is drafted if the limit allows it, which sees the candidates and the frontier of level 3.
    for last in (1, 3, 4):
        seen = []

        def pays(scores, depths, frontier, drafted, last=last, seen=seen):
            seen.append((int(drafted), np.isfinite(scores).sum(), frontier))
            return drafted < last

        tree = draft(rerank=True, nodes=12, pays=pays)
        assert levels == list(range(2, last + 1))
        assert np.isfinite(tree.scores).sum() == len(rows) * (1 + min(12, 4 * last - 2))
        assert [(drafted, count) for drafted, count, _ in seen] == [
            (level, len(rows) * (4 * level - 2)) for level in range(1, last + 1)
        ]
        np.testing.assert_array_equal(seen[-1][2], whole.scores[:, 2 * last - 1 : 2 * last + 1])


def test_a_full_vocabulary_head_may_permute_its_ids():
    """`d2t` applies even if draft and target vocabulary have the same size."""
    head = tiny_head("eagle3", TreeConfig.chain(1))
    turned = dict(head.params, d2t=jnp.asarray((np.arange(12) + 5) % 12 - np.arange(12), jnp.int32))
    other = eagle_jax.DraftHead.from_params(head.config, turned, tiny_target(), head.tree)
    first, second = (int(drafted(which, temperature=0.0)[0].tokens[0, 1]) for which in (head, other))
    assert second == (first + 5) % 12


@pytest.mark.parametrize(("kind", "depth"), [("eagle1", 6), ("eagle3", 8)])
def test_the_default_tree_is_that_of_the_heads_paper(kind, depth):
    like = tiny_head(kind, TreeConfig.chain(2), vocab=16)
    assert eagle_jax.DraftHead.from_params(like.config, like.params, tiny_target(vocab=16)).tree == TreeConfig(
        depth, 10, 59
    )
