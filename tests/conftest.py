"""What every test runs under: four fake CPU devices, no silent rank promotion, annotations checked on every call."""

from __future__ import annotations

import atexit
import importlib.util
import mmap
import os
import re
import shutil
import tempfile
from pathlib import Path

# Read once by JAX when it is first imported, hence before anything else.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
# Tiny programs spend their time in the compiler: without its optimisations the suite takes a third of the time.
# `tests/test_full_optimisation.py` runs some of it again with them.
_quick = "--xla_backend_optimization_level=0"


def _compiler_knows(option: bytes) -> bool:
    """Whether the installed one has it: one that it has not, of another version, would end the process."""
    (folder,) = importlib.util.find_spec("jaxlib").submodule_search_locations
    for path in Path(folder).glob("libjax_common.*"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return text.find(b"\0" + option + b"\0") >= 0
    return False


if _compiler_knows(b"xla_cpu_use_fusion_emitters"):  # which are nearly half of what is left to compile
    _quick += " --xla_cpu_use_fusion_emitters=false"
_level = "" if "EAGLE_JAX_TESTS_OPTIMISED" in os.environ else _quick
os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=4 {_level}".strip()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # One for all workers and for the processes that tests start: they inherit the environment of the first.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled = tempfile.mkdtemp(prefix="eagle-jax-compiled-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network; one that tries fails at once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

REPOSITORY = Path(__file__).resolve().parent.parent

jax.config.update("jax_numpy_rank_promotion", "raise")
# From here on the types and array shapes of every function of these rooms are checked on every call. Not in config and
# runtime, which refuse wrong types themselves, by messages that are tested.
_rooms = {path.stem for path in (REPOSITORY / "eagle_jax").iterdir() if path.suffix in ("", ".py")}
install_import_hook(
    [f"eagle_jax.{room}" for room in sorted(_rooms - {"__init__", "config", "runtime"})],
    "beartype.beartype",
)

from eagle_jax.runtime.compilation import forget_programs

# Compilation makes the first example slow; the same examples every time, so that a red test stays red.
hypothesis.settings.register_profile("eagle_jax", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("eagle_jax")


@pytest.fixture(autouse=True)
def _programs_are_forgotten():
    yield
    forget_programs()


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def golden() -> Path:
    """The golden runs of the reference engine that travel with the tests."""
    return REPOSITORY / "tests" / "golden"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data beside the checkout (or at EAGLE_JAX_SHARED); tests that need it are skipped without it."""
    path = Path(os.environ.get("EAGLE_JAX_SHARED", REPOSITORY.parent / "shared"))
    if not (path / "data").is_dir():
        pytest.skip(f"needs the data folder {path}, which is not on this machine (EAGLE_JAX_SHARED names another)")
    return path
