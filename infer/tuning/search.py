"""Predicts the speed of every setting, measures the best and chooses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.runtime.drafters import BoundDrafter, TreeDrafter
from eagle_jax.runtime.profile import Entry
from infer.common.labels import PLAIN, Label, is_own, named
from infer.common.methods import OPTIONS, Loader, Places
from infer.tuning.costs import Costs, between, ends_of, measure_costs
from infer.tuning.prediction import Drafts, record
from infer.tuning.trials import TOLERATED, Samples, Score, Setting, batches, show_progress, time_against_plain

POOL = 64
"""Minimum nodes of a recorded tree."""


class Grid(NamedTuple):
    """Holds the sizes of the trees that are searched."""

    depths: Sequence[int]
    top_ks: Sequence[int]
    nodes: Sequence[int]

    def trees(self, deepest: int | None) -> dict[str, TreeConfig]:
        """Returns all possible trees, chains first, keyed by the setting in their labels.

        A chain has one node per level.
        """
        depths = [depth for depth in self.depths if deepest is None or depth <= deepest]
        found = {f"chain{depth}": TreeConfig.chain(depth) for depth in depths if 1 in self.top_ks}
        for depth in depths:
            for top_k in (width for width in self.top_ks if width > 1):
                most = TreeConfig(depth, top_k, depth).pool_size
                counts = [count for count in self.nodes if max(depth, 2) <= count <= most]
                found |= {f"{depth}x{top_k}x{count}": TreeConfig(depth, top_k, count) for count in counts}
        return found


class Candidate(NamedTuple):
    """Holds a method with one setting.

    Attributes:
      entry: profile entry; its batch size and temperature are placeholders.
      tree: predicted from recorded drafts, a chain for a lookup; None: not predicted, always measured.
    """

    drafter: BoundDrafter
    entry: Entry
    tree: TreeConfig | None


Recorded = Mapping[str, Drafts]
"""Recorded drafts by method; their replies are those of all tasks, in order."""


def find_candidates(
    methods: Sequence[str], target: eagle_jax.Target, sources: Places, grid: Grid
) -> dict[str, Candidate]:
    """Returns all candidates by label.

    A method without a setting gives the whole grid; a label with a setting gives one candidate.

    Raises:
      ValueError: a method that a profile cannot hold, or no candidate.
    """
    load = Loader(target, sources)
    found: dict[str, Candidate] = {}
    for text in methods:
        if is_own(text):
            raise ValueError(f"--methods must name methods of the library, got {text}. Time it with infer.bench.")
        parsed = Label.parse(text)
        method = parsed.method
        if parsed.lookup is not None:
            raise ValueError(f"--methods must name methods that a profile can hold, got {text}, two in one. "
                             "Time it with infer.bench.")  # fmt: skip
        searched = text == method and method not in ("lookahead", "eagle1")  # eagle1 is the static tree of its paper
        trees: dict[str, TreeConfig | None] = {text: None}
        if searched and method == "pld":
            trees = {f"pld@{length}": TreeConfig.chain(length) for length in grid.depths}
        elif searched:
            head: Any = load(f"{method}@deterministic")
            rule = "/deterministic" if method == "sps" else ""
            trees = {f"{method}@{shape}{rule}": tree for shape, tree in grid.trees(head.max_depth).items()}
        for label, tree in trees.items():
            drafter: Any = load(label)
            found[label] = Candidate(drafter, _entry(label, drafter, sources), tree)
    if not found:
        raise ValueError("--methods and the grid must leave a choice, got none. Name a method, or widen --depths, "
                         "--top-ks and --nodes.")  # fmt: skip
    return found


def _entry(text: str, drafter: BoundDrafter, sources: Places) -> Entry:
    """Returns the entry of a profile; a `ConfigError` names the setting that a profile cannot hold."""
    label = Label.parse(text)
    fields: dict[str, Any] = label.fields
    if isinstance(drafter, TreeDrafter):
        where = getattr(sources, OPTIONS[label.method]) or "bundled"
        fields = {"weights": str(Path(where).resolve()) if Path(where).exists() else where, "tree": drafter.tree}
    with named(text):
        return Entry(1, 0.0, method=label.method, **fields)  # type: ignore[arg-type]


def families(candidates: Mapping[str, Candidate]) -> dict[str, dict[TreeConfig, BoundDrafter]]:
    """Returns the drafters of every searched method by tree."""
    found: dict[str, dict[TreeConfig, BoundDrafter]] = {}
    for one in candidates.values():
        if one.tree is not None:
            found.setdefault(one.entry.method, {})[one.tree] = one.drafter
    return found


def record_drafts(
    target: eagle_jax.Target, candidates: Mapping[str, Candidate], samples: Samples, setting: Setting
) -> Recorded:
    """Records every method's drafts along the replies, with one tree that contains all searched trees."""
    found: dict[str, Drafts] = {}
    prompts = list(itertools.chain(*samples.values()))
    for method, trees in families(candidates).items():
        depth, top_k = max(tree.depth for tree in trees), max(tree.top_k for tree in trees)
        drafter = next(drafter for tree, drafter in trees.items() if tree.depth == depth)
        if isinstance(drafter, TreeDrafter):
            pool = TreeConfig(depth, top_k, depth).pool_size
            most = min(pool, max(POOL, *(tree.num_nodes for tree in trees)))
            drafter = drafter.with_tree(TreeConfig(depth, top_k, most))
        show_progress(f"recording: compiling {method} for {len(prompts)} replies")
        found[method] = record(target, drafter, prompts, setting)
    return found


def predict(
    candidates: Mapping[str, Candidate], recorded: Recorded, costs: Costs, samples: Samples, batch: int
) -> dict[str, Score]:
    """Predicts the speedup over plain decoding per label and task; the prefill does not count."""
    found = {}
    for label, one in candidates.items():
        if one.tree is not None:
            drafts = recorded[one.entry.method]
            cycle = costs.cycle(one.entry.method, one.tree) / costs.at_rows(1)
            plain, own = (passes(drafts, tree, samples, batch) for tree in (None, one.tree))
            found[label] = Score({task: [plain[task] / (cycle * own[task])] for task in samples})
    return found


def passes(drafts: Drafts, tree: TreeConfig | None, samples: Samples, batch: int) -> dict[str, int]:
    """Returns the target passes of every task in batches, at least one, by the longest row of each batch."""
    cycles = iter(drafts.cycles(tree))
    counts = {task: list(itertools.islice(cycles, len(prompts))) for task, prompts in samples.items()}
    return {task: max(1, sum(max(part) for part in batches(own, batch))) for task, own in counts.items()}


def affordable(samples: Samples, batch: int, share: float) -> Samples:
    """Returns about `share` of the prompts of every task, the first ones, in whole batches; at least one batch."""
    return {task: prompts[: max(1, round(share * len(prompts) / batch)) * batch] for task, prompts in samples.items()}


def shortlist(predicted: Mapping[str, Score], count: int) -> list[str]:
    """Returns the labels to measure: every method's best within 10% of the best of all, then the others.

    Settings predicted to be too slow on a task come last, since they would not be chosen.
    """
    order = sorted(predicted, key=lambda label: (predicted[label].worst < 1 - TOLERATED, -predicted[label].mean))
    close = [label for label in order if predicted[label].mean > 0.9 * predicted[order[0]].mean]
    first = {label.partition("@")[0]: label for label in reversed(close)}
    return sorted(order, key=lambda label: label not in first.values())[:count]


def tune_request(
    target: eagle_jax.Target,
    candidates: Mapping[str, Candidate],
    recorded: Recorded,
    samples: Samples,
    setting: Setting,
    measured: int,
    repeats: int,
    minutes: float,
) -> tuple[Entry, dict[str, Any]]:
    """Chooses for one setting: the safe method with the largest mean; plain decoding if none is safe.

    A safe method beats plain decoding in the mean over tasks and loses at most `TOLERATED` on any task, both by more
    than the spread (`Score.safe`). The `measured` best predicted settings are measured, and those without a prediction,
    on as many prompts as take `minutes` by the prediction.

    Returns:
      the entry of a profile, and a report of all measurements.
    """
    every = sorted(itertools.chain(*samples.values()), key=lambda prompt: len(prompt.tokens))
    places = 0, max(0, (len(every) - setting.batch) // 2), max(0, len(every) - setting.batch)
    sample = [every[place:][: setting.batch] for place in places]
    measured_at = ends_of(sample)
    first, *longer = [measure_costs(target, families(candidates), part, setting, repeats) for part in measured_at]
    few, middle, many = (len(part[-1].tokens) for part in sample)  # prompts are in the order of their lengths
    costs = between(first, longer[0], (middle - few) / (many - few)) if longer else first
    predicted = predict(candidates, recorded, costs, samples, setting.batch)
    names = [*shortlist(predicted, measured), *(label for label, one in candidates.items() if one.tree is None)]
    tokens = len(every) * setting.max_new_tokens / setting.batch
    once = costs.at_rows(1) * tokens * (1 + sum(1 / predicted[name].mean if name in predicted else 1 for name in names))
    part = affordable(samples, setting.batch, 60 * minutes / (once * repeats))
    show_progress(f"{len(predicted)} settings are predicted. The best are measured: {', '.join(names)}")
    parts = {
        label: first.parts(one.entry.method, one.tree, *longer)
        for label in names
        if (one := candidates[label]).tree is not None
    }
    drafters = {label: candidates[label].drafter for label in names}
    expected = {label: predicted[label].mean for label in parts}
    scores, identical = time_against_plain(target, drafters, part, setting, repeats, costs=parts, expected=expected)
    safe = {label: score.mean for label, score in scores.items() if score.safe}
    chosen = max(safe, key=safe.__getitem__, default=PLAIN)
    rows: dict[str, dict[str, Any]] = {}
    for label, score in scores.items():
        guess = round(predicted[label].mean, 3) if label in predicted else None
        rows[label] = {"predicted": guess, "measured": round(score.mean, 3), "worst": round(score.worst, 3)}
    place = {"batch": setting.batch, "temperature": setting.temperature, "prompt": setting.prompt}
    own = candidates[chosen].entry if chosen in candidates else Entry(1, 0.0)
    entry = dataclasses.replace(own, **place, cost=parts.get(chosen), **rows.get(chosen, {}))  # type: ignore[arg-type]
    plain = costs.at_rows(1)
    return entry, place | {
        "chosen": chosen,
        "plain_ms_per_pass": round(1000 * plain, 3),
        "pass_over_plain": {rows: round(costs.at_rows(rows) / plain, 3) for rows in costs.rows},
        "predicted": {label: round(score.mean, 3) for label, score in predicted.items()},
        "candidates": {label: row | {"safe": scores[label].safe} for label, row in rows.items()},
        "measured_prompts": sum(map(len, part.values())),
        "identical": identical,
    }
