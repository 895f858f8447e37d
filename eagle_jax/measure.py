"""What the measuring programs share: prompts, fair timing, a compilation cache, the machine and the code by name."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from eagle_jax.data.stops import stop_ids, with_stop_ids  # noqa: F401 (what goes with chat_ids)
from eagle_jax.data.templates import SkippedRow, chat_template, check_template_arguments, render
from eagle_jax.devices import in_reach

K = TypeVar("K", bound=Hashable)
SAID = ("content", "tool_calls")
"""Keys of a message, of which it has one."""


def chat_ids(tokenizer: Any, messages: Sequence[Any], **template_args: Any) -> list[int]:
    """Token ids of a conversation up to the assistant's next turn; plain concatenated text without a chat template.

    Args:
      tokenizer: of `transformers`. messages: with "role" and "content" each.
      template_args: of the chat template, such as `enable_thinking=False`; `tools` is a list of JSON schemas.

    Raises:
      ValueError: it is no conversation, the template refuses it, or does not read an argument.
    """
    return encode_chat(tokenizer, chat_text(tokenizer, messages, **template_args))


def chat_text(tokenizer: Any, messages: Sequence[Any], **template_args: Any) -> str:
    """The text of `chat_ids`.

    Raises:
      ValueError: it is no conversation, the template refuses it, as some do a system message, or does not read an
        argument.
    """
    for message in messages:  # of a string its letters, of a dict its keys
        if not (isinstance(message, Mapping) and "role" in message and not message.keys().isdisjoint(SAID)):
            raise ValueError(
                f"messages={messages!r:.80} must be a list of dicts, each with a role (user, assistant, system) and "
                'content: [{"role": "user", "content": "Hello"}]'
            )
    given = {name: template_args.pop(name) for name in ("tools", "documents") if name in template_args}
    check_template_arguments(tokenizer, template_args)
    if chat_template(tokenizer, tools=given.get("tools") is not None) is None:
        if given:
            raise ValueError(f"{next(iter(given))} must be left out: the tokenizer has no chat template to read it")
        return "\n\n".join(message["content"] for message in messages)
    try:
        return str(
            render(tokenizer, list(messages), tokenize=False, add_generation_prompt=True, **given, **template_args)
        )
    except SkippedRow as error:
        raise ValueError(
            f"{error}: leave out a system message if there is one, or give the tokenizer another template"
        ) from error


def encode_chat(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `chat_text`; a template has written the special tokens itself.

    What is too long for the model is the caller's to say, who knows the reply's length; `verbose` would warn here.
    """
    special = {} if chat_template(tokenizer) is None else {"add_special_tokens": False}
    return list(tokenizer.encode(text, verbose=False, **special))


def time_repetitions(calls: Mapping[K, Callable[[], Any]], repetitions: int) -> dict[K, list[float]]:
    """Seconds of every call in every repetition, made in turns so that a slow minute of the machine hits all alike.

    A call must return only when its work is done, and must have been made once before, so that nothing compiles here.
    Every other repetition goes backwards.
    """
    seconds: dict[K, list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions):
        for name in list(calls)[:: 1 if repetition % 2 == 0 else -1]:
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def time_interleaved(calls: Mapping[K, Callable[[], Any]], repetitions: int) -> dict[K, float]:
    """Median seconds of every call; see `time_repetitions`."""
    return {name: statistics.median(values) for name, values in time_repetitions(calls, repetitions).items()}


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
