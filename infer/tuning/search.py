"""The search for the fastest method and tree: what is predicted from costs and replayed drafts, then measured."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import eagle_jax
from eagle_jax.config import ConfigError, TreeConfig
from eagle_jax.runtime.drafters import BoundDrafter, TreeDrafter
from eagle_jax.runtime.profile import BUNDLED, NUMBERS, Entry, Profile
from infer.common.labels import PLAIN, Label
from infer.common.methods import OPTIONS, Loader, Sources
from infer.common.own import is_own
from infer.tuning.choice import LEAST, SLOWER, choose_of, may_be_safe, safe, shortlist, spread
from infer.tuning.replay import Replay, Score, count_passes, speedup, trees
from infer.tuning.shadow import can_watch
from infer.tuning.trials import (
    Costs,
    Sample,
    Setting,
    Trial,
    compete,
    cycles_of,
    designs,
    measure_costs,
    note,
    prefill_seconds,
    record,
)

BRIEF = 3
"""Repetitions of a round of an exhaustive search, whose mean is enough to go on with a third."""
AUTO = "auto"
"""Label of what a profile chooses, among those of `Tuner.drafters`."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """What is searched, and how thoroughly it is measured.

    Attributes:
      depths, top_ks, nodes: of trees. lengths: of what prompt lookup drafts. ngrams: of most tokens that it looks up.
      widths: rows of measured target passes.
      candidates: of the best predicted, how many are measured. repeats: of all measurements.
      turns: cycles per measurement of a cycle. exhaustive: whether all are measured.
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
    exhaustive: bool = False


class Tuned(NamedTuple):
    """The result at one setting.

    Attributes:
      entry: of the profile. plain: tokens per second of plain decoding. report: for the JSON object.
    """

    entry: Entry
    plain: float
    report: dict[str, Any]


class Tuner:
    """Chooses for one target, setting by setting; what is watched and loaded is kept."""

    def __init__(
        self, grid: Grid, target: eagle_jax.Target, sources: Sources, labels: Sequence[str], samples: dict[str, Sample]
    ):
        self.grid, self.target, self.sources, self.samples = grid, target, sources, samples
        self.load = Loader(target, sources)
        self.widths = sorted({1, *grid.widths})
        self.drafters: dict[str, BoundDrafter] = {}
        known: list[dict[str, Any]] = []
        for label in labels:
            for text in [label] if "@" in label else self.labels(label):
                if (draft := self.load.draft(text)) in known:
                    continue  # the same head and tree under another name, as of eagle1 and eagle2
                known.append(draft)
                with_setting = self.load(text)
                assert with_setting is not None
                entry_of(text, with_setting, sources, Setting(1, 0.0, 1))  # refuses what a profile cannot hold
                self.drafters[text] = with_setting
        if not self.drafters:
            raise ValueError("--methods and the grid leave nothing to choose from: name a method, or widen --depths, "
                             "--top-ks and --nodes")  # fmt: skip
        self._replays: dict[tuple[str, float], dict[str, Replay]] = {}
        self.options: dict[str, Any] = {}

    def asking(self, samples: dict[str, Sample]) -> Tuner:
        """The same tuner, its weights shared, with other prompts."""
        other = copy.copy(self)
        other.samples, other._replays = samples, {}
        return other

    def follow(self, profile: Profile) -> None:
        """Makes what a profile chooses, prompt by prompt, one more method, `AUTO`."""
        self.drafters[AUTO], self.options = AUTO, {"profile": profile}  # type: ignore[assignment]

    def labels(self, method: str) -> list[str]:
        """Labels of all settings of a method that are searched."""
        if method == "pld":
            return [f"pld@{length}x{ngram}" for length in self.grid.lengths for ngram in self.grid.ngrams]
        if method == "lookahead":
            return ["lookahead@5x7x7"]
        if is_own(method):
            raise ValueError(f"{method}: a profile holds methods of the library alone; infer.bench times your own")
        if method == "eagle1":
            return ["eagle1@static"]  # its paper's; another tree of it can be named
        head = self.load(method + ("/deterministic" if "@" in method else "@deterministic"))
        assert isinstance(head, TreeDrafter)
        depths = [d for d in self.grid.depths if head.deepest is None or d <= head.deepest]
        shapes = trees(depths, self.grid.top_ks, self.grid.nodes)
        reached = {tree.num_nodes for tree in shapes if tree.top_k > 1}
        if max(self.grid.top_ks) > 1 and (idle := [nodes for nodes in self.grid.nodes if nodes not in reached]):
            print(f"{method}: no tree of the grid has {', '.join(map(str, idle))} nodes: --depths and --top-ks are too "
                  "small for so many, or too deep for so few", file=sys.stderr)  # fmt: skip
        return [label_of(method, tree) for tree in shapes]

    def replayed(self) -> dict[str, list[str]]:
        """By what is watched (the wide tree of a method, a long lookup as "pld3") the labels that follow from it."""
        found: dict[str, list[str]] = {}
        for label, drafter in self.drafters.items():
            method = Label.parse(label).method
            tree = drafter.tree if isinstance(drafter, TreeDrafter) else None
            plain = tree is not None and tree == TreeConfig(tree.depth, tree.top_k, tree.num_nodes)
            if method == "pld":
                own = Label.parse(label)
                found.setdefault(f"pld{own.numbers[1]}" + "".join(f"/{n}{v}" for n, v in own.fields), []).append(label)
            elif plain and can_watch(drafter):
                found.setdefault(method, []).append(label)
        return found

    def replays(self, method: str, labels: Sequence[str], setting: Setting) -> dict[str, Replay]:
        """Per task the drafts of a method along the replies; `method` and `labels` are of `replayed`."""
        if (method, setting.temperature) not in self._replays:
            shapes = [shape_of(self.drafters[label]) for label in labels]
            if method.startswith("pld"):
                widest: Any = max((self.drafters[label] for label in labels), key=lambda one: one.drafter.depth)
            else:
                depth, top_k = (max(getattr(shape, name) for shape in shapes) for name in ("depth", "top_k"))
                pool = TreeConfig(depth, top_k, depth).pool_size
                drafter: Any = self.drafters[labels[0]]
                widest = drafter.with_tree(TreeConfig(depth, top_k, pool))
            self._replays[method, setting.temperature] = {}
            for task, sample in self.samples.items():
                note(f"{task}: watching {method} at temperature {setting.temperature:g}")
                found = record(self.target, widest, sample, setting)
                self._replays[method, setting.temperature][task] = found
        return self._replays[method, setting.temperature]

    def costs(self, setting: Setting) -> Costs:
        """Of passes, drafts and of the methods that are measured as they are, at a batch of middling prompts."""
        parts = [part for sample in self.samples.values() for part in sample.batches(setting.batch)]
        parts = [part for part in parts if len(part.prompts) == min(setting.batch, max(len(p.prompts) for p in parts))]
        middle = sorted(parts, key=lambda part: max(map(len, part.prompts)))[len(parts) // 2]
        heads: dict[str, tuple[Any, list[TreeConfig]]] = {}
        replayed = self.replayed()
        for method, labels in replayed.items():
            if not method.startswith("pld"):
                shapes = [shape_of(self.drafters[label]) for label in labels]
                depths, top_ks = [s.depth for s in shapes], [s.top_k for s in shapes]
                heads[method] = self.drafters[labels[0]], designs(depths, top_ks, self.widths)
        within = {label for method in heads for label in replayed[method]}
        fixed = {label: drafter for label, drafter in self.drafters.items() if label not in within}
        return measure_costs(
            self.target, heads, fixed, middle, setting, self.widths, self.grid.turns, self.grid.repeats
        )

    def predict(self, setting: Setting) -> tuple[dict[str, Score], Costs]:
        """Speed over plain decoding per label and task, from costs and replayed cycles."""
        costs, replayed = self.costs(setting), self.replayed()
        watched = {label: method for method, labels in replayed.items() for label in labels}
        before: dict[str | None, dict[str, float]] = {None: prefill_seconds(self.target, None, self.samples, setting)}
        plain = costs.passes.at(1)
        found = {}
        for label, drafter in self.drafters.items():
            method, shape = Label.parse(label).method, shape_of(drafter)
            if label in costs.whole:
                cycle = costs.whole[label]
            else:
                cycle = costs.passes.at(shape.num_nodes + 1) + costs.drafts[method].at(shape.depth, shape.top_k)
            # What a drafter reads of the prompt does not depend on its tree; lookups only copy it.
            reader = None if method == "pld" else watched.get(label, label)
            if reader not in before:
                before[reader] = prefill_seconds(self.target, drafter, self.samples, setting)
            ratios: dict[str, tuple[float, ...]] = {}
            for task, sample in self.samples.items():
                if label in watched:
                    replay = self.replays(watched[label], replayed[watched[label]], setting)[task]
                    drafted, alone = replay.cycles(shape), replay.cycles(None)
                else:
                    drafted = np.array(cycles_of(self.target, drafter, sample, setting))
                    alone = self.plain_cycles(task, setting)
                passes = [count_passes(cycles, setting.batch) for cycles in (alone, drafted)]
                ratios[task] = (speedup(passes[0], plain, passes[1], cycle, before[None][task], before[reader][task]),)
            found[label] = Score(ratios)
        return found, costs

    def plain_cycles(self, task: str, setting: Setting) -> np.ndarray:
        """Cycles of plain decoding per reply."""
        parts = self.samples[task].batches(setting.batch)
        options: dict[str, Any] = {"temperature": setting.temperature, "max_new_tokens": setting.max_new_tokens}
        texts = [eagle_jax.generate(self.target, None, part.prompts, key=part.keys, **options).tokens for part in parts]
        return np.array([len(row) - 1 for text in texts for row in text])

    def tune(self, setting: Setting) -> Tuned:
        """Predicts, measures the best, chooses."""
        predicted, costs = self.predict(setting)
        names = shortlist(predicted, self.grid.candidates)
        trial = self.measure(names, setting)
        chosen = choose_of(trial.scores)
        if chosen is None and (undecided := [name for name in names if may_be_safe(trial.scores[name])]):
            # Faster, but by less than the spread, or measured too seldom to know one: more repetitions tell.
            trial = trial.and_then(self.measure(undecided, setting, max(LEAST, 3 * self.grid.repeats)))
            chosen = choose_of(trial.scores)
        report: dict[str, Any] = {name: getattr(setting, name) for name in ("batch", "temperature", "prompt")}
        if self.grid.exhaustive:
            chosen, trial, report["exhaustive"] = self.exhaust(chosen, trial, setting)
        name = chosen or PLAIN
        entry = entry_of(name, self.drafters.get(name), self.sources, setting)
        if chosen is not None:
            score = trial.scores[chosen]
            entry = dataclasses.replace(entry, predicted=round(predicted[chosen].mean, 3),
                                        measured=round(score.mean, 3), worst=round(score.worst, 3))  # fmt: skip
        errors = {label: predicted[label].mean / score.mean - 1 for label, score in trial.scores.items()}
        report |= {
            "chosen": name,
            "plain_tok_s": round(trial.plain, 1),
            "plain_ms_per_pass": round(1000 * costs.passes.at(1), 3),
            "pass_over_plain": {rows: round(costs.passes.at(rows) / costs.passes.at(1), 3) for rows in self.widths},
            "draft_over_plain": {
                method: [{"depth": depth, "top_k": width, "passes": round(seconds / costs.passes.at(1), 3)}
                         for depth, width, seconds in cost.measured]
                for method, cost in costs.drafts.items()
            },
            "cycle_over_plain": {label: round(cost / costs.passes.at(1), 3) for label, cost in costs.whole.items()},
            "acceptance": self.acceptance(setting),
            "predicted": {label: round(score.mean, 3) for label, score in predicted.items()},
            "candidates": {
                label: {"predicted": round(predicted[label].mean, 3), "measured": round(score.mean, 3),
                        "worst": round(score.worst, 3), "safe": safe(score), "error": round(errors[label], 3)}
                for label, score in trial.scores.items()
            },
            "mean_absolute_error": round(float(np.mean(np.abs(list(errors.values())))), 3),
            "searched": len(predicted),
            "identical": f"{trial.identical}/{trial.compared}",
        }  # fmt: skip
        return Tuned(entry, trial.plain, report)

    def acceptance(self, setting: Setting) -> dict[str, Any]:
        """Of every method that was watched: candidates by depth and rank, over the positions of all tasks' replies.

        `reached`, `accepted`: [depth][rank] counts, as in `Replay.by_position`. `unknown`: by top_k of the grid the
        share of a narrower beam's nodes of which nothing was watched, the most over tasks.
        """
        found = {}
        for (method, temperature), replays in self._replays.items():
            if temperature == setting.temperature:
                tables = [replay.by_position() for replay in replays.values()]
                ranks = max(reached.shape[1] for reached, _ in tables)
                wide = np.array(
                    [[np.pad(one, ((0, 0), (0, ranks - one.shape[1]))) for one in table] for table in tables]
                )
                reached, accepted = wide.sum(axis=0).tolist()
                unknown = {k: round(max(replay.unknown(k) for replay in replays.values()), 4)
                           for k in self.grid.top_ks if k <= ranks}  # fmt: skip
                found[method] = {"reached": reached, "accepted": accepted, "unknown": unknown}
        return found

    def measure(
        self,
        labels: Sequence[str],
        setting: Setting,
        repeats: int | None = None,
        samples: dict[str, Sample] | None = None,
    ) -> Trial:
        """Whole calls in turns with plain decoding."""
        methods = {label: self.drafters[label] for label in labels}
        repeats = repeats or self.grid.repeats
        return compete(self.target, methods, samples or self.samples, setting, repeats, **self.options)

    def exhaust(self, chosen: str | None, trial: Trial, setting: Setting) -> tuple[str | None, Trial, dict[str, Any]]:
        """Measures all there is, with a batch of every task; the best third again with three times as many prompts.

        And so on until no more than `candidates` are left, which are measured with all prompts in turns with the
        choice. What is dropped was measured, never only predicted.
        """
        rest = [label for label in self.drafters if label != AUTO]
        count, prompts, rounds = len(rest), setting.batch, []
        while len(rest) > self.grid.candidates:
            part = {task: sample.first(prompts) for task, sample in self.samples.items()}
            scores: dict[str, Score] = {}
            for at in range(0, len(rest), 6):
                scores |= self.measure(rest[at : at + 6], setting, min(BRIEF, self.grid.repeats), part).scores
            rounds.append({"trees": len(rest), "prompts": sum(len(sample.prompts) for sample in part.values())})
            left = max(self.grid.candidates, len(rest) // 3)
            rest = sorted(rest, key=lambda label: -scores[label].mean)[:left]
            prompts *= 3
        last = list(dict.fromkeys([*([chosen] if chosen else []), *rest]))
        final = self.measure(last, setting, max(LEAST, self.grid.repeats))
        plain = Score({task: (1.0,) * len(ratios) for task, ratios in next(iter(final.scores.values())).ratios.items()})
        scores = {PLAIN: plain} | final.scores
        # Compared with the best that loses on no task what a choice may not lose; the best of all is told as well.
        top, fastest = (max((label for label, score in scores.items() if score.worst >= least),
                            key=lambda label: scores[label].mean) for least in (1 - SLOWER, 0.0))  # fmt: skip
        own, best = scores[chosen or PLAIN], scores[top]
        over, reach = own.mean / best.mean, spread(own, best)
        report = {"trees": count, "rounds": rounds, "chosen": chosen or PLAIN, "best": top,
                  "best_speedup": round(best.mean, 3), "fastest": fastest,
                  "fastest_speedup": round(scores[fastest].mean, 3), "fastest_worst": round(scores[fastest].worst, 3),
                  "choice_over_best": round(over, 3),
                  "interval": [round(over - reach, 3), round(over + reach, 3)]}  # fmt: skip
        return choose_of(final.scores), trial.and_then(final), report


def entry_of(label: str, drafter: BoundDrafter | None, sources: Sources, setting: Setting) -> Entry:
    """The entry of a profile that stands for a label.

    Raises:
      ValueError: a setting that a profile cannot hold, naming it.
    """
    method = Label.parse(label).method
    fields: dict[str, Any] = {}
    if isinstance(drafter, TreeDrafter):
        where = getattr(sources, OPTIONS[method])
        if where is not None and Path(where).is_dir():
            where = str(Path(where).resolve())
        fields = {"weights": where or BUNDLED, "tree": drafter.tree}
    elif method in NUMBERS:
        own = Label.parse(label)
        names = ("length", "ngram") if method == "pld" else NUMBERS[method]
        fields = dict(zip(names, own.numbers, strict=True)) | dict(own.fields)
    try:
        return Entry(setting.batch, setting.temperature, method, prompt=setting.prompt, **fields)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from error


def shape_of(drafter: BoundDrafter) -> TreeConfig:
    """What it drafts; of a lookup a chain."""
    return drafter.tree if isinstance(drafter, TreeDrafter) else TreeConfig.chain(drafter.drafter.depth)


def label_of(method: str, tree: TreeConfig) -> str:
    """The label of a method with a chain or dynamic tree."""
    shape = f"chain{tree.depth}" if tree.top_k == 1 else f"{tree.depth}x{tree.top_k}x{tree.num_nodes}"
    return f"{method}@{shape}/deterministic" if method == "sps" else f"{method}@{shape}"
