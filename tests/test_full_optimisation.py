"""Repeats proofs in programs compiled as users compile them: other tests lower the compiler's effort."""

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


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_proofs_hold_in_optimised_programs(name, repository):
    flags = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment = flags | {"EAGLE_JAX_TESTS_OPTIMISED": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *shlex.split(CASES[name])]
    run = subprocess.run(command, capture_output=True, text=True, cwd=repository, env=environment, check=False)
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout.splitlines()[-1]
    assert "skipped" not in run.stdout.splitlines()[-1]
