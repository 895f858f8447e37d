"""The compilation cache on disk, compiled programs in memory, and the names of machine and revision."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import jax

from eagle_jax.devices import in_reach

MOST_MAPS = 20_000
"""Memory maps at which `forget_programs` acts."""


def forget_programs() -> bool:
    """Drops compiled programs where there are very many, and says whether it did; the next calls load them anew.

    On CPU every program lives in a few hundred memory maps, and Linux allows a process 65,530 (`vm.max_map_count`):
    the program after that ends the process. To be called where many shapes are measured, before what is warmed up.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") <= MOST_MAPS:
        return False
    jax.clear_caches()
    return True


def use_compilation_cache(directory: str | os.PathLike[str] = ".jax_cache") -> Path:
    """Keeps what is compiled from now on on disk, so that the next process starts at once.

    Args:
      directory: relative to where the process was started; the environment's JAX_COMPILATION_CACHE_DIR wins.

    Returns:
      the directory.
    """
    path = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", directory)).resolve()
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return path


def machine() -> str:
    """Processor or accelerator, count and versions, e.g. "Intel Xeon ..., 2 cores, linux, jax 0.10.2".

    Raises:
      DeviceError: JAX is told to take a device that is not there, or that another process holds.
    """
    with in_reach():
        devices = jax.devices()
    if devices[0].platform == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        what = f"{_processor()}, {cores} cores"
    else:
        what = f"{len(devices)} x {devices[0].device_kind}"
    return f"{what}, {platform.system().lower()}, jax {jax.__version__}"


def revision(folder: str | os.PathLike[str]) -> str | None:
    """The commit that a checkout is at, with "-dirty" where files were changed since; None where it is no checkout."""
    command = ["git", "-C", os.fspath(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return None
    return found.stdout.strip() or None


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    said = {line.partition(":")[0].strip(): " ".join(line.partition(":")[2].split()) for line in lines if ":" in line}
    name = said.get("model name") or platform.processor() or platform.machine()
    # Clouds hide which one it is: generations that differ threefold in speed are all an "AMD EPYC" there.
    numbers = [f"{what} {said[key]}" for what, key in (("family", "cpu family"), ("model", "model")) if key in said]
    return name if any(map(str.isdigit, name)) or not numbers else f"{name} ({', '.join(numbers)})"
