"""Reading tasks, prompts from conversations, fair timing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.measure import chat_ids, find_task, machine, read_questions, time_interleaved
from tests.models import tiny_head, tiny_target

LINE = {"question_id": 7, "category": "math", "turns": ["How many?", "Why?"], "reference": ["3"]}


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "question.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8")
        return path

    return write


def test_the_compilation_cache_is_written(tmp_path):
    """In a process of its own: JAX does not give a cache up again."""
    code = (
        "from eagle_jax.measure import use_compilation_cache; import jax, jax.numpy as jnp; use_compilation_cache();"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0); jax.jit(jnp.sin)(jnp.ones(3))"
    )
    (tmp_path / "here").mkdir()
    for name, setting in (("here/.jax_cache", {}), ("elsewhere", {"JAX_COMPILATION_CACHE_DIR": "../elsewhere"})):
        environment = {**os.environ, **setting, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path / "here", env=environment)
        assert any((tmp_path / name).iterdir())


def test_loaded_things_print_as_one_line():
    assert repr(tiny_target()) == "Target(name='target', dtype='float32', mesh=None)"
    told = repr(tiny_head("eagle3", TreeConfig.chain(2)))
    assert told.startswith("DraftHead(name='head', mesh=None, tree=TreeConfig(depth=2, ")


def test_questions(write):
    path = write(json.dumps(LINE), "", json.dumps({"question_id": "b", "turns": ["Über?"]}, ensure_ascii=False))
    first, second = read_questions(path)
    assert first == ("7", "math", ("How many?", "Why?"))
    assert second == ("b", "", ("Über?",))
    assert read_questions(path, limit=1) == [first]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ('{"question_id": 1, "turns": ["a"', r"question\.jsonl, line 3: not JSON"),
        ("[1, 2]", r"line 3: expected an object with question_id, category and turns, found list"),
        ('{"category": "x"}', r"line 3: missing question_id, turns"),
        ('{"question_id": 1, "turns": "a"}', r"line 3: turns must be a non-empty list of non-empty strings"),
        ('{"question_id": 1, "turns": []}', r"line 3: turns must"),
        ('{"question_id": 1, "turns": ["a", ""]}', r"line 3: turns must"),
    ],
)
def test_a_broken_line_is_named_by_its_number(write, broken, message):
    path = write(json.dumps(LINE), "", broken)
    with pytest.raises(ValueError, match=message):
        read_questions(path)
    assert len(read_questions(path, limit=1)) == 1  # never reached


def test_no_questions(write):
    with pytest.raises(ValueError, match="holds no questions"):
        read_questions(write("", ""))


def test_a_task_is_a_name_or_a_path(tmp_path):
    (tmp_path / "gsm8k.jsonl").touch()
    (tmp_path / "mt_bench").mkdir()
    (tmp_path / "mt_bench" / "question.jsonl").touch()
    assert find_task("gsm8k", tmp_path) == tmp_path / "gsm8k.jsonl"
    assert find_task("mt_bench", tmp_path) == tmp_path / "mt_bench" / "question.jsonl"
    assert find_task(str(tmp_path / "gsm8k.jsonl"), "nowhere") == tmp_path / "gsm8k.jsonl"
    with pytest.raises(ValueError, match=r"task 'alpaca' is neither a file nor a name .* \(it has gsm8k, mt_bench\)"):
        find_task("alpaca", tmp_path)
    with pytest.raises(ValueError, match="empty or does not exist"):
        find_task("alpaca", tmp_path / "absent")


def test_the_tasks_beside_the_checkout_are_readable(shared):
    for name in ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum"):
        assert len(read_questions(find_task(name, shared / "data" / "tasks"))) > 70


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
    seconds = time_interleaved(calls, 3)
    assert order == ["slow", "fast", "fast", "slow", "slow", "fast"]
    assert seconds["slow"] > 0.015 > seconds["fast"]


def test_the_machine_has_a_name():
    assert "cores" in machine()
    assert "jax" in machine()
