"""Checks the engine on tabular targets against a slow NumPy loop, for every tree, batch and law."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.core import Engine, RowRandomness, Sizes, extend, make_sampling, prefill, step, verify_key
from eagle_jax.drafters import vanilla_drafter
from tests import oracles
from tests.models import SAMPLED, TREES, random_prompts
from tests.tables import (
    TARGET,
    batch_of,
    check,
    log_probs_of,
    parameters,
    random_table,
    run,
    slow_run,
    slow_texts,
    table_drafter,
    texts_of,
    watched,
)

VOCAB, CHUNK = 12, 4
TABLE = random_table(VOCAB)
PARAMS = parameters(TABLE)
SIZES = Sizes(max_tokens=24, chunk=CHUNK)
# Rows that stop at different times: by budget, by a stop token of their own, in the first token, beyond the capacity.
PROMPTS = random_prompts([5, 11, 1, 7, 8, 3], VOCAB)
BATCH = batch_of(PROMPTS, [24, 7, 20, 1, 99, 12], [[3], [5, 2], [], [1], [0, 9], [4]], CHUNK)
ORDER = np.array([4, 2, 2, 0, 4, 0])
OTHER = jax.tree.map(lambda rows: rows[ORDER], BATCH)
"""The same rows in another order, some of them twice."""
LAWS = {
    "greedy": {},
    "sampled": dict(temperature=1.0),
    "cut": dict(temperature=1.3, top_k=7, top_p=0.9, min_p=0.03),
}


@functools.cache
def wanted(law: str) -> list[list[int]]:
    return slow_texts(TABLE, BATCH, SIZES.max_tokens, **LAWS[law])


FAST = {"greedy": ("chain4", "static", "k3n12", "k10n59"), "cut": ("k3n12",), "sampled": ()}
PLAIN = watched(vanilla_drafter())


def cases():
    for law, fast in FAST.items():
        for tree in TREES:
            yield pytest.param(tree, law, marks=() if tree in fast else pytest.mark.slow)


@pytest.mark.parametrize(("tree", "law"), list(cases()))
def test_texts_are_those_of_a_slow_loop(tree, law):
    drafter = table_drafter(TREES[tree], VOCAB)
    state = run(PARAMS, BATCH, make_sampling(**LAWS[law]), drafter, SIZES)
    assert texts_of(state) == wanted(law)
    assert state.done.all() and (state.not_finite == -1).all() and (state.bad_drafts == -1).all()
    accepted = np.asarray(state.accepted).sum(0)
    assert accepted[1:].sum() > 0, "nothing was ever accepted: the test would not see a wrong acceptance"
    assert drafter.depth == 1 or accepted[2:].sum() > 0, "no path beyond one node was ever accepted"


@pytest.mark.parametrize("law", ["greedy", "cut"])
def test_plain_decoding_is_the_slow_loop(law):
    state = run(PARAMS, BATCH, make_sampling(**LAWS[law]), PLAIN, SIZES, log_probs="law")
    assert texts_of(state) == wanted(law)
    assert state.cycles.tolist() == [len(text) - 1 for text in wanted(law)]
    for got, want in zip(log_probs_of(state), slow_run(TABLE, BATCH, SIZES.max_tokens, **LAWS[law])[1], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_log_probs_of_accepted_paths():
    """The target's at temperature 1, whatever is sampled. The plain decoding test checks those of the sampled law."""
    drafter = table_drafter(TREES["k3n12"], VOCAB)
    state = run(PARAMS, BATCH, make_sampling(**LAWS["cut"]), drafter, SIZES, log_probs="target")
    for prompt, got, text in zip(PROMPTS, log_probs_of(state), wanted("cut"), strict=True):
        whole = [-1, *prompt, *text]
        triples = list(zip(whole, whole[1:], whole[2:], strict=False))[len(prompt) - 1 :]
        own = [oracles.log_softmax(TABLE[before + 1, last])[token] for before, last, token in triples]
        np.testing.assert_allclose(got, own, atol=1e-5)


@pytest.mark.parametrize("rule", [pytest.param(n, marks=() if n == "traversal" else pytest.mark.slow) for n in SAMPLED])
def test_sampled_drafts_obey_stops_budgets_and_keys(rule):
    """Sampled drafts change the tokens of a key, not their law (`test_law.py`)."""
    drafter, sampling = table_drafter(SAMPLED[rule], VOCAB), make_sampling(1.0)
    state = run(PARAMS, BATCH, sampling, drafter, SIZES)
    assert np.asarray(state.accepted)[:, 2:].sum() > 0
    for row, text in enumerate(texts_of(state)):
        stops, budget = BATCH.eos_ids[row].tolist(), min(int(BATCH.budget[row]), SIZES.max_tokens)
        assert 1 <= len(text) <= budget
        assert not set(text[:-1]) & set(stops)
        assert len(text) == budget or text[-1] in stops
    assert texts_of(run(PARAMS, OTHER, sampling, drafter, SIZES)) == [texts_of(state)[row] for row in ORDER]


def test_a_row_does_not_depend_on_the_others():
    """A row whose prompt has no finite logits emits no token, and the other rows do not change."""
    sampling, drafter = make_sampling(**LAWS["cut"]), table_drafter(TREES["k3n12"], VOCAB)
    assert texts_of(run(PARAMS, OTHER, sampling, drafter, SIZES)) == [wanted("cut")[row] for row in ORDER]
    table = TABLE.copy()
    table[PROMPTS[1][-2] + 1, PROMPTS[1][-1]] = np.nan
    state = run(parameters(table), BATCH, sampling, drafter, SIZES)
    assert texts_of(state)[1] == [] and state.not_finite.tolist() == [-1, 0, -1, -1, -1, -1]


@pytest.mark.parametrize("chunk", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_chunks_of_the_prompt_change_nothing(chunk):
    batch = batch_of(PROMPTS, BATCH.budget.tolist(), BATCH.eos_ids.tolist(), chunk)
    drafter = table_drafter(TREES["k3n12"], VOCAB)
    state = run(PARAMS, batch, make_sampling(), drafter, SIZES._replace(chunk=chunk))
    whole = run(PARAMS, BATCH, make_sampling(), drafter, SIZES)
    assert texts_of(state) == wanted("greedy")
    assert state.accepted.tolist() == whole.accepted.tolist()


def test_steps_by_hand_are_the_loop():
    drafter, sampling = table_drafter(TREES["k3n12"], VOCAB), make_sampling(1.0)
    engine = Engine(TARGET, drafter, log_probs="law")
    state = jax.jit(prefill, static_argnames=("engine", "sizes"))(PARAMS, BATCH, sampling, engine=engine, sizes=SIZES)
    texts, found = ([[float(row[0])] for row in rows] for rows in (state.tokens, state.log_probs))
    cycle = jax.jit(step, static_argnames="engine")
    while not state.done.all():
        finished, lengths = state.done, state.cache.length
        state, info = cycle(PARAMS, state, sampling, engine=engine)
        assert (jnp.where(finished, info.emitted, 0) == 0).all() and (jnp.where(finished, 1, info.emitted) > 0).all()
        assert (jnp.where(finished, state.cache.length - lengths, 0) == 0).all()
        check(state, BATCH)
        for row, count in enumerate(info.emitted.tolist()):
            texts[row] += info.tokens[row, :count].tolist()
            found[row] += info.log_probs[row, :count].tolist()
    assert texts == wanted("sampled")
    for got, want in zip(found, slow_run(TABLE, BATCH, SIZES.max_tokens, temperature=1.0)[1], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_extending_a_text_is_reading_it_anew():
    """Two replies: the second prompt continues the first reply."""
    drafter, sampling = table_drafter(TREES["k3n12"], VOCAB), make_sampling(1.0)
    engine, sizes = Engine(TARGET, drafter), SIZES._replace(slots=80)
    first = run(PARAMS, BATCH, sampling, drafter, sizes)
    added = random_prompts([3, 6, 1, 2, 5, 7], VOCAB, 2)
    turns = [[text[-1], *more] for text, more in zip(texts_of(first), added, strict=True)]
    then = batch_of(turns, [9] * 6, [[]] * 6, CHUNK, seed=8)

    @jax.jit
    def reply(cache, inner):
        state = extend(PARAMS, cache, inner, then, sampling, engine, sizes)
        return jax.lax.while_loop(lambda s: ~s.done.all(), lambda s: step(PARAMS, s, sampling, engine)[0], state)

    second = reply(first.cache, first.drafter)
    assert second.drafter.sound.all()
    whole = [prompt + text[:-1] + more for prompt, text, more in zip(PROMPTS, texts_of(first), turns, strict=True)]
    anew = batch_of(whole, [9] * 6, [[]] * 6, CHUNK, seed=8)
    assert texts_of(second) == slow_texts(TABLE, anew, SIZES.max_tokens, temperature=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_trees_write_the_text_of_the_slow_loop(seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, ("chain", "dynamic", "static", "dynamic")[seed % 4])
    state = run(PARAMS, BATCH, make_sampling(), table_drafter(tree, VOCAB), SIZES)
    assert texts_of(state) == wanted("greedy")


def random_tree(rng, kind):
    """A tree of K 1 to 10 and N 1 to 128."""
    if kind == "chain":
        return TreeConfig.chain(int(rng.integers(1, 8)))
    if kind == "static":
        return TreeConfig.static([int(rng.integers(-1, node)) for node in range(int(rng.integers(2, 13)))])
    top_k, depth = int(rng.integers(1, 11)), int(rng.integers(1, 7))
    most = min(top_k + (depth - 1) * top_k**2, 128)
    return TreeConfig(depth=depth, top_k=top_k, num_nodes=int(rng.integers(depth, max(most, depth) + 1)))


@pytest.mark.slow
@pytest.mark.parametrize(("law", "tree"), list(itertools.product(("cut", "sampled"), ("chain4", "static"))))
def test_a_drafter_that_knows_the_targets_law_has_every_draw(law, tree):
    """Ranking by "draw" accepts the whole path in every cycle; ranking by "law" does not."""
    params, shares = parameters(TABLE, likeness=1.0), {}
    for ranking in ("draw", "law"):
        drafter = table_drafter(dataclasses.replace(TREES[tree], sampled_ranking=ranking), VOCAB)
        state = run(params, BATCH, make_sampling(**LAWS[law]), drafter, SIZES)
        assert texts_of(state) == wanted(law)
        shares[ranking] = int(state.accepted[:, -1].sum() / state.cycles.sum() * 100)
    assert shares["draw"] == 100 > shares["law"]


@pytest.mark.parametrize(("name", "value"), [(None, np.nan), ("k3n12", np.nan), ("k3n12", np.inf), ("k3n12", -np.inf)])
def test_a_row_ends_where_the_target_has_no_finite_logits(name, value):
    texts = wanted("greedy")
    pairs = [list(itertools.pairwise([*prompt, *text])) for prompt, text in zip(PROMPTS, texts, strict=True)]
    late = [(row, pair) for row, prompt in enumerate(PROMPTS) for pair in pairs[row][len(prompt) + 2 : -2]]
    row, bad = next((row, pair) for row, pair in late if sum(pair in others for others in pairs) == 1)
    table = TABLE.copy()
    table[bad[0] + 1, bad[1]] = value
    drafter = PLAIN if name is None else table_drafter(TREES[name], VOCAB)
    state = run(parameters(table), BATCH, make_sampling(), drafter, SIZES, log_probs=None if name else "law")
    assert texts_of(state) == slow_texts(table, BATCH, SIZES.max_tokens)
    ended = len(texts_of(state)[row])
    assert 2 < ended < len(texts[row])
    assert state.not_finite.tolist() == [ended if other == row else -1 for other in range(6)]
    assert all(texts_of(state)[other] == texts[other] for other in range(6) if other != row)


def test_drafts_that_are_nan_change_no_text_and_are_counted():
    drafter = table_drafter(TREES["chain4"], VOCAB)

    def draft(params, state, root, randomness, sampling):
        tree, state = drafter.draft(params, state, root, randomness, sampling)
        late = randomness.index[:, None] >= 4
        return tree._replace(scores=jnp.where(late, jnp.nan, tree.scores)), state

    state = run(PARAMS, BATCH, make_sampling(), drafter._replace(draft=draft), SIZES)
    assert texts_of(state) == wanted("greedy")
    for begun, text in zip(state.bad_drafts.tolist(), wanted("greedy"), strict=True):
        assert begun >= 4 if len(text) > 8 else begun == -1 or begun >= 4


def test_own_keys_of_a_drafter_are_new_in_every_cycle_and_row():
    keys = BATCH.keys
    drawn = [jax.random.key_data(RowRandomness(keys, jnp.full((6,), index)).own_keys()) for index in range(4)]
    drawn += [jax.random.key_data(jax.vmap(verify_key)(keys, jnp.full((6,), index))) for index in range(4)]
    drawn += [jax.random.key_data(jax.vmap(lambda key, at=at: jax.random.fold_in(key, at))(keys)) for at in range(4)]
    assert len(np.unique(np.concatenate(drawn), axis=0)) == 12 * 6
