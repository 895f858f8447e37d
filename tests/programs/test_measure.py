"""Checks timed calls, keys of questions, and the names of machine and code."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.core import CycleCost
from eagle_jax.data.chat.tokenize import chat_ids
from eagle_jax.devices import DeviceError
from eagle_jax.runtime import compilation, generation
from eagle_jax.runtime.compilation import machine, revision
from infer.common.tasks import keys_of
from infer.common.timing import FEW, Part, engine, time_interleaved, time_repetitions, time_turns
from tests.models import random_prompts, tiny_head, tiny_target
from tests.programs.conftest import ByteTokenizer


@pytest.mark.parametrize(("temperature", "drafted"), [(0.0, False), pytest.param(1.0, True, marks=pytest.mark.slow)])
def test_the_prefill_compiles_nothing_of_its_own(temperature, drafted):
    head = tiny_head("eagle1", TreeConfig.chain(1)).rebind(tiny_target()) if drafted else None
    method = engine(tiny_target(), head, 8, temperature)
    prompts, keys = random_prompts([5, 3], 12), keys_of(7, ["a", "b"], 0)
    whole = method.answer(prompts, keys)
    compiled = generation.generate_program._cache_size()
    first = method.prefill(prompts, keys)
    assert generation.generate_program._cache_size() == compiled
    assert first.tokens == [tokens[:1] for tokens in whole.tokens]
    assert [len(tokens) for tokens in whole.tokens] == [8, 8]
    assert [sum(row) for row in whole.accepted] == whole.cycles


def test_repetitions_begin_with_what_earlier_prompts_have_taught(monkeypatch):
    given, made = [], iter("abcdefg")

    def generate(*_, payoff, **options):
        given.append(payoff)
        return eagle_jax.GenerateOutput([[1]], np.array([1]), np.array([[1]]), payoff=next(made))

    monkeypatch.setattr(eagle_jax, "generate", generate)
    method = engine(None, None, 8, 0.0, CycleCost((1,), (1.0,)))
    for prompts in ([[1]], [[2]], [[3]]):
        for _ in range(2):
            method.answer(prompts, None)
    assert given == [None, None, "b", "b", "d", "d"]


def test_a_key_depends_on_seed_question_and_turn_alone():
    """Equal keys would correlate questions; keys by batch index would change texts with the batch size."""
    together = jax.random.key_data(keys_of(0, ["a", "b", "a:1"], 0)).tolist()
    assert len({tuple(key) for key in together}) == 3
    assert jax.random.key_data(keys_of(0, ["b"], 0)).tolist() == together[1:2]
    for seed, turn in ((0, 1), (1, 0)):
        assert jax.random.key_data(keys_of(seed, ["b"], turn)).tolist() != together[1:2]


def test_timed_calls_alternate_order(monkeypatch):
    order = []
    seconds = time_repetitions({name: lambda name=name: order.append(name) for name in ("one", "two")}, 3)
    assert order == ["one", "two", "two", "one", "one", "two"]
    assert [len(values) for values in seconds.values()] == [3, 3]
    clock = iter([0.0, 0.0, 2.0, 2.0, 2.0, 5.0, 5.5])  # the end, two repetitions of 2 and 3 s, and a look after each
    with monkeypatch.context() as slow:
        slow.setattr(time, "perf_counter", lambda: next(clock))
        assert time_repetitions({"call": lambda: None}, 1, enough=5.2) == {"call": [2.0, 3.0]}
    clock = iter([0.0, 5.0, 5.0, 6.0, 6.0, 8.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert time_interleaved({"call": lambda: None}, 3) == {"call": 2.0}  # the median


def test_a_turn_costs_what_further_turns_add(monkeypatch):
    """What a call does once does not count: a copy of 7 s, and 2 s per turn."""
    now, ran = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call(once: float, each: float, turns: int) -> None:
        ran.append(turns)
        now[0] += once + each * turns

    programs = {name: functools.partial(call, *costs) for name, costs in {"step": (7, 2), "commit": (1, 0)}.items()}
    assert time_turns(programs, 10, "step", 2) == {"step": 2.0, "commit": 0.0}
    assert set(ran) == {FEW, FEW + 10}
    with pytest.raises(DeviceError, match=r"a plain step must take time, got calls of 2 steps .* than those of 12"):
        time_turns(programs, 10, "commit", 2)


def test_a_lucky_call_and_delayed_ones_cost_nothing(monkeypatch):
    """Five calls of each length: two are 9 s too slow, and a long one is 3 s too fast."""
    now, luck = [0.0], {FEW: iter([0, 9, 0, 0, 9]), FEW + 10: iter([9, 0, 9, -3, 0])}
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call(turns: int) -> None:
        now[0] += 2 * turns + next(luck[turns])

    assert time_turns({"step": call}, 10, "step", 5) == {"step": 2.0}


def test_a_part_runs_so_many_times():
    program = Part(lambda params, carry: carry + params["step"], {"step": jnp.int32(3)}, jnp.int32(1)).program()
    assert [int(program(turns)) for turns in (2, 5)] == [7, 16]


def test_a_part_begins_from_every_carry():
    seen = []

    def body(params, carry):
        jax.debug.callback(lambda value: seen.append(int(value)), carry)
        return carry + params

    assert int(Part(body, jnp.int32(1), jnp.int32(1)).program(jnp.int32(5))(2)) == 7
    jax.effects_barrier()
    assert sorted(seen) == [1, 2, 5, 6]


def test_the_compilation_cache_is_written(tmp_path):
    """Runs in a process of its own, because JAX keeps the first cache directory."""
    # The cache may be enabled after the first compilation.
    code = (
        "import jax, jax.numpy as jnp; jax.jit(jnp.cos)(jnp.ones(3));"
        "from eagle_jax import use_compilation_cache; use_compilation_cache();"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0); jax.jit(jnp.sin)(jnp.ones(3))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)
    assert any((tmp_path / ".jax_cache").iterdir())


def test_the_machine_has_a_name(tmp_path):
    path = tmp_path / "cpuinfo"
    for cpuinfo, name in (
        ("cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n", "AMD EPYC (family 26, model 2)"),
        ("cpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Intel(R)  Xeon(R) @ 2.80GHz\n", "Intel(R) Xeon(R) @ 2.80GHz"),
    ):
        path.write_text(cpuinfo, encoding="utf-8")
        assert compilation._processor(path) == name
    assert compilation._processor(tmp_path / "absent")
    assert "cores" in machine() and "jax" in machine()


def test_revision_is_the_git_commit(tmp_path):
    assert revision(tmp_path) is None  # no checkout
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    commit = revision(tmp_path)
    assert len(commit) >= 7
    (tmp_path / "file").write_text("2")
    assert revision(tmp_path) == f"{commit}-dirty"


def test_many_compiled_programs_are_dropped(monkeypatch):
    """Every compiled program has memory maps, whose number Linux limits."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("only Linux counts memory maps")
    double = jax.jit(lambda x: 2 * x)
    double(1.0)
    assert not compilation.forget_programs() and double._cache_size() == 1
    monkeypatch.setattr(compilation, "MOST_MAPS", 1)
    assert compilation.forget_programs() and double._cache_size() == 0
    assert double(2.0) == 4.0


def test_prompts_without_a_template_are_joined_by_blank_lines():
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    assert chat_ids(ByteTokenizer(), messages) == list(b"x\n\ny")
