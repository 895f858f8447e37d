"""The profile of a cycle, on a pair small enough to run it in seconds."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Var

from infer import cycle


def test_the_last_line_is_one_json_object(pair, capsys):
    cycle.main(cycle.Args(context=8, turns=2, repeats=1))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    alone = {"its products alone", "its attention alone"}
    parts = alone | {"plain step", "cycle", "draft", "target pass", "head update", "commit"}
    assert set(result["ms"]) == parts
    assert all(value > 0 for value in result["ms"].values())
    assert result["break_even_tau"] == pytest.approx(result["ms"]["cycle"] / result["ms"]["plain step"], abs=2e-3)


def test_the_products_are_those_of_the_model(pair):
    """Two flops per weight of every linear layer and token; the kernels themselves are in no loop or slice."""
    weights = sum(kernel.size for kernel in cycle.matrices(pair.params))
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48  # q and o, k and v, the MLP
    assert weights == 2 * layer + 32 * 258
    assert cycle.pass_flops(pair, batch=3, rows=5) == 2 * 15 * weights


def test_a_context_that_leaves_no_room_is_refused(pair):
    with pytest.raises(ValueError, match=r"--context 5000 must be at most \d+ for 2 turns"):
        cycle.main(cycle.Args(context=5000, turns=2))
    with pytest.raises(ValueError, match="the small pair is float32, not bfloat16"):
        cycle.main(cycle.Args(dtype="bfloat16"))


def test_a_target_without_its_head_is_refused():
    with pytest.raises(ValueError, match="--target and --head belong together"):
        cycle.main(cycle.Args(target="x"))
    with pytest.raises(ValueError, match="--turns 0 must be at least 1"):
        cycle.main(cycle.Args(turns=0))


def waits(jaxpr, inputs):
    """Whether each matrix product in a jaxpr depends on one of the inputs that are marked, and which outputs do."""
    marked = {var for var, mark in zip(jaxpr.invars, inputs, strict=True) if mark}
    found = []
    for equation in jaxpr.eqns:
        marks = [isinstance(var, Var) and var in marked for var in equation.invars]
        if equation.primitive.name in ("jit", "pjit", "closed_call", "custom_jvp_call"):  # the compiler inlines these
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr")).jaxpr
            products, results = waits(inner, marks)
            found += products
        else:
            results = [any(marks)] * len(equation.outvars)
            if "dot_general" in str(equation):
                found.append(any(marks))
        marked |= {var for var, mark in zip(equation.outvars, results, strict=True) if mark}
    return found, [isinstance(var, Var) and var in marked for var in jaxpr.outvars]


@pytest.mark.parametrize("head", ["hass", "eagle3"])
def test_every_turn_does_its_work(pair, head):
    """Every matrix product waits for the turn before, so that the compiler can move none out of the loop."""
    made = cycle.parts(pair, cycle.eagle_jax.load_demo(head)[1], cycle.Args(context=8, turns=2))
    for name, part in made.items():
        jaxpr = jax.make_jaxpr(part.body)(part.params, part.carry).jaxpr
        weights, carried = len(jax.tree.leaves(part.params)), len(jax.tree.leaves(part.carry))
        products, _ = waits(jaxpr, [False] * weights + [True] * carried)
        assert all(products), name
        assert products or name == "commit", name
    assert int(made["cycle"].repeat(3)().cycles[0]) == 3
    assert not all(waits(jax.make_jaxpr(lambda w, x: w @ w + x)(jnp.eye(2), jnp.eye(2)).jaxpr, [False, True])[0])
