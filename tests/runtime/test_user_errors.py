"""Checks that a limit of the machine raises an error with the sizes and a remedy."""

from __future__ import annotations

import re
import sys
import types

import jax
import numpy as np
import pytest

import eagle_jax
from eagle_jax import devices
from eagle_jax.checkpoints.files import weights
from eagle_jax.devices import DeviceError
from eagle_jax.runtime import compilation, errors, generation, loading, session
from eagle_jax.runtime.generation import request_of
from infer.common.programs import run
from infer.demo import Args
from tests.models import TREES, random_prompts, tiny_head, tiny_target

EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes."


def raising(error):
    def fail(*args, **options):
        raise error

    return fail


@pytest.mark.parametrize(
    ("place", "name", "call"),
    [
        (generation, "generate_program", lambda *pair: eagle_jax.generate(*pair, [[1, 2]], max_new_tokens=9)),
        (generation, "step_program", lambda *pair: list(eagle_jax.stream(*pair, [1, 2], max_new_tokens=9))),
        (session, "extend_program", lambda *pair: list(session.Session(*pair).stream([1, 2], max_new_tokens=9))),
    ],
)
def test_out_of_memory_errors_have_the_sizes_and_a_remedy(place, name, call, monkeypatch):
    monkeypatch.setattr(place, name, raising(jax.errors.JaxRuntimeError(EXHAUSTED)))
    message = (
        r"out of memory on .* \(Out of memory allocating 17179869184 bytes\): weights .* GB, caches of 1 row and \d+ "
        r"slots .* GB, .* GB together without activations.* Lower the number of prompts, max_new_tokens, a session's"
    )
    with pytest.raises(MemoryError, match=message):
        call(tiny_target(), tiny_head("eagle3", TREES["k3n12"]))


def test_a_batch_larger_than_the_memory_raises_an_error_before_compilation(monkeypatch):
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    rows, compiled = 2000, generation.generate_program._cache_size()
    one = errors.size_of(errors.cache_shapes(request_of(target, head, [[1]], max_new_tokens=9)))
    monkeypatch.setattr(errors, "memory_of", lambda _: errors.size_of((target.params, head.params)) + 1500 * one)
    with pytest.raises(MemoryError, match=r"^out of memory on .*, where 1500 of 2000 rows fit: weights"):
        eagle_jax.generate(target, head, [[1]] * rows, max_new_tokens=9)
    assert generation.generate_program._cache_size() == compiled


def test_a_stream_or_conversation_larger_than_the_memory_raises_an_error(monkeypatch):
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    small = request_of(target, head, [[1, 2]], max_new_tokens=9)
    room = errors.size_of(small.params) + errors.size_of(errors.cache_shapes(small))
    monkeypatch.setattr(errors, "memory_of", lambda _: room - 1)
    with pytest.raises(MemoryError, match=r"out of memory on [^,]*: weights"):
        eagle_jax.stream(target, head, [1, 2], max_new_tokens=9)
    monkeypatch.setattr(errors, "memory_of", lambda _: room)
    assert list(eagle_jax.stream(target, head, [1, 2], max_new_tokens=2))
    talk = session.Session(target, head, context=256)  # a turn fits, the context does not
    with pytest.raises(MemoryError, match=r"caches of 1 row and \d{3} slots"):
        list(talk.stream([1, 2], max_new_tokens=9))
    monkeypatch.setattr(errors, "memory_of", lambda _: None)
    assert list(talk.stream([1, 2], max_new_tokens=2))


def test_the_memory_of_a_meshs_devices_adds_up(monkeypatch):
    """Every accelerator has its own memory; only those of this process report it."""

    class Chip(types.SimpleNamespace):
        __hash__ = object.__hash__

        def memory_stats(self):
            assert self.process_index == 0, "a device of another process was read"
            return {"bytes_limit": self.limit}

    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(2, 1, 1), ("data", "fsdp", "tensor"))
    request = request_of(*eagle_jax.shard(target, head, mesh), random_prompts([5, 9], 12), max_new_tokens=9)
    assert errors.size_of(request.params) == errors.size_of((target.params, head.params))
    assert re.search(r"caches of 2 rows and .* GB on 2 devices together without", errors.memory_message(request))
    total = errors.size_of(request.params) + errors.size_of(errors.cache_shapes(request))
    kind = type(jax.tree.leaves(request.params)[0].sharding)
    for share, fits in ((total // 4 + 1, True), (total // 4 - 1, False)):
        chips = {Chip(platform="tpu", process_index=process, limit=share) for process in (0, 0, 1, 1)}
        monkeypatch.setattr(kind, "device_set", property(lambda _, chips=chips: chips))
        if fits:
            errors.check_fits(request)
        else:
            with pytest.raises(MemoryError, match=r"where [01] of 2 rows fit"):
                errors.check_fits(request)


def test_the_memory_of_a_container_is_its_limit(monkeypatch, tmp_path):
    limit, machine = tmp_path / "memory.max", tmp_path / "meminfo"
    machine.write_text("MemTotal:       1000 kB\nMemFree:  7 kB\nSwapTotal:        24 kB\n")
    monkeypatch.setattr(devices, "CONTAINER_LIMITS", (limit, tmp_path / "none"))
    monkeypatch.setattr(devices, "MEMINFO", machine)
    cpu = jax.devices("cpu")[0]
    for text, expected in (("max\n", 1024 * 1024), ("4096\n", 4096), (f"{2**60}\n", 1024 * 1024)):
        limit.write_text(text)
        assert devices.memory_of(cpu) == expected
    limit.unlink()
    machine.unlink()
    assert devices.memory_of(cpu) is None


def test_weights_larger_than_the_memory_raise_an_error_with_their_size(monkeypatch):
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Attempting to reserve 4.70G at the bottom of memory.")
    monkeypatch.setattr(weights, "jnp", types.SimpleNamespace(asarray=raising(full)))
    with pytest.raises(MemoryError, match=r"reserve 4.70G .*\) while loading .*target: its weights are 0.0 GB"):
        eagle_jax.load_demo()


def test_loading_without_the_accelerator_raises_a_device_error(monkeypatch):
    absent = raising(RuntimeError("Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed"))
    monkeypatch.setattr(loading, "load_target_checkpoint", absent)
    monkeypatch.setattr(compilation.jax, "devices", absent)
    with pytest.raises(DeviceError, match="JAX finds no TPU"):
        compilation.machine()
    with pytest.raises(DeviceError, match=r"JAX finds no TPU on this machine .* Change runtime type > TPU"):
        eagle_jax.load_demo()


def test_an_accelerator_that_jax_does_not_see_gives_a_warning(monkeypatch, tmp_path):
    """An example is a notebook on a TPU whose JAX lacks libtpu."""
    (tmp_path / "accel0").touch()
    monkeypatch.setattr(devices, "ACCELERATORS", {"TPU": (str(tmp_path / "accel0"),)})
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.warns(UserWarning, match=r"seems to have a TPU that JAX does not see.* 'jax\[tpu\]'"):
        eagle_jax.load_demo()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert devices.unused_accelerator() is None
    monkeypatch.delenv("JAX_PLATFORMS")
    (tmp_path / "accel0").unlink()
    assert devices.unused_accelerator() is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError("out of memory on TPU v5e"), "error: out of memory on TPU v5e"),
        (DeviceError("JAX finds no TPU"), "error: JAX finds no TPU"),
        (RuntimeError("Unable to initialize backend 'tpu': NOT_FOUND: No jellyfish device found. "
                      "(set JAX_PLATFORMS='' to automatically choose an available backend)"),
         r"error: JAX finds no TPU on this machine \(Unable to .*: NOT_FOUND: No jellyfish device found\)\. In Colab "
         "choose Runtime > Change runtime type > TPU"),
        (RuntimeError("Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 71."),
         "error: another process holds this machine's TPU .*pid 71.*Runtime > Restart session"),
        (RuntimeError("Unable to initialize backend 'cuda': no device"), "finds no CUDA on this machine .* Set JAX"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 20.1G of 15.75G hbm. Exceeded hbm capacity by 4.3G."),
         r"error: the device's memory is used up \(Used 20.1G of .* capacity by 4.3G\): lower the batch"),
    ],
)  # fmt: skip
def test_programs_end_with_one_line(error, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program"])
    with pytest.raises(SystemExit, match=message):
        run(raising(error), Args, None)
    with pytest.raises(RuntimeError, match="INTERNAL: a fault"):  # other errors pass
        run(raising(RuntimeError("INTERNAL: a fault")), Args, None)
