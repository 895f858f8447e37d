"""Temperature above 0: the joint law of the first three tokens is the target's, enumerated from its table."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from eagle_jax.config import TreeConfig
from eagle_jax.core import Batch, Engine, Sizes, deterministic, emitted_tokens, generate, make_sampling
from tests import oracles
from tests.tables import TARGET, parameters, random_table, table_drafter

VOCAB, ROWS = 5, 25_000
PROMPT = [3, 1, 4]
SETTINGS = {
    "temperature": dict(temperature=0.8),
    "top_k": dict(temperature=1.2, top_k=3),
    "top_p": dict(temperature=1.2, top_p=0.8),
    "min_p": dict(temperature=1.0, min_p=0.1),
    "all": dict(temperature=1.1, top_k=4, top_p=0.9, min_p=0.05),
}
TREES = {
    "dynamic": TreeConfig(depth=3, top_k=3, num_nodes=8),
    "static": TreeConfig.static([-1, -1, -1, 0, 0, 1]),
    "rejection": TreeConfig.chain(3, "rejection"),
    "block": TreeConfig.chain(3, "block"),
    "tree-rejection": TreeConfig.static([-1, -1, -1, 0, 0, 1], "rejection"),
    "traversal": TreeConfig.static([-1, -1, -1, 0, 0, 1], "traversal"),
}
OPTIMISED = {"xla_backend_optimization_level": 3}  # unlike the rest of the suite: here the time goes into the draws


def exact(table: np.ndarray, settings: dict) -> np.ndarray:
    """[V, V, V] joint law of the three tokens after the prompt."""
    joint = np.zeros((VOCAB,) * 3)
    for words in itertools.product(range(VOCAB), repeat=3):
        text, law = [*PROMPT, *words], 1.0
        for at in range(2, 5):
            law *= oracles.processed_law(table[text[at - 1] + 1, text[at]], **settings)[text[at + 1]]
        joint[words] = law
    return joint


def drawn(tree: str, settings: dict, verify=None, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """[ROWS, 3] tokens of independent rows of one prompt, and how many drafts their cycles accepted."""
    params = parameters(random_table(VOCAB, seed, 1.5), likeness=0.6)
    engine, sizes = Engine(TARGET, table_drafter(TREES[tree], VOCAB), verify=verify), Sizes(max_tokens=3, chunk=3)

    # The batch is an argument: XLA would evaluate the prefill of a constant while it compiles.
    @functools.partial(jax.jit, compiler_options=OPTIMISED)
    def run(params, batch, sampling):
        state = generate(params, batch, sampling, engine, sizes)
        return emitted_tokens(state), state.accepted.sum(0)

    full = functools.partial(jnp.full, (ROWS,))
    keys = jax.random.split(jax.random.key(seed), ROWS)
    batch = Batch(jnp.tile(jnp.asarray(PROMPT), (ROWS, 1)), full(3), full(3), full(-1)[:, None], keys)
    tokens, accepted = run(params, batch, make_sampling(**settings))
    return np.asarray(tokens), np.asarray(accepted)


def compare(tokens: np.ndarray, law: np.ndarray) -> tuple[float, float]:
    """p-value of a chi-square test over the cells expected at least five times, and the total variation."""
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(tokens.T), 1)
    assert counts[law == 0].sum() == 0, "a token outside the processed law was emitted"
    big = law * len(tokens) >= 5
    wanted = law[big] / law[big].sum() * counts[big].sum()
    return stats.chisquare(counts[big], wanted).pvalue, 0.5 * np.abs(counts / len(tokens) - law).sum()


CASES = [(tree, "all") for tree in TREES]
CASES += [pytest.param("dynamic", name, marks=pytest.mark.slow) for name in SETTINGS if name != "all"]


@pytest.mark.parametrize(("tree", "settings"), CASES)
def test_joint_law_of_three_tokens_is_the_targets(tree, settings):
    tokens, accepted = drawn(tree, SETTINGS[settings])
    assert accepted[2:].sum() > 0.05 * accepted.sum(), "too little is accepted to test acceptance"
    pvalue, variation = compare(tokens, exact(random_table(VOCAB, 0, 1.5), SETTINGS[settings]))
    assert pvalue > 1e-3
    assert variation < 0.025


def keep_a_rejected_node(tree, logits, keys, index, sampling, depth):
    """A broken rule: the best child of the root is taken even when the target drew something else."""
    result = deterministic(tree, logits, keys, index, sampling, depth)
    rejected = result.count == 0
    path = jnp.where(rejected[:, None], jnp.minimum(jnp.arange(depth + 1), 1)[None], result.path)
    return result._replace(count=jnp.where(rejected, 1, result.count), path=path)


def test_a_broken_rule_is_seen():
    tokens, _ = drawn("dynamic", SETTINGS["temperature"], keep_a_rejected_node)
    assert compare(tokens, exact(random_table(VOCAB, 0, 1.5), SETTINGS["temperature"]))[0] < 1e-6
