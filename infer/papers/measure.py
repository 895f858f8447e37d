"""Runs the measurements that the report is made of (`measurements.yaml`), each as a process of its own."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import infer.acceptance
import infer.bench
from infer.common.labels import Label
from infer.common.methods import OPTIONS, Places, Sources, check_methods
from infer.common.programs import arguments, listed
from infer.common.tasks import load_tasks

RUNS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("measurements.yaml").read_text("utf-8"))
"""By the name of its folder: program, methods, tasks, options."""


def commands(args: Any) -> dict[str, list[str]]:
    """Returns the words of every measurement behind `python`, checked.

    Args:
      args: those of `infer.papers`.

    Raises:
      ValueError: an unknown measurement, or a task or method that its program would refuse.
    """
    only = listed(args, "only")
    if unknown := [name for name in only if name not in RUNS]:
        raise ValueError(f"--only must be some of {', '.join(RUNS)}, got {','.join(unknown)}.")
    plan = {name: words for name in RUNS if name in only and (words := _command(name, args))}
    if not plan:
        raise ValueError(
            "--only must name a measurement whose methods have weights. Give heads, such as --eagle3 PATH."
        )
    for words in plan.values():  # an error in the last command must not come after hours of the first
        kind: Any = {"infer.bench": infer.bench.Args, "infer.acceptance": infer.acceptance.Args}[words[1]]
        own = arguments(kind, None, words[2:])
        check_methods(listed(own, "methods"), Sources.of(own, own.dtype))
        load_tasks(listed(own, "tasks"), own.data, own.limit)
    return plan


def run_all(plan: Mapping[str, list[str]], out: Path) -> None:
    """Runs the measurements in this terminal; one that was begun continues.

    Raises:
      ValueError: a program failed; its message stands above.
    """
    for number, (name, words) in enumerate(plan.items(), 1):
        print(f"\n{number} of {len(plan)}, {name}: {shlex.join(['python', *words])}\n", flush=True)
        resume = ["--resume"] if (out / name / "result.json").exists() else []
        status = subprocess.run([sys.executable, *words, *resume], check=False).returncode
        if status == 130:
            raise KeyboardInterrupt
        if status:
            raise ValueError(
                f"{words[1]} ended with status {status}: see above. The same command continues from there."
            )


def _command(name: str, args: Any) -> list[str]:
    """Returns the words of one measurement; none where none of its methods has weights."""
    run = RUNS[name]
    labels = run["methods"].split(",")
    methods = {label: Label.parse(label).method for label in labels}
    missing = [m for m in methods.values() if args.target and m in OPTIONS and getattr(args, OPTIONS[m]) is None]
    if missing:
        print(f"{name}: without {', '.join(sorted({*missing}))}, which have no weights", file=sys.stderr)
    if not (kept := [label for label in labels if methods[label] not in missing]):
        return []
    words = ["-m", f"infer.{run['program']}", "--methods", ",".join(kept), "--tasks", args.tasks or run["tasks"]]
    words += shlex.split(run["options"])
    limit = words.index("--limit") + 1
    words[limit] = str(args.limit or words[limit])
    if "--batches" in words:  # a task may have fewer questions than the largest batch
        most, at = int(words[limit]), words.index("--batches") + 1
        if args.tasks is not None:
            most = min(len(task.questions) for task in load_tasks(listed(args, "tasks"), args.data, most))
        words[at] = ",".join(size for size in words[at].split(",") if int(size) <= most)
    for option in ("max_new_tokens", "dtype", "data", *(field.name for field in dataclasses.fields(Places))):
        value = getattr(args, option)
        if value is not None and value != getattr(type(args)(), option):
            words += [f"--{option.replace('_', '-')}", *(value if isinstance(value, tuple) else [str(value)])]
    return [*words, "--out", str(args.out / name)]
