"""Copies tables of docs/results/report.md, and the README's, to where they are shown: `python -m docs.tables`.

A table of docs/results.md whose head the report has becomes the report's; the README's table of speeds is made of the
timed files. Text around them is for a person to hold against the new numbers, and tests do (tests/docs/test_results_page).
Prints the tables of the page that the report has not, which stay as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from eagle_jax.checkpoints.files.staging import write_whole
from infer.common import results
from infer.papers.cells import means
from infer.papers.evidence import ORDER, title

REPOSITORY = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"(?:^\|.*\n)+", flags=re.MULTILINE)
TIMED = [REPOSITORY / "docs" / "results" / f"{name}.json" for name in ("bench", "eagle2")]
"""What the README's table is made of: every method from the first that has it."""
SPEEDS = "| method | T=0 |"
"""How the README's table begins."""


def copied(page: str, report: str) -> tuple[str, list[str]]:
    """The page with the report's tables, and the heads of those that the report has not.

    Of several tables with one head (of several temperatures) the first is the first, and so on.

    Raises:
      ValueError: the page has more or fewer of them than the report, so that it is not known which is which.
    """
    there: dict[str, list[str]] = {}
    for table in TABLE.findall(report):
        there.setdefault(table.splitlines()[0], []).append(table)
    shown = Counter(table.splitlines()[0] for table in TABLE.findall(page))
    for head, number in shown.items():
        if len(there.get(head, ())) > 1 and len(there[head]) != number:
            raise ValueError(f"{head}: the report has {len(there[head])} such tables, the page {number}: show them all")
    unknown = [head for head in shown if head not in there]

    def next_of(found: re.Match[str]) -> str:
        head = found[0].splitlines()[0]
        return there[head].pop(0) if there.get(head) else found[0]

    return TABLE.sub(next_of, page), unknown


def speeds(timed: Iterable[results.Result]) -> str:
    """The README's table: of every method that was timed speedup, tau and identical texts at temperature 0 and 1."""
    rows = {}
    for result, label in [(run, name) for run in timed for name in run.labels]:
        if title(label) in rows:
            continue
        columns = []
        for temperature in (0.0, 1.0):
            cells = [cell for cell in result.cells if (cell.label, cell.temperature) == (label, temperature)]
            speedup, tau = means(cells)
            texts = f"{sum(cell.identical for cell in cells)}/{sum(cell.compared for cell in cells)}"
            columns += [f"{speedup:.2f}x", "-" if tau is None else f"{tau:.2f}", texts]
        rows[title(label)] = f"| {title(label)} | {' | '.join(columns)} |"
    place = {title(name): number for number, name in enumerate(ORDER)}
    order = sorted(rows, key=lambda name: place.get(name.partition(",")[0], len(place)))
    head = [f"{SPEEDS} tau | identical | T=1 | tau | identical |", "|---|---:|---:|---:|---:|---:|---:|"]
    return "".join(f"{line}\n" for line in [*head, *(rows[name] for name in order)])


def with_speeds(readme: str, timed: Iterable[results.Result]) -> str:
    """The README with its table made anew."""
    old = next(table for table in TABLE.findall(readme) if table.startswith(SPEEDS))
    return readme.replace(old, speeds(timed))


def main() -> None:
    """Writes the pages."""
    page, readme = REPOSITORY / "docs" / "results.md", REPOSITORY / "README.md"
    report = (REPOSITORY / "docs" / "results" / "report.md").read_text(encoding="utf-8")
    text, unknown = copied(page.read_text(encoding="utf-8"), report)
    write_whole(page, text)
    print("\n".join(f"not in the report: {head}" for head in unknown))
    write_whole(readme, with_speeds(readme.read_text(encoding="utf-8"), map(results.read, TIMED)))


if __name__ == "__main__":
    main()
