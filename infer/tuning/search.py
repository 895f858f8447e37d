"""Searches the fastest method and tree: predicts from costs and recorded drafts, then measures the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import eagle_jax
from eagle_jax.config import ConfigError, TreeConfig
from eagle_jax.runtime.drafters import BoundDrafter, TreeDrafter
from eagle_jax.runtime.profile import Entry
from infer.common.labels import NUMBERS, Label
from infer.common.methods import OPTIONS, Loader, Sources
from infer.common.own import is_own
from infer.tuning.costs import Costs, measure_costs, prefill_seconds
from infer.tuning.replay import Drafts, can_record, record
from infer.tuning.trials import LEAST, Samples, Score, Setting, batches, choose, compete, note, shortlist

LOOKUPS = [f"{length}x{ngram}" for length in (1, 2, 3, 5, 10) for ngram in (1, 3, 5)]
"""Searched settings of prompt lookup: drafted tokens and longest n-gram."""
RECORDED = 8
"""Most replies that are recorded at a time."""
POOL = 64
"""Least nodes of a recorded tree."""


class Grid(NamedTuple):
    """Sizes of the trees that are searched."""

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


class Tuned(NamedTuple):
    """The choice at one setting: the entry of a profile, and all that was measured."""

    entry: Entry
    report: dict[str, Any]


class Tuner:
    """Chooses for one target, setting by setting; loaded weights and recorded drafts are kept.

    Attributes:
      drafters: the searched drafters by label. families: of these, the trees whose cycles one recording gives.
    """

    def __init__(
        self, grid: Grid, target: eagle_jax.Target, sources: Sources, labels: Sequence[str], repeats: int = LEAST
    ):
        self.target, self.sources, self.load, self.repeats = target, sources, Loader(target, sources), repeats
        self.drafters: dict[str, BoundDrafter] = {}
        self.families: dict[str, dict[str, TreeConfig]] = {}
        for label in [one for given in labels for one in self._settings(given, grid)]:
            drafter = self.load(label)
            assert drafter is not None
            self.drafters[label] = drafter
            self.entry(label, Setting(1, 0.0, 1))  # raises if a profile cannot hold it
            if (family := _family(label, drafter)) is not None:
                self.families.setdefault(family, {})[label] = _shape(drafter)
        if not self.drafters:
            raise ValueError("--methods and the grid must leave a choice, got none. Name a method, or widen --depths, "
                             "--top-ks and --nodes.")  # fmt: skip
        self._drafts: dict[tuple[str, float, int | None], dict[str, list[Drafts]]] = {}

    def _settings(self, label: str, grid: Grid) -> list[str]:
        """Returns the labels of a method's settings in the grid; a label with a setting alone."""
        if is_own(label):
            raise ValueError(f"--methods must name methods of the library, got {label}. Time it with infer.bench.")
        if label == "pld":
            return [f"pld@{setting}" for setting in LOOKUPS]
        if "@" in label or label in ("lookahead", "eagle1"):  # eagle1 is the static tree of its paper
            return [label]
        head = self.load(f"{label}@deterministic")
        assert isinstance(head, TreeDrafter)
        return [_label(label, tree) for tree in grid.trees(head.deepest)]

    def drafts(self, family: str, samples: Samples, setting: Setting) -> dict[str, list[Drafts]]:
        """Returns per task the drafts of a family's widest tree along the replies."""
        key = family, setting.temperature, setting.prompt
        if key not in self._drafts:
            trees = self.families[family]
            drafter = self.drafters[max(trees, key=lambda label: trees[label].depth)]
            if isinstance(drafter, TreeDrafter):
                shapes = trees.values()
                depth, top_k = max(tree.depth for tree in shapes), max(tree.top_k for tree in shapes)
                pool = TreeConfig(depth, top_k, depth).pool_size
                most = min(pool, max(POOL, *(tree.num_nodes for tree in shapes)))
                drafter = drafter.with_tree(TreeConfig(depth, top_k, most))
            self._drafts[key] = {}
            for task, prompts in samples.items():
                note(f"{task}: recording the drafts of {family} at temperature {setting.temperature:g}")
                parts = batches(prompts, RECORDED)
                self._drafts[key][task] = [record(self.target, drafter, part, setting) for part in parts]
        return self._drafts[key]

    def predict(self, samples: Samples, setting: Setting) -> tuple[dict[str, Score], Costs]:
        """Predicts the speed over plain decoding per label and task, from costs, recorded drafts and prefills."""
        parts = [part for prompts in samples.values() for part in batches(prompts, setting.batch)]
        whole = [part for part in parts if len(part) == max(map(len, parts))]
        middle = sorted(whole, key=lambda part: max(len(prompt.tokens) for prompt in part))[len(whole) // 2]
        made = {
            family: {tree: self.drafters[label] for label, tree in trees.items()}
            for family, trees in self.families.items()
        }
        costs = measure_costs(self.target, made, middle, setting, self.repeats)
        plain_prefill = prefill_seconds(self.target, None, samples, setting) if made else {}
        found = {}
        for family, trees in self.families.items():
            drafts = self.drafts(family, samples, setting)
            seconds = {
                label: {task: costs.cycle(family, tree) * _passes(drafts[task], tree, setting) for task in samples}
                for label, tree in trees.items()
            }
            # What a drafter reads of the prompt does not depend on its tree. That of the best is compiled anyway.
            best = min(seconds, key=lambda label: sum(seconds[label].values()))
            prefill = prefill_seconds(self.target, self.drafters[best], samples, setting)
            plain = {task: costs.at_rows(1) * _passes(drafts[task], None, setting) for task in samples}
            for label, own in seconds.items():
                ratios = {task: [(plain_prefill[task] + plain[task]) / (prefill[task] + own[task])] for task in samples}
                found[label] = Score(ratios)
        return found, costs

    def tune(self, samples: Samples, setting: Setting, candidates: int) -> Tuned:
        """Predicts, measures the best predicted and what has no prediction, and chooses."""
        predicted, costs = self.predict(samples, setting)
        names = shortlist(predicted, candidates) + [label for label in self.drafters if label not in predicted]
        methods = {label: self.drafters[label] for label in names}
        trial = compete(self.target, methods, samples, setting, self.repeats)
        chosen = choose(trial.scores)
        rows: dict[str, dict[str, Any]] = {}
        for label, score in trial.scores.items():
            guess = round(predicted[label].mean, 3) if label in predicted else None
            rows[label] = {"predicted": guess, "measured": round(score.mean, 3), "worst": round(score.worst, 3)}
        entry = dataclasses.replace(self.entry(chosen, setting), **rows.get(chosen, {}))
        plain = costs.at_rows(1)
        report = {
            "batch": setting.batch,
            "temperature": setting.temperature,
            "prompt": setting.prompt,
            "chosen": chosen,
            "plain_tok_s": round(trial.plain, 1),
            "plain_ms_per_pass": round(1000 * plain, 3),
            "pass_over_plain": {rows: round(costs.at_rows(rows) / plain, 3) for rows in costs.rows},
            "draft_over_plain": {
                method: [[depth, top_k, round(seconds / plain, 3)] for depth, top_k, seconds in measured]
                for method, measured in costs.drafts.items()
            },
            "predicted": {label: round(score.mean, 3) for label, score in predicted.items()},
            "candidates": {label: row | {"safe": trial.scores[label].safe} for label, row in rows.items()},
            "identical": f"{trial.identical}/{trial.compared}",
        }
        return Tuned(entry, report)

    def entry(self, label: str, setting: Setting) -> Entry:
        """Returns the entry of a profile for a label.

        Raises:
          ConfigError: a setting that a profile cannot hold; the message names it.
        """
        own, drafter = Label.parse(label), self.drafters.get(label)
        fields: dict[str, Any] = {}
        if isinstance(drafter, TreeDrafter):
            where = getattr(self.sources, OPTIONS[own.method])
            if where is not None and Path(where).is_dir():
                where = str(Path(where).resolve())
            fields = {"weights": where or "bundled", "tree": drafter.tree}
        elif drafter is not None:
            fields = dict(zip(NUMBERS[own.method], own.numbers, strict=True)) | dict(own.fields)
        place: dict[str, Any] = {"batch": setting.batch, "temperature": setting.temperature, "prompt": setting.prompt}
        try:
            return Entry(**place, method=own.method, **fields)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(f"{label}: {error}") from error


def _passes(parts: Sequence[Drafts], tree: TreeConfig | None, setting: Setting) -> int:
    """Returns the target passes of all replies in batches; the longest row of a batch counts."""
    cycles = [count for part in parts for count in part.cycles(tree)]
    return sum(max(cycles[at : at + setting.batch]) for at in range(0, len(cycles), setting.batch))


def _family(label: str, drafter: BoundDrafter) -> str | None:
    """Returns the name of a label's recording: a method, or a lookup of some n-gram; None without a recording."""
    own = Label.parse(label)
    if own.method == "pld":
        return f"pld{own.numbers[1]}" + "".join(f"/{name}{value}" for name, value in own.fields)
    tree = _shape(drafter)
    plain = isinstance(drafter, TreeDrafter) and tree == TreeConfig(tree.depth, tree.top_k, tree.num_nodes)
    return own.method if plain and can_record(drafter) else None


def _shape(drafter: BoundDrafter) -> TreeConfig:
    """Returns the tree of a drafter; of a lookup a chain."""
    return drafter.tree if isinstance(drafter, TreeDrafter) else TreeConfig.chain(drafter.drafter.depth)


def _label(method: str, tree: TreeConfig) -> str:
    """Returns the label of a method with a chain or dynamic tree."""
    shape = f"chain{tree.depth}" if tree.top_k == 1 else f"{tree.depth}x{tree.top_k}x{tree.num_nodes}"
    return f"{method}@{shape}/deterministic" if method == "sps" else f"{method}@{shape}"
