"""Checks a chain added to a tree: the paths of both, each once; the text, the programs, the errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle_jax
from eagle_jax.config import ConfigError, TreeConfig
from eagle_jax.core import PADDING, ROOT, CycleCost, DraftTree, Engine, Sizes, deterministic, make_sampling
from eagle_jax.core.loop import drafted_levels
from eagle_jax.drafters import combined_drafter, lookahead_drafter, prompt_lookup_drafter
from eagle_jax.drafters.combined import add_chain
from eagle_jax.parallel import make_mesh
from eagle_jax.runtime import generation
from tests import oracles, tables
from tests.models import DRAFTERS, TREES, near_model, random_prompts, tiny_head, tiny_target

NODES, DEPTH, LENGTH, ROOT_TOKEN = 7, 3, 4, 9
add_jit = jax.jit(add_chain, static_argnames="depth")


def tree_of(parents: list[int], tokens: list[int], scores: list[float]) -> DraftTree:
    """A tree of one row."""
    return DraftTree(*(jnp.asarray([column]) for column in (tokens, parents, np.float32(scores))))


def drawn_tree(draw) -> DraftTree:
    """A tree of at most NODES nodes without equal siblings; padding lies between the nodes, with any token."""
    parents, tokens, scores, paths = [ROOT], [ROOT_TOKEN], [0.0], {0: ()}
    for row in range(1, NODES + 1):
        above = draw(st.sampled_from([node for node, path in paths.items() if len(path) < DEPTH]))
        token = draw(st.integers(0, 2))
        path = (*paths[above], token)
        is_node = draw(st.booleans()) and path not in paths.values()
        parents.append(above if is_node else PADDING)
        tokens.append(token)
        scores.append(scores[above] - 1 / 2**row if is_node else -np.inf)
        paths |= {row: path} if is_node else {}
    return tree_of(parents, tokens, scores)


def chain_of(tokens: list[int], pad: list[int]) -> DraftTree:
    count = len(tokens)
    parents = [*range(ROOT, count), *[PADDING] * (LENGTH - count)]
    scores = [*(-0.25 * step for step in range(count + 1)), *[-np.inf] * (LENGTH - count)]
    return tree_of(parents, [ROOT_TOKEN, *tokens, *pad[: LENGTH - count]], scores)


@given(st.data(), st.lists(st.integers(0, 2), max_size=LENGTH), st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_a_combined_tree_has_the_paths_of_both_each_once(data, chain, pad):
    tree, added = drawn_tree(data.draw), chain_of(chain, pad)
    merged = add_jit(tree, added, depth=DEPTH)
    tokens, parents, scores = (np.asarray(part[0]) for part in merged[:3])
    assert len(tokens) == NODES + LENGTH + 1
    assert all(parents[row] < row for row in range(len(parents)))
    own = oracles.paths_of(np.asarray(tree.tokens[0]), np.asarray(tree.parents[0]))
    theirs = [tuple(chain[: end + 1]) for end in range(len(chain))]
    paths = oracles.paths_of(tokens, parents)
    assert len(set(paths)) == len(paths), "a path is there twice"
    assert set(paths) == {*own, *theirs}
    np.testing.assert_array_equal(scores == -np.inf, parents == PADDING)
    for part, before in zip((tokens, parents, scores), tree[:3], strict=True):
        np.testing.assert_array_equal(part[: NODES + 1], before[0])
    for row in np.flatnonzero(parents[NODES + 1 :] >= 0) + NODES + 1:
        assert scores[row] == scores[parents[row]] - 0.25  # what the node adds in the chain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_a_slow_loop(temperature):
    table, sizes = tables.random_table(7), Sizes(max_tokens=24, chunk=4)
    batch = tables.batch_of([[1], [2, 3, 4, 5, 6], [3, 1], [5, 6, 0]], [24, 20, 9, 24], [[], [], [], [4]], sizes.chunk)
    known = tables.parameters(table, likeness=0.6)
    slow = tables.slow_texts(table, batch, 24, temperature=temperature)
    head = tables.table_drafter(TreeConfig(depth=2, top_k=2, num_nodes=5), 7)
    taken = {}
    for name, drafter in (("both", combined_drafter(head, prompt_lookup_drafter(2, 5))), ("head", head)):
        params = known | {"drafter": {"tree": known["drafter"], "chain": {}}} if name == "both" else known
        state = tables.run(params, batch, make_sampling(temperature), drafter, sizes)
        assert tables.texts_of(state) == slow
        taken[name] = np.asarray(state.accepted)
        assert name == "head" or state.drafter.tree.sound.all()
    assert taken["both"].sum() <= taken["head"].sum(), "the chain never adds a cycle"
    assert temperature or taken["both"][:, 3:].sum() > 0, "no path longer than the head's tree was ever accepted"


def test_a_repeated_sample_is_accepted_beyond_the_heads_tree_without_a_new_program():
    """Under the head's tree a known reply is drafted at the lookup's length, and else the head drafts."""
    target, prompts = tiny_target(), random_prompts([9, 4, 17, 6], 12)
    options = dict(max_new_tokens=31, eos_ids=(), temperature=1.0, key=5)
    head = near_model(target, TreeConfig(depth=2, top_k=3, num_nodes=6))
    alone = eagle_jax.generate(target, head, prompts, **options)
    both = head.with_lookup(eagle_jax.prompt_lookup(target, ngram=6, length=9, shortest=3, history=[]))
    blank = eagle_jax.generate(target, both, prompts, **options)
    programs = generation.generate_program._cache_size()
    told = both.with_history([[*prompt[-6:], *text] for prompt, text in zip(prompts, alone.tokens, strict=True)])
    out = eagle_jax.generate(target, told, prompts, **options)
    assert generation.generate_program._cache_size() == programs
    assert alone.tokens == blank.tokens == out.tokens
    assert (blank.cycles <= alone.cycles).all() and out.tau > 9 > 3 >= alone.tau
    assert out.accepted.shape == (4, 10)
    spread, other = eagle_jax.shard(target, told, make_mesh(data=2, tensor=2))
    again = eagle_jax.generate(spread, other, prompts, **options)
    assert again.tokens == out.tokens and again.tau == out.tau


def test_sessions_rewind_both_methods():
    target, prompt = tiny_target(), random_prompts([30], 12)[0]
    both = DRAFTERS["combined-dynamic"](target)
    session = eagle_jax.Session(target, both, context=120)
    for text in (prompt, [*prompt[:20], 3, 4]):
        found = [token for chunk in session.stream(text, max_new_tokens=8, eos_ids=()) for token in chunk.tokens]
        assert found == eagle_jax.generate(target, None, [text], max_new_tokens=8, eos_ids=()).tokens[0]
    assert session.read == 2, "the text before the change was read again"
    back = both.plain.rewind(session._state.drafter, jnp.array([5]))
    assert back.tree.cache.length.tolist() == back.chain.length.tolist() == [5]


def test_a_ladder_verifies_part_of_a_combined_tree():
    target, prompts = tiny_target(), random_prompts([9, 4], 12)
    both = DRAFTERS["combined-dynamic"](target)
    rows = both.drafter.num_nodes + 1
    cost = CycleCost((1, 6, rows), (1.0, 1.2, 1.3), 0.05)
    out = eagle_jax.generate(target, both, prompts, max_new_tokens=32, eos_ids=(), cycle_cost=cost)
    assert out.tokens == eagle_jax.generate(target, None, prompts, max_new_tokens=32, eos_ids=()).tokens
    assert out.accepted[:, 1:].sum() > 0
    assert both.drafter.with_limit is not None
    limited = both.plain.with_limit(None, jnp.ones(2, bool))
    assert limited.num_nodes == rows - 1 and limited.level_nodes == both.base.drafter.num_nodes


def test_a_chain_beside_a_tree_is_no_level():
    """The root, two levels of one node each, and a chain of three more nodes below the second."""
    tree = DraftTree(jnp.zeros((1, 6), jnp.int32), jnp.array([[-1, 0, 1, 2, 3, 4]]), jnp.zeros((1, 6)))
    drafter = DRAFTERS["combined-dynamic"](tiny_target()).plain._replace(depth=5)
    assert int(drafted_levels(drafter._replace(level_nodes=2), tree)) == 2
    assert int(drafted_levels(drafter._replace(level_nodes=None), tree)) == 5


def test_with_tree_changes_the_tree_and_keeps_the_chain():
    both = DRAFTERS["combined-dynamic"](tiny_target())
    other = both.with_tree(TreeConfig.chain(3))
    assert other.drafter.num_nodes == 3 + 6 and other.drafter.depth == 6
    assert other.lookup is both.lookup and other.params["tree"]["head"] is both.params["tree"]["head"]
    assert both.with_tree(both.base.tree).drafter is both.drafter, "jit caches are not shared"


def test_drafters_that_cannot_be_combined_raise():
    target = tiny_target()
    lookup = eagle_jax.prompt_lookup(target)
    for name in ("eagle3-rejection", "small-block", "medusa-traversal"):
        with pytest.raises(ConfigError, match="verification of combined drafters must be 'deterministic', got a rule"):
            DRAFTERS[name](target).with_lookup(lookup)
    head = tiny_head("eagle3", TREES["chain4"])
    for other, found in ((head, "DraftHead"), (None, "None")):
        with pytest.raises(ValueError, match=rf"lookup must be prompt_lookup\(target, .*, got .*{found}"):
            head.with_lookup(other)
    with pytest.raises(ValueError, match=r"lookup must be .* for the target 'target', got one for 'target'"):
        head.with_lookup(eagle_jax.prompt_lookup(tiny_target(windows=(8, 0))))
    for wrong in (lookahead_drafter(3, 4, 3, 512), head.plain, near_model(target, TREES["k2n6"]).plain):
        with pytest.raises(ConfigError, match="the added drafter must draft chains and read neither"):
            combined_drafter(head.plain, wrong)
    with pytest.raises(ConfigError, match="drafter must have a tree, got prompt lookup"):
        lookup.with_lookup(lookup).with_tree(TREES["chain4"])


def test_sampled_drafts_raise_before_compilation():
    """A method with a law and without a rule of its own is found while the program is traced."""
    known = tables.parameters(tables.random_table(7))
    batch = tables.batch_of([[1, 2, 3, 4]], [4], [[]], 4)
    sampled = tables.table_drafter(TreeConfig.chain(2, "rejection"), 7)
    assert combined_drafter(sampled._replace(verify=deterministic), prompt_lookup_drafter()).verify is None
    engine = Engine(tables.TARGET, combined_drafter(sampled._replace(verify=None), prompt_lookup_drafter()))
    params = known | {"drafter": {"tree": known["drafter"], "chain": {}}}
    with pytest.raises(ValueError, match="draft_log_probs of combined trees must be None, got a law"):
        tables.generate_jit.lower(params, batch, make_sampling(1.0), engine=engine, sizes=Sizes(4, 4))
