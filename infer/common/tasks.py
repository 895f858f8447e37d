"""Reads questions of benchmarks: files of EAGLE and Spec-Bench, and datasets of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.assets import bundled_questions
from eagle_jax.core.randomness import row_keys
from eagle_jax.data.chat import chat_ids
from eagle_jax.data.corpus import ENDINGS, hub_rows, is_dataset_name, read_rows
from eagle_jax.data.rows import REPLIES, is_absent, is_metadata, is_reference

ALIASES = {"nq": "qa", "cnn_dm": "sum"}
"""Tasks of the papers whose files have other names in their repository."""
COLUMNS = ("turns", "prompt", "question", "instruction", "article")
"""Columns that may hold the user's message. The first one in a row counts."""
SUMMARIZE = "Summarize: "
"""The papers put this before an article of CNN/DM."""
HUB = {
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts:train", ""),
    "humaneval": ("openai/openai_humaneval:test", "Complete the code I provided.\n\n"),
    "gsm8k": ("openai/gsm8k:main/test", ""),
    "alpaca": ("tatsu-lab/alpaca:train", ""),
    "cnn_dm": ("abisee/cnn_dailymail:3.0.0/test", ""),
    "nq": ("google-research-datasets/nq_open:validation", ""),
}
"""Datasets of the six tasks, and the words that the papers put before each question. The papers measure 80 questions of
each task, chosen by their authors: not the first 80 of these datasets."""
BUNDLED = "chat,math,code"
"""Tasks of the package, which `find_task` finds in every folder."""


def task_folder() -> Path:
    """Returns the folder of tasks: EAGLE_JAX_TASKS of the environment, or the bundled questions."""
    return Path(os.environ.get("EAGLE_JAX_TASKS") or bundled_questions())


class Question(NamedTuple):
    """Holds an entry of a `question.jsonl` (the format of MT-bench, EAGLE and Spec-Bench).

    Attributes:
      id: as in the file.
      turns: the user's messages, turn by turn.
    """

    id: str
    turns: tuple[str, ...]


class Task(NamedTuple):
    """Holds some questions under a name."""

    name: str
    questions: tuple[Question, ...]

    @property
    def key(self) -> str:
        """Returns a hash of the questions, 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.questions).encode()).hexdigest()[:16]


def load_task(name: str, folder: str | os.PathLike[str], limit: int | None = None) -> Task:
    """Loads the first `limit` questions of a task.

    Args:
      name: a name in `folder` or a path (`find_task`); `owner/dataset[:part]` on the hub, where `part` is a split,
        `config/split`, or a file of the repository; or `hub:gsm8k` for one of `HUB`.
      folder: directory of the named tasks.

    Raises:
      ValueError: no task has that name, or a line has no question; the message names the file and the line.
    """
    paper = name.removeprefix("hub:")
    if paper != name and paper in HUB:
        source, before = HUB[paper]
        return Task(paper, _from_hub(source, limit, before))
    try:
        path = find_task(name, folder)
    except ValueError:
        dataset = name.partition(":")[0]
        if "/" not in dataset or not is_dataset_name(dataset):
            raise
        return Task(dataset.partition("/")[2], _from_hub(name, limit))
    return Task(name if name in ALIASES else _name(path), tuple(read_questions(path, limit)))


def load_tasks(names: Sequence[str], folder: str | os.PathLike[str], limit: int | None = None) -> list[Task]:
    """Loads several tasks as `load_task`; raises a ValueError on two tasks of one name."""
    tasks = [load_task(name, folder, limit) for name in dict.fromkeys(names)]
    called = [task.name for task in tasks]
    if twice := [name for name in called if called.count(name) > 1]:
        raise ValueError(f"--tasks must have different names, got {twice[0]} twice. Rename a file.")
    return tasks


def names_of(questions: Sequence[Question]) -> list[str]:
    """Returns a name for every question, the same in every file: its id and a hash of its text."""
    found: list[str] = []
    for question in questions:
        name = f"{question.id}:{hashlib.sha256(json.dumps(question.turns).encode()).hexdigest()[:8]}"
        found.append(f"{name}:{found.count(name)}" if name in found else name)
    return found


def keys_of(seed: int, names: Sequence[str], turn: int) -> jax.Array:
    """Returns [rows] keys by `seed`, the question's name (`names_of`) and the turn, whatever the batch.

    Questions with the same noise would not be independent, and intervals over them would be too narrow.
    """
    numbers = [zlib.crc32(f"{name}, turn {turn}".encode()) for name in names]
    return _row_keys(jax.random.key(seed, impl="threefry2x32"), jnp.asarray(np.array(numbers, np.uint32)))


_row_keys = jax.jit(row_keys)


class Conversation:
    """Holds a question that is sent turn by turn, with the replies so far.

    Args:
      room: most tokens of a prompt.
    """

    def __init__(self, question: Question, tokenizer: Any, room: int) -> None:
        self.question, self._tokenizer, self._room = question, tokenizer, room
        self._messages: list[dict[str, str]] = []

    def prompt(self, turn: int) -> list[int] | None:
        """Returns the prompt of a turn, counted from 0; None if it is too long."""
        self._messages.append({"role": "user", "content": self.question.turns[turn]})
        prompt = chat_ids(self._tokenizer, self._messages)
        return prompt if len(prompt) <= self._room else None

    def add_reply(self, reply: Sequence[int]) -> None:
        """Appends the assistant's reply."""
        text = self._tokenizer.decode(reply, skip_special_tokens=True)
        self._messages.append({"role": "assistant", "content": text})


def find_task(name_or_path: str, folder: str | os.PathLike[str]) -> Path:
    """Finds the file of a task: a path, `folder/name.jsonl`, `folder/name/question.jsonl`, or bundled.

    A file of another format, JSON or compressed, has its own ending.

    Raises:
      ValueError: no such file; the message lists the names the folder has.
    """
    folder = Path(folder)
    names = [name_or_path, ALIASES.get(name_or_path, name_or_path)]
    inside = [folder / (form + ending) for name in names for ending in ENDINGS for form in (name, f"{name}/question")]
    if name_or_path in BUNDLED.split(","):
        inside.append(bundled_questions() / f"{name_or_path}.jsonl")
    for path in [Path(name_or_path), *inside]:
        if path.is_file():
            return path
    files = [path for path in [*folder.glob("*.*"), *folder.glob("*/question.*")] if path.name.endswith(ENDINGS)]
    known = ", ".join(sorted(map(_name, files))) or "none there"
    raise ValueError(
        f"task must be bundled ({BUNDLED}), in --data {folder} ({known}), a path, owner/dataset, or hub: and one of "
        f"{', '.join(HUB)}, got {name_or_path!r}. Give the folder by --data or EAGLE_JAX_TASKS."
    )


def _name(path: Path) -> str:
    stem = next((path.name.removesuffix(ending) for ending in ENDINGS if path.name.endswith(ending)), path.stem)
    return path.parent.name if stem == "question" else stem


def read_questions(path: str | os.PathLike[str], limit: int | None = None) -> list[Question]:
    """Reads the first `limit` questions of JSONL, a JSON array (either may be compressed) or Parquet.

    Raises:
      ValueError: the file has no questions, or a line, element or row has none; the message names it.
    """
    return _questions(((f"{path}, {place}", row) for place, row in read_rows(Path(path))), limit, path)


def _from_hub(source: str, limit: int | None, before: str = "") -> tuple[Question, ...]:
    name, _, part = source.partition(":")
    rows = ((f"{source}, row {number}", row) for number, row in enumerate(hub_rows(name, part or None), 1))
    found = _questions(rows, limit, source)
    return tuple(question._replace(turns=tuple(before + turn for turn in question.turns)) for question in found)


def _questions(rows: Iterable[tuple[str, Any]], limit: int | None, source: object) -> list[Question]:
    found = [_question(entry, where) for where, entry in itertools.islice(rows, limit)]
    if not found:
        raise ValueError(f"{source} must hold questions, got an empty file. Leave it out.")
    return found


def _question(entry: Any, where: str) -> Question:
    column = next((name for name in COLUMNS if entry.get(name) is not None), None)
    if column is None:
        raise ValueError(
            f"{where} must have one of {', '.join(COLUMNS)}, got {', '.join(entry) or 'nothing'}. Rename one."
        )
    value = entry[column]
    turns = [value] if column != "turns" and isinstance(value, str) else value
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        kind = "a non-empty list of non-empty strings" + ("" if column == "turns" else ", or one string")
        raise ValueError(f"{where}: {column} must be {kind}, got {str(value)[:60]!r}. Correct the row.")
    read = {column, *REPLIES, "text"}  # Alpaca's text is the rest of the row, rendered
    if column == "instruction" and entry.get("input"):
        turns, read = [f"{turns[0]}\n\n{entry['input']}", *turns[1:]], {*read, "input"}
    for key, other in entry.items():
        if not (key in read or is_metadata(key) or is_reference(key) or is_absent(other) or other in turns):
            raise ValueError(f"{where} must have keys that are read, got {key!r}. Remove it, or name it _{key}.")
    if column == "article":
        turns = [SUMMARIZE + turn for turn in turns]
    number = where.rpartition(" ")[2]
    name = next((entry[key] for key in ("question_id", "prompt_id", "task_id", "id") if key in entry), number)
    return Question(str(name), tuple(turns))
