"""Makes the papers' tables and figures of result files.

    python -m infer.bench --methods eagle2,eagle3 --temperatures 0,1 --data FOLDER --tasks gsm8k,mt_bench
    python -m infer.acceptance --methods eagle2,eagle3 --data FOLDER --tasks gsm8k,mt_bench
    python -m infer.papers runs/bench/result.json runs/acceptance/result.json --out runs/report

Reads result files of infer.bench and infer.acceptance in any number and order, and writes `OUT/report.md` and the
figures beside it. Prints last one JSON object: the report, its figures and sections.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from eagle_jax.checkpoints import write_whole
from eagle_jax.viz import png
from infer.common.programs import can_write, run
from infer.common.tables import table
from infer.papers import drafting, speed
from infer.papers.sources import gather


@dataclasses.dataclass(frozen=True)
class Args:
    """Options of the program."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]  # result files of infer.bench and infer.acceptance
    out: Path = Path("runs/report")  # folder of the report


def main(args: Args) -> dict[str, Any]:
    """Writes the report; prints and returns the names of its files."""
    can_write(args.out)
    sources = gather(args.files)
    rows = [[str(path), file.machine, file.revision or "-"] for path, file in sources.files.items()]
    parts = ["# Report", table(["file", "machine", "revision"], rows, left=3)]
    titles, pictures = [], []
    every = [drafting.label_rows(sources), *speed.speeds(sources), *speed.taus(sources)]
    every += [speed.ablation(sources), speed.batches(sources), speed.temperatures(sources)]
    every += [drafting.positions(sources), drafting.calibration(sources)]
    every += [drafting.n_alpha(sources), drafting.expected(sources)]
    for section in every:
        if not section.tables:
            continue
        titles.append(section.title)
        parts += [f"## {section.title}", section.text, *section.tables]
        for name, draw in section.figures.items():
            write_whole(args.out / name, png(draw()))
            pictures.append(name)
            parts.append(f"![{name.removesuffix('.png')}]({name})")
    write_whole(args.out / "report.md", "\n\n".join(parts) + "\n")
    report = {"report": str(args.out / "report.md"), "figures": sorted(pictures), "sections": titles}
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    run(main, Args, __doc__)
