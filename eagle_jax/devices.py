"""Turns errors of JAX's runtime about missing, busy and full devices into messages with a remedy."""

from __future__ import annotations

import contextlib
import math
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax


class DeviceError(RuntimeError):
    """The device that JAX_PLATFORMS or JAX names is missing, or another process holds it or keeps it busy."""


MEMINFO = Path("/proc/meminfo")
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files in which Linux keeps the machine's memory and a container's limit (cgroups 2 and 1)."""


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Converts errors of the first use of a device.

    Raises:
      DeviceError: the device is missing, or another process holds it. Other errors pass.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        if (message := device_message(error)) is None:
            raise
        raise DeviceError(message) from None


ACCELERATORS = {"TPU": ("/dev/accel0", "/dev/vfio/0"), "GPU": ("/dev/nvidia0",)}
"""Device files by kind of accelerator."""
EXTRAS = {"TPU": "'jax[tpu]'", "GPU": "'jax[cuda13]' ('jax[cuda12]' for a driver below 580)"}
"""The extra of JAX that supports each kind."""


def unused_accelerator() -> str | None:
    """Returns a warning if JAX runs on the CPU of a machine with an accelerator, else None."""
    if os.environ.get("JAX_PLATFORMS") or jax.default_backend() != "cpu":
        return None
    for kind, files in ACCELERATORS.items():
        if any(os.path.exists(file) for file in files):
            return (
                f"this machine seems to have a {kind} that JAX does not see; JAX runs on the CPU. Run pip install "
                f"{EXTRAS[kind]} and start again, or set JAX_PLATFORMS=cpu to silence this warning."
            )
    return None


@contextlib.contextmanager
def loading_errors(what: str, size: int) -> Iterator[None]:
    """Converts errors of placing weights on devices.

    Args:
      what: name of the model. size: of its weights in bytes, on all devices together.

    Raises:
      MemoryError: the weights do not fit in device memory. Other errors pass.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(
            f"out of memory on {device_name()}{shortage(str(error))} while loading {what}: its weights are "
            f"{size / 1e9:.1f} GB. Load it in bfloat16, spread it over a mesh (mesh=), or free device memory."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error of the runtime reports that device memory ran out."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def shortage(text: str) -> str:
    """Returns the runtime's own words about memory that ran out, in parentheses."""
    report = " ".join(text.removeprefix("RESOURCE_EXHAUSTED:").split()).rstrip(".")
    return f" ({textwrap.shorten(report, 160, placeholder=' ...')})" if report else ""


def device_name() -> str:
    """Returns the kind of the first device, with its memory if it reports one."""
    first = jax.local_devices()[0]
    limit = memory_of(first)
    return first.device_kind + (f" with {limit / 1e9:.0f} GB" if limit else "")


def memory_of(one: Any) -> int | None:
    """Returns the memory of a device in bytes, None if unknown. The devices of a CPU share one memory."""
    if one.platform != "cpu":
        return (one.memory_stats() or {}).get("bytes_limit")
    texts = [file.read_text(encoding="utf-8").strip() for file in CONTAINER_LIMITS if file.is_file()]
    limits = [int(text) for text in texts if text.isdigit()]  # "max" is no limit
    if MEMINFO.is_file():
        text = MEMINFO.read_text(encoding="utf-8")
        if sizes := re.findall(r"^(?:MemTotal|SwapTotal):\s+(\d+) kB", text, flags=re.MULTILINE):
            limits.append(1024 * sum(map(int, sizes)))
    return min(limits, default=None)


def bits_of(dtype: Any) -> int:
    """Returns the bits of a value of a dtype; NumPy's `itemsize` counts a byte for an int4."""
    return 4 if dtype.name in ("int4", "uint4") else 8 * dtype.itemsize


def size_of(tree: Any) -> int:
    """Returns the bytes of all arrays of a tree, or of their shapes. A CPU holds an int4 in a byte."""

    def bits(leaf: Any) -> int:
        devices = getattr(leaf.sharding, "device_set", ()) if isinstance(leaf, jax.Array) else ()
        return 8 * leaf.dtype.itemsize if any(one.platform == "cpu" for one in devices) else bits_of(leaf.dtype)

    return sum(math.prod(leaf.shape) * bits(leaf) // 8 for leaf in jax.tree.leaves(tree))


def device_message(error: BaseException) -> str | None:
    """Returns a message for the error of a backend that is missing or busy; None for any other error.

    Examples: a notebook runtime without a TPU, or a TPU that an earlier kernel holds.
    """
    text = " ".join(str(error).split())
    match = re.search(r"[Uu]nable to initialize backend '(\w+)'", text)
    if not match and not (isinstance(error, AssertionError) and not text and not _started()):
        return None
    backend = (match[1] if match else os.environ.get("JAX_PLATFORMS", "").partition(",")[0]).upper()
    report = re.sub(r"\.? \(set JAX_PLATFORMS.*", "", text)  # JAX's own remedy
    # For a platform without its plugin, JAX raises an AssertionError without a message.
    reason = f" ({textwrap.shorten(report, 160, placeholder=' ...')})" if report else ""
    if "already in use" in text or "already been held" in text:
        return (
            f"another process holds this machine's {backend}{reason}. End that process (in a notebook: "
            "Runtime > Restart session), or set JAX_PLATFORMS=cpu."
        )
    remedy = "In Colab choose Runtime > Change runtime type > TPU; elsewhere set" if backend == "TPU" else "Set"
    return (
        f"JAX finds no {backend} on this machine{reason}. {remedy} JAX_PLATFORMS=cpu, or unset "
        "JAX_PLATFORMS to use any available device."
    )


def _started() -> bool:
    """Returns whether JAX has initialised a backend."""
    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):
        return False
