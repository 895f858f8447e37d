"""Searches the fastest method and tree: predicts from costs and recorded drafts, then measures the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import eagle_jax
from eagle_jax.config import ConfigError, TreeConfig
from eagle_jax.runtime.drafters import BoundDrafter, TreeDrafter
from eagle_jax.runtime.profile import REQUIRED, Entry
from infer.common.labels import PLAIN, Label
from infer.common.methods import OPTIONS, Loader, Sources
from infer.common.own import is_own
from infer.tuning.choice import LEAST, Score, choose, shortlist
from infer.tuning.costs import Costs, designs, measure_costs, prefill_seconds, speedup
from infer.tuning.replay import Replay, count_passes, trees
from infer.tuning.shadow import can_record, record
from infer.tuning.trials import Sample, Setting, Trial, compete, note, timed_call

Samples = dict[str, Sample]
RECORDED = 8
"""Most replies that are recorded at a time."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """What is searched, and how often it is measured.

    Attributes:
      depths, top_ks, nodes: of trees. lengths, ngrams: of prompt lookup. widths: rows of measured target passes.
      candidates: how many of the best predicted are measured. repeats: of all measurements.
      turns: cycles per measurement of a cycle.
    """

    depths: tuple[int, ...]
    top_ks: tuple[int, ...]
    nodes: tuple[int, ...]
    lengths: tuple[int, ...]
    ngrams: tuple[int, ...]
    widths: tuple[int, ...]
    candidates: int = 4
    repeats: int = 5
    turns: int = 8


class Tuned(NamedTuple):
    """The choice at one setting: the entry of a profile, and all that was measured."""

    entry: Entry
    report: dict[str, Any]


class Tuner:
    """Chooses for one target, setting by setting; loaded weights and recorded drafts are kept."""

    def __init__(self, grid: Grid, target: eagle_jax.Target, sources: Sources, labels: Sequence[str]):
        self.grid, self.target, self.sources = grid, target, sources
        self.load = Loader(target, sources)
        self.widths = sorted({1, *grid.widths})
        self.drafters: dict[str, BoundDrafter] = {}
        known: list[dict[str, Any]] = []
        for label in labels:
            for text in [label] if "@" in label else self.labels(label):
                if (draft := self.load.draft(text)) in known:
                    continue  # one head and tree under two names, such as eagle1 and eagle2
                known.append(draft)
                drafter = self.load(text)
                assert drafter is not None
                entry_of(text, drafter, sources, Setting(1, 0.0, 1))  # raises if a profile cannot hold it
                self.drafters[text] = drafter
        if not self.drafters:
            raise ValueError("--methods and the grid must leave a choice, got none. Name a method, or widen --depths, "
                             "--top-ks and --nodes.")  # fmt: skip
        self._replays: dict[tuple[str, float, int | None], dict[str, Replay]] = {}

    def labels(self, method: str) -> list[str]:
        """Returns the labels of all settings of a method in the grid."""
        if method == "pld":
            return [f"pld@{length}x{ngram}" for length in self.grid.lengths for ngram in self.grid.ngrams]
        if method == "lookahead":
            return ["lookahead@5x7x7"]
        if is_own(method):
            raise ValueError(f"--methods must name methods of the library, got {method}. Time it with infer.bench.")
        if method == "eagle1":
            return ["eagle1@static"]  # its paper's; another tree of it can be named
        head = self.load(method + ("/deterministic" if "@" in method else "@deterministic"))
        assert isinstance(head, TreeDrafter)
        depths = [d for d in self.grid.depths if head.deepest is None or d <= head.deepest]
        shapes = trees(depths, self.grid.top_ks, self.grid.nodes)
        return [label_of(method, tree) for tree in shapes]

    def replayed(self) -> dict[str, list[str]]:
        """Returns what is recorded (the wide tree of a method, a long lookup as "pld3") with the labels it covers."""
        found: dict[str, list[str]] = {}
        for label, drafter in self.drafters.items():
            method = Label.parse(label).method
            tree = drafter.tree if isinstance(drafter, TreeDrafter) else None
            plain = tree is not None and tree == TreeConfig(tree.depth, tree.top_k, tree.num_nodes)
            if method == "pld":
                own = Label.parse(label)
                found.setdefault(f"pld{own.numbers[1]}" + "".join(f"/{n}{v}" for n, v in own.fields), []).append(label)
            elif plain and can_record(drafter):
                found.setdefault(method, []).append(label)
        return found

    def replays(self, method: str, labels: Sequence[str], samples: Samples, setting: Setting) -> dict[str, Replay]:
        """Returns per task the drafts of a method along the replies; `method` and `labels` are of `replayed`."""
        key = method, setting.temperature, setting.prompt
        if key not in self._replays:
            drafter: Any = self.drafters[labels[0]]
            if method.startswith("pld"):
                drafter = max((self.drafters[label] for label in labels), key=lambda one: one.drafter.depth)
            else:
                shapes = [shape_of(self.drafters[label]) for label in labels]
                depth, top_k = max(shape.depth for shape in shapes), max(shape.top_k for shape in shapes)
                drafter = drafter.with_tree(TreeConfig(depth, top_k, TreeConfig(depth, top_k, depth).pool_size))
            options: dict[str, Any] = {"max_new_tokens": setting.max_new_tokens, "temperature": setting.temperature}
            self._replays[key] = {}
            for task, sample in samples.items():
                note(f"{task}: recording the drafts of {method} at temperature {setting.temperature:g}")
                parts = [
                    record(self.target, drafter, part.prompts, key=part.keys, **options)
                    for part in sample.batches(RECORDED)
                ]
                self._replays[key][task] = Replay.joined(parts)
        return self._replays[key]

    def costs(self, samples: Samples, setting: Setting) -> Costs:
        """Measures passes, drafts and what cannot be replayed, at a batch of prompts of middle length."""
        parts = [part for sample in samples.values() for part in sample.batches(setting.batch)]
        largest = max(len(part.prompts) for part in parts)
        whole = [part for part in parts if len(part.prompts) == largest]
        middle = sorted(whole, key=lambda part: max(map(len, part.prompts)))[len(whole) // 2]
        heads: dict[str, tuple[Any, list[TreeConfig]]] = {}
        replayed = {method: labels for method, labels in self.replayed().items() if not method.startswith("pld")}
        for method, labels in replayed.items():
            shapes = [shape_of(self.drafters[label]) for label in labels]
            chosen = designs([shape.depth for shape in shapes], [shape.top_k for shape in shapes], self.widths)
            heads[method] = self.drafters[labels[0]], chosen
        covered = {label for labels in replayed.values() for label in labels}
        fixed = {label: drafter for label, drafter in self.drafters.items() if label not in covered}
        return measure_costs(
            self.target, heads, fixed, middle, setting, self.widths, self.grid.turns, self.grid.repeats
        )

    def predict(self, samples: Samples, setting: Setting) -> tuple[dict[str, Score], Costs]:
        """Predicts the speed over plain decoding per label and task, from costs and replayed cycles."""
        costs, replayed = self.costs(samples, setting), self.replayed()
        covers = {label: method for method, labels in replayed.items() for label in labels}
        prefills: dict[str | None, dict[str, float]] = {None: prefill_seconds(self.target, None, samples, setting)}
        plain = costs.passes.at(1)
        found = {}
        for label, drafter in self.drafters.items():
            method, shape = Label.parse(label).method, shape_of(drafter)
            if label in costs.whole:
                cycle = costs.whole[label]
            else:
                cycle = costs.passes.at(shape.num_nodes + 1) + costs.drafts[method].at(shape.depth, shape.top_k)
            # What a drafter reads of the prompt does not depend on its tree; lookups only copy it.
            reader = None if method == "pld" else covers.get(label, label)
            if reader not in prefills:
                prefills[reader] = prefill_seconds(self.target, drafter, samples, setting)
            ratios: dict[str, tuple[float, ...]] = {}
            for task, sample in samples.items():
                if label in covers:
                    replay = self.replays(covers[label], replayed[covers[label]], samples, setting)[task]
                    cycles = replay.cycles(None), replay.cycles(shape)
                else:
                    cycles = self._count(None, sample, setting), self._count(drafter, sample, setting)
                alone, drafted = (count_passes(one, setting.batch) for one in cycles)
                ratios[task] = (speedup(alone, plain, drafted, cycle, prefills[None][task], prefills[reader][task]),)
            found[label] = Score(ratios)
        return found, costs

    def _count(self, drafter: BoundDrafter | None, sample: Sample, setting: Setting) -> np.ndarray:
        """Counts the cycles of every reply by generating it."""
        parts = sample.batches(setting.batch)
        return np.concatenate([timed_call(self.target, drafter, part, setting)().cycles for part in parts])

    def tune(self, samples: Samples, setting: Setting) -> Tuned:
        """Predicts, measures the best predicted, and chooses."""
        predicted, costs = self.predict(samples, setting)
        names = shortlist(predicted, self.grid.candidates)
        trial = self.measure(names, samples, setting, self.grid.repeats)
        chosen = choose(trial.scores)
        if chosen is None and (undecided := [name for name in names if trial.scores[name].promising]):
            # Faster, but by less than the spread of so few repetitions.
            more = self.measure(undecided, samples, setting, max(LEAST, 3 * self.grid.repeats))
            trial = trial.and_then(more)
            chosen = choose(trial.scores)
        entry = entry_of(chosen or PLAIN, self.drafters.get(chosen or ""), self.sources, setting)
        rows = {}
        for label, score in trial.scores.items():
            rows[label] = {"predicted": round(predicted[label].mean, 3), "measured": round(score.mean, 3),
                           "worst": round(score.worst, 3), "safe": score.safe}  # fmt: skip
        if chosen is not None:
            own = rows[chosen]
            entry = dataclasses.replace(entry, predicted=own["predicted"], measured=own["measured"], worst=own["worst"])
        plain = costs.passes.at(1)
        report = {
            "batch": setting.batch,
            "temperature": setting.temperature,
            "prompt": setting.prompt,
            "chosen": chosen or PLAIN,
            "plain_tok_s": round(trial.plain, 1),
            "plain_ms_per_pass": round(1000 * plain, 3),
            "pass_over_plain": {width: round(costs.passes.at(width) / plain, 3) for width in self.widths},
            "draft_over_plain": {
                method: [{"depth": depth, "top_k": width, "passes": round(seconds / plain, 3)}
                         for depth, width, seconds in cost.measured]
                for method, cost in costs.drafts.items()
            },
            "cycle_over_plain": {label: round(cost / plain, 3) for label, cost in costs.whole.items()},
            "acceptance": {
                method: {task: np.round(replay.acceptance(), 3).tolist() for task, replay in replays.items()}
                for (method, *at), replays in self._replays.items()
                if at == [setting.temperature, setting.prompt]
            },
            "predicted": {label: round(score.mean, 3) for label, score in predicted.items()},
            "candidates": rows,
            "identical": f"{trial.identical}/{trial.compared}",
        }  # fmt: skip
        return Tuned(entry, report)

    def measure(self, labels: Sequence[str], samples: Samples, setting: Setting, repeats: int) -> Trial:
        """Times whole calls in turns with plain decoding."""
        return compete(self.target, {label: self.drafters[label] for label in labels}, samples, setting, repeats)


def entry_of(label: str, drafter: BoundDrafter | None, sources: Sources, setting: Setting) -> Entry:
    """Returns the entry of a profile for a label.

    Raises:
      ValueError: a setting that a profile cannot hold, naming it.
    """
    method = Label.parse(label).method
    fields: dict[str, Any] = {}
    if isinstance(drafter, TreeDrafter):
        where = getattr(sources, OPTIONS[method])
        if where is not None and Path(where).is_dir():
            where = str(Path(where).resolve())
        fields = {"weights": where or "bundled", "tree": drafter.tree}
    elif method in REQUIRED:
        own = Label.parse(label)
        names = ("length", "ngram") if method == "pld" else REQUIRED[method]
        fields = dict(zip(names, own.numbers, strict=True)) | dict(own.fields)
    try:
        return Entry(setting.batch, setting.temperature, method, prompt=setting.prompt, **fields)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from error


def shape_of(drafter: BoundDrafter) -> TreeConfig:
    """Returns the tree of a drafter; of a lookup a chain."""
    return drafter.tree if isinstance(drafter, TreeDrafter) else TreeConfig.chain(drafter.drafter.depth)


def label_of(method: str, tree: TreeConfig) -> str:
    """Returns the label of a method with a chain or dynamic tree."""
    shape = f"chain{tree.depth}" if tree.top_k == 1 else f"{tree.depth}x{tree.top_k}x{tree.num_nodes}"
    return f"{method}@{shape}/deterministic" if method == "sps" else f"{method}@{shape}"
