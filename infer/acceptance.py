"""Records without a clock where drafts are accepted: by tree position, by confidence, along chains.

    python -m infer.acceptance --methods eagle2,eagle3 --limit 10
    python -m infer.acceptance --data FOLDER --tasks gsm8k,humaneval,mt_bench
    python -m infer.acceptance --methods eagle2@static,eagle3@untempered --temperatures 0,1,1.5 --resume

Every method answers the turns of every task with its own tree, and every tree that the target verified is counted. A
method that fills any tree also drafts chains of every length in `chains`, for n-alpha and expected tokens per pass.
Conversations continue with plain decoding's text. Writes `OUT/result.json` after every cell; `infer.papers` makes
tables and figures of it. Prints last one JSON object: tau of every method, task and temperature.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.evaluate import Cycles, by_position, calibrate, n_alpha, record_cycles
from eagle_jax.runtime.compilation import forget_programs, use_compilation_cache
from eagle_jax.runtime.drafters import BoundDrafter, TreeDrafter
from eagle_jax.runtime.target import Target
from infer.common.labels import PLAIN
from infer.common.methods import choose_methods
from infer.common.programs import at_least_one, listed, run
from infer.common.results import Calibration, Chain, CountedQuestions, Draft, Positions, Recorded, Recording
from infer.common.runs import USUAL, Run, RunArgs, Turn, prepare, turns
from infer.common.tasks import Task


@dataclasses.dataclass(frozen=True)
class Args(RunArgs):
    """Options of the recording. Plain decoding has no drafts and is left out."""

    temperatures: str = "0,1"  # separated by commas
    chains: str = "1,2,3,4,5,6,7,8"  # lengths of chains, separated by commas; empty for none. n-alpha is of the longest
    batch: int = 4  # replies that are written at a time; no text depends on it
    out: Path = Path("runs/acceptance")  # folder of the result file


def main(args: Args) -> dict[str, Any]:
    """Records all cells that the result file lacks; returns the text that it prints last."""
    at_least_one(args, "batch")
    lengths = sorted(listed(args, "chains", int, 1)) if args.chains.strip() else []
    if choose_methods(args, USUAL) == [PLAIN]:
        raise ValueError(f"--methods must name a method that drafts, got {PLAIN}. Add one, such as eagle3.")
    current = prepare(args, Recorded, free=["methods"])
    use_compilation_cache()
    methods = {label: method for label in current.labels if (method := current.load(label)) is not None}
    cells = current.result.cells
    for task in current.tasks:
        for temperature in current.temperatures:
            known = {cell.key for cell in cells}
            wanted = [label for label in methods if (label, task.name, temperature) not in known]
            all_turns = conversations(task, current, args, temperature) if wanted else []
            chains: dict[Any, list[Chain]] = {}
            for label in wanted:
                print(f"{task.name} at temperature {temperature:g}: {label} ...", file=sys.stderr, flush=True)
                forget_programs()
                record = Recorder(current.target, all_turns, args.max_new_tokens, temperature)
                cells.append(recording(label, task, record, methods[label], current.load.draft(label)))
                cells[-1].chains = follow(record, methods[label], lengths, chains)
                current.save()
    taus = [{name: getattr(cell, name) for name in ("label", "task", "temperature", "tau")} for cell in cells]
    print(json.dumps(report := {"result": str(current.path), "tau": taus}))
    return report


def conversations(task: Task, current: Run[Recorded], args: Args, temperature: float) -> list[Turn]:
    """Returns every turn of every conversation, with plain decoding's text as earlier replies."""
    found = []
    for turn in turns(task.questions, current, args, args.batch):
        found.append(turn)
        if not turn.is_last:
            out = eagle_jax.generate(current.target, None, turn.prompts, max_new_tokens=args.max_new_tokens,
                                     temperature=temperature, key=turn.keys)  # fmt: skip
            turn.add_replies(out.tokens)
    if not found:
        raise ValueError(f"--tasks must have prompts that fit the model's {current.target.config.max_position} "
                         f"positions, got none in {task.name}. Lower --max-new-tokens.")  # fmt: skip
    return found


class Recorder(NamedTuple):
    """Records methods on the turns of a task."""

    target: Target
    turns: Sequence[Turn]
    max_new_tokens: int
    temperature: float

    def __call__(self, drafter: BoundDrafter) -> Cycles:
        """Returns every cycle of a method over all turns. `prompt` numbers the prompts of all turns together."""
        options: Any = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        parts, first = [], 0
        for turn in self.turns:
            part = record_cycles(self.target, drafter, turn.prompts, key=turn.keys, **options)
            parts.append(part._replace(prompt=part.prompt + first))
            first += len(turn.prompts)
        return Cycles._make(np.concatenate(columns) for columns in zip(*parts, strict=True))


def recording(label: str, task: Task, record: Recorder, method: BoundDrafter, draft: Draft) -> Recording:
    """Returns the counts of a method on a task, without chains."""
    cycles = record(method)
    tau = float(cycles.emitted.mean()) if len(cycles.emitted) else None  # emitted tokens per target pass
    names = [name for turn in record.turns for name in turn.questions]
    sampled = record.temperature > 0 and method.drafter.verify is not None
    return Recording(
        label=label,
        task=task.name,
        temperature=record.temperature,
        questions=len(task.questions),
        replies=len(names),
        tokens=int(cycles.emitted.sum()),
        cycles=len(cycles.emitted),
        tau=None if tau is None else round(tau, 4),
        positions=Positions(*(table.tolist() for table in by_position(cycles))),
        calibration=calibration_of(cycles, sampled),
        chains=[],
        draft=draft,
        by_question=by_question(cycles, names),
    )


def by_question(cycles: Cycles, names: Sequence[str]) -> CountedQuestions:
    """Returns tokens and cycles of every question; `names` has the question of every prompt."""
    own = list(dict.fromkeys(names))
    place = np.array([own.index(name) for name in names])[cycles.prompt]
    tokens, passes = np.bincount(place, cycles.emitted, len(own)), np.bincount(place, minlength=len(own))
    return CountedQuestions(own, tokens.astype(int).tolist(), passes.tolist())


def calibration_of(cycles: Cycles, sampled: bool) -> Calibration | None:
    """Returns the calibration; None of drafts without confidence, or sampled ones (accepted by p/q)."""
    try:
        found = None if sampled else calibrate(cycles)
    except ValueError:  # prompt lookup and lookahead
        return None
    if found is None or not found.count.any():
        return None
    confidence = [None if np.isnan(value) else round(float(value), 6) for value in found.confidence]
    return Calibration(found.count.tolist(), confidence, found.accepted.tolist())


def follow(record: Recorder, method: BoundDrafter, lengths: Sequence[int], done: dict[Any, list[Chain]]) -> list[Chain]:
    """Records chains of a method, whatever its own tree; none where a method cannot fill any tree.

    Block and traversal verification accept a path as a whole, not draft by draft: such a method's chains are left out.
    """
    if not isinstance(method, TreeDrafter) or method.tree.verification in ("block", "traversal"):
        return []
    own = (id(method.params), method.tree.verification, method.tree.sampled_ranking)
    if own not in done:  # labels of the same weights differ in the tree, and the chains are the same
        done[own] = []
        for length in lengths:
            if length > (method.max_depth or length):
                continue
            chain = TreeConfig.chain(length, method.tree.verification)
            cycles = record(method.with_tree(dataclasses.replace(chain, sampled_ranking=method.tree.sampled_ranking)))
            alpha = n_alpha(cycles)
            counts = length, int(cycles.emitted.sum()), len(cycles.emitted)
            done[own].append(Chain(*counts, alpha.tested, alpha.accepted))
    return done[own]


if __name__ == "__main__":
    run(main, Args, __doc__)
