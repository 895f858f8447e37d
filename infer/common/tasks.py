"""Reads questions of benchmarks: files in the format of EAGLE and Spec-Bench, and datasets of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle_jax.assets import bundled_questions
from eagle_jax.data.chat.tokenize import chat_ids
from eagle_jax.data.corpus.files import ENDINGS, read_rows
from eagle_jax.data.corpus.sources import hub_rows, is_dataset_name
from eagle_jax.data.rows.columns import is_absent, is_metadata, is_reference
from eagle_jax.data.rows.parse import REPLIES

ALIASES = {"nq": "qa", "cnn_dm": "sum"}
"""Tasks of the papers whose files have other names in their repository."""
COLUMNS = ("turns", "prompt", "question", "instruction", "article")
"""Columns that may hold the user's message; the first that a row has counts."""
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
"""Where the six tasks of the papers come from, and the words that the papers put before each. The papers measure 80
questions each, chosen by their authors; the first 80 of these are others."""
_HUB_NAME = re.compile(r"([\w-]+/[\w.-]+)(?::(.+))?")


BUNDLED = "chat,math,code"
"""The questions that come with the package, as programs take them; `find_task` knows them whatever the folder."""


def task_folder() -> Path:
    """Returns the folder of tasks: EAGLE_JAX_TASKS of the environment, or the bundled questions."""
    return Path(os.environ.get("EAGLE_JAX_TASKS") or bundled_questions())


class Question(NamedTuple):
    """One entry of a `question.jsonl` (the format of MT-bench, EAGLE and Spec-Bench).

    Attributes:
      id: as in the file. category: may be empty. turns: the user's messages, turn by turn.
    """

    id: str
    category: str
    turns: tuple[str, ...]


class Task(NamedTuple):
    """Some questions under a name."""

    name: str
    questions: tuple[Question, ...]

    @property
    def key(self) -> str:
        """A hash of the questions, 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.questions).encode()).hexdigest()[:16]


def load_task(name: str, folder: str | os.PathLike[str], limit: int | None = None) -> Task:
    """Loads the first `limit` questions of a task.

    Args:
      name: a name in `folder` or a path (`find_task`); `owner/dataset[:part]` on the hub, where `part` is a split,
        `config/split`, or a file of the repository; or `hub:gsm8k` for one of `HUB`.
      folder: where names are looked for.

    Raises:
      ValueError: nothing of the kind, or naming the file and the number of the line that is no question.
    """
    if name.startswith("hub:"):
        paper = {files: paper for paper, files in ALIASES.items()}.get(name[4:], name[4:])
        if paper not in HUB:
            raise ValueError(
                f"task {name!r}: the tasks known on the hub are {', '.join(HUB)}; name others owner/dataset"
            )
        source, before = HUB[paper]
        return Task(name[4:], tuple(_from_hub(source, limit, before)))
    on_hub = _HUB_NAME.fullmatch(name)
    try:
        path = find_task(name, folder)
    except ValueError:
        if on_hub is None or not is_dataset_name(on_hub[1]):
            raise
        return Task(on_hub[1].partition("/")[2], tuple(_from_hub(name, limit)))
    stem = _stem(path)
    called = name if name in ALIASES else path.parent.name if stem == "question" else stem
    return Task(called, tuple(read_questions(path, limit)))


def load_tasks(
    names: Sequence[str], folder: str | os.PathLike[str], limit: int | None = None, *, spread: bool = False
) -> list[Task]:
    """Loads several tasks, which must have different names.

    Args:
      spread: takes the `limit` questions of a task evenly from its categories, and not the first.

    Raises:
      ValueError: as `load_task`, or two that are called alike.
    """
    tasks = [load_task(name, folder, None if spread else limit) for name in dict.fromkeys(names)]
    if spread and limit is not None:
        tasks = [task._replace(questions=_spread(task.questions, limit)) for task in tasks]
    called = [task.name for task in tasks]
    if twice := [name for name in called if called.count(name) > 1]:
        raise ValueError(f"--tasks names two tasks that are called {twice[0]}: measure them apart, or rename a file")
    return tasks


def _spread(questions: Sequence[Question], limit: int) -> tuple[Question, ...]:
    """Takes the first question of every category, then the second, and so on; in the file's order."""
    seen: dict[str, int] = {}
    turns = []
    for place, question in enumerate(questions):
        seen[question.category] = seen.get(question.category, 0) + 1
        turns.append((seen[question.category], place))
    return tuple(questions[place] for place in sorted(place for _, place in sorted(turns)[:limit]))


class Conversation:
    """A question that is sent turn by turn, with the replies so far.

    Args:
      room: most tokens of a prompt.
    """

    def __init__(self, question: Question, tokenizer: Any, room: int) -> None:
        self.question, self._tokenizer, self._room = question, tokenizer, room
        self._messages: list[dict[str, str]] = []

    def ask(self, turn: int) -> list[int] | None:
        """Returns the prompt of a turn, counted from 0; None if it is too long."""
        self._messages.append({"role": "user", "content": self.question.turns[turn]})
        prompt = chat_ids(self._tokenizer, self._messages)
        return prompt if len(prompt) <= self._room else None

    def hear(self, reply: Sequence[int]) -> None:
        """Appends the assistant's reply."""
        text = self._tokenizer.decode(reply, skip_special_tokens=True)
        self._messages.append({"role": "assistant", "content": text})


def find_task(name_or_path: str, folder: str | os.PathLike[str]) -> Path:
    """Finds the file of a task: a path, `folder/name.jsonl`, `folder/name/question.jsonl`, or a bundled one.

    A file of another kind that holds rows, as JSON or compressed, has its own ending.

    Raises:
      ValueError: no such file; the message lists the names the folder has.
    """
    folder = Path(folder)
    names = [name_or_path, *([ALIASES[name_or_path]] if name_or_path in ALIASES else [])]
    forms = [form + ending for name in names for ending in ENDINGS for form in (name, f"{name}/question")]
    inside = [folder / form for form in forms]
    if name_or_path in BUNDLED.split(","):
        inside.append(bundled_questions() / f"{name_or_path}.jsonl")
    for path in [Path(name_or_path), *inside]:
        if path.is_file():
            return path
    if not folder.is_dir() and "/" not in name_or_path and not name_or_path.endswith(ENDINGS):
        raise ValueError(
            f"--data {folder}: no such directory, in which task {name_or_path!r} is looked for: give the folder of the "
            "tasks' files (also EAGLE_JAX_TASKS), or as a task the path of a question.jsonl or owner/dataset of the hub"
        )
    known = {_stem(path) for path in folder.glob("*.*") if path.name.endswith(ENDINGS)}
    known |= {path.parent.name for path in folder.glob("*/question.*") if path.name.endswith(ENDINGS)}
    has = f"it has {', '.join(sorted(known))}" if known else "it is empty or does not exist"
    if not known.issuperset(BUNDLED.split(",")):
        has += f"; bundled are {BUNDLED.replace(',', ', ')}"
    paper = {files: paper for paper, files in ALIASES.items()}.get(name_or_path, name_or_path)
    on_hub = f"; hub:{paper} fetches questions of the kind" if paper in HUB else ""
    raise ValueError(
        f"task {name_or_path!r} is neither a file nor a name in the folder {folder} ({has}); give the path of a "
        f"question.jsonl, owner/dataset of the hub, or the folder with --data or EAGLE_JAX_TASKS{on_hub}"
    )


def _stem(path: Path) -> str:
    return next((path.name.removesuffix(ending) for ending in ENDINGS if path.name.endswith(ending)), path.stem)


def read_questions(path: str | os.PathLike[str], limit: int | None = None) -> list[Question]:
    """Reads the first `limit` questions of JSONL, a JSON array (either may be compressed) or Parquet.

    Raises:
      ValueError: naming the file and the line, element or row that is no question.
    """
    rows = ((f"{path}, {place}", row) for place, row in read_rows(Path(path)))
    return _taken(rows, limit) or _none(path)


def _from_hub(source: str, limit: int | None, before: str = "") -> list[Question]:
    name, _, part = source.partition(":")
    rows = ((f"{source}, row {number}", row) for number, row in enumerate(hub_rows(name, part or None), 1))
    found = _taken(rows, limit) or _none(source)
    return [question._replace(turns=tuple(before + turn for turn in question.turns)) for question in found]


def _taken(rows: Iterable[tuple[str, Any]], limit: int | None) -> list[Question]:
    return [_question(entry, where) for where, entry in itertools.islice(rows, limit)]


def _none(where: object) -> list[Question]:
    raise ValueError(f"{where} holds no questions")


def _question(entry: Any, where: str) -> Question:
    column = next((name for name in COLUMNS if entry.get(name) is not None), None)
    if column is None:
        raise ValueError(f"{where}: it has none of {', '.join(COLUMNS)} (found {', '.join(entry) or 'nothing'})")
    said = entry[column]
    turns = [said] if column != "turns" and isinstance(said, str) else said
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        text = "" if column == "turns" else " or one string"
        raise ValueError(f"{where}: {column} must be a non-empty list of non-empty strings{text}")
    read = {column, *REPLIES, "text"}  # Alpaca's text is the rest of the row, rendered
    if column == "instruction" and entry.get("input"):
        turns, read = [f"{turns[0]}\n\n{entry['input']}", *turns[1:]], {*read, "input"}
    for key, value in entry.items():
        if not (key in read or is_metadata(key) or is_reference(key) or is_absent(value) or value in turns):
            raise ValueError(f"{where}: it has the key {key!r}, which is not read. Remove it, or name it _{key}")
    if column == "article":
        turns = [SUMMARIZE + turn for turn in turns]
    number = where.rpartition(" ")[2]
    name = next((entry[key] for key in ("question_id", "prompt_id", "task_id", "id") if key in entry), number)
    return Question(str(name), str(entry.get("category") or ""), tuple(turns))
