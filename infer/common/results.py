"""Declares, writes and reads the result files of `infer.bench` and `infer.acceptance`.

msgspec checks a file against the dataclasses below. A file that does not fit is refused with one sentence that names
the file and the field.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypedDict, TypeVar

import msgspec

from eagle_jax.checkpoints.files.staging import write_whole
from infer.common.drafts import Draft, check_draft

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Group(NamedTuple):
    """What is measured in turns. `temperature` 0 is greedy; `batch` is the number of conversations at a time."""

    task: str
    temperature: float
    batch: int


class TimedQuestions(TypedDict):
    """One entry per question in every column; questions with the same `call` were answered in one batch.

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


class CountedQuestions(TypedDict):
    """Tokens and target passes of every question."""

    question: list[str]
    tokens: list[Count]
    cycles: list[Count]


class PositionCounts(TypedDict):
    """[D][K] counts by depth and rank among siblings (`eagle_jax.evaluate.positions`)."""

    drafted: list[list[Count]]
    reached: list[list[Count]]
    accepted: list[list[Count]]


class CalibrationCounts(TypedDict):
    """[M] by bin of confidence; the confidence of an empty bin is None. `error` is the expected calibration error."""

    count: list[Count]
    confidence: list[float | None]
    accepted: list[Count]
    error: float | None


class ChainCounts(TypedDict):
    """Chains of one length: `tested` and `accepted` count by position, for n-alpha."""

    length: Count
    tokens: Count
    cycles: Count
    tested: list[Count]
    accepted: list[Count]


@dataclasses.dataclass(frozen=True)
class SpecBench:
    """The definitions of Spec-Bench (arXiv:2401.07851, evaluation/speed.py).

    Attributes:
      mean_accepted_tokens: mean over all cycles of accepted drafts + 1; None for a method that does not count cycles.
      tok_s: mean over questions of (new tokens of all turns / seconds of all turns).
      speedup: that mean over plain decoding's.
    """

    mean_accepted_tokens: float | None
    tok_s: float
    speedup: float


@dataclasses.dataclass(frozen=True)
class Category:
    """One category of the task's questions; fields as in `Cell`."""

    tau: float | None
    speedup: float
    spec_bench: SpecBench


@dataclasses.dataclass(frozen=True)
class Cell:
    """One method on one group, timed. None stands for what a method does not count (`transformers` has no passes).

    Attributes:
      method: name of the papers. label: the method and its setting; unique within a group.
      task, temperature, batch: the group.
      questions: conversations. replies: turns that were answered. tokens: new tokens of all replies.
      passes: target passes after the prefills: cycles of the longest row of each batch. cycles: summed over rows.
      seconds: of all calls, prompts included, one sum per repetition. prefill_seconds: of the prefills alone.
      tok_s: median over repetitions of tokens / seconds. tok_s_range: least and most.
      decode_tok_s: median of (tokens - replies) / (seconds - prefill_seconds); None where every reply is one token.
      speedup: median over repetitions of tok_s over plain decoding's in the same repetition. speedup_range: least and
        most. decode_speedup: the same of decoding alone.
      tau: tokens per cycle, pooled: (tokens - replies) / cycles; None without a cycle.
      accepted: histogram: cycles in which 0, 1, ..., D drafted tokens were accepted.
      ms_per_pass: milliseconds of decoding alone per target pass.
      identical: replies that equal plain decoding's. compared: replies that were compared.
      spec_bench: by the definitions of Spec-Bench. categories: the same by category, where a task has several.
      draft: the tree, weights and acceptance rule that were measured (`infer/common/drafts.py`).
      by_question: sums over the replies of every question.
    """

    method: str
    label: str
    task: str
    temperature: float
    batch: int
    questions: Count
    replies: Count
    tokens: Count
    passes: Count | None
    cycles: Count | None
    seconds: list[float]
    prefill_seconds: list[float]
    tok_s: float
    tok_s_range: list[float]
    decode_tok_s: float | None
    speedup: float
    speedup_range: list[float]
    decode_speedup: float | None
    tau: float | None
    accepted: list[Count] | None
    ms_per_pass: float | None
    identical: Count
    compared: Count
    spec_bench: SpecBench
    categories: dict[str, Category]
    draft: Draft
    by_question: TimedQuestions

    def __post_init__(self) -> None:
        """Checks the draft, and that every column has one entry per question."""
        check_draft(self.draft)
        columns = dict(self.by_question)
        nested = [row for name in ("seconds", "plain_seconds") for row in self.by_question[name]]
        flat = [column for name, column in columns.items() if "seconds" not in name and column is not None]
        _same_length("by_question", *flat, *nested)  # type: ignore[arg-type]

    @property
    def group(self) -> Group:
        """What it was measured in turns with."""
        return Group(self.task, self.temperature, self.batch)

    @property
    def key(self) -> tuple[Any, ...]:
        """What is unique in a file."""
        return (self.label, *self.group)


@dataclasses.dataclass(frozen=True)
class Recording:
    """Drafts of one method on one task at one temperature, counted; no times.

    Attributes:
      method, label, task, temperature, questions, replies, draft: as in `Cell`.
      tokens: emitted after each reply's first token. cycles: target passes, summed over replies.
      tau: tokens / cycles; None without a cycle.
      positions: counts by depth and rank.
      calibration: None where drafts have no confidence. uncalibrated: the reason.
      chains: one per length; empty for a method that drafts no chain of a given length.
      by_question: tokens and cycles of every question.
    """

    method: str
    label: str
    task: str
    temperature: float
    questions: Count
    replies: Count
    tokens: Count
    cycles: Count
    tau: float | None
    positions: PositionCounts
    calibration: CalibrationCounts | None
    uncalibrated: str | None
    chains: list[ChainCounts]
    draft: Draft
    by_question: CountedQuestions

    def __post_init__(self) -> None:
        """Checks the draft, lengths, and that no more was accepted than the target reached."""
        check_draft(self.draft)
        _same_length("by_question", *self.by_question.values())  # type: ignore[arg-type]
        for accepted, reached in zip(self.positions["accepted"], self.positions["reached"], strict=True):
            _no_more("positions", accepted, reached)
        if self.calibration is not None:
            _no_more("calibration", self.calibration["accepted"], self.calibration["count"])
            _same_length("calibration", self.calibration["count"], self.calibration["confidence"])
        for chain in self.chains:
            _no_more("chains", chain["accepted"], chain["tested"])

    @property
    def key(self) -> tuple[Any, ...]:
        """What is unique in a file."""
        return self.label, self.task, self.temperature


@dataclasses.dataclass(frozen=True)
class File:
    """What every result file has.

    Attributes:
      machine: processor or accelerator and versions. revision: of the code, if it is a checkout.
      settings: the arguments of the run.
      cells: what was measured.
    """

    SCHEMA: ClassVar[str]
    PROGRAM: ClassVar[str]

    machine: str
    revision: str | None
    settings: dict[str, Any]
    cells: Sequence[Any]

    def as_json(self) -> dict[str, Any]:
        """The JSON object."""
        content = dataclasses.asdict(self)
        more = content.pop("more", {})
        return {"schema": self.SCHEMA} | content | more


@dataclasses.dataclass(frozen=True)
class Result(File):
    """A file of `infer.bench`: every method of every finished group.

    Attributes:
      more: the other keys of the file, such as `golden` and `groups` (finished groups, and the turns left out of each).
    """

    SCHEMA = "eagle_jax.bench/3"
    PROGRAM = "infer.bench"

    cells: list[Cell]
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def groups(self) -> list[Group]:
        """Groups that have cells, in the order of the file."""
        return list(dict.fromkeys(cell.group for cell in self.cells))

    @property
    def labels(self) -> list[str]:
        """Methods with their settings, in the order of the file."""
        return list(dict.fromkeys(cell.label for cell in self.cells))

    def cell(self, label: str, group: Group) -> Cell | None:
        """The cell of a method in a group; None where it was not measured."""
        return next((cell for cell in self.cells if cell.label == label and cell.group == group), None)


@dataclasses.dataclass(frozen=True)
class Recorded(File):
    """A file of `infer.acceptance`."""

    SCHEMA = "eagle_jax.acceptance/2"
    PROGRAM = "infer.acceptance"

    cells: list[Recording]


SCHEMA = Result.SCHEMA
FileType = TypeVar("FileType", bound=File)


def write(result: File, path: Path) -> None:
    """Writes a result file; a reader sees the old file or the new one, never a part."""
    write_whole(path, json.dumps(result.as_json(), allow_nan=False) + "\n")


def read(path: str | os.PathLike[str]) -> Result:
    """Reads a result file of `infer.bench`.

    Raises:
      ValueError: the file is no such result; the message names the file and the field.
    """
    return read_as(path, Result)


def read_as(path: str | os.PathLike[str], *kinds: type[FileType]) -> FileType:
    """Reads a result file as the one of `kinds` whose schema it names.

    Raises:
      ValueError: no JSON, another schema, a field that is missing or of another type, or a cell that is there twice.
    """
    remedy = f"give a result.json that {' or '.join(kind.PROGRAM for kind in kinds)} of this version wrote"
    try:
        content = msgspec.json.decode(Path(path).read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a JSON file ({error}): {remedy}") from None
    schema = content.get("schema") if isinstance(content, Mapping) else None
    kind = next((kind for kind in kinds if schema == kind.SCHEMA), None)
    if kind is None:
        wanted = " or ".join(repr(kind.SCHEMA) for kind in kinds)
        raise ValueError(f"{path} must have the schema {wanted}, got {schema!r}: {remedy}")
    try:
        found = msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}: {remedy}") from None
    keys = [cell.key for cell in found.cells]
    if twice := [cell for cell in found.cells if keys.count(cell.key) > 1]:
        raise ValueError(f"{path}: {describe(twice[0])} is there twice: {remedy}")
    if isinstance(found, Result):
        own = {"schema", *(field.name for field in dataclasses.fields(found))}
        more = {name: value for name, value in content.items() if name not in own}
        found = dataclasses.replace(found, more=more)
    return found


def describe(cell: Group | Cell | Recording) -> str:
    """A group, or a method on one, in words."""
    batch = "" if isinstance(cell, Recording) else f", batch {cell.batch}"
    label = "" if isinstance(cell, Group) else f"{cell.label} on "
    return f"{label}{cell.task} at temperature {cell.temperature:g}{batch}"


def _same_length(name: str, *columns: Sequence[Any]) -> None:
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"{name} must have columns of one length")


def _no_more(name: str, accepted: Sequence[int], reached: Sequence[int]) -> None:
    if len(accepted) != len(reached) or any(part > whole for part, whole in zip(accepted, reached, strict=True)):
        raise ValueError(f"{name} must not count more accepted than reached")
