"""Predicts the speed of every setting from costs and recorded drafts, and measures the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.runtime.drafters import BoundDrafter, TreeDrafter
from eagle_jax.runtime.profile import Entry
from infer.common.labels import Label, named
from infer.common.methods import OPTIONS, Loader, Places
from infer.common.own import is_own
from infer.tuning.costs import Costs, measure_costs
from infer.tuning.replay import Drafts, record
from infer.tuning.trials import Samples, Score, Setting, batches, choose, compete, note, shortlist

RECORDED = 8
"""Most replies that are recorded at a time."""
POOL = 64
"""Least nodes of a recorded tree."""


class Grid(NamedTuple):
    """Holds the sizes of the trees that are searched."""

    depths: Sequence[int]
    top_ks: Sequence[int]
    nodes: Sequence[int]

    def trees(self, deepest: int | None) -> list[TreeConfig]:
        """Returns every possible tree, chains first; a chain has as many nodes as levels."""
        depths = [depth for depth in self.depths if deepest is None or depth <= deepest]
        found = [TreeConfig.chain(depth) for depth in depths if 1 in self.top_ks]
        for depth in depths:
            for top_k in (width for width in self.top_ks if width > 1):
                most = TreeConfig(depth, top_k, depth).pool_size
                found += [TreeConfig(depth, top_k, count) for count in self.nodes if max(depth, 2) <= count <= most]
        return found


class Candidate(NamedTuple):
    """Holds a method with one setting.

    Attributes:
      entry: of a profile; its batch size and temperature do not count.
      predicted: whether the setting is of the grid, so that recorded drafts predict its speed.
    """

    drafter: BoundDrafter
    entry: Entry
    predicted: bool

    @property
    def tree(self) -> TreeConfig:
        """Returns the tree that is verified; of a lookup a chain."""
        return self.entry.tree or TreeConfig.chain(self.drafter.drafter.depth)


Recorded = Mapping[str, Mapping[str, Sequence[Drafts]]]
"""Recorded drafts by method and task."""


def find_candidates(
    methods: Sequence[str], target: eagle_jax.Target, sources: Places, grid: Grid
) -> dict[str, Candidate]:
    """Returns all candidates by label: the grid of a method without a setting, else the setting alone.

    Raises:
      ValueError: a method that a profile cannot hold, or no candidate.
    """
    load = Loader(target, sources)
    found: dict[str, Candidate] = {}
    for text in methods:
        if is_own(text):
            raise ValueError(f"--methods must name methods of the library, got {text}. Time it with infer.bench.")
        method = Label.parse(text).method
        searched = text == method and method not in ("lookahead", "eagle1")  # eagle1 is the static tree of its paper
        if searched and method == "pld":
            labels = [f"pld@{length}" for length in grid.depths]
        elif searched:
            head = load(f"{method}@deterministic")
            assert isinstance(head, TreeDrafter)
            labels = [label_of(method, tree) for tree in grid.trees(head.deepest)]
        else:
            labels = [text]
        for label in labels:
            drafter = load(label)
            assert drafter is not None
            found[label] = Candidate(drafter, _entry(label, drafter, sources), searched)
    if not found:
        raise ValueError("--methods and the grid must leave a choice, got none. Name a method, or widen --depths, "
                         "--top-ks and --nodes.")  # fmt: skip
    return found


def label_of(method: str, tree: TreeConfig) -> str:
    """Returns the label of a method with a chain or dynamic tree."""
    shape = f"chain{tree.depth}" if tree.top_k == 1 else f"{tree.depth}x{tree.top_k}x{tree.num_nodes}"
    return f"{method}@{shape}/deterministic" if method == "sps" else f"{method}@{shape}"


def _entry(text: str, drafter: BoundDrafter, sources: Places) -> Entry:
    """Returns the entry of a profile; a `ConfigError` names the setting that a profile cannot hold."""
    label = Label.parse(text)
    if isinstance(drafter, TreeDrafter):
        where = getattr(sources, OPTIONS[label.method]) or "bundled"
        where = str(Path(where).resolve()) if Path(where).is_dir() else where
        fields: dict[str, Any] = {"weights": where, "tree": drafter.tree}
    else:
        fields = label.fields
    with named(text):
        return Entry(1, 0.0, method=label.method, **fields)  # type: ignore[arg-type]


def families(candidates: Mapping[str, Candidate]) -> dict[str, dict[TreeConfig, BoundDrafter]]:
    """Returns the drafters of every searched method by tree."""
    found: dict[str, dict[TreeConfig, BoundDrafter]] = {}
    for one in candidates.values():
        if one.predicted:
            found.setdefault(one.entry.method, {})[one.tree] = one.drafter
    return found


def record_drafts(
    target: eagle_jax.Target, candidates: Mapping[str, Candidate], samples: Samples, setting: Setting
) -> Recorded:
    """Records the drafts of every searched method along the replies, with a tree that holds its others."""
    found: dict[str, dict[str, list[Drafts]]] = {}
    for method, trees in families(candidates).items():
        depth, top_k = max(tree.depth for tree in trees), max(tree.top_k for tree in trees)
        drafter = next(drafter for tree, drafter in trees.items() if tree.depth == depth)
        if isinstance(drafter, TreeDrafter):
            pool = TreeConfig(depth, top_k, depth).pool_size
            most = min(pool, max(POOL, *(tree.num_nodes for tree in trees)))
            drafter = drafter.with_tree(TreeConfig(depth, top_k, most))
        found[method] = {}
        for task, prompts in samples.items():
            note(f"{task}: recording the drafts of {method} at temperature {setting.temperature:g}")
            found[method][task] = [record(target, drafter, part, setting) for part in batches(prompts, RECORDED)]
    return found


def predict(candidates: Mapping[str, Candidate], recorded: Recorded, costs: Costs, batch: int) -> dict[str, Score]:
    """Predicts the speed of decoding over plain decoding per label and task; the prefill does not count."""
    found = {}
    for label, one in candidates.items():
        if one.predicted:
            cycle = costs.cycle(one.entry.method, one.tree) / costs.at_rows(1)
            drafts = recorded[one.entry.method]
            found[label] = Score({
                task: [passes(parts, None, batch) / (cycle * passes(parts, one.tree, batch))]
                for task, parts in drafts.items()
            })  # fmt: skip
    return found


def passes(parts: Sequence[Drafts], tree: TreeConfig | None, batch: int) -> int:
    """Returns the target passes of all replies in batches, at least one, by the longest row of each batch."""
    cycles = [count for part in parts for count in part.cycles(tree)]
    return max(1, sum(max(cycles[at : at + batch]) for at in range(0, len(cycles), batch)))


def tune_request(
    target: eagle_jax.Target,
    candidates: Mapping[str, Candidate],
    recorded: Recorded,
    samples: Samples,
    setting: Setting,
    *,
    measured: int,
    repeats: int,
) -> tuple[Entry, dict[str, Any]]:
    """Chooses for one setting: predicts, and measures the best `measured` and what has no prediction.

    Returns:
      the entry of a profile, and a report of all measurements.
    """
    every = sorted((prompt for part in samples.values() for prompt in part), key=lambda prompt: len(prompt.tokens))
    start = max(0, (len(every) - setting.batch) // 2)
    middle = every[start : start + setting.batch]
    costs = measure_costs(target, families(candidates), middle, setting, repeats)
    predicted = predict(candidates, recorded, costs, setting.batch)
    names = [*shortlist(predicted, measured), *(label for label, one in candidates.items() if not one.predicted)]
    trial = compete(target, {label: candidates[label].drafter for label in names}, samples, setting, repeats)
    chosen = choose(trial.scores)
    rows: dict[str, dict[str, Any]] = {}
    for label, score in trial.scores.items():
        guess = round(predicted[label].mean, 3) if label in predicted else None
        rows[label] = {"predicted": guess, "measured": round(score.mean, 3), "worst": round(score.worst, 3)}
    place = {"batch": setting.batch, "temperature": setting.temperature, "prompt": setting.prompt}
    own = candidates[chosen].entry if chosen in candidates else Entry(1, 0.0)
    entry = dataclasses.replace(own, **place, **rows.get(chosen, {}))  # type: ignore[arg-type]
    plain = costs.at_rows(1)
    return entry, place | {
        "chosen": chosen,
        "plain_tok_s": round(trial.plain, 1),
        "plain_ms_per_pass": round(1000 * plain, 3),
        "pass_over_plain": {rows: round(costs.at_rows(rows) / plain, 3) for rows in costs.rows},
        "draft_over_plain": {
            method: [[depth, top_k, round(seconds / plain, 3)] for depth, top_k, seconds in found]
            for method, found in costs.drafts.items()
        },
        "predicted": {label: round(score.mean, 3) for label, score in predicted.items()},
        "candidates": {label: row | {"safe": trial.scores[label].safe} for label, row in rows.items()},
        "identical": f"{trial.identical}/{trial.compared}",
    }
