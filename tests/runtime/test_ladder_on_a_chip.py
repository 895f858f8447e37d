"""Replays the choice of tree sizes at the modelled costs of a TPU, against trees of one size."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core import CycleCost, adaptive, loop, prefill
from eagle_jax.runtime.generation import request_of
from infer.common.tasks import BUNDLED, load_tasks, task_folder

V6E = CycleCost((1, 8, 16, 32, 60), (1.0, 1.0, 1.0, 1.53, 2.87), 0.04)
"""Costs that infer.aot models for Llama-3.1-8B at batch 32 on one TPU v6e (docs/measurements.md)."""


def modelled_cost(request, ladder):
    """The cost of a whole call in plain steps, by the costs of a v6e, with one size of tree or as a ladder."""
    params, _, sampling, engine, _ = request
    cycle = jax.jit(lambda payoff, state: loop.drafted_cycle(params, payoff, state, sampling, engine, V6E))
    fixed = jax.jit(lambda state: loop.step(params, state, sampling, engine))
    plain = jax.jit(lambda payoff, state: loop.burst(params, payoff, state, sampling, engine))
    payoff, state, total = adaptive.start(), prefill(*request), 0.0
    while not state.done.all():
        before, passes = payoff, int(state.cycles.max())
        if not ladder:
            state, info = fixed(state)
            levels = int(loop.drafted_levels(engine.drafter, info.tree))
            total += float(np.interp(info.tree.tokens.shape[1], V6E.rows, V6E.passes)) + V6E.level * levels
        elif payoff.wait > 0:
            payoff, state = plain(payoff, state)
            total += int(state.cycles.max()) - passes
        else:
            payoff, state = cycle(payoff, state)
            total += float(payoff.spent - (1 - 1 / adaptive.MEMORY) * before.spent)
    return total, state.tokens[:, :48]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ladder_keeps_up_with_the_best_tree_of_one_size(temperature):
    """The bundled pair at the costs of a batch of 32 of an 8B: at most 1.1 times the cost of the best fixed tree."""
    target, head, tokenizer = eagle_jax.load_demo("eagle3")
    questions = [
        question.turns[0] for task in load_tasks(BUNDLED.split(","), task_folder()) for question in task.questions
    ]
    chats = itertools.islice(itertools.cycle(questions), 32)
    prompts = [eagle_jax.chat_ids(tokenizer, [{"role": "user", "content": text}]) for text in chats]
    options = {"max_new_tokens": 48, "eos_ids": (), "temperature": temperature, "key": 1}
    trees = [TreeConfig.chain(3), *(TreeConfig(8, 10, nodes) for nodes in (15, 31, 59)), TreeConfig(4, 2, 7)]
    costs = {}
    for tree in trees:
        costs[tree], tokens = modelled_cost(request_of(target, head.with_tree(tree), prompts, **options), ladder=False)
    ours, same = modelled_cost(
        request_of(target, head.with_tree(TreeConfig(8, 10, 59)), prompts, **options), ladder=True
    )
    np.testing.assert_array_equal(same, tokens)
    print(f"T={temperature}: the ladder costs {ours:.1f} plain steps of 47, trees of one size {costs}")
    assert ours <= 1.1 * min(47, *costs.values())
