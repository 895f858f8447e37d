"""How much of what a target says was said before: what prompt lookup and lookahead live on. No clock is read.

    python -m infer.papers.repetition --tasks chat,math,code
    python -m infer.papers.repetition --target PATH --data FOLDER --tasks mt_bench,nq --temperatures 0,1

Plain decoding answers the turns of every task, as `infer.acceptance` has them answered. Of every token of a reply it is
told whether the n-gram that ends with it stood in the reply before ("repeated"), or else in the prompt ("copied"), and
of every reply whether it ends in a loop. Prints a table and, last, one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eagle_jax
from eagle_jax.runtime.compilation import machine, revision, use_compilation_cache
from infer import REPOSITORY, acceptance
from infer.common.methods import Sources, load_pair
from infer.common.programs import at_least_one, check_seed, listed, run
from infer.common.tasks import BUNDLED, load_tasks, task_folder
from infer.papers.evidence import table

LOOP_TOKENS, LOOP_TIMES = 24, 3
"""A reply ends in a loop if its last tokens are one block so often at least, and so many in all."""


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the program.

    Attributes:
      target: path or hub id of the model; default is the bundled one.
      tasks: as in infer.bench, separated by commas.
      temperatures: separated by commas; 0 is greedy.
      data: folder of the tasks; its default is EAGLE_JAX_TASKS, or else the bundled questions.
      limit: questions per task, the first ones.
      spread: takes them evenly from a file's categories.
      max_new_tokens: longest reply.
      ngram: tokens that have to have stood there.
      batch: replies that are written at a time; no text depends on it.
      seed: of sampled draws.
      dtype: of the weights.
    """

    target: str | None = None
    tasks: str = BUNDLED
    temperatures: str = "0,1"
    data: Path = dataclasses.field(default_factory=task_folder)
    limit: int = 8
    spread: bool = False
    max_new_tokens: int = 128
    ngram: int = 4
    batch: int = 4
    seed: int = 0
    dtype: str = "float32"


def main(args: Args) -> dict[str, Any]:
    """Counts; returns what it prints last."""
    at_least_one(args, "limit", "max_new_tokens", "ngram", "batch")
    check_seed(args)
    temperatures = listed(args, "temperatures", float, 0)
    tasks = load_tasks(listed(args, "tasks"), args.data, args.limit, spread=args.spread)
    own = {field.name for field in dataclasses.fields(acceptance.Args)}
    asked = acceptance.Args(**{name: value for name, value in vars(args).items() if name in own})
    sources = Sources.of(asked, args.dtype)
    use_compilation_cache()
    target, tokenizer = load_pair(sources)
    cells = []
    for task, questions in tasks:
        for temperature in temperatures:
            counts = dict.fromkeys(("replies", "tokens", "repeated", "copied", "loops"), 0)
            for batch in acceptance.conversations(task, questions, target, tokenizer, asked, temperature):
                replies = batch.replies or eagle_jax.generate(
                    target, None, batch.prompts, max_new_tokens=args.max_new_tokens, temperature=temperature,
                    key=batch.keys,
                ).tokens  # fmt: skip
                for prompt, reply in zip(batch.prompts, replies, strict=True):
                    repeated, copied = said_before(prompt, reply, args.ngram)
                    found = (1, len(reply), repeated, copied, int(ends_in_loop(reply)))
                    counts = {name: counts[name] + value for name, value in zip(counts, found, strict=True)}
            cells.append({"task": task, "temperature": temperature} | counts)
    print(table(HEAD, rows(cells), left=1))
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report = {"machine": machine(), "revision": revision(REPOSITORY), "settings": settings, "cells": cells}
    print(json.dumps(report))
    return report


HEAD = ["task", "temperature", "replies", "tokens", "repeated", "copied from the prompt", "end in a loop"]


def rows(cells: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Of the table, one per task and temperature."""
    return [
        [
            cell["task"], f"{cell['temperature']:g}", str(cell["replies"]),
            str(cell["tokens"]), f"{cell['repeated'] / cell['tokens']:.0%}", f"{cell['copied'] / cell['tokens']:.0%}",
            str(cell["loops"]),
        ]
        for cell in cells
    ]  # fmt: skip


def said_before(prompt: Sequence[int], reply: Sequence[int], ngram: int) -> tuple[int, int]:
    """How many of a reply's tokens end an n-gram that stood in the reply before, and how many one of the prompt alone.

    An n-gram may begin in the prompt; one that only the prompt has ends there too.
    """
    text = [*prompt, *reply]
    in_prompt = {tuple(prompt[end - ngram : end]) for end in range(ngram, len(prompt) + 1)}
    in_reply: set[tuple[int, ...]] = set()
    repeated = copied = 0
    for end in range(max(len(prompt) + 1, ngram), len(text) + 1):
        last = tuple(text[end - ngram : end])
        repeated += last in in_reply
        copied += last in in_prompt and last not in in_reply
        in_reply.add(last)
    return repeated, copied


def ends_in_loop(reply: Sequence[int]) -> bool:
    """Whether the end of a reply is one block of tokens `LOOP_TIMES` at least, `LOOP_TOKENS` in all at least."""
    for period in range(1, len(reply) // LOOP_TIMES + 1):
        alike = 0
        while alike < len(reply) - period and reply[-1 - alike] == reply[-1 - alike - period]:
            alike += 1
        if alike + period >= max(LOOP_TIMES * period, LOOP_TOKENS):
            return True
    return False


if __name__ == "__main__":
    run(main, Args, __doc__)
