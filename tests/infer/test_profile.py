"""The profile of a cycle, on a pair small enough to run it in seconds."""

from __future__ import annotations

import json

import jax
import pytest

from infer import profile


def test_the_last_line_is_one_json_object(pair, capsys):
    profile.main(profile.Args(context=8, turns=2, repeats=1))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    parts = {"plain step", "cycle", "draft", "target pass", "its products alone", "head update", "commit"}
    assert set(result["ms"]) == parts
    assert all(value > 0 for value in result["ms"].values())
    assert result["break_even_tau"] == pytest.approx(result["ms"]["cycle"] / result["ms"]["plain step"], abs=2e-3)


def test_the_products_are_those_of_the_model(pair):
    """Two flops per weight of every linear layer and token; the kernels themselves are in no loop or slice."""
    weights = sum(kernel.size for kernel in profile.matrices(pair.params))
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48  # q and o, k and v, the MLP
    assert weights == 2 * layer + 32 * 258
    assert profile.pass_flops(pair, batch=3, rows=5) == 2 * 15 * weights


def test_a_target_without_its_head_is_refused():
    with pytest.raises(ValueError, match="--target and --head belong together"):
        profile.main(profile.Args(target="x"))
    with pytest.raises(ValueError, match="--turns 0 must be at least 1"):
        profile.main(profile.Args(turns=0))


def test_every_turn_does_its_work(pair):
    """Twice the turns commit twice the tokens: nothing was moved out of the loop."""
    head = profile.eagle_jax.load_demo()[1]
    lengths = []
    for turns in (2, 4):
        calls = profile.programs(pair, head, profile.Args(context=8, turns=turns))
        lengths.append(int(calls["commit"]().length[0]) - 7)
        assert int(calls["cycle"]().cycles[0]) == turns
        assert int(calls["plain step"]().cycles[0]) == turns
        jax.block_until_ready(calls["target pass"]())
    assert lengths[1] - lengths[0] == 2
