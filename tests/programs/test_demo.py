"""Checks the demo and the parts of a cycle on a small random pair."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Var

import eagle_jax
from eagle_jax.core import CycleCost
from infer import cycle, demo
from infer.common.memory import reading
from infer.common.programs import arguments
from tests.programs.conftest import ByteTokenizer


def test_the_demo_ends_with_one_json_object(pair, capsys, monkeypatch):
    loaded = pair, eagle_jax.prompt_lookup(pair, length=2), ByteTokenizer()
    asked = []
    monkeypatch.setattr(eagle_jax, "load_demo", lambda *given, **options: asked.append((given, options)) or loaded)
    demo.main(demo.Args(prompt="def f(", drafter="eagle3", max_new_tokens=12, repetitions=1, weights="fp8"))
    assert asked == [(("eagle3",), {"weights": "fp8"})]
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("--- EAGLE-3") for line in lines)
    result = json.loads(lines[-1])
    assert set(result) == {"identical", "tau", "speedup", "drafted_tok_s", "vanilla_tok_s", "machine"}
    assert result["identical"] is True and result["tau"] >= 1
    assert result["speedup"] == pytest.approx(result["drafted_tok_s"] / result["vanilla_tok_s"], rel=0.01)


@pytest.mark.slow
def test_the_parts_of_a_cycle(pair, capsys, tmp_path):
    out = tmp_path / "new" / "cost.json"
    cycle.main(cycle.Args(method="hass@chain1", context="8", turns=8, repeats=3, temperature=1.0, out=out))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(out.read_text(encoding="utf-8")) == result
    draws = {"walk of 3 tokens", "draw"}
    parts = {"plain step", "cycle", "draft", "target pass", "head update", "commit", "cycle of 2 rows"}
    parts |= {cycle.DRAFTING, cycle.EMPTY, f"plain step{cycle.READ_ONCE}", f"cycle{cycle.READ_ONCE}"}
    assert set(result["ms"]) == draws | parts
    assert all(value >= 0 for value in result["ms"].values()) and result["ms"]["cycle"] > 0  # a commit may be too short
    assert result["break_even_tau"] == pytest.approx(result["ms"]["cycle"] / result["ms"]["plain step"], abs=2e-3)


@pytest.mark.slow
def test_random_weights_of_a_published_size(pair, capsys, monkeypatch):
    """The costs are those of the measured parts, as `generate` takes them."""
    monkeypatch.setattr(cycle, "model", lambda name: pair.config)
    milliseconds = {"plain step": 2.0, "cycle": 5.0, "cycle of 4 rows": 2.5, "cycle of 6 rows": 3.0, "draft": 0.5,
                    "target pass": 2.4, "head update": 0.3, "commit": 0.1,
                    cycle.DRAFTING: 2.0 + 0.6, cycle.EMPTY: 2.0 + 1.0, cycle.READING: 1.0}  # fmt: skip
    monkeypatch.setattr(cycle, "time_turns", lambda calls, *_: {name: milliseconds[name] / 1000 for name in calls})
    monkeypatch.setattr(cycle, "drafting_of", lambda *_: lambda turns: SimpleNamespace(levels=jnp.int32(turns)))  # of 2
    given = cycle.Args(model="tiny", method="eagle3@2x2x5", context="8,9,64", turns=1, repeats=1, dtype="bfloat16")
    cycle.main(given)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["ms"][f"cycle{cycle.READ_ONCE}"] > report["ms"][f"plain step{cycle.READ_ONCE}"] > 0
    cost = report["cycle_cost"]
    own = {"rows": [1, 4, 6], "passes": [1.0, 1.25, 1.5], "level": 0.3, "token": 0.0, "draft": 0.2}
    slots = cost["slots"], cost["longer"]["slots"]
    assert cost == own | {"slots": slots[0], "longer": own | {"slots": slots[1]}}
    assert 8 < slots[0] < slots[1] < 256  # small caches are read whole, those of 8 and 9 tokens are alike
    target, head = cycle.with_random_weights("tiny", given)
    assert target.dtype == "bfloat16" and head.tree.num_nodes == 5
    lists = {name: tuple(cost[name]) for name in ("rows", "passes")}  # the tests' type checks refuse JSON's lists
    given = CycleCost(**cost | lists | {"longer": CycleCost(**cost["longer"] | lists)})
    assert given.prices(6).rows == (1, 4, 6) and given.longer.slots == slots[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": "5000", "turns": 2}, r"--context must be at most \d+ for 2 turns, got 5000"),
        ({"method": "pld"}, "--method must be an EAGLE head, got pld"),
        ({"model": "llama-3.1-8b", "method": "hass"}, r"--model must come with --method eagle3 .*, got hass\. Give"),
        ({"turns": 0}, "--turns must be at least 1, got 0"),
        ({"out": Path(__file__).parent}, r"--out must be a file, got .*programs\. Choose another path"),
    ],
)
def test_a_bad_option_of_infer_cycle_is_an_error(options, message, pair):
    with pytest.raises(ValueError, match=message):
        cycle.main(cycle.Args(**options))


def test_the_head_of_the_pair_is_measured(monkeypatch):
    """Without --method."""

    def stop(labels, args):
        raise ValueError(f"the labels are {labels}")

    monkeypatch.setattr("infer.common.methods.smollm2_target", lambda: Path("target.gguf"))
    monkeypatch.setattr(cycle, "check_methods", stop)
    with pytest.raises(ValueError, match=r"^the labels are \['eagle3'\]$"):
        cycle.main(arguments(cycle.Args, None, ["--pair", "smollm2"]))


def dependence(jaxpr, inputs):
    """Returns whether each matrix product in a jaxpr depends on a marked input, and which outputs do."""
    marked = {var for var, mark in zip(jaxpr.invars, inputs, strict=True) if mark}
    found = []
    for equation in jaxpr.eqns:
        marks = [isinstance(var, Var) and var in marked for var in equation.invars]
        if equation.primitive.name in ("jit", "pjit", "closed_call", "custom_jvp_call"):  # the compiler inlines these
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr")).jaxpr
            products, results = dependence(inner, marks)
            found += products
        else:
            results = [any(marks)] * len(equation.outvars)
            if "dot_general" in str(equation):
                found.append(any(marks))
        marked |= {var for var, mark in zip(equation.outvars, results, strict=True) if mark}
    return found, [isinstance(var, Var) and var in marked for var in jaxpr.outvars]


@pytest.mark.parametrize("head", ["hass", "eagle3"])
def test_every_turn_repeats_its_matrix_products(pair, head):
    """Every matrix product depends on the turn before, so that the compiler moves none out of the loop."""
    made = cycle.parts(pair, eagle_jax.load_demo(head)[1], [4, 8], 8, cycle.Args(turns=2))
    made[cycle.READING], _ = reading(1e5)
    for name, part in made.items():
        jaxpr = jax.make_jaxpr(part.body)(part.params, part.carry).jaxpr
        weights, carried = len(jax.tree.leaves(part.params)), len(jax.tree.leaves(part.carry))
        products, _ = dependence(jaxpr, [False] * weights + [True] * carried)
        assert all(products), name
        assert products or name == "commit", name
    assert not all(dependence(jax.make_jaxpr(lambda w, x: w @ w + x)(jnp.eye(2), jnp.eye(2)).jaxpr, [False, True])[0])
