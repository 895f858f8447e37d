"""Checks that a limit of the machine gives one sentence: what was needed, and a remedy."""

from __future__ import annotations

import dataclasses
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
from tests.models import TREES, random_prompts, tiny_head, tiny_target

EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes."


@dataclasses.dataclass(frozen=True)
class Args:
    """None.

    Attributes:
      size: any.
    """

    size: int = 1


def raising(error):
    def fail(*args, **options):
        raise error

    return fail


@pytest.mark.parametrize(
    ("place", "name"),
    [(generation, "generate_program"), (generation, "step_program"), (session, "extend_program")],
)
def test_out_of_memory_says_what_was_needed_and_what_to_lower(place, name, monkeypatch):
    monkeypatch.setattr(place, name, raising(jax.errors.JaxRuntimeError(EXHAUSTED)))
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    calls = {
        "generate_program": lambda: eagle_jax.generate(target, head, [[1, 2]], max_new_tokens=9),
        "step_program": lambda: list(eagle_jax.stream(target, head, [1, 2], max_new_tokens=9)),
        "extend_program": lambda: list(session.Session(target, head).stream([1, 2], max_new_tokens=9)),
    }
    message = (
        r"out of memory on .* \(Out of memory allocating 17179869184 bytes\): weights .* GB, caches of 1 row and \d+ "
        r"slots .* GB, .* GB together without activations.* Lower the number of prompts, max_new_tokens, a session's"
    )
    with pytest.raises(MemoryError, match=message):
        calls[name]()


def test_a_batch_that_no_device_holds_is_refused_before_it_is_compiled(monkeypatch):
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    rows, compiled = 2000, generation.generate_program._cache_size()
    one = errors.size_of(errors.cache_shapes(request_of(target, head, [[1]], max_new_tokens=9)))
    monkeypatch.setattr(errors, "memory_of", lambda _: errors.size_of((target.params, head.params)) + 1500 * one)
    with pytest.raises(MemoryError, match=r"^out of memory on .*, where 1500 of 2000 rows fit: weights"):
        eagle_jax.generate(target, head, [[1]] * rows, max_new_tokens=9)
    assert generation.generate_program._cache_size() == compiled


def test_a_stream_and_a_conversation_that_no_device_holds_are_refused(monkeypatch):
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    small = request_of(target, head, [[1, 2]], max_new_tokens=9)
    room = errors.size_of(small.params) + errors.size_of(errors.cache_shapes(small))
    monkeypatch.setattr(errors, "memory_of", lambda _: room - 1)
    with pytest.raises(MemoryError, match=r"out of memory on [^,]*: weights"):
        eagle_jax.stream(target, head, [1, 2], max_new_tokens=9)
    monkeypatch.setattr(errors, "memory_of", lambda _: room)
    assert list(eagle_jax.stream(target, head, [1, 2], max_new_tokens=2))
    talk = session.Session(target, head, context=256)  # has room for a turn, and none for the whole of it
    with pytest.raises(MemoryError, match=r"caches of 1 row and \d{3} slots"):
        list(talk.stream([1, 2], max_new_tokens=9))
    monkeypatch.setattr(errors, "memory_of", lambda _: None)
    assert list(talk.stream([1, 2], max_new_tokens=2))


def test_devices_of_a_mesh_add_up_and_those_of_other_processes_are_not_asked(monkeypatch):
    """As of accelerators: each has its own memory, and one of another process does not tell."""

    class Chip(types.SimpleNamespace):
        __hash__ = object.__hash__

        def memory_stats(self):
            assert self.process_index == 0, "asked a device of another process"
            return {"bytes_limit": self.limit}

    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    request = request_of(target, head, random_prompts([5, 9], 12), max_new_tokens=9)
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


def test_a_container_has_what_it_may_take(monkeypatch, tmp_path):
    limit, machine = tmp_path / "memory.max", tmp_path / "meminfo"
    machine.write_text("MemTotal:       1000 kB\nMemFree:  7 kB\nSwapTotal:        24 kB\n")
    monkeypatch.setattr(devices, "CONTAINER_LIMITS", (limit, tmp_path / "none"))
    monkeypatch.setattr(devices, "MEMINFO", machine)
    cpu = jax.devices("cpu")[0]
    for told, expected in (("max\n", 1024 * 1024), ("4096\n", 4096), (f"{2**60}\n", 1024 * 1024)):
        limit.write_text(told)
        assert devices.memory_of(cpu) == expected
    limit.unlink()
    machine.unlink()
    assert devices.memory_of(cpu) is None


def test_weights_that_do_not_fit_say_how_large_they_are(monkeypatch):
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Attempting to reserve 4.70G at the bottom of memory.")
    monkeypatch.setattr(weights, "jnp", types.SimpleNamespace(asarray=raising(full)))
    with pytest.raises(MemoryError, match=r"reserve 4.70G .*\) while loading .*target: its weights are 0.0 GB"):
        eagle_jax.load_demo()


def test_loading_where_there_is_no_accelerator_is_a_sentence(monkeypatch):
    absent = raising(RuntimeError("Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed"))
    monkeypatch.setattr(loading, "load_target_checkpoint", absent)
    monkeypatch.setattr(compilation.jax, "devices", absent)
    with pytest.raises(DeviceError, match="JAX finds no TPU"):
        compilation.machine()
    with pytest.raises(DeviceError, match=r"JAX finds no TPU on this machine .* Change runtime type > TPU"):
        eagle_jax.load_demo()


def test_an_accelerator_that_jax_does_not_see_is_told(monkeypatch, tmp_path):
    """As in a notebook on a TPU whose JAX came without libtpu: minutes of CPU without a word."""
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


def test_sizes_are_those_of_all_devices():
    target, head = tiny_target(), tiny_head("eagle3", TREES["k3n12"])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(2, 1, 1), ("data", "fsdp", "tensor"))
    request = request_of(*eagle_jax.shard(target, head, mesh), random_prompts([5, 9], 12), max_new_tokens=9)
    assert errors.size_of(request.params) == errors.size_of((target.params, head.params))
    assert re.search(r"caches of 2 rows and .* GB on 2 devices together without", errors.memory_message(request))


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
def test_programs_end_with_one_sentence(error, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program"])
    with pytest.raises(SystemExit, match=message):
        run(raising(error), Args, "None.")
    with pytest.raises(RuntimeError, match="INTERNAL: a fault"):  # other errors keep their words
        run(raising(RuntimeError("INTERNAL: a fault")), Args, "None.")
