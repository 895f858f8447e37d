"""Checks that processes join by the environment, and rows of several processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax._src.clusters import cloud_tpu_cluster

from eagle_jax.config import ConfigError
from eagle_jax.parallel import make_mesh, processes

ALL = {"JAX_COORDINATOR_ADDRESS": "host0:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}


@pytest.fixture
def joined(monkeypatch) -> list[tuple]:
    calls: list[tuple] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: calls.append(args))
    return calls


def slice_of(number: str, endpoints: str) -> dict[str, str]:
    return {"agent-worker-number": number, "worker-network-endpoints": endpoints}


@pytest.mark.parametrize(
    ("environment", "metadata", "call"),
    [
        ({}, None, None),
        (ALL, None, ("host0:1234", 4, 2)),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None, None),
        ({"TPU_WORKER_HOSTNAMES": "t0,t1"}, None, ()),
        ({"TPU_PROCESS_ADDRESSES": "t0:8476,t1:8476"}, None, ()),
        ({"TPU_PROCESS_ADDRESSES": "t0:8476", "TPU_WORKER_HOSTNAMES": "t0,t1"}, None, None),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "t0"}, None, ()),
        ({"SLURM_NTASKS": "1"}, None, None),
        ({"SLURM_NTASKS": "8"}, None, ()),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, None, ()),
        ({}, slice_of("1", "a:b:10.0.0.1,a:b:10.0.0.2"), ()),
        ({"JAX_PLATFORMS": "tpu,cpu"}, slice_of("1", "t0,t1"), ()),
        ({"JAX_PLATFORMS": "cpu"}, slice_of("1", "t0,t1"), None),
        ({}, slice_of("0", "t0"), None),
        ({}, slice_of("0", "t0") | {"tpu-env": "MEGASCALE_NUM_SLICES: '2'"}, ()),
        ({}, {}, None),
    ],
)
def test_processes_are_joined(environment, metadata, call, joined, monkeypatch):
    """`metadata`: the answers of the server of a plain TPU VM; None: no chips, so nothing may read from the server."""

    def answer(key: str) -> tuple[str, int]:
        assert metadata is not None, f"read {key} from the server"
        if not metadata:  # chips without a slice
            raise ConnectionError(key)
        return (metadata[key], 200) if key in metadata else ("", 404)

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", metadata is not None)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", answer)
    for name in ("TPU_SKIP_MDS_QUERY", "MEGASCALE_NUM_SLICES"):
        monkeypatch.delenv(name, raising=False)
    processes.initialise(environment)
    assert joined == ([] if call is None else [call])


def test_processes_that_did_not_join_raise(joined, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ConfigError, match="JAX_PROCESS_ID must be set on each of the 4 processes"):
        processes.initialise({})
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert processes.initialise({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"JAX_PROCESS_ID": ""}, "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID must be set together"),
        ({"JAX_NUM_PROCESSES": "four"}, "JAX_PROCESS_ID must be a number below JAX_NUM_PROCESSES=four, got 2"),
        ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID must be a number below JAX_NUM_PROCESSES=4, got 4"),
    ],
)
def test_an_incomplete_environment_raises(change, message, joined):
    with pytest.raises(ConfigError, match=message):
        processes.initialise({**ALL, **change})
    assert not joined


def test_rows_go_over_data_and_fsdp_and_come_back():
    mesh = make_mesh(2, 1, 2)
    rows = {"tokens": np.arange(24).reshape(2, 4, 3)}
    spread = processes.global_rows(mesh, rows, axis=1)
    assert {shard.data.shape for shard in spread["tokens"].addressable_shards} == {(2, 1, 3)}
    np.testing.assert_array_equal(processes.to_host(spread)["tokens"], rows["tokens"])
    assert processes.gather_values({"a": [1]}) == [{"a": [1]}]
    assert processes.leader_first(lambda: 7, "here") == 7


TWO = """
import sys

import jax
import numpy as np
from eagle_jax.config import ConfigError
from eagle_jax.parallel import make_mesh, processes

assert processes.initialise()
devices = jax.devices()
jax.devices = lambda: [devices[i] for i in (2, 0, 3, 1)]  # numbered by place, as TPUs are
own = np.arange(4, dtype=np.int32)[:, None] + 10 * jax.process_index()
for mesh in (make_mesh(2, 1, 2), make_mesh(1, 2, 2)):
    assert [d.process_index for d in mesh.devices.flat] == [0, 0, 1, 1]
    found = processes.to_host(processes.global_rows(mesh, own)).ravel().tolist()
    assert found == [0, 1, 2, 3, 10, 11, 12, 13], found

try:
    make_mesh(1, 4, 1)
except ConfigError as error:
    sys.stdout.write(f"raised: {error}\\n")  # in one piece: Gloo writes lines of its own between
"""


def both_processes(attempts: int = 3) -> list[str]:
    """Output of the two processes. Repeats if Gloo times out while one still starts on a loaded machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = []
    for index in range(2):
        named = dict(zip(ALL, (f"localhost:{port}", "2", str(index)), strict=True))
        environment = os.environ | named | {"JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen([sys.executable, "-c", TWO], env=environment, **options))
    found = [process.communicate(timeout=300) for process in running]
    errors = "".join(error for _, error in found)
    if any(process.returncode for process in running) and attempts > 1 and ("Gloo" in errors or "DEADLINE" in errors):
        return both_processes(attempts - 1)
    assert not any(process.returncode for process in running), errors
    return [out for out, _ in found]


def test_two_processes_have_their_rows_in_order():
    """Rows are in order even if JAX lists devices in another order; no matrix is split over processes."""
    for out in both_processes():
        assert "raised: tensor=4 must divide the 2 devices of a process" in out
