"""The trees that an EAGLE head grows against a slow NumPy version of EAGLE-2, with every switch of the ablations."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core import RowRandomness, make_sampling
from eagle_jax.core.randomness import gumbel
from eagle_jax.drafters.eagle import HeadFns
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
    sampling = make_sampling(temperature)
    request = request_of(tiny_target(), head, random_prompts([9], 12, seed=seed), 8, sampling, (), 0)
    state = generation.prefill_program(*request)
    draft = jax.jit(head.drafter.draft)
    tree, _ = draft(request.params, state.drafter, state.root, RowRandomness(state.keys, state.num_tokens), sampling)
    return jax.device_get(tree), request.params, state


def path_log_probs(head, params, whole):
    """Log-confidence of every next token after a path of target ids: one head pass per token, no tree and no mask."""
    fns = HeadFns(head.config, head.target_fn, "float32")
    model = fns.expander(params, whole.drafter, whole.root)
    known = {}

    def run(path):
        if path not in known:
            if not path:
                hidden, earlier = model.root, model.blank(0)
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


@pytest.mark.parametrize(("kind", "name"), [("eagle1", "eagle2"), *(("eagle3", name) for name in SWITCHES)])
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


def test_a_full_vocabulary_head_may_permute_its_ids():
    """`d2t` counts even where draft and target vocabulary have the same size."""
    head = tiny_head("eagle3", TreeConfig.chain(1))
    turned = dict(head.params, d2t=jnp.asarray((np.arange(12) + 5) % 12 - np.arange(12), jnp.int32))
    other = eagle_jax.DraftHead.from_params(head.config, turned, tiny_target(), head.tree)
    first, second = (int(drafted(which, temperature=0.0)[0].tokens[0, 1]) for which in (head, other))
    assert second == (first + 5) % 12


@pytest.mark.parametrize(
    ("tree", "law"),
    [
        (TreeConfig.chain(4), dict(temperature=1.5, top_k=6, top_p=0.9, min_p=0.02)),
        (TreeConfig.static([-1, -1, 0, 0, 2, 4]), dict(temperature=1.0)),
    ],
)
@pytest.mark.slow
def test_a_head_that_knew_the_targets_law_would_have_every_draw(tree, law, monkeypatch):
    """Ranked by "draw", drafts whose law is the target's own are all accepted, at any temperature."""
    table = 2.0 * jax.random.normal(jax.random.key(2), (12, 12))  # for both models: logits after each last token
    own_forward, own_run = tiny_target().fn.forward, HeadFns.run

    def forward(params, tokens, *rest):
        return own_forward(params, tokens, *rest)._replace(hidden=jax.nn.one_hot(tokens, 16))

    def run(self, params, tokens, *rest):
        return own_run(self, params, tokens, *rest)._replace(states=jax.nn.one_hot(tokens, 16))

    monkeypatch.setattr(HeadFns, "run", run)
    fn = tiny_target().fn._replace(forward=forward, logits=lambda params, hidden: hidden[..., :12] @ table)
    target = dataclasses.replace(tiny_target(), fn=fn)
    settings = dict(max_new_tokens=41, eos_ids=(), key=5, **law)
    accepted = {}
    for ranking in ("draw", "law"):
        shape = dataclasses.replace(tree, sampled_ranking=ranking)
        like = tiny_head("eagle1", shape)
        head = eagle_jax.DraftHead.from_params(like.config, like.params, target, shape)
        out = eagle_jax.generate(target, head, [[1, 2], [7]], **settings)
        assert out.tokens == eagle_jax.generate(target, None, [[1, 2], [7]], **settings).tokens
        accepted[ranking] = out.accepted
    assert accepted["draw"].tolist() == [[0, 0, 0, 0, 8]] * 2
    assert accepted["law"][:, :2].sum() > 8, "too sharp a law: ranked without the noise, drafts should mostly fail"


@pytest.mark.parametrize(("kind", "depth"), [("eagle1", 6), ("eagle3", 8)])
def test_the_default_tree_is_that_of_the_heads_paper(kind, depth):
    like = tiny_head(kind, TreeConfig.chain(2), vocab=16)
    assert eagle_jax.DraftHead.from_params(like.config, like.params, tiny_target(vocab=16)).tree == TreeConfig(
        depth, 10, 59
    )
