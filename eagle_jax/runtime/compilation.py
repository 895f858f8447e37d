"""Manages compiled programs on disk and in memory, and names the machine and the revision."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import jax

from eagle_jax.devices import device_errors

MOST_MAPS = 20_000
"""Memory maps above which `forget_programs` drops programs."""


def forget_programs() -> bool:
    """Drops all compiled programs if there are very many; returns whether it did. Calls compile again.

    On CPU a program takes a few hundred memory maps, and Linux kills a process beyond 65,530 (`vm.max_map_count`).
    Call it between shapes when many are measured, before the warm-up.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") <= MOST_MAPS:
        return False
    jax.clear_caches()
    return True


def use_compilation_cache(directory: str | os.PathLike[str] = ".jax_cache") -> Path:
    """Turns on JAX's compilation cache on disk, so that the next process starts without compiling.

    Args:
      directory: relative to the working directory; the environment variable JAX_COMPILATION_CACHE_DIR overrides it.

    Returns:
      the directory.
    """
    path = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", directory)).resolve()
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return path


def machine() -> str:
    """Returns hardware and versions, such as "Intel Xeon ..., 2 cores, linux, jax 0.10.2".

    Raises:
      DeviceError: the device that JAX_PLATFORMS names is missing or busy.
    """
    with device_errors():
        devices = jax.devices()
    if devices[0].platform == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        hardware = f"{_processor()}, {cores} cores"
    else:
        hardware = f"{len(devices)} x {devices[0].device_kind}"
    return f"{hardware}, {platform.system().lower()}, jax {jax.__version__}"


def revision(folder: str | os.PathLike[str]) -> str | None:
    """Returns the commit of a git checkout, with "-dirty" if files have changed; None outside a checkout."""
    command = ["git", "-C", os.fspath(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    return found.stdout.strip() or None


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    info = {line.partition(":")[0].strip(): " ".join(line.partition(":")[2].split()) for line in lines if ":" in line}
    name = info.get("model name") or platform.processor() or platform.machine()
    # Clouds hide the model: generations that differ threefold in speed are all named "AMD EPYC".
    numbers = [f"{what} {info[key]}" for what, key in (("family", "cpu family"), ("model", "model")) if key in info]
    return name if any(map(str.isdigit, name)) or not numbers else f"{name} ({', '.join(numbers)})"
