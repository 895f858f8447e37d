"""Makes the papers' tables and figures of result files, and measures those files where they are not given.

    python -m infer.papers runs/bench/result.json runs/acceptance/result.json --out runs/report
    python -m infer.papers --data FOLDER --out runs/papers      # measures all of docs/results.md first: four hours
    python -m infer.papers --only trees,acceptance --data FOLDER # tau, n-alpha and calibration alone, without a clock
    python -m infer.papers --tasks chat,math --limit 2           # a first look, on bundled questions
    python -m infer.papers --target PATH --eagle3 PATH --data FOLDER --dtype bfloat16 --out runs/own

Reads result files of infer.bench and infer.acceptance, and writes `OUT/report.md` and the figures beside it. Without
files, both programs run first, into folders of OUT, and the report goes to `OUT/report`. Give the same command again to
continue a run that was stopped. Prints last one JSON object: the report, its figures and sections.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from eagle_jax.checkpoints.files.staging import write_whole
from infer.common import figures
from infer.common.methods import Places
from infer.common.programs import at_least_one, can_write, run
from infer.common.tables import table
from infer.common.tasks import task_folder
from infer.papers import drafting, measure, speed
from infer.papers.sources import Section, Sources, gather


@dataclasses.dataclass(frozen=True)
class Args(Places):
    """Arguments of the program.

    Attributes:
      files: result files of infer.bench and infer.acceptance. Without files, both programs run first.
      data: folder of the papers' tasks; its default is EAGLE_JAX_TASKS.
      only: measurements to make, separated by commas; of bench, ablation, untempered, batches, rules, eagle2, trees,
        drawn, untempered_trees, branching, acceptance.
      tasks: tasks of every measurement instead of the papers'; chat, math and code are bundled.
      limit: questions per task in every measurement, instead of each one's own.
      max_new_tokens: longest reply.
      dtype: of the weights.
      out: folder of the report, and of the measurements.
      show: print the commands of the measurements instead, one a line.
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    data: Path = dataclasses.field(default_factory=task_folder)
    only: str = ",".join(measure.RUNS)
    tasks: str | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    dtype: str = "float32"
    out: Path = Path("runs/papers")
    show: bool = False


def main(args: Args) -> dict[str, Any] | None:
    """Measures if no file is given, writes the report, and returns what it prints last."""
    if args.files:
        return write_report(args.files, args.out)
    at_least_one(args, "limit", "max_new_tokens")
    plan = measure.commands(args)
    if args.show:
        print("\n".join(shlex.join(["python", *words]) for words in plan.values()))
        return None
    can_write(args.out)
    measure.run_all(plan, args.out)
    made = [args.out / name / "result.json" for name in measure.RUNS]
    return write_report([path for path in made if path.exists()], args.out / "report")


def write_report(files: Sequence[Path], out: Path) -> dict[str, Any]:
    """Writes the report of result files into a folder; prints and returns the names of what it wrote."""
    can_write(out)
    sources = gather(files)
    made = sections(sources)
    pictures = {name: figure for section in made for name, figure in section.figures.items()}
    for name, figure in pictures.items():
        write_whole(out / name, figures.png(figure))
    rows = [[str(path), file.PROGRAM, file.machine, file.revision or "-"] for path, file in sources.files]
    head = ["# Report", table(["file", "written by", "machine", "revision"], rows, left=4)]
    write_whole(out / "report.md", "\n\n".join([*head, *(f"## {one.title}\n\n{one.text}" for one in made)]) + "\n")
    report = {"report": str(out / "report.md"), "figures": sorted(pictures), "sections": [one.title for one in made]}
    print(json.dumps(report))
    return report


def sections(sources: Sources) -> list[Section]:
    """Returns the parts of the report for which the files have data, in the order of the papers."""
    of_speed = [speed.ablation(sources), speed.batches(sources), speed.temperatures(sources)]
    of_drafts = [
        make(sources) for make in (drafting.positions, drafting.calibration, drafting.n_alpha, drafting.expected)
    ]
    made = [drafting.labels(sources), *speed.speeds(sources), *speed.taus(sources), *of_speed, *of_drafts]
    return [section for section in made if section is not None]


if __name__ == "__main__":
    run(main, Args, __doc__)
