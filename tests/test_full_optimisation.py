"""Repeats proofs in programs compiled as users compile them: other tests lower the compiler's effort."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import jax
import pytest

import eagle_jax
from eagle_jax import core
from eagle_jax.runtime import generation
from tests.models import TREES, random_prompts, tiny_head, tiny_target

GENERATE = "tests/runtime/test_generate.py"
CASES = {
    "golden": "tests/golden -k test_every_run",
    "trees": f"{GENERATE} -k 'of_plain_decoding and (k3n12 or static or lookahead)'",
    "rows": f"{GENERATE} -k 'fewer_rows'",
    "sharded": "tests/parallel/test_sharding.py -k 'text_is_the_same or sampling_and_plain'",
}


@pytest.mark.slow
def test_an_optimised_program_writes_the_same_text(monkeypatch):
    options = {"xla_backend_optimization_level": 3}
    program = jax.jit(core.generate, static_argnames=generation.STATIC, compiler_options=options)
    run = dict(max_new_tokens=20, eos_ids=())
    prompts = random_prompts([5, 9, 31], 12)
    plain = eagle_jax.generate(tiny_target(), None, prompts[:1], **run)
    monkeypatch.setattr(generation, "generate_program", program)
    assert eagle_jax.generate(tiny_target(), tiny_head("eagle3", TREES["k3n12"]), prompts, **run).tokens[:1] == (
        plain.tokens
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_proofs_hold_in_optimised_programs(name, repository):
    flags = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment = flags | {"EAGLE_JAX_TESTS_OPTIMISED": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    command += shlex.split(CASES[name])
    run = subprocess.run(command, capture_output=True, text=True, cwd=repository, env=environment, check=False)
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout.splitlines()[-1]
    assert "skipped" not in run.stdout.splitlines()[-1]
