"""Checks tokens, trees and accepted lengths against runs of SafeAILab/EAGLE cb7e084 in float32."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.runtime import generation
from eagle_jax.runtime.generation import request_of
from tests import oracles

GOLDEN = Path(__file__).parent
RUNS = json.loads((GOLDEN / "reference_outputs.json").read_text())


@pytest.fixture(scope="module")
def target():
    return eagle_jax.load_target(GOLDEN / "target")


FAST = ("eagle3_total24_depth4_topk6",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in RUNS])
def test_every_run_is_the_references(name, target):
    """All prompts of a run go through as one ragged batch; the reference ran them one by one."""
    run = RUNS[name]
    args = run["reference_args"]  # total_token counts the root; depth is one below the number of drafted levels
    tree = TreeConfig(depth=args["depth"] + 1, top_k=args["top_k"], num_nodes=args["total_token"] - 1)
    head = eagle_jax.load_drafter(GOLDEN / run["head"], target, tree)
    rows = run["rows"]
    cycles = max(row["cycles"] for row in rows)
    budget = cycles * (tree.depth + 1) + 1
    prompts = [row["prompt_ids"] for row in rows]
    request = request_of(target, head, prompts, max_new_tokens=min(budget, 400), eos_ids=())
    state = generation.prefill_program(*request)
    output = [[int(token)] for token in state.root]
    accepted = [[] for _ in rows]
    for cycle in range(cycles):
        state, info = generation.step_program(request.params, state, request.sampling, request.engine)
        info = jax.device_get(info)
        for index, row in enumerate(rows):
            if cycle >= row["cycles"]:
                continue
            count = int(info.acceptance.count[index])
            accepted[index].append(count)
            output[index] += info.tokens[index, : count + 1].tolist()
            if cycle < len(row["trees"]):
                mask = oracles.closure(info.tree.parents[index])
                _same_tree(info.tree.tokens[index], mask, info.tree.scores[index], row["trees"][cycle])
    for index, row in enumerate(rows):
        shared = min(len(output[index]), len(row["output"]))
        assert shared >= row["new_token"]
        assert output[index][:shared] == row["output"][:shared]
        assert accepted[index] == row["accept_lengths"]
    taken = sum(sum(counts) + len(counts) for counts in accepted)
    assert taken / sum(len(counts) for counts in accepted) == pytest.approx(run["tau"])


def _same_tree(tokens, mask, scores, reference):
    expected, expected_mask = reference["draft_tokens"], np.array(reference["tree_mask"], bool)
    if tokens.tolist() == expected:
        np.testing.assert_array_equal(mask, expected_mask)
        assert (mask.sum(1) - 1).tolist() == reference["position_ids"]
        return
    # Only where two scores differ by less than 1e-5 may the order of nodes differ: then the sets of paths agree.
    differing = [i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b]
    assert all(np.min(np.abs(np.delete(scores, i) - scores[i])) < 1e-5 for i in differing)
    paths = {tuple(tokens[row]) for row in mask}
    assert paths == {tuple(np.array(expected)[row]) for row in expected_mask}
