"""Finds the fastest method and tree for a target on this machine, and writes them down for `generate`.

    python -m infer.tune --methods eagle2,eagle3,pld --temperatures 0,1 --out profile.yaml
    python -m infer.tune --target PATH --eagle3 PATH --methods eagle3 --batches 1,8 --dtypes float32,bfloat16
    python -m infer.tune --check profile.yaml --skip 4

It measures what a cycle costs by the width of the target's pass and by the levels that are drafted, and watches what
every method would draft along the target's own replies; from both follows the speed of every tree of the grid. The few
best by that prediction are then measured in turns with plain decoding. Of those that beat it in the mean over tasks,
and lose no more than 3% to it on any, both by more than the spread, the one with the largest mean is chosen; where
there is none, plain decoding is. Prints a table per batch size and temperature and, last, one JSON object with the
choices; all that was measured is in a file beside the profile. With --prompts 256 it chooses once for prompts of at
most so many tokens and once for longer ones. With --search exhaustive every tree of the grid is measured as well, and
the best of them once more beside the choice. With --check nothing is tuned: "auto" is measured against plain decoding
(and, with --search exhaustive, against every tree), on questions not tuned on with --skip, and the exit status is 1
where it is more than 5% slower. See docs/tuning.md.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax.checkpoints.staging import write_whole
from eagle_jax.core.randomness import row_keys
from eagle_jax.runtime.compilation import machine, revision, use_compilation_cache
from eagle_jax.runtime.profile import Entry, ProfileFile, fingerprint, read_profile
from infer import REPOSITORY
from infer.common.labels import PLAIN
from infer.common.methods import Places, Sources, check_methods, load_pair
from infer.common.programs import at_least_one, can_write, check_seed, listed, naming, not_negative, run
from infer.common.tasks import BUNDLED, Conversation, Task, load_tasks, task_folder
from infer.tuning.choice import SLOWER
from infer.tuning.replay import TOLERATED
from infer.tuning.search import AUTO, Grid, Tuned, Tuner
from infer.tuning.trials import Sample, Setting, compete

MOST_ENTRIES = 30
"""Of a profile, which is to be read by people."""


@dataclasses.dataclass(frozen=True)
class Args(Places):
    """Arguments of the program.

    Attributes:
      methods: as in infer.bench, separated by commas. Of one without a setting the whole grid is searched, of one with
        a setting (eagle3@6x10x59) that alone. Only what is named is searched.
      tasks: as in infer.bench; their first turns are the sample prompts.
      data: folder of the tasks; its default is EAGLE_JAX_TASKS, or else the bundled questions.
      limit: prompts per task.
      skip: questions at the head of every task that are left out, such as those tuned on.
      max_new_tokens: longest reply.
      batches: prompts at a time, separated by commas.
      temperatures: 0 is greedy.
      prompts: lengths, in tokens, between which the choice may differ, separated by commas; empty is one for all.
      dtypes: of the target's weights; another dtype is another target, so only several if any will do.
      depths: of the grid of trees.
      top_ks: of the grid of trees.
      nodes: of the grid of trees; a tree that cannot have so many is left out.
      lengths: of what prompt lookup drafts.
      ngrams: most tokens that prompt lookup looks up.
      widths: rows of the target passes that are measured.
      candidates: how many of the best predicted are measured.
      repeats: of all measurements; a choice takes five at least.
      turns: cycles per measurement of a cycle.
      search: whether every tree of the grid is measured as well.
      seed: of sampled draws.
      out: the profile that is written; NAME_report.json beside it has all that was measured.
      check: a profile that is measured instead; the methods it names need no paths.
    """

    methods: str = "hass,eagle2,eagle3,pld"
    tasks: str = BUNDLED
    data: Path = dataclasses.field(default_factory=task_folder)
    limit: int = 4
    skip: int = 0
    max_new_tokens: int = 64
    batches: str = "1"
    temperatures: str = "0,1"
    prompts: str = ""
    dtypes: str = "float32"
    depths: str = "1,2,3,4,5,6,8"
    top_ks: str = "1,2,3,4,6,10"
    nodes: str = "2,3,4,5,6,7,8,10,12,15,20,31,45,59"
    lengths: str = "1,2,3,5,10"
    ngrams: str = "1,3,5"
    widths: str = "1,2,3,4,6,8,12,16,24,32,60"
    candidates: int = 4
    repeats: int = 5
    turns: int = 8
    search: Literal["predicted", "exhaustive"] = "predicted"
    seed: int = 0
    out: Path = Path("profile.yaml")
    check: Path | None = None


def main(args: Args) -> int:
    """Tunes or checks; the exit status is 1 where a checked profile does not hold."""
    at_least_one(args, "limit", "max_new_tokens", "candidates", "repeats", "turns")
    not_negative(args, "skip")
    check_seed(args)
    batches, temperatures = listed(args, "batches", int, 1), listed(args, "temperatures", float, 0)
    bounds: list[int | None] = [*(sorted(listed(args, "prompts", int, 1)) if args.prompts.strip() else []), None]
    grid = grid_of(args)
    if (count := len(batches) * len(temperatures) * len(bounds)) > MOST_ENTRIES:
        raise ValueError(f"--batches x --temperatures x --prompts are {count} settings: a profile has {MOST_ENTRIES} "
                         "at most")  # fmt: skip
    if max(batches) > args.limit:
        raise ValueError(f"--batches {args.batches}: a batch of {max(batches)} takes as many prompts of every task; "
                         f"raise --limit {args.limit}")  # fmt: skip
    settings = [Setting(batch, heat, args.max_new_tokens) for heat in temperatures for batch in batches]
    if args.check is not None:
        return check(args, settings, grid)
    beside = args.out.with_name(f"{args.out.stem}_report.json")
    for place in (args.out, beside):
        can_write(place, folder=False)
    places = {dtype: Sources.of(args, dtype, option="--dtypes") for dtype in listed(args, "dtypes")}
    labels = [label for label in check_methods(listed(args, "methods"), Sources.of(args)) if label != PLAIN]
    tasks = asked(args)
    use_compilation_cache()
    found: dict[str, tuple[eagle_jax.Target, list[Tuned]]] = {}
    for dtype, sources in places.items():
        target, tokenizer = load_pair(sources)
        samples = samples_of(tasks, tokenizer, target, args)
        groups = by_length(samples, bounds)
        tuner = Tuner(grid, target, sources, labels, samples)
        found[dtype] = target, []
        for bound, group in groups.items():
            asked_so = tuner.asking(group)
            for setting in settings:
                found[dtype][1].append(asked_so.tune(setting._replace(prompt=bound)))
                show(found[dtype][1][-1].report, group)
        result, best = write(args, found, beside)  # a dtype that fails, or is interrupted, leaves those before it
    print(f"\nWritten: {args.out}, for {best} weights, and {beside}. Machine: {machine()}")
    names = ("batch", "temperature", "prompt", "chosen", "mean_absolute_error")
    choices = [
        {name: one.report[name] for name in names} | {"measured": one.entry.measured, "worst": one.entry.worst}
        for one in found[best][1]
    ]
    print(json.dumps(result | {"report": str(beside), "choices": choices}))
    return 0


def write(
    args: Args, found: dict[str, tuple[eagle_jax.Target, list[Tuned]]], beside: Path
) -> tuple[dict[str, Any], str]:
    """Writes the profile of the fastest dtype so far, and the report; returns how that begins, and the dtype."""
    # By ratios, or the setting with the most tokens per second, that of the largest batch, would decide alone.
    rates = {dtype: [one.plain * (one.entry.measured or 1.0) for one in each] for dtype, (_, each) in found.items()}
    best = max(rates, key=lambda dtype: float(np.mean(np.log(rates[dtype]))))
    target, tuned = found[best]
    name = "bundled" if args.target is None else args.target
    entries = tuple(one.entry for one in tuned)
    file = ProfileFile("eagle_jax.profile/1", name, fingerprint(target), best, machine(), entries)
    write_whole(args.out, file.to_yaml(
        'Made by python -m infer.tune; eagle_jax.generate(target, "auto", prompts, profile=THIS FILE) follows it.\n'
        "predicted, measured, worst: tokens/s over plain decoding's, mean and least over the tasks tuned on.\n"
        f"These are {args.tasks}: at most {args.limit} questions each, after the first {args.skip}."
    ))  # fmt: skip
    result = {"profile": str(args.out), "dtype": best, "machine": machine(), "revision": revision(REPOSITORY)}
    reports = {dtype: [one.report for one in each] for dtype, (_, each) in found.items()}
    write_whole(beside, json.dumps(result | {"settings": reports, "arguments": shown(args)}, indent=1) + "\n")
    return result, best


def check(args: Args, settings: Sequence[Setting], grid: Grid) -> int:
    """Measures "auto" with a profile against plain decoding, and with an exhaustive search against every tree."""
    with naming("--check", args.check):
        file = read_profile(str(args.check))
    tasks = asked(args)
    labels = [label for label in listed(args, "methods") if label != PLAIN]
    if args.search == "exhaustive":
        check_methods(labels, Sources.of(args))
    use_compilation_cache()
    sources = Sources.of(args, file.dtype)
    target, tokenizer = load_pair(sources)
    profile = eagle_jax.load_profile(str(args.check), target)
    samples, rows = samples_of(tasks, tokenizer, target, args), []
    tuner = Tuner(grid, target, sources, labels, samples) if args.search == "exhaustive" else None
    if tuner is not None:
        tuner.follow(profile)
    head = "| batch | temperature | auto is | worst task | mean | identical |"
    print(head + (" of the best |" if tuner else "") + "\n|---:|---:|---|---:|---:|---:|" + ("---|" if tuner else ""))
    for setting in settings:
        auto: Any = {AUTO: "auto"}
        trial = compete(target, auto, samples, setting, args.repeats, profile=profile)
        score, entries = trial.scores[AUTO], used(profile.file, samples, setting)
        names = dict.fromkeys(PLAIN if entry is None else entry.method for entry in entries)
        places = [entry and {"batch": entry.batch, "temperature": entry.temperature, "prompt": entry.prompt}
                  for entry in entries]  # fmt: skip
        row: dict[str, Any] = {"batch": setting.batch, "temperature": setting.temperature,
                               "auto": ", ".join(names), "entries": places,
                               "per_task": {task: round(value, 3) for task, value in score.speedups.items()},
                               "worst": round(score.worst, 3), "mean": round(score.mean, 3),
                               "identical": f"{trial.identical}/{trial.compared}"}  # fmt: skip
        if tuner is not None:
            _, _, against = tuner.exhaust(AUTO, trial, setting)
            row |= {"over_best": against["choice_over_best"]} | {name: against[name] for name in (
                "best", "interval", "rounds", "fastest", "fastest_speedup", "fastest_worst")}  # fmt: skip
        rows.append(row)
        print(checked(row))
    worst = min(row["worst"] for row in rows)
    holds = worst >= 1 - SLOWER and min(row.get("over_best", 1.0) for row in rows) >= 1 - SLOWER
    for row in rows:
        if None in row["entries"]:
            which = "" if row["entries"] == [None] else " and the longest prompts"
            print(f"\nNo entry for batch {row['batch']} or more at temperature {row['temperature']:g} or more{which}: "
                  "\"auto\" decodes plainly there.")  # fmt: skip
    print(f"\nWorst against plain decoding: {worst:.2f}x. Machine: {machine()}")
    print(json.dumps({"profile": str(args.check), "holds": holds, "worst": worst, "settings": rows,
                      "machine": machine(), "revision": revision(REPOSITORY), "arguments": shown(args)}))  # fmt: skip
    return 0 if holds else 1


def checked(row: dict[str, Any]) -> str:
    """A row of the table of a check; an entry of another setting is named."""
    auto, against = row["auto"], ""
    if row["entries"] == [None]:
        auto += " (no entry)"
    elsewhere = {(place["batch"], place["temperature"]) for place in row["entries"] if place}
    for batch, temperature in sorted(elsewhere - {(row["batch"], row["temperature"])}):
        auto += f" (entry of batch {batch}, temperature {temperature:g})"
    if "best" in row:
        against = " {:.2f} [{:.2f}, {:.2f}] ({}) |".format(row["over_best"], *row["interval"], row["best"])
    return (
        f"| {row['batch']} | {row['temperature']:g} | {auto} | {row['worst']:.2f}x | {row['mean']:.2f}x | "
        f"{row['identical']} |{against}"
    )


def used(file: ProfileFile, samples: dict[str, Sample], setting: Setting) -> list[Entry | None]:
    """The entries that "auto" takes for these prompts, each once, from the shortest prompts to the longest."""
    parts = [part for sample in samples.values() for part in sample.batches(setting.batch)]
    lengths = sorted(max(map(len, part.prompts)) for part in parts)
    return list(dict.fromkeys(file.find(setting.batch, setting.temperature, length) for length in lengths))


def by_length(samples: dict[str, Sample], bounds: Sequence[int | None]) -> dict[int | None, dict[str, Sample]]:
    """The prompts of every task between two bounds, by the upper one; tasks that have none there are left out.

    Raises:
      ValueError: a part without prompts.
    """
    found: dict[int | None, dict[str, Sample]] = {}
    for below, bound in zip([0, *bounds], bounds, strict=False):
        parts = {task: sample.of_length(below or 0, bound) for task, sample in samples.items()}
        found[bound] = {task: part for task, part in parts.items() if part.prompts}
        if not found[bound]:
            lengths = sorted(len(prompt) for sample in samples.values() for prompt in sample.prompts)
            between = f"more than {below}" if bound is None else f"{(below or 0) + 1} to {bound}"
            raise ValueError(f"--prompts: no sample prompt has {between} tokens, they have {lengths[0]} to "
                             f"{lengths[-1]}; take other lengths, or tasks with such prompts")  # fmt: skip
    return found


def asked(args: Args) -> list[Task]:
    """The tasks' questions behind those that --skip leaves out.

    Raises:
      ValueError: as `load_tasks`, or a task that has fewer.
    """
    tasks = load_tasks(listed(args, "tasks"), args.data, args.skip + args.limit)
    for task in tasks:
        if args.skip and len(task.questions) < args.skip + args.limit:
            raise ValueError(f"task {task.name} has {len(task.questions)} questions: --skip {args.skip} --limit "
                             f"{args.limit} takes {args.skip + args.limit}; lower one of them")  # fmt: skip
    return [task._replace(questions=task.questions[args.skip :]) for task in tasks]


def samples_of(tasks: Sequence[Task], tokenizer: Any, target: eagle_jax.Target, args: Args) -> dict[str, Sample]:
    """The first turns of every task that leave room for a reply, each with its key.

    Raises:
      ValueError: a task of which every prompt is too long.
    """
    found: dict[str, Sample] = {}
    base, number = jax.random.key(args.seed, impl="threefry2x32"), 0
    for task, questions in tasks:
        room = target.config.max_position - args.max_new_tokens
        prompts = [Conversation(question, tokenizer, room).ask(0) for question in questions]
        fitting = [prompt for prompt in prompts if prompt is not None]
        if not fitting:
            raise ValueError(f"task {task}: every prompt is too long for the model's {target.config.max_position} "
                             "positions; lower --max-new-tokens or leave the task out")  # fmt: skip
        keys = row_keys(base, jnp.arange(number, number + len(fitting)))
        number += len(fitting)
        found[task] = Sample(fitting, keys)
    return found


def grid_of(args: Args) -> Grid:
    """What is searched.

    Raises:
      ValueError: a number below 1, or one that does not read so.
    """
    names = ("depths", "top_ks", "nodes", "lengths", "ngrams", "widths")
    values = {name: tuple(sorted(listed(args, name, int, 1))) for name in names}
    exhaustive = args.search == "exhaustive"
    return Grid(**values, candidates=args.candidates, repeats=args.repeats, turns=args.turns, exhaustive=exhaustive)


def show(report: dict[str, Any], samples: dict[str, Sample]) -> None:
    """The candidates of one setting, and what was chosen."""
    lengths = sorted(len(prompt) for sample in samples.values() for prompt in sample.prompts)
    print(f"\nBatch {report['batch']}, temperature {report['temperature']:g}, {len(lengths)} prompts of {lengths[0]} "
          f"to {lengths[-1]} tokens: {report['searched']} settings searched, "
          f"plain decoding {report['plain_tok_s']:.0f} tokens/s\n\n"
          "| candidate | predicted | measured | worst task | error |\n|---|---:|---:|---:|---:|")  # fmt: skip
    for label, row in report["candidates"].items():
        values = " | ".join(f"{row[name]:.2f}x" for name in ("predicted", "measured", "worst"))
        print(f"| {label} | {values} | {row['error']:+.1%} |")
    if report["chosen"] == PLAIN:
        print(f"Plain decoding: no candidate is faster in the mean, and on no task {TOLERATED:.0%} slower, by more "
              "than the spread.")  # fmt: skip
    else:
        print(f"Chosen: {report['chosen']}")
    if "exhaustive" in report:
        found = report["exhaustive"]
        print(f"Of {found['trees']} measured, {found['best']} is the best with {found['best_speedup']:.2f}x; "
              f"{found['chosen']}, chosen by prediction, reaches {found['choice_over_best']:.1%} of it.")  # fmt: skip


def shown(args: Args) -> dict[str, Any]:
    """The arguments for the report."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in dataclasses.asdict(args).items()}


if __name__ == "__main__":
    run(main, Args, __doc__)
