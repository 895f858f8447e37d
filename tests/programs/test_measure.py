"""Prompts from conversations, fair timing, names of machine and code."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.data.chat.tokenize import chat_ids
from eagle_jax.runtime import compilation
from eagle_jax.runtime.compilation import machine, revision
from infer.common.timing import time_interleaved, time_repetitions
from tests.models import tiny_head, tiny_target


def test_the_compilation_cache_is_written(tmp_path):
    """In a process of its own: JAX does not give a cache up again."""
    code = (
        "from eagle_jax import use_compilation_cache; import jax, jax.numpy as jnp; use_compilation_cache();"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0); jax.jit(jnp.sin)(jnp.ones(3))"
    )
    (tmp_path / "here").mkdir()
    before = "import jax, jax.numpy as jnp; jax.jit(jnp.cos)(jnp.ones(3));"  # a cache may come later
    for name, setting in (("here/.jax_cache", {}), ("elsewhere", {"JAX_COMPILATION_CACHE_DIR": "../elsewhere"})):
        given = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
        environment = {**given, **setting, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        subprocess.run([sys.executable, "-c", before + code], check=True, cwd=tmp_path / "here", env=environment)
        assert any((tmp_path / name).iterdir())


def test_loaded_things_print_as_one_line():
    assert repr(tiny_target()) == "Target(name='target', dtype='float32', mesh=None)"
    told = repr(tiny_head("eagle3", TreeConfig.chain(2)))
    assert told.startswith("DraftHead(name='head', mesh=None, tree=TreeConfig(depth=2, ")


class Tokenizer:
    """One token per character."""

    chat_template = None

    def encode(self, text, **options):
        return [ord(character) for character in text]

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize
        return (
            "".join(f"{message['role'][0]}{message['content']}" for message in messages) + "a" * add_generation_prompt
        )


def test_conversations():
    tokenizer = Tokenizer()
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    assert chat_ids(tokenizer, messages) == [ord(c) for c in "x\n\ny"]
    tokenizer.chat_template = "{{ }}"
    assert chat_ids(tokenizer, messages) == [ord(c) for c in "uxuya"]


def test_timing_takes_turns():
    order = []
    calls = {
        "slow": lambda: (order.append("slow"), time.sleep(0.02)),
        "fast": lambda: order.append("fast"),
    }
    seconds = time_repetitions(calls, 3)
    assert order == ["slow", "fast", "fast", "slow", "slow", "fast"]
    assert len(seconds["slow"]) == len(seconds["fast"]) == 3
    assert min(seconds["slow"]) > 0.015


def test_the_median_counts(monkeypatch):
    clock = iter([0.0, 5.0, 5.0, 6.0, 6.0, 8.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert time_interleaved({"call": lambda: None}, 3) == {"call": 2.0}


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n", "AMD EPYC (family 26, model 2)"),
        ("cpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Intel(R)  Xeon(R) @ 2.80GHz\n", "Intel(R) Xeon(R) @ 2.80GHz"),
        ("model name\t: Some Core\n", "Some Core"),
    ],
)
def test_processors_of_one_name_are_told_apart(cpuinfo, name, tmp_path):
    (tmp_path / "cpuinfo").write_text(cpuinfo, encoding="utf-8")
    assert compilation._processor(tmp_path / "cpuinfo") == name
    assert compilation._processor(tmp_path / "absent")


def test_the_machine_has_a_name():
    assert "cores" in machine()
    assert "jax" in machine()


def test_the_code_has_a_name(tmp_path):
    assert revision(tmp_path) is None  # no checkout
    repository = tmp_path / "checkout"
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        repository.mkdir(exist_ok=True)
        (repository / "file").write_text("1")
        subprocess.run(["git", "-C", str(repository), *command], check=True)
    commit = revision(repository)
    assert len(commit) >= 7
    (repository / "file").write_text("2")
    assert revision(repository) == f"{commit}-dirty"


def test_programs_are_forgotten_where_there_are_many(monkeypatch):
    """As many compiled programs as a long benchmark has would end the process: each lives in many memory maps."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("only Linux counts memory maps")
    double = jax.jit(lambda x: 2 * x)
    double(1.0)
    assert not compilation.forget_programs() and double._cache_size() == 1
    monkeypatch.setattr(compilation, "MOST_MAPS", 1)
    assert compilation.forget_programs() and double._cache_size() == 0
    assert double(2.0) == 4.0


@pytest.mark.parametrize("messages", ["hello", ["hello"], [{"content": "x"}], [{"role": "user"}]], ids=str)
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(ValueError, match=r"^messages must be a list of dicts, each with a role"):
        chat_ids(Tokenizer(), messages)
