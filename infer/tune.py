"""Finds the fastest method and tree for a target on this machine, and writes a profile for `generate`.

    python -m infer.tune --methods eagle2,eagle3,pld --temperatures 0,1 --out profile.yaml
    python -m infer.tune --pair smollm2
    python -m infer.tune --target PATH --eagle3 PATH --methods eagle3 --batches 1,8 --dtype bfloat16
    python -m infer.tune --check profile.yaml --skip 4

The program records the drafts of every method along the target's own replies. It measures the cost of a target pass by
its rows and the cost of drafting by depth and top_k. Both predict the speed of every tree of the grid. The trees with
the best predictions are measured in turns with plain decoding. A method must beat plain decoding in the mean and lose
at most 3% on any task, both by more than the spread. The fastest such method is chosen, or else plain decoding.

It prints its progress to stderr, a table per batch size and temperature and, last, one JSON object with the choices. A
report next to the profile has all measurements. `--prompts 256` chooses once for prompts of at most 256 tokens and once
for longer ones. `--check` measures "auto" with a profile against plain decoding instead; the exit status is 1 if a task
is more than 5% slower. See docs/tuning.md.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eagle_jax
from eagle_jax.checkpoints import write_whole
from eagle_jax.runtime.compilation import machine, revision, use_compilation_cache
from eagle_jax.runtime.profile import Entry, ProfileFile, fingerprint
from eagle_jax.settings import load_yaml
from infer import REPOSITORY
from infer.common.labels import PLAIN
from infer.common.methods import Places, choose_methods, load_pair
from infer.common.programs import at_least_one, can_write, check_seed, listed, naming, not_negative, run
from infer.common.tables import number, table
from infer.common.tasks import BUNDLED, Conversation, keys_of, load_tasks, names_of, task_folder
from infer.tuning.search import Grid, Recorded, find_candidates, record_drafts, tune_request
from infer.tuning.trials import LEAST, SLOWER, Prompt, Samples, Setting, batches, show_progress, time_against_plain

AUTO = "auto"
USUAL = ("hass", "eagle2", "eagle3", "pld")
"""Methods that are tuned without --methods."""


@dataclasses.dataclass(frozen=True)
class Args(Places):
    """Holds the arguments of the program."""

    # as in infer.bench, separated by commas; of a method without a setting the whole grid is searched, and a method
    # with one (eagle3@6x10x59) is one candidate; None is those of hass, eagle2, eagle3 and pld that have weights
    methods: str | None = None
    tasks: str = BUNDLED  # as in infer.bench; their first turns are the sample prompts
    data: Path = dataclasses.field(default_factory=task_folder)  # of tasks; EAGLE_JAX_TASKS, or the bundled questions
    limit: int = 4  # prompts per task
    skip: int = 0  # questions at the head of every task that are left out, such as those tuned on
    max_new_tokens: int = 64  # longest reply
    batches: str = "1"  # prompts at a time, separated by commas
    temperatures: str = "0"  # 0 is greedy; several separated by commas
    # lengths, in tokens, between which the choice may differ, separated by commas; empty is one choice for all
    prompts: str = ""
    depths: str = "1,2,3,4,5,6,8"  # depths in the grid of trees, and lengths of prompt lookup
    top_ks: str = "1,2,3,4,6,10"  # values of top_k in the grid of trees
    nodes: str = "2,3,4,5,6,7,8,10,12,15,20,31,45,59"  # numbers of nodes in the grid; impossible ones are left out
    candidates: int = 3  # number of trees to measure, the best predicted
    repeats: int = 5  # repetitions of every measurement, at least five
    minutes: float = 4  # to measure whole replies, per setting; a slow machine measures fewer prompts of every task
    seed: int = 0  # seed of sampled draws
    out: Path = Path("profile.yaml")  # the profile that is written; NAME_report.json beside it has all measurements
    check: Path | None = None  # a profile to measure, instead of writing a new one


def main(args: Args) -> int:
    """Tunes or checks; the exit status is 1 if a checked profile does not hold."""
    at_least_one(args, "limit", "max_new_tokens", "candidates")
    not_negative(args, "skip")
    if not args.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {args.minutes:g}. Raise it.")
    check_seed(args)
    if args.repeats < LEAST:
        raise ValueError(f"--repeats must be at least {LEAST}, got {args.repeats}. Fewer do not show the spread.")
    sizes, temperatures = listed(args, "batches", int, 1), listed(args, "temperatures", float, 0)
    bounds: list[int | None] = [*(sorted(listed(args, "prompts", int, 1)) if args.prompts.strip() else []), None]
    grid = Grid(*(sorted(listed(args, name, int, 1)) for name in Grid._fields))
    if max(sizes) > args.limit:
        raise ValueError(f"--batches must be at most --limit {args.limit}, got {max(sizes)}. Raise --limit: a batch "
                         "takes as many prompts of every task.")  # fmt: skip
    settings = [Setting(batch, heat, args.max_new_tokens) for heat in temperatures for batch in sizes]
    if args.check is not None:
        return check(args, args.check, settings)
    report = args.out.with_name(f"{args.out.stem}_report.json")
    for place in (args.out, report):
        can_write(place, folder=False)
    labels = [label for label in choose_methods(args, USUAL) if label != PLAIN]
    target, whole = load(args)
    candidates = find_candidates(labels, target, args, grid)
    about = {"machine": machine(), "revision": revision(REPOSITORY), "arguments": dataclasses.asdict(args)}
    entries: list[Entry] = []
    found: list[dict[str, Any]] = []
    groups = by_length(whole, bounds)
    total = len(groups) * len(settings)
    try:
        for bound, samples in groups.items():
            recorded: dict[float, Recorded] = {}
            for setting in (each._replace(prompt=bound) for each in settings):
                show_progress(f"setting {len(entries) + 1} of {total}: batch {setting.batch}, "
                              f"temperature {setting.temperature:g}, prompts to {bound or 'any length'}")  # fmt: skip
                if setting.temperature not in recorded:
                    recorded[setting.temperature] = record_drafts(target, candidates, samples, setting)
                given = target, candidates, recorded[setting.temperature], samples, setting
                entry, row = tune_request(*given, args.candidates, args.repeats, args.minutes)
                show(row, samples)
                entries.append(entry)
                found.append(row)
                # An interrupted run keeps its results.
                write_whole(args.out, profile_text(args, target, entries))
                write_whole(report, json.dumps(about | {"settings": found}, indent=1, default=str) + "\n")
    except KeyboardInterrupt:
        state = f"has {len(entries)} of {total} settings" if entries else "is unchanged"
        print(f"\n{args.out} {state}. Compiled programs stay in the compilation cache.", file=sys.stderr)
        raise
    print(f"\nWritten: {args.out} and {report}. Machine: {machine()}")
    choices = [dataclasses.asdict(entry) | {"chosen": row["chosen"]} for entry, row in zip(entries, found, strict=True)]
    print(json.dumps(about | {"report": report, "choices": choices}, default=str))
    return 0


def profile_text(args: Args, target: eagle_jax.Target, entries: Sequence[Entry]) -> str:
    """Returns the contents of a profile."""
    name = "bundled" if args.target is None else args.target
    file = ProfileFile("eagle_jax.profile/1", name, fingerprint(target), args.dtype, machine(), tuple(entries))
    quantised = "" if args.weights is None else f"The target was loaded with weights={args.weights!r}.\n"
    return file.to_yaml(
        f"{quantised}"
        'Made by python -m infer.tune; eagle_jax.generate(target, "auto", prompts, profile=THIS FILE) follows it.\n'
        "Speedups over the tasks: predicted (of decoding alone) and measured in the mean, measured on the worst task.\n"
        f"These are {args.tasks}: at most {args.limit} questions each, after the first {args.skip}."
    )


def show(report: dict[str, Any], samples: Samples) -> None:
    """Prints the measurements of one setting."""
    lengths = lengths_of(samples)
    print(
        f"\nBatch {report['batch']}, temperature {report['temperature']:g}, {len(lengths)} prompts of {lengths[0]} to "
        f"{lengths[-1]} tokens: {len(report['predicted'])} settings predicted. Chosen: {report['chosen']}\n"
    )
    rows = [
        [
            label,
            *(number(row[name], "x") for name in ("predicted", "measured", "worst")),
            "yes" if row["safe"] else "no",
        ]
        for label, row in report["candidates"].items()
    ]
    print(table(["method", "predicted", "measured", "worst task", "safely faster"], rows), flush=True)


def check(args: Args, path: Path, settings: Sequence[Setting]) -> int:
    """Measures "auto" with a profile against plain decoding."""
    if not path.is_file():
        raise ValueError(f"--check must be a profile, got {path}: no such file. Write one by python -m infer.tune "
                         f"--out {path}.")  # fmt: skip
    with naming("--check", path):
        file = load_yaml(ProfileFile, path)
    target, samples = load(dataclasses.replace(args, dtype=file.dtype))  # type: ignore[arg-type]
    profile = eagle_jax.load_profile(str(path), target)
    rows: list[dict[str, Any]] = []
    for setting in settings:
        scores, identical = time_against_plain(target, {AUTO: AUTO}, samples, setting, args.repeats, profile=profile)
        score = scores[AUTO]
        rows.append({
            "batch": setting.batch,
            "temperature": setting.temperature,
            "auto": used(file, samples, setting),
            "per_task": {task: round(value, 3) for task, value in score.speedups.items()},
            "worst": round(score.worst, 3),
            "mean": round(score.mean, 3),
            "identical": identical,
        })  # fmt: skip
    print(table(
        ["auto is", "batch", "temperature", "worst task", "mean", "identical"],
        [["; ".join(row["auto"]), str(row["batch"]), f"{row['temperature']:g}", number(row["worst"], "x"),
          number(row["mean"], "x"), row["identical"]] for row in rows],
    ))  # fmt: skip
    worst = min(row["worst"] for row in rows)
    holds = worst >= 1 - SLOWER
    print(f"\nWorst against plain decoding: {worst:.2f}x. Machine: {machine()}")
    result = {"holds": holds, "worst": worst, "settings": rows, "profile": path, "machine": machine()}
    print(json.dumps(result | {"arguments": dataclasses.asdict(args)}, default=str))
    return 0 if holds else 1


def used(file: ProfileFile, samples: Samples, setting: Setting) -> list[str]:
    """Returns the entries that "auto" takes for these prompts, each once, from short prompts to long ones."""
    parts = [part for prompts in samples.values() for part in batches(prompts, setting.batch)]
    lengths = sorted(max(len(prompt.tokens) for prompt in part) for part in parts)
    entries = dict.fromkeys(file.find(setting.batch, setting.temperature, length) for length in lengths)
    return [
        f"{one.method} (entry of batch {one.batch}, temperature {one.temperature:g})" if one else f"{PLAIN} (no entry)"
        for one in entries
    ]


def lengths_of(samples: Samples) -> list[int]:
    """Returns the lengths of all prompts in tokens, ascending."""
    return sorted(len(prompt.tokens) for prompts in samples.values() for prompt in prompts)


def by_length(samples: Samples, bounds: Sequence[int | None]) -> dict[int | None, Samples]:
    """Groups the prompts of every task by the first bound that they do not exceed; None is no bound.

    Raises:
      ValueError: a group without prompts.
    """
    found: dict[int | None, dict[str, list[Prompt]]] = {bound: {} for bound in bounds}
    for task, prompts in samples.items():
        for prompt in prompts:
            bound = next(bound for bound in bounds if bound is None or len(prompt.tokens) <= bound)
            found[bound].setdefault(task, []).append(prompt)
    if empty := [bound for bound, part in found.items() if not part]:
        lengths = lengths_of(samples)
        part = "beyond the last" if empty[0] is None else f"for {empty[0]}"
        raise ValueError(f"--prompts must have sample prompts up to every length and beyond the last, got none {part}. "
                         f"The sample has prompts of {lengths[0]} to {lengths[-1]} tokens.")  # fmt: skip
    return dict(found)


def load(args: Args) -> tuple[eagle_jax.Target, Samples]:
    """Loads the target, and of every task the first turns after `--skip` that leave room for a reply.

    Raises:
      ValueError: a task has no such prompt.
    """
    tasks = load_tasks(listed(args, "tasks"), args.data, args.skip + args.limit)
    use_compilation_cache()
    target, tokenizer = load_pair(args)
    found: dict[str, list[Prompt]] = {}
    room = target.config.max_position - args.max_new_tokens
    for task, every in tasks:
        questions = every[args.skip :]
        prompts = [Conversation(question, tokenizer, room).prompt(0) for question in questions]
        keys = keys_of(args.seed, names_of(questions), 0)
        found[task] = [Prompt(tokens, key) for tokens, key in zip(prompts, keys, strict=True) if tokens is not None]
        if not found[task]:
            raise ValueError(f"--tasks must have prompts of at most {room} tokens after the first {args.skip}, got "
                             f"none in {task}. Lower --max-new-tokens or --skip, or leave the task out.")  # fmt: skip
    return target, found


if __name__ == "__main__":
    run(main, Args, __doc__)
