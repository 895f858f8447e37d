"""Declares, writes and reads the result files of `infer.bench` and `infer.acceptance`, with msgspec."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from eagle_jax.checkpoints import write_whole

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Group(NamedTuple):
    """Holds a setting whose methods take turns: `temperature`, and `batch` conversations at a time."""

    task: str
    temperature: float
    batch: int

    def __str__(self) -> str:
        return f"{self.task} at temperature {self.temperature:g}, batch {self.batch}"


class Draft(msgspec.Struct, frozen=True):
    """Holds the drafts of a label: the same label may be another tree in another run."""

    tree: str  # in words
    rule: str  # the acceptance rule, and what candidates are ranked by
    rows: Count  # of a target pass
    weights: str | None = None  # a path, hub id or "bundled ..."; None without weights
    parents: tuple[int, ...] = ()  # of a static tree


class TimedQuestions(msgspec.Struct):
    """Holds an entry per question in every column; questions of one batch have the same `call`.

    `seconds` and `plain_seconds` have a list per repetition. `cycles` is None where a method does not count them.
    """

    question: list[str]
    call: list[Count]
    replies: list[Count]
    tokens: list[Count]
    cycles: list[Count] | None
    seconds: list[list[Seconds]]
    plain_tokens: list[Count]
    plain_seconds: list[list[Seconds]]


class CountedQuestions(msgspec.Struct):
    """Holds tokens and target passes of every question. The first token of a reply is not counted."""

    question: list[str]
    tokens: list[Count]
    cycles: list[Count]


class Positions(msgspec.Struct):
    """Holds [D][K] counts by depth and rank among siblings (`eagle_jax.evaluate`)."""

    drafted: list[list[Count]]
    reached: list[list[Count]]
    accepted: list[list[Count]]


class Calibration(msgspec.Struct):
    """Holds [M] by bin of confidence. The mean confidence of an empty bin is None."""

    count: list[Count]
    confidence: list[float | None]
    accepted: list[Count]


class Chain(msgspec.Struct):
    """Holds chains of one length. `tested` and `accepted` count by position, for n-alpha."""

    length: Count
    tokens: Count
    cycles: Count
    tested: list[Count]
    accepted: list[Count]


class Measured(msgspec.Struct, kw_only=True):
    """Holds one method on one task at one temperature."""

    label: str  # the method and its setting
    task: str
    temperature: float  # 0 is greedy
    questions: Count  # conversations
    replies: Count  # turns that were answered
    tau: float | None  # tokens per target pass without each reply's first token; None where passes are not counted
    draft: Draft

    @property
    def method(self) -> str:
        """Returns the name of the method, without its setting."""
        return self.label.partition("@")[0]

    @property
    def key(self) -> tuple[Any, ...]:
        """Returns the fields that identify an entry of a file."""
        return self.label, self.task, self.temperature


class Cell(Measured, kw_only=True):
    """Holds the times of one method. None is a count that a method lacks (`transformers` has no passes)."""

    batch: Count  # conversations at a time
    tokens: Count  # new tokens of all replies
    passes: Count | None  # target passes after the prefills: cycles of the longest row of each batch
    cycles: Count | None  # summed over rows
    tok_s: float  # median over repetitions of tokens / seconds, prompts included
    speedup: float  # median over repetitions of tok_s over plain decoding's in the same repetition
    speedup_range: list[float]  # least and most
    decode_speedup: float | None  # without the prefills; None where every reply is one token
    accepted: list[Count] | None  # cycles in which 0, 1, ..., D drafted tokens were accepted
    ms_per_pass: float | None  # milliseconds of decoding alone per target pass
    identical: Count  # replies that equal plain decoding's
    by_question: TimedQuestions

    @property
    def group(self) -> Group:
        """Returns the setting of the cell; cells of one setting were measured in turns."""
        return Group(self.task, self.temperature, self.batch)

    @property
    def key(self) -> tuple[Any, ...]:
        """Returns the fields that identify an entry of a file."""
        return *super().key, self.batch


class Recording(Measured, kw_only=True):
    """Holds drafts of one method, counted without a clock."""

    tokens: Count  # emitted after each reply's first token
    cycles: Count  # target passes, summed over replies
    positions: Positions
    calibration: Calibration | None  # None of sampled drafts, and where drafts have no confidence
    chains: list[Chain]  # one per length; empty for a method that drafts no chain of a given length
    by_question: CountedQuestions


class File(msgspec.Struct, tag_field="schema"):
    """Holds the fields of every result file."""

    machine: str  # processor or accelerator, and versions
    revision: str | None  # of the code, if it is a checkout
    settings: dict[str, Any]  # the arguments of the run, and hashes of its questions and of the tokenizer
    cells: list[Any]  # the measurements


class Costs(msgspec.Struct):
    """Holds the costs, in plain steps, that `--by-cost` measured (`eagle_jax.core.CycleCost`)."""

    label: str
    temperature: float
    batch: Count
    rows: tuple[int, ...]
    passes: tuple[float, ...]
    level: float
    token: float = 0.0
    draft: float = 0.0
    slots: float | None = None
    longer: dict[str, Any] | None = None


class Result(File, tag="eagle_jax.bench/4"):
    """Holds a file of `infer.bench`: every method of every finished group."""

    cells: list[Cell]
    costs: list[Costs] = msgspec.field(default_factory=list)


class Recorded(File, tag="eagle_jax.acceptance/3"):
    """Holds a file of `infer.acceptance`."""

    cells: list[Recording]


FileType = TypeVar("FileType", bound=File)


def write(result: File, path: Path) -> None:
    """Writes a result file; a reader sees the old file or the new one, never a part."""
    write_whole(path, msgspec.json.encode(result) + b"\n")


def read(path: str | os.PathLike[str], kind: Any = Result | Recorded) -> Any:
    """Reads a result file.

    Args:
      kind: `Result`, `Recorded`, or their union.

    Raises:
      ValueError: no JSON, another schema, a field that is missing or of another type, or a cell that occurs twice.
    """
    remedy = "Give a result.json that infer.bench or infer.acceptance of this version wrote."
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a result file: {error}. {remedy}") from error
    keys = [cell.key for cell in found.cells]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{path} must have a cell once, got {twice[0]} twice. {remedy}")
    return found


def continued(new: FileType, path: Path, free: Collection[str]) -> FileType:
    """Returns `new` with the cells of the file at `path`, if there is one.

    Args:
      new: an empty result with the settings of this run.
      free: settings that may differ from those of the file.

    Raises:
      ValueError: the file has other settings, or is of another machine; the message names them.
    """
    if not path.exists():
        return new
    old: FileType = read(path, type(new))
    shared = [name for name in new.settings if name in old.settings and name not in free]
    changed = [
        f"{name} was {old.settings[name]!r} and is {new.settings[name]!r}"
        for name in shared
        if old.settings[name] != new.settings[name]
    ]
    if isinstance(new, Result) and old.machine != new.machine:
        changed.append(f"machine was {old.machine} and is {new.machine}")
    if changed:
        raise ValueError(f"--resume must have the settings of {path}: {'; '.join(changed)}. "
                         "Give the same settings, or another --out.")  # fmt: skip
    revisions = dict.fromkeys([*(old.revision or "").split(", "), new.revision or ""])
    old.revision = ", ".join(filter(None, revisions)) or None
    old.settings |= new.settings
    return old
