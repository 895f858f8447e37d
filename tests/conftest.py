"""Sets up every test: four fake CPU devices, no silent rank promotion, annotations checked on calls."""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import mmap
import os
import re
import shutil
import tempfile
from pathlib import Path

# Read once by JAX when it is first imported, hence before anything else.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
# Tiny programs spend their time in the compiler, so its optimisations are off.
# `tests/test_repeated.py` runs some tests again with them.
_quick = "--xla_backend_optimization_level=0"


def _compiler_knows(option: bytes) -> bool:
    """Returns whether the installed XLA has `option`: an unknown option would end the process."""
    (folder,) = importlib.util.find_spec("jaxlib").submodule_search_locations
    for path in Path(folder).glob("libjax_common.*"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return text.find(b"\0" + option + b"\0") >= 0
    return False


# The first saves nearly half of the remaining compile time; the second a tenth, as the workers occupy all cores.
for _option, _value in (("xla_cpu_use_fusion_emitters", "false"), ("xla_cpu_parallel_codegen_split_count", "1")):
    if _compiler_knows(_option.encode()):
        _quick += f" --{_option}={_value}"
_level = "" if "EAGLE_JAX_TESTS_OPTIMISED" in os.environ else _quick
os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=4 {_level}".strip()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # All workers and the processes of tests share one folder: they inherit the environment of the first.
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
# From here on, calls check types and array shapes of every function of these rooms. Config and runtime raise on
# wrong types themselves, by messages that are tested.
_rooms = {path.stem for path in (REPOSITORY / "eagle_jax").iterdir() if path.suffix in ("", ".py")}
install_import_hook(
    [f"eagle_jax.{room}" for room in sorted(_rooms - {"__init__", "config", "runtime"})],
    "beartype.beartype",
)

from eagle_jax.kernels import attend_cached
from eagle_jax.models import attention
from eagle_jax.runtime.compilation import forget_programs

if "EAGLE_JAX_TESTS_KERNELS" in os.environ:  # `tests/test_repeated.py` runs some tests again with the TPU's attention
    kernel_calls = itertools.count()

    def counted_kernel(*operands, scale):
        next(kernel_calls)
        return attend_cached(*operands, scale=scale, interpret=True)

    def pytest_sessionfinish(session):
        """Fails a run in which no test came to the kernel: it would prove nothing."""
        if not session.config.pluginmanager.hasplugin("dsession") and next(kernel_calls) == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    attention.BY_DEVICE["cpu"] = counted_kernel

# Compilation makes the first example slow; the same examples every time, so that a red test stays red.
hypothesis.settings.register_profile("eagle_jax", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("eagle_jax")


_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _programs_are_forgotten():
    yield
    if not next(_tests) % 8:  # counting the maps takes about 10 ms
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
    """Data folder beside the checkout (or at EAGLE_JAX_SHARED); without it, tests that need it are skipped."""
    path = Path(os.environ.get("EAGLE_JAX_SHARED", REPOSITORY.parent / "shared"))
    if not (path / "data").is_dir():
        pytest.skip(f"needs the data folder {path}, which is not on this machine (EAGLE_JAX_SHARED names another)")
    return path
