"""Joining processes: what the environment says. (Two real processes: tests/training/test_head_program.py.)"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from eagle_jax import distributed
from eagle_jax.config import ConfigError
from eagle_jax.sharding import make_mesh

ALL = {"JAX_COORDINATOR_ADDRESS": "host0:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}


@pytest.fixture
def joined(monkeypatch) -> list[tuple]:
    calls: list[tuple] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: calls.append(args))
    return calls


@pytest.mark.parametrize(
    ("environment", "call"),
    [
        ({}, None),
        (ALL, ("host0:1234", 4, 2)),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"TPU_WORKER_HOSTNAMES": "t0,t1"}, ()),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "t0"}, ()),
        ({"SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "8"}, ()),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ()),
    ],
)
def test_processes_are_joined_where_there_are_several(environment, call, joined):
    distributed.initialise(environment)
    assert joined == ([] if call is None else [call])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"JAX_PROCESS_ID": ""}, "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES set without JAX_PROCESS_ID"),
        ({"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES='four' and JAX_PROCESS_ID='2' must be numbers"),
        ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID=4 must be below JAX_NUM_PROCESSES=4"),
    ],
)
def test_half_an_environment_is_refused(change, message, joined):
    with pytest.raises(ConfigError, match=message):
        distributed.initialise({**ALL, **change})
    assert not joined


def test_rows_go_over_data_and_fsdp_and_come_back():
    mesh = make_mesh(2, 1, 2)
    rows = {"tokens": np.arange(24).reshape(2, 4, 3)}
    spread = distributed.global_rows(mesh, rows, axis=1)
    assert {shard.data.shape for shard in spread["tokens"].addressable_shards} == {(2, 1, 3)}
    np.testing.assert_array_equal(distributed.to_host(spread)["tokens"], rows["tokens"])
    assert distributed.everyones({"a": [1]}) == [{"a": [1]}]
    assert distributed.leader_first(lambda: 7, "here") == 7
