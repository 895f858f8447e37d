"""The papers' tables and figures from one command: every measurement of docs/results.md, and the report of them.

    python -m infer.papers --data FOLDER                         # the bundled pair on the papers' files, four hours
    python -m infer.papers --only trees,acceptance --data FOLDER # tau, n-alpha and calibration alone, without a clock
    python -m infer.papers --tasks chat,math --limit 2           # a first look, on bundled questions
    python -m infer.papers --target PATH --eagle3 PATH --data FOLDER --dtype bfloat16 --out runs/own

Runs `infer.bench` and `infer.acceptance` one after the other, each a process of its own that has the machine to
itself, and `infer.papers.report` on what they wrote. Methods that a target of your own has no weights for are left out, and
named. A run that was stopped goes on where it was: give the same command again. Prints what the programs print, and
last the JSON object of the report.
"""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import infer.acceptance
import infer.bench
from infer import REPOSITORY
from infer.common.labels import Label
from infer.common.methods import OPTIONS, Places, Sources, check_methods
from infer.common.programs import arguments, at_least_one, can_write, listed, run
from infer.common.tasks import load_tasks, task_folder

STUDY = REPOSITORY / "docs" / "evidence" / "study.json"
SIX = "gsm8k,humaneval,mt_bench,alpaca,nq,cnn_dm"
THREE = "gsm8k,humaneval,mt_bench"


class Run(NamedTuple):
    """One measurement: a program, what it measures, and its options."""

    program: str
    methods: str
    tasks: str
    options: str


ENGINE = "--no-transformers --no-golden"
RUNS = {
    "bench": Run("bench", "sps,pld,lookahead,medusa,hydra,eagle1,hass,eagle3", SIX,
                 "--limit 4 --temperatures 0,1,1.5 --no-golden"),
    "ablation": Run("bench", "hass@4x2x7,hass@4x2x7/confidence,hass@4x2x7/norerank,hass@4x2x7/confidence/norerank",
                    THREE, f"--limit 4 --temperatures 0 {ENGINE}"),
    "untempered": Run("bench", "hass@untempered,eagle3@untempered", THREE, f"--limit 4 --temperatures 1,1.5 {ENGINE}"),
    "batches": Run("bench", "hass@chain3,eagle3@chain3", "gsm8k", f"--limit 64 --batches 1,2,4,8,16,32,64 {ENGINE}"),
    "rules": Run("bench", "sps@chain4/deterministic,sps@chain4/rejection,sps@chain4/block,hass@static/deterministic,"
                 "hass@static/rejection,hass@static/traversal", "gsm8k,mt_bench",
                 f"--limit 4 --temperatures 1 {ENGINE}"),
    "eagle2": Run("bench", "eagle2", SIX, f"--limit 4 --temperatures 0,1,1.5 {ENGINE}"),
    "trees": Run("acceptance", "sps,pld,lookahead,medusa@static,hydra@static,eagle1,hass@6x10x59,eagle2@5x10x25,"
                 "eagle2@6x10x59,eagle2@6x10x59/confidence,eagle2@6x10x59/norerank,eagle2@6x10x59/confidence/norerank,"
                 "eagle3@8x10x59", SIX, '--limit 8 --chains ""'),
    "drawn": Run("acceptance", "sps@chain4/rejection,sps@chain4/block,eagle2@static/rejection,eagle2@static/traversal",
                 SIX, '--limit 8 --temperatures 1 --chains ""'),
    "untempered_trees": Run("acceptance", "medusa@static/untempered,hydra@static/untempered,eagle1@static/untempered,"
                            "hass@6x10x59/untempered,eagle2@6x10x59/untempered,eagle3@8x10x59/untempered", SIX,
                            '--limit 8 --temperatures 1 --chains ""'),
    "branching": Run("acceptance", "eagle2@6x10x59/top_p0.9,eagle3@8x10x59/top_p0.9", SIX, '--limit 8 --chains ""'),
    "acceptance": Run("acceptance", "hass,eagle2,eagle3,sps", THREE, "--limit 8 --chains 1,2,4,6"),
}  # fmt: skip
"""By the name of its folder. Times first: they want the machine to themselves."""


@dataclasses.dataclass(frozen=True)
class Args(Places):
    """Arguments of the program.

    Attributes:
      data: folder of the papers' tasks; its default is EAGLE_JAX_TASKS.
      only: measurements that are made, separated by commas; of bench, ablation, untempered, batches, rules, eagle2,
        trees, drawn, untempered_trees, branching, acceptance. The report takes those that are there.
      tasks: asked in every measurement instead of the papers' tasks; chat, math and code are bundled.
      limit: questions per task in every measurement, instead of each one's own.
      max_new_tokens: longest reply.
      dtype: of the weights.
      out: folder of all results; the report is in `OUT/report`.
      show: print the commands instead, one a line.
    """

    data: Path = dataclasses.field(default_factory=task_folder)
    only: str = ",".join(RUNS)
    tasks: str | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    dtype: str = "float32"
    out: Path = Path("runs/papers")
    show: bool = False


def main(args: Args) -> None:
    """Measures what is not there yet, and reports."""
    at_least_one(args, "limit", "max_new_tokens")
    asked = listed(args, "only")
    if unknown := [name for name in asked if name not in RUNS]:
        raise ValueError(f"--only {','.join(unknown)}: there are {', '.join(RUNS)}")
    plan = {name: found for name in RUNS if name in asked and (found := command(name, args)) is not None}
    if not plan:
        raise ValueError("nothing to measure: the target has no weights for any method of --only; give --eagle3 PATH")
    if args.show:
        print("\n".join(shlex.join(["python", *words]) for words in (*plan.values(), report(args, plan))))
        return
    can_write(args.out)
    for words in plan.values():  # refuses all that cannot be run before the first hour is spent
        check(words)
    for number, (name, words) in enumerate(plan.items(), 1):
        print(f"\n{number} of {len(plan)}, {name}: {shlex.join(['python', *words])}\n")
        begun = (args.out / name / "result.json").exists()
        start([*words, "--resume"] if begun else words)
    start(report(args, plan))


def command(name: str, args: Args) -> list[str] | None:
    """The words of one measurement behind `python`; None where none of its methods has weights."""
    run = RUNS[name]
    labels = run.methods.split(",")
    kept = [label for label in labels if has_weights(label, args)]
    if missing := sorted({Label.parse(label).method for label in labels if label not in kept}):
        print(f"{name}: without {', '.join(missing)}, of which no weights were given", file=sys.stderr)
    if not kept:
        return None
    words = ["-m", f"infer.{run.program}", "--methods", ",".join(kept), "--tasks", args.tasks or run.tasks]
    words += shlex.split(run.options)
    limit = words.index("--limit") + 1
    if args.limit is not None:
        words[limit] = str(args.limit)
    if "--batches" in words:
        at, most = words.index("--batches") + 1, int(words[limit])
        if args.tasks is not None:  # which may have fewer
            asked = load_tasks(listed(args, "tasks"), args.data, most)
            most = min(len(task.questions) for task in asked)
        words[at] = batches(words[at], most)
    own = {"max_new_tokens": args.max_new_tokens, "dtype": args.dtype, "data": args.data} | {
        field.name: getattr(args, field.name) for field in dataclasses.fields(Places)
    }
    for option, value in own.items():
        if value is not None and value != getattr(DEFAULTS, option):
            words += [f"--{option.replace('_', '-')}", *(value if isinstance(value, tuple) else [str(value)])]
    return [*words, "--out", str(args.out / name)]


DEFAULTS = Args()


def batches(sizes: str, limit: int) -> str:
    """Those that so many questions fill."""
    return ",".join(size for size in sizes.split(",") if int(size) <= limit) or "1"


def has_weights(label: str, args: Args) -> bool:
    """Whether the method needs none, is bundled with the target, or its path is given."""
    method = Label.parse(label).method
    return args.target is None or method not in OPTIONS or getattr(args, OPTIONS[method]) is not None


def check(words: list[str]) -> None:
    """Refuses a command whose tasks or methods its program would refuse.

    Raises:
      ValueError: as the program would, naming the option.
    """
    kind = {"infer.bench": infer.bench.Args, "infer.acceptance": infer.acceptance.Args}[words[1]]
    args: Any = arguments(kind, None, words[2:])
    check_methods(listed(args, "methods"), Sources.of(args, args.dtype))
    load_tasks(listed(args, "tasks"), args.data, args.limit)


def report(args: Args, plan: dict[str, list[str]]) -> list[str]:
    """The words of the report; the training study that is kept belongs to the bundled target."""
    places = {name: args.out / name / "result.json" for name in RUNS}
    files = [str(place) for name, place in places.items() if name in plan or place.exists()]
    study = [str(STUDY)] if args.target is None else []
    return ["-m", "infer.papers.report", *files, *study, "--out", str(args.out / "report")]


def start(words: list[str]) -> None:
    """Runs a program in this process's terminal.

    Raises:
      ValueError: it failed; what it said stands above. KeyboardInterrupt: it was interrupted.
    """
    status = subprocess.run([sys.executable, *words], check=False).returncode
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise ValueError(f"{words[1]} ended with status {status}, see above; when that is mended the same "
                         "command goes on from there")  # fmt: skip


if __name__ == "__main__":
    run(main, Args, __doc__)
