"""Prepares a run of `infer.bench` or `infer.acceptance`: options, tasks, models, result to continue."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple

import jax

import eagle_jax
from eagle_jax.data.chat import tokenizer_settings
from eagle_jax.runtime.compilation import machine, revision
from infer import REPOSITORY
from infer.common.methods import Loader, Places, choose_methods, load_pair, source_name
from infer.common.programs import at_least_one, can_write, check_seed, listed
from infer.common.results import FileType, continued, write
from infer.common.tasks import BUNDLED, Conversation, Question, Task, keys_of, load_tasks, names_of, task_folder

USUAL = ("eagle2", "eagle3")
"""Methods of a run without --methods."""


@dataclasses.dataclass(frozen=True)
class RunArgs(Places):
    """Options that `infer.bench` and `infer.acceptance` share."""

    # of vanilla, sps (a small model), pld (prompt lookup), lookahead, medusa, hydra, eagle1 (a static tree), hass,
    # eagle2, eagle3, each with a setting if wanted: eagle3@6x10x59, eagle3@chain3, eagle2@static, sps@chain5/block,
    # eagle2@4x2x7/norerank, eagle3@untempered, pld@10, lookahead@5x7x7. Your own method is own:module:function, a
    # function of the target that returns a Drafter or BoundDrafter. None is those of eagle2 and eagle3 with weights.
    methods: str | None = None
    # names in the data folder, paths of question files, or owner/dataset[:part] on the hub, separated by commas; of the
    # papers mt_bench, humaneval, gsm8k, alpaca, cnn_dm, nq (hub:gsm8k takes one from the hub). chat, math and code are
    # bundled, ten questions each.
    tasks: str = BUNDLED
    # folder of the tasks; its default is EAGLE_JAX_TASKS, or else the bundled questions
    data: Path = dataclasses.field(default_factory=task_folder)
    limit: int = 10  # questions per task, the first ones
    max_new_tokens: int = 128  # longest reply
    temperatures: str = "0"  # 0 is greedy; several separated by commas
    seed: int = 0  # of sampled draws; every method gets the same
    resume: bool = False  # continue the result in `out`


@dataclasses.dataclass(frozen=True)
class Run(Generic[FileType]):
    """Holds the measurements of a program, and its result so far. `labels` begins with plain decoding."""

    labels: list[str]
    temperatures: list[float]
    tasks: list[Task]
    target: eagle_jax.Target
    tokenizer: Any
    load: Loader
    result: FileType
    path: Path

    def save(self) -> None:
        """Writes the result."""
        write(self.result, self.path)


def prepare(args: Any, kind: type[FileType], free: Sequence[str]) -> Run[FileType]:
    """Checks the options of a program, loads tasks and models, and returns the run.

    Args:
      args: a `RunArgs` with `out`.
      kind: of the result file.
      free: options that may differ between a run and the one that continues it, because no cell depends on them.

    Raises:
      ValueError: a bad option (checked before weights are read), or a result in `out` with other settings.
    """
    at_least_one(args, "limit", "max_new_tokens")
    check_seed(args)
    temperatures = listed(args, "temperatures", float, 0)
    labels = choose_methods(args, USUAL)
    tasks = load_tasks(listed(args, "tasks"), args.data, args.limit)
    can_write(args.out)
    path = args.out / "result.json"
    if path.exists() and not args.resume:
        raise ValueError(f"--out must be a folder without a result.json, got {args.out}. "
                         "Continue that result by --resume, or give another folder.")  # fmt: skip
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # about a missing torch
    target, tokenizer = load_pair(args)
    if args.max_new_tokens >= target.config.max_position:
        raise ValueError(f"--max-new-tokens must be below the model's {target.config.max_position} positions, got "
                         f"{args.max_new_tokens}. Leave room for a prompt.")  # fmt: skip
    settings = dataclasses.asdict(args)
    for name in ("out", "resume", "data"):
        del settings[name]
    settings |= {"methods": sorted(labels), "template_args": list(args.template_args)}  # as in JSON
    settings |= {name: source_name(args, name) for name in ("target", "eagle3")}
    settings |= {f"questions of {task.name}": task.key for task in tasks}
    settings |= tokenizer_settings(tokenizer) | {"stop tokens": list(target.config.eos_ids)}
    result = continued(kind(machine(), revision(REPOSITORY), settings, []), path, ("tasks", "temperatures", *free))
    return Run(labels, temperatures, tasks, target, tokenizer, Loader(target, args), result, path)


class Turn(NamedTuple):
    """Holds prompts that are answered together: one turn of some conversations."""

    batch: int  # number of the batch
    questions: list[str]  # [rows] names (`names_of`)
    prompts: list[list[int]]
    keys: jax.Array  # [rows] keys of the draws
    is_last: bool  # no conversation goes on after the turn
    conversations: list[Conversation]  # [rows]

    def add_replies(self, replies: Sequence[Sequence[int]]) -> None:
        """Appends the assistant's replies, [rows] tokens, on which the prompts of the next turn depend."""
        for conversation, reply in zip(self.conversations, replies, strict=True):
            conversation.add_reply(reply)


def turns(questions: Sequence[Question], run: Run[Any], args: Any, batch: int) -> Iterator[Turn]:
    """Yields every turn of `batch` questions at a time; the caller adds replies before the next.

    A turn that is too long for the model with its reply is left out.
    """
    room, names = run.target.config.max_position - args.max_new_tokens, names_of(questions)
    for start in range(0, len(questions), batch):
        together = range(start, min(start + batch, len(questions)))
        talks = {row: Conversation(questions[row], run.tokenizer, room) for row in together}
        longest = max(len(questions[row].turns) for row in together)
        for turn in range(longest):
            every = {row: talk.prompt(turn) for row, talk in talks.items() if turn < len(questions[row].turns)}
            prompts = {row: prompt for row, prompt in every.items() if prompt is not None}
            if not prompts:
                continue
            own = [names[row] for row in prompts]
            keys = keys_of(args.seed, own, turn)
            going = [talks[row] for row in prompts]
            yield Turn(start // batch, own, list(prompts.values()), keys, turn == longest - 1, going)
