"""Repeats proofs in other programs: compiled as users compile them, or with the TPU's attention, interpreted."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

GENERATE = "tests/runtime/test_generate.py"
CASES = {
    "golden": "tests/golden -k test_every_run",
    "trees": f"{GENERATE} -k 'of_plain_decoding and (k3n12 or static or lookahead)'",
    "rows": f"{GENERATE} -k 'fewer_rows'",
    "sharded": "tests/parallel/test_sharding.py -k 'text_is_the_same or sampling_and_plain'",
}


KERNELS = {
    "golden": "tests/golden -k test_every_run",
    "windows": "tests/runtime/test_windows.py",
    "experts": "tests/test_experts.py -k 'text'",
    "costs": "tests/runtime/test_adaptive.py -m 'not slow' -k 'plain_decoding or sizes_of_trees'",
    "rollouts": "tests/runtime/test_rollouts.py -m 'not slow' -k 'those_of_generate or mesh'",
    "sessions": "tests/runtime/test_session.py -m 'not slow'",
    "trees": CASES["trees"],
    "sharded": CASES["sharded"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_proofs_hold_in_optimised_programs(name, repository):
    flags = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    passes(CASES[name], repository, flags | {"EAGLE_JAX_TESTS_OPTIMISED": "1"})


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_proofs_hold_with_kernels(name, repository):
    passes(KERNELS[name], repository, os.environ | {"EAGLE_JAX_TESTS_KERNELS": "1"})


def passes(tests, repository, environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *shlex.split(tests)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=repository, env=environment, check=False)
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout.splitlines()[-1]
    assert "skipped" not in run.stdout.splitlines()[-1]
