"""The sections of `infer.report` that compare settings of one method: EAGLE-2's ablation, acceptance rules."""

from __future__ import annotations

from infer.cells import both, find, means, pair, smallest, tasks_of
from infer.evidence import Evidence, Section, distinct, missing, rule_of, table, title, unablated, unruled

PUBLISHED_ABLATION = {
    frozenset[str](): 4.98,
    frozenset({"norerank"}): 4.86,
    frozenset({"confidence"}): 4.39,
    frozenset({"confidence", "norerank"}): 3.92,
}
"""Tau as printed in the EAGLE-2 paper (arXiv:2406.16858): Vicuna-7B, MT-bench, temperature 0."""
ABLATION = {
    frozenset[str](): "value and rerank (EAGLE-2)",
    frozenset({"norerank"}): "no rerank",
    frozenset({"confidence"}): "no value: expanded by confidence",
    frozenset({"confidence", "norerank"}): "neither",
}


def ablation(evidence: Evidence) -> Section:
    """EAGLE-2's ablation: the frontier by confidence and not by value, no rerank, both."""
    heading = "EAGLE-2's ablation"
    bases = distinct(unablated(cell.label)[0] for cell in evidence.bench if unablated(cell.label)[1])
    base = bases[0] if bases else "eagle2@4x2x7"
    command = "python -m infer.bench --methods " + ",".join(
        [base, f"{base}/confidence", f"{base}/norerank", f"{base}/confidence/norerank"]
    )
    if not bases:
        return missing(heading, "no label with confidence or norerank", command)
    parts = ["Speedup and tau of one head and one size of tree; what is left out is named."]
    for base in bases:
        own = [cell for cell in evidence.bench if unablated(cell.label)[0] == base]
        for temperature in sorted({cell.temperature for cell in own}):
            cells, batch = smallest(own, temperature)
            tasks = tasks_of(cells)
            rows = []
            for without, words in ABLATION.items():
                found = [
                    next((c for c in cells if unablated(c.label)[1] == without and c.task == task), None)
                    for task in tasks
                ]
                printed = [f"{PUBLISHED_ABLATION[without]:.2f}"] if temperature == 0 else []
                rows.append([words, *map(both, found), pair(*means(found)), *printed])
            head = [f"{title(base)}, temperature {temperature:g}, batch {batch}", *tasks, "mean"]
            head += ["published tau (EAGLE-2 paper, Vicuna-7B, MT-bench)"] * (temperature == 0)
            parts.append(table(head, rows))
    return Section(heading, "\n\n".join(parts))


def rules(evidence: Evidence) -> Section:
    """Acceptance rules of one method and tree: the deterministic one, and those of drafts that are sampled."""
    heading = "Acceptance rules"
    command = (
        "python -m infer.bench --methods eagle2@chain4,eagle2@chain4/rejection,eagle2@chain4/block --temperatures 1"
    )
    bases = distinct(unruled(cell.label)[0] for cell in evidence.bench if unruled(cell.label)[1])
    if not bases:
        return missing(heading, "no label with deterministic, rejection, block or traversal", command)
    parts = [
        "Speedup and tau of one method and one tree. `deterministic` ranks candidates with the noise of the target's "
        "draw in view, and keeps plain decoding's text; the others draw the drafts, and keep its law."
    ]
    for temperature in sorted({cell.temperature for cell in evidence.bench if unruled(cell.label)[1]}):
        for base in bases:
            cells, batch = smallest([cell for cell in evidence.bench if unruled(cell.label)[0] == base], temperature)
            named = {unruled(cell.label)[1] for cell in cells} - {None}
            if not named:
                continue
            # The label without a rule stands for its method's own, unless that was measured by its name as well.
            labels = [
                label
                for label in distinct(cell.label for cell in cells)
                if unruled(label)[1] or rule_of(label) not in named
            ]
            tasks = tasks_of([cell for cell in cells if unruled(cell.label)[1]])
            rows = []
            for label in labels:
                found = [find(cells, label, task) for task in tasks]
                if any(found):
                    rows.append([rule_of(label), *map(both, found), pair(*means(found))])
            parts.append(table([f"{title(base)}, temperature {temperature:g}, batch {batch}", *tasks, "mean"], rows))
    return Section(heading, "\n\n".join(parts))
