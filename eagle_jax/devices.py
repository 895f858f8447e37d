"""Devices that are not there, held by another process, or full: a sentence with a remedy for the runtime's words."""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax


class DeviceError(RuntimeError):
    """A device that JAX was told to take and cannot have."""


MEMINFO = Path("/proc/meminfo")
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""What Linux says of memory: the machine's, and what a container may take of it (cgroups 2 and 1)."""


@contextlib.contextmanager
def in_reach() -> Iterator[None]:
    """Around what first asks JAX for a device.

    Raises:
      DeviceError: there is no such device, or another process holds it. Every other error passes.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        if (told := out_of_reach(error)) is None:
            raise
        raise DeviceError(told) from None


ACCELERATORS = {"TPU": ("/dev/accel0", "/dev/vfio/0"), "GPU": ("/dev/nvidia0",)}
"""Files of machines that have one, and the extras of JAX that see it."""
EXTRAS = {"TPU": "'jax[tpu]'", "GPU": "'jax[cuda13]' ('jax[cuda12]' for a driver below 580)"}


def overlooked() -> str | None:
    """A sentence where JAX chose the CPU of a machine that seems to have an accelerator; None anywhere else."""
    if os.environ.get("JAX_PLATFORMS") or jax.default_backend() != "cpu":
        return None
    for kind, files in ACCELERATORS.items():
        if any(os.path.exists(file) for file in files):
            return (
                f"this machine seems to have a {kind} that JAX does not see, and everything runs on its CPU: "
                f"pip install {EXTRAS[kind]} and start again, or set JAX_PLATFORMS=cpu if that is meant"
            )
    return None


@contextlib.contextmanager
def loading(what: str, size: int) -> Iterator[None]:
    """Around arrays that are put on a device.

    Args:
      what: is loaded. size: of its weights in bytes, on all devices together.

    Raises:
      MemoryError: the device is too small. Every other error passes.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not exhausted(error):
            raise
        raise MemoryError(
            f"out of memory on {device()}{more_of(str(error))} while {what} is loaded: its weights are "
            f"{size / 1e9:.1f} GB. Load it in bfloat16, spread it over a mesh (mesh=), or free what else is there"
        ) from error


def exhausted(error: BaseException) -> bool:
    """Whether an error of the runtime says that memory ran out."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def more_of(text: str) -> str:
    """What the runtime says was lacking, in brackets, bytes as GB (1e9); nothing if it does not say."""
    number = r"([\d.]+ ?(?:bytes|[KMGT]i?B?)\b)"
    for said, pattern in (
        ("{} too much", rf"[Ee]xceeded \w+ capacity by {number}"),
        ("{} more were wanted", rf"(?:[Aa]llocat\w*|reserve) (?:\w+ )*?{number}"),
    ):
        if found := re.search(pattern, text):
            count = found[1].removesuffix("bytes").strip()
            return f" ({said.format(f'{int(count) / 1e9:.2f} GB' if count.isdigit() else found[1])})"
    return ""


def device() -> str:
    """The first device, with its memory where it tells."""
    first = jax.local_devices()[0]
    limit = memory_of(first)
    return first.device_kind + (f" with {limit / 1e9:.0f} GB" if limit else "")


def memory_of(one: Any) -> int | None:
    """Bytes that it can hold, None where it does not tell. Devices of a CPU share what they have."""
    if one.platform != "cpu":
        return (one.memory_stats() or {}).get("bytes_limit")
    told = [file.read_text(encoding="utf-8").strip() for file in CONTAINER_LIMITS if file.is_file()]
    limits = [int(text) for text in told if text.isdigit()]  # else "max"
    if MEMINFO.is_file():
        text = MEMINFO.read_text(encoding="utf-8")
        if sizes := re.findall(r"^(?:MemTotal|SwapTotal):\s+(\d+) kB", text, flags=re.MULTILINE):
            limits.append(1024 * sum(map(int, sizes)))
    return min(limits, default=None)


def out_of_reach(error: BaseException) -> str | None:
    """A sentence for a backend that is asked for and cannot be had; None for any other error.

    As in a notebook whose runtime has no TPU, or whose TPU an earlier kernel holds.
    """
    text = " ".join(str(error).split())
    found = re.search(r"[Uu]nable to initialize backend '(\w+)'", text)
    if not found and not (isinstance(error, AssertionError) and not text and not _started()):
        return None
    backend = (found[1] if found else os.environ.get("JAX_PLATFORMS", "").partition(",")[0]).upper()
    said = re.sub(r"\.? \(set JAX_PLATFORMS.*", "", text)  # JAX's own remedy; ours is below
    # Of a platform without its plugin JAX only says that it asserts.
    reason = f" ({textwrap.shorten(said, 160, placeholder=' ...')})" if said else ""
    if "already in use" in text or "already been held" in text:
        return (
            f"another process holds this machine's {backend}{reason}: end it (in a notebook Runtime > Restart session: "
            "a program cannot have the device that a kernel holds), or set JAX_PLATFORMS=cpu"
        )
    remedy = "in Colab choose Runtime > Change runtime type > TPU, elsewhere " if backend == "TPU" else ""
    return (
        f"JAX finds no {backend} on this machine{reason}: {remedy}set JAX_PLATFORMS=cpu, or leave "
        "JAX_PLATFORMS unset to take what there is"
    )


def _started() -> bool:
    """Whether JAX has a backend."""
    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):
        return False
