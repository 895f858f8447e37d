"""Measures drafting methods against plain decoding, prompt by prompt, on the tasks of the papers.

    python -m infer.bench --methods eagle2,eagle3 --limit 4 --temperatures 0,1
    python -m infer.bench --methods eagle3@chain3,eagle3@4x2x7 --batches 1,4,16 --limit 16 --data FOLDER --tasks gsm8k
    python -m infer.bench --target meta-llama/Llama-3.1-8B-Instruct --eagle3 yuhuili/EAGLE3-LLaMA3.1-Instruct-8B \
        --methods eagle3@7x10x59,eagle3@static,pld,lookahead --dtype bfloat16 --tasks path/to/question.jsonl

A method may have a setting, `name[@setting]`: see `infer/common/labels.py`. Plain decoding is always measured, as the
baseline. For every task, temperature and batch size, all methods first run a prompt untimed, which compiles and gives
the compared text. Then they run it `repeats` times in turns. The speedup is the median of the ratios within a
repetition. The prefill is also timed alone, with the same program. A conversation continues with the replies of plain
decoding. If torch is installed, `transformers` is measured on the same weights; `--weights` leaves it out.

The program writes result.json and table.md to `out` after every measurement, and `--resume` continues a stopped run. It
prints the tables and, last, one JSON object (fields: `infer/common/results.py`). `infer.papers` draws the figures.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from eagle_jax.checkpoints import write_whole
from eagle_jax.runtime.compilation import forget_programs, use_compilation_cache
from infer.common.labels import PLAIN
from infer.common.methods import NOTHING
from infer.common.programs import at_least_one, listed, run
from infer.common.results import Group, Result
from infer.common.runs import Run, RunArgs, prepare, turns
from infer.common.tables import markdown
from infer.common.timing import Call, Method, cell, engine, hugging_face, time_repetitions


@dataclasses.dataclass(frozen=True)
class Args(RunArgs):
    """Options of the benchmark."""

    batches: str = "1"  # conversations at a time, several sizes separated by commas
    repeats: int = 3  # timed runs, of which the median counts
    transformers: bool = True  # measure `transformers` generate too, if torch is installed
    out: Path = Path("runs/bench")  # directory of the result


def main(args: Args) -> dict[str, Any]:
    """Runs the benchmark; returns the text that it prints last."""
    at_least_one(args, "repeats")
    batches = listed(args, "batches", int, 1)
    current = prepare(args, Result, free=["batches"])
    for task in current.tasks:
        if len(task.questions) < max(batches):
            raise ValueError(f"--batches must be at most the {len(task.questions)} questions of {task.name}, got "
                             f"{max(batches)}. Raise --limit, or lower --batches.")  # fmt: skip
    use_compilation_cache()
    drafters = {label: current.load(label) for label in current.labels}
    drafts = {label: current.load.draft(label) for label in current.labels}
    makers: dict[str, Callable[[int, float], Method]] = {
        label: functools.partial(engine, current.target, drafter) for label, drafter in drafters.items()
    }
    if args.transformers and args.weights is not None:
        print(f"transformers would run on float weights: it is not measured beside --weights {args.weights}")
    elif args.transformers and find_spec("torch"):
        makers["transformers"], drafts["transformers"] = hugging_face(current.target), NOTHING
    elif args.transformers:
        print("torch is not installed (pip install -e '.[test]'): transformers is not measured beside the engine")
    names = [task.name for task in current.tasks]
    groups = [Group(*found) for found in itertools.product(names, current.temperatures, batches)]
    done = {one.group for one in current.result.cells}
    for number, group in enumerate(groups, 1):
        if group in done:
            continue
        print(f"{number} of {len(groups)}, {group}: {', '.join(makers)} in turns; programs are compiled first ...",
              file=sys.stderr, flush=True)  # fmt: skip
        methods = {label: make(args.max_new_tokens, group.temperature) for label, make in makers.items()}
        calls = measure(current, methods, group, args)
        if calls[PLAIN]:
            current.result.cells += [
                cell(label, group, own, calls[PLAIN], drafts[label]) for label, own in calls.items()
            ]
        current.save()
        write_whole(args.out / "table.md", markdown(current.result))
    print(f"\n{markdown(current.result)}\n\nWritten: {current.path}, with every number of every question")
    report = {"result": str(current.path)} | msgspec.to_builtins(current.result)
    for one in report["cells"]:
        del one["by_question"], one["draft"], one["accepted"]  # the last line stays short
    print(json.dumps(report))
    return report


def measure(current: Run[Result], methods: Mapping[str, Method], group: Group, args: Args) -> dict[str, list[Call]]:
    """Runs every method on the conversations of a task."""
    questions = next(task.questions for task in current.tasks if task.name == group.task)
    found: dict[str, list[Call]] = {label: [] for label in methods}
    for turn in turns(questions, current, args, group.batch):
        forget_programs()
        calls = {
            (label, part): functools.partial(getattr(method, part), turn.prompts, turn.keys)
            for label, method in methods.items()
            for part in ("answer", "prefill")
        }
        answers = {key: call() for key, call in calls.items()}  # compiles
        seconds = time_repetitions(calls, args.repeats)
        plain = answers[PLAIN, "answer"]
        for label, own in found.items():
            times = seconds[label, "answer"], seconds[label, "prefill"]
            own.append(Call(turn.batch, turn.questions, answers[label, "answer"], plain, *times))
        turn.add_replies(plain.tokens)
        if sys.stderr.isatty():
            print(f"batch {turn.batch + 1} of {-(-len(questions) // group.batch)} \033[K", end="\r", file=sys.stderr)
    left_out = sum(len(question.turns) for question in questions) - sum(len(call.questions) for call in found[PLAIN])
    if left_out:
        print(f"{group}: {left_out} turns are too long for the model's {current.target.config.max_position} positions "
              "and left out")  # fmt: skip
    return found


if __name__ == "__main__":
    run(main, Args, __doc__)
