"""Checks that every acceptance rule has the law of the target, and accepts as theory says.

One program per tree: settings, tables and budgets are its arguments.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from eagle_jax.config import TreeConfig
from eagle_jax.core import (
    Batch,
    DraftTree,
    Engine,
    Sampling,
    Sizes,
    deterministic,
    emitted_tokens,
    generate,
    make_sampling,
)
from eagle_jax.drafters.rules import block, rejection, traversal
from tests import oracles
from tests.tables import TARGET, parameters, random_table, table_drafter

VOCAB, ROWS = 4, 10_000
PROMPT = [3, 1, 2]
SETTINGS = {
    "temperature": dict(temperature=0.8),
    "all": dict(temperature=1.1, top_k=3, top_p=0.95, min_p=0.03),
}
BRANCHES = [-1, -1, -1, 0, 0, 1]
TREES = {
    "dynamic": TreeConfig(depth=3, top_k=3, num_nodes=8),
    "rejection": TreeConfig.chain(2, "rejection"),
    "block": TreeConfig.chain(2, "block"),
    "tree-rejection": TreeConfig.static(BRANCHES, "rejection"),
    "traversal": TreeConfig.static(BRANCHES, "traversal"),
    "narrow": TreeConfig.chain(2, "rejection"),
}
DRAFT_VOCAB = {"narrow": VOCAB - 1}
"""Vocabulary of a draft model with fewer tokens than the target."""


def tables(seed: int) -> dict:
    return parameters(random_table(VOCAB, seed, 1.5), likeness=0.6)


def law_after(params: dict, before: int, last: int, settings: dict) -> np.ndarray:
    return oracles.processed_law(np.asarray(params["table"])[before + 1, last], **settings)


def exact(params: dict, settings: dict) -> np.ndarray:
    """[V, V, V] joint law of the three tokens after the prompt."""
    joint = np.zeros((VOCAB,) * 3)
    for words in itertools.product(range(VOCAB), repeat=3):
        text = [*PROMPT, *words]
        laws = [law_after(params["target"], text[at - 1], text[at], settings)[text[at + 1]] for at in range(2, 5)]
        joint[words] = np.prod(laws)
    return joint


@functools.cache
def program(tree: str):
    drafter = table_drafter(TREES[tree], VOCAB, DRAFT_VOCAB.get(tree, VOCAB))
    engine, sizes = Engine(TARGET, drafter), Sizes(max_tokens=3, chunk=3)

    # The batch is an argument: XLA would evaluate the prefill of a constant while it compiles.
    def run(params, batch, sampling):
        state = generate(params, batch, sampling, engine, sizes)
        return emitted_tokens(state), state.accepted.sum(0), state.drafter.sound.all()

    # Ten thousand rows run in a fifth of the time for as long a compilation.
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 1})


def drawn(tree: str, settings: dict, seed: int = 0, budget: int = 3, rounds: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """[rounds * ROWS, 3] tokens of independent rows of one prompt, and the cycles that accepted 0, 1, ... drafts."""
    full = functools.partial(jnp.full, (ROWS,))
    neutral = {"top_k": VOCAB, "top_p": 1.0, "min_p": 0.0} | settings
    sampling = Sampling(**{name: jnp.asarray(value) for name, value in neutral.items()})
    prompts, texts, accepted = jnp.tile(jnp.asarray(PROMPT), (ROWS, 1)), [], []
    for keys in jax.random.split(jax.random.key(seed), rounds * ROWS).reshape(rounds, ROWS):
        batch = Batch(prompts, full(3), full(budget), full(-1)[:, None], keys)
        tokens, counts, sound = program(tree)(tables(seed), batch, sampling)
        assert sound
        texts.append(np.asarray(tokens))
        accepted.append(np.asarray(counts))
    return np.concatenate(texts), np.sum(accepted, axis=0)


def compare(tokens: np.ndarray, law: np.ndarray) -> tuple[float, float]:
    """p-value of a chi-square test over the cells expected at least five times, and the total variation."""
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(tokens.T), 1)
    assert counts[law == 0].sum() == 0, "a token outside the processed law was emitted"
    big = law * len(tokens) >= 5
    wanted = law[big] / law[big].sum() * counts[big].sum()
    return stats.chisquare(counts[big], wanted).pvalue, 0.5 * np.abs(counts / len(tokens) - law).sum()


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tree", [*list(TREES)[:-1], pytest.param("narrow", marks=pytest.mark.slow)])
def test_joint_law_of_three_tokens_is_the_targets(tree, rounds):
    """Ten thousand draws fit by chi-square; 200,000 draws are within a total variation of 0.01 as well."""
    for name, seed in (("all", 0), ("temperature", 2)):  # on some tables some faults hardly show
        tokens, accepted = drawn(tree, SETTINGS[name], seed, rounds=rounds)
        assert accepted[2:].sum() > 0.05 * accepted.sum(), "too little is accepted to test acceptance"
        pvalue, variation = compare(tokens, exact(tables(seed), SETTINGS[name]))
        if rounds == 1:
            assert pvalue > 0.01
        else:
            assert pvalue > 0.001 and variation < 0.01


def test_what_a_rule_accepts_is_what_theory_predicts():
    """Token by token the overlap of the laws; of blocks the ratio of the laws, cut at 1 after every token."""
    settings, params = dict(temperature=1.0), tables(0)
    target, draft = params["target"], params["drafter"]["model"]
    first = second = block = 0.0
    for root, x in itertools.product(range(VOCAB), repeat=2):
        weight = law_after(target, PROMPT[-2], PROMPT[-1], settings)[root]
        p, q = (law_after(params, PROMPT[-1], root, settings)[x] for params in (target, draft))
        after = [law_after(params, root, x, settings) for params in (target, draft)]
        first += weight * min(p, q)
        second += weight * min(p, q) * np.minimum(*after).sum()
        block += weight * (q * after[1] * np.minimum(min(p / q, 1) * after[0] / after[1], 1)).sum()
    shares = {name: drawn(name, settings, budget=2)[1] / ROWS for name in TREES if name not in ("dynamic", "narrow")}
    assert shares["rejection"][1:].sum() == pytest.approx(first, abs=0.02)
    assert shares["rejection"][2] == pytest.approx(second, abs=0.02)
    assert shares["block"][2] == pytest.approx(block, abs=0.02)
    mean = {name: (share * np.arange(3)).sum() for name, share in shares.items()}
    assert mean["traversal"] > mean["tree-rejection"] > mean["rejection"] + 0.05
    assert mean["block"] > mean["rejection"]


def verify(rule, temperature, parents=(-1, 0), depth=2, drafts_known=True):
    nodes = len(parents) + 1
    law = jnp.full((2, nodes, VOCAB), -np.log(VOCAB), jnp.float32) if drafts_known else None
    rows = jnp.tile(jnp.asarray([-1, *(parent + 1 for parent in parents)], jnp.int32), (2, 1))
    tree = DraftTree(jnp.tile(jnp.arange(nodes) % VOCAB, (2, 1)), rows, jnp.zeros((2, nodes)), law)
    logits, keys = jax.random.normal(jax.random.key(2), (2, nodes, VOCAB)), jax.random.split(jax.random.key(0), 2)
    return rule(tree, logits, keys, jnp.zeros((2,), jnp.int32), make_sampling(temperature), depth)


@pytest.mark.parametrize("rule", [rejection, block, traversal])
def test_rules_are_deterministic_at_temperature_0(rule):
    for left, right in zip(verify(rule, 0.0), verify(deterministic, 0.0), strict=True):
        np.testing.assert_array_equal(left, right)
    with pytest.raises(ValueError, match=r"draft_log_probs .*got None.*TreeConfig\(verification=\.\.\.\)"):
        verify(rule, 1.0, drafts_known=False)


def test_block_verification_is_for_chains():
    with pytest.raises(ValueError, match="tree must be a chain of 2 nodes, got 3"):
        verify(block, 1.0, (-1, -1, 0))
