"""What the measuring programs share: prompts of a benchmark, fair timing, a compilation cache, the machine's name."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Question(NamedTuple):
    """One entry of a `question.jsonl` (the format of MT-bench, EAGLE and Spec-Bench).

    Attributes:
      id: as in the file. category: may be empty. turns: what the user says, turn by turn.
    """

    id: str
    category: str
    turns: tuple[str, ...]


def find_task(name_or_path: str, folder: str | os.PathLike[str]) -> Path:
    """The file of a task: a path as it is, a name as `folder/name.jsonl` or `folder/name/question.jsonl`.

    Raises:
      ValueError: no such file; the message lists the names the folder has.
    """
    folder = Path(folder)
    candidates = [Path(name_or_path), folder / f"{name_or_path}.jsonl", folder / name_or_path / "question.jsonl"]
    for path in candidates:
        if path.is_file():
            return path
    known = {path.stem for path in folder.glob("*.jsonl")} | {
        path.parent.name for path in folder.glob("*/question.jsonl")
    }
    has = f"it has {', '.join(sorted(known))}" if known else "it is empty or does not exist"
    raise ValueError(
        f"task {name_or_path!r} is neither a file nor a name in the folder {folder} ({has}); give the path of a "
        "question.jsonl, or the folder with --data or EAGLE_JAX_TASKS"
    )


def read_questions(path: str | os.PathLike[str], limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a file; blank lines are skipped.

    Raises:
      ValueError: naming the file and the number of the line that is no question.
    """
    questions: list[Question] = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(questions) >= limit:
                break
            if line.strip():
                questions.append(_question(line, f"{path}, line {number}"))
    if not questions:
        raise ValueError(f"{path} holds no questions")
    return questions


def _question(line: str, where: str) -> Question:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}, column {error.colno})") from None
    if not isinstance(entry, dict):
        raise ValueError(
            f"{where}: expected an object with question_id, category and turns, found {type(entry).__name__}"
        )
    if missing := [name for name in ("question_id", "turns") if name not in entry]:
        raise ValueError(f"{where}: missing {', '.join(missing)}")
    turns = entry["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where}: turns must be a non-empty list of non-empty strings")
    return Question(str(entry["question_id"]), str(entry.get("category", "")), tuple(turns))


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation up to the assistant's next turn; plain concatenated text without a chat template."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(tokenizer.encode("\n\n".join(message["content"] for message in messages)))


def time_interleaved(calls: Mapping[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """Median seconds of every call, made in turns so that a slow minute of the machine hits all of them alike.

    A call must return only when its work is done, and must have been made once before, so that nothing compiles here.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions):
        names = list(calls)[:: 1 if repetition % 2 == 0 else -1]
        for name in names:
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def use_compilation_cache(directory: str | os.PathLike[str] = ".jax_cache") -> Path:
    """Keeps compiled programs on disk, so that the next process starts at once; JAX_COMPILATION_CACHE_DIR wins."""
    path = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", directory)).resolve()
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return path


def machine() -> str:
    """Processor or accelerator, count and versions, e.g. "Intel Xeon ..., 2 cores, linux, jax 0.10.2"."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        what = f"{_processor()}, {cores} cores"
    else:
        what = f"{len(devices)} x {devices[0].device_kind}"
    return f"{what}, {platform.system().lower()}, jax {jax.__version__}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()
