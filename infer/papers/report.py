"""Makes the papers' tables and figures of result files.

    python -m infer.papers.report runs/bench/result.json runs/acceptance/result.json docs/evidence/study.json --out runs/report

Reads results of infer.bench (speeds), infer.acceptance (drafts) and train.demo.study (trained heads), in any number and
order, and writes `OUT/report.md` and the figures beside it. A section whose data no file has says which command gives
them. Nothing is measured here: the same files give the same bytes. Numbers printed in the papers stand apart and are
marked as published. Prints last one JSON object: the page, its figures, and the sections without data.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from eagle_jax.checkpoints.staging import write_whole
from infer.common.programs import can_write, run
from infer.papers import ablations, claims, drafting, figures
from infer.papers.evidence import Evidence, Section, gather, table
from infer.tuning import speeds

PICTURES = ("speedup_t*.png", "batch_t*.png", "temperature.png", "positions_t*.png", "nodes_t*.png", "calibration.png",
            "n_alpha.png", "expected.png")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the report.

    Attributes:
      files: result files, of any of the three programs.
      out: folder of the page and its figures; those of an older report there are replaced.
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    out: Path = Path("runs/report")


def main(args: Args) -> dict[str, Any]:
    """Writes the page; returns what it prints last."""
    if not args.files:
        raise ValueError(
            "no result file is given: name files that infer.bench, infer.acceptance or train.demo.study wrote"
        )
    can_write(args.out)
    evidence = gather(args.files)
    made = sections(evidence)
    text = page(evidence, made)
    pictures = {name: figures.png(figure) for section in made for name, figure in section.pictures.items()}
    for pattern in PICTURES:
        for old in args.out.glob(pattern):
            if old.name not in pictures:
                old.unlink()
    for name, picture in pictures.items():
        write_whole(args.out / name, picture)
    write_whole(args.out / "report.md", text)
    report = {
        "page": str(args.out / "report.md"),
        "figures": sorted(pictures),
        "missing": [section.title for section in made if not section.there],
    }
    print(json.dumps(report))
    return report


def sections(evidence: Evidence) -> list[Section]:
    """All parts of the page, in the order of the papers."""
    return [
        claims.claims(evidence),
        ablations.labels(evidence),
        *speeds.speedups(evidence),
        ablations.taus(evidence),
        ablations.ablation(evidence),
        drafting.study(evidence),
        drafting.positions(evidence),
        drafting.calibration(evidence),
        drafting.n_alpha(evidence),
        speeds.batches(evidence),
        drafting.expected(evidence, speeds.chain_costs(evidence)),
        ablations.rules(evidence),
        speeds.hot(evidence),
        speeds.spec_bench(evidence),
    ]


def page(evidence: Evidence, made: list[Section]) -> str:
    """The Markdown text."""
    kinds = {"bench": "infer.bench", "acceptance": "infer.acceptance", "study": "train.demo.study"}
    rows = [[source.path, kinds[source.kind], source.machine, source.revision or "-"] for source in evidence.sources]
    parts = [
        "# Report",
        "Made by `python -m infer.papers.report` of these files, and of nothing else:",
        table(["file", "written by", "machine", "revision"], rows, left=4),
    ]
    for section in made:
        parts += [f"## {section.title}", section.text]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    run(main, Args, __doc__)
