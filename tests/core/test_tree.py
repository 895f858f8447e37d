"""Checks masks, rerank and walk of draft trees against slow versions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eagle_jax.core.sampling import draw, make_sampling
from eagle_jax.core.tree import SMALL, ancestor_mask, by_score, node_depths
from eagle_jax.core.types import PADDING, ROOT, DraftTree
from eagle_jax.core.verify import deterministic, walk
from eagle_jax.drafters.tree_growth import Pool, gather_tree, select_best
from tests import oracles


@st.composite
def random_trees(draw, rows=12):
    """Parents of a tree with padding at the end: [rows] with ROOT first."""
    nodes = draw(st.integers(1, rows))
    parents = [ROOT] + [draw(st.integers(0, node - 1)) for node in range(1, nodes)]
    return np.array(parents + [PADDING] * (rows - nodes), np.int32)


@given(random_trees())
@example(np.arange(-1, 11, dtype=np.int32))
def test_mask_is_the_transitive_closure(parents):
    """For every depth that is given as the longest path: a chain needs all squarings of the matrix."""
    wanted = oracles.closure(np.where(parents == PADDING, -1, parents)) | np.eye(12, dtype=bool)
    depths = wanted.sum(1) - 1
    mask = jax.jit(ancestor_mask, static_argnums=1)(jnp.asarray(parents)[None], max(int(depths.max()), 1))
    np.testing.assert_array_equal(mask[0], wanted)
    np.testing.assert_array_equal(node_depths(mask)[0], depths)
    few = jax.jit(ancestor_mask, static_argnums=1)(jnp.asarray(parents[:SMALL])[None], max(int(depths.max()), 1))
    np.testing.assert_array_equal(few[0], wanted[:SMALL, :SMALL])  # without products


@st.composite
def candidate_pools(draw, size=30):
    """Pools as the drafters record them: a child never scores above its parent; gains of 0 make ties."""
    parents, scores = [], []
    for index in range(size):
        parent = draw(st.integers(-1, index - 1))
        gain = draw(st.sampled_from([0.0, -0.0, -0.5, -1.0, -2.5, -1e-7]))
        parents.append(parent)
        scores.append(np.float32((scores[parent] if parent >= 0 else 0.0) + np.float32(gain)))
    return np.array(parents, np.int32), np.array(scores, np.float32)


@given(candidate_pools(), st.sampled_from([1, 2, 7, 16, 30]))
def test_rerank_keeps_the_best_and_stays_connected_with_ties(pool, count):
    parents, scores = pool
    tokens = np.arange(100, 130, dtype=np.int32)
    batch = Pool(*(jnp.asarray(part)[None] for part in (tokens, parents, scores)))
    kept = np.asarray(jax.jit(select_best, static_argnums=1)(batch, count))[0]
    assert kept.tolist() == oracles.best_candidates(scores, count)
    assert all(parents[index] == ROOT or parents[index] in kept for index in kept)
    tree = jax.jit(gather_tree)(jnp.array([7]), batch, jnp.asarray(kept)[None])
    rows = np.asarray(tree.parents)[0]
    assert rows[0] == ROOT and (rows[1:] < np.arange(1, count + 1)).all() and (rows[1:] >= 0).all()
    for row, index in enumerate(kept, start=1):
        expected = 7 if parents[index] == ROOT else tokens[parents[index]]
        assert int(tree.tokens[0, rows[row]]) == expected
        assert float(tree.scores[0, row]) == scores[index]


@given(random_trees(), st.data())
def test_rows_that_stand_for_the_same_text_are_walked_together(parents, data):
    """Where siblings carry equal tokens, the longest of all their paths is found."""
    tokens = np.array([data.draw(st.integers(0, 1)) for _ in parents], np.int32)
    nodes = np.flatnonzero(parents != PADDING)
    texts = dict(enumerate([(), *oracles.paths_of(tokens[nodes], parents[nodes])]))
    after = {text: data.draw(st.integers(0, 1)) for text in sorted(set(texts.values()))}
    choices = np.array([after.get(texts.get(row, ()), 0) for row in range(len(parents))])
    wanted: tuple[int, ...] = ()
    while (*wanted, after[wanted]) in after:
        wanted = (*wanted, after[wanted])
    tree = DraftTree(jnp.asarray(tokens)[None], jnp.asarray(parents, jnp.int32)[None], jnp.zeros((1, 12)))
    logits, keys = jax.nn.one_hot(choices, 2)[None], jax.random.split(jax.random.key(0), 1)
    result = jax.jit(deterministic, static_argnums=5)(tree, logits, keys, jnp.zeros((1,), int), make_sampling(), 11)
    count = int(result.count[0])
    assert tokens[np.asarray(result.path)[0, 1 : count + 1]].tolist() == list(wanted)
    walked = walk(jax.tree.map(lambda rows: rows[0], tree), lambda node, step: jnp.asarray(choices)[node], 11)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda rows: rows[0], result), walked)
    assert int(result.next_token[0]) == after[wanted]


@pytest.mark.parametrize(("rows", "row_groups"), [(3, 1), (4, 1), (8, 1), (8, 4), (16, 1), (24, 2)])
def test_every_row_of_a_batch_walks_as_alone(rows, row_groups):
    """Rows of a group take turns, and go down at different depths; a third of them starts with a wrong token."""
    nodes, words, depth = 6, 12, 5
    sampling, random = make_sampling(0.7), np.random.default_rng(rows)
    logits = jnp.asarray(random.normal(size=(rows, nodes, words)).astype(np.float32))
    keys, index = jax.random.split(jax.random.key(1), rows), jnp.arange(rows) * 3
    drawn = jax.vmap(jax.vmap(lambda row, key, at: draw(row, key, at, sampling), (0, None, 0)))(
        logits, keys, index[:, None] + jnp.arange(nodes)[None]
    )
    right = random.integers(0, depth + 1, size=rows) * (random.random(rows) > 1 / 3)
    tokens = jnp.pad(drawn[:, :-1], ((0, 0), (1, 0))) + (jnp.arange(nodes)[None] > right[:, None])
    parents = jnp.tile(jnp.array([ROOT, *range(nodes - 1)]), (rows, 1))
    tree = DraftTree(tokens, parents, jnp.zeros((rows, nodes)))
    run = jax.jit(deterministic, static_argnums=(5, 6))
    found = jax.tree.map(np.asarray, run(tree, logits, keys, index, sampling, depth, row_groups))
    np.testing.assert_array_equal(found.count, right)
    for row in range(rows):
        one = jax.tree.map(lambda column, row=row: column[row], tree)
        choose = lambda node, step, row=row: draw(logits[row, node], keys[row], index[row] + step, sampling)  # noqa: E731
        alone = jax.jit(lambda one=one, choose=choose: walk(one, choose, depth))()
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda column, row=row: column[row], found), alone)


@given(random_trees(), st.data())
def test_the_first_rows_by_score_are_a_tree_of_the_best_nodes(parents, data):
    """For any scores, also of a drafter whose children score above their parents; NaN counts least."""
    draws = [data.draw(st.sampled_from([0.0, -1.0, -2.0, -3.5, np.nan])) for _ in parents]
    scores = np.where(parents == PADDING, -np.inf, np.array(draws, np.float32))
    scores[0] = 0
    tokens = np.arange(100, 112, dtype=np.int32)
    tree = DraftTree(*(jnp.asarray(part)[None] for part in (tokens, parents, scores)))
    found = jax.tree.map(lambda rows: np.asarray(rows)[0], jax.jit(by_score, static_argnums=1)(tree, 11))
    assert found.tokens[0] == 100 and sorted(found.tokens) == sorted(tokens)
    old = found.tokens - 100
    above = oracles.closure(np.where(parents == PADDING, -1, parents)) | np.eye(12, dtype=bool)
    counted = np.array([np.min(scores[row]) for row in above])[old[1:]]
    assert (counted == sorted(counted, key=lambda value: (np.isnan(value), -value)))[~np.isnan(counted)].all()
    np.testing.assert_array_equal(found.scores, scores[old])
    for row in range(12):
        parent = parents[old[row]]
        assert found.parents[row] < max(row, 1)
        assert parent == (old[found.parents[row]] if found.parents[row] >= 0 else found.parents[row])
