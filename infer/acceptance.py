"""Records where drafts are accepted: by tree position, by confidence, and along chains. No clock is read.

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
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import eagle_jax
from eagle_jax.config import TreeConfig
from eagle_jax.evaluate import positions
from eagle_jax.evaluate.acceptance import Cycles, record_cycles
from eagle_jax.runtime.compilation import forget_programs, machine, revision, use_compilation_cache
from eagle_jax.runtime.drafters import BoundDrafter, TreeDrafter
from eagle_jax.runtime.target import Target
from infer import REPOSITORY
from infer.common.calls import DRAWS, keys_of
from infer.common.labels import PLAIN
from infer.common.methods import Loader, Places, Sources, check_methods, load_pair
from infer.common.programs import at_least_one, can_write, check_seed, listed, run
from infer.common.rendering import NOTE, check_rendering
from infer.common.results import CountedQuestions, Recorded, Recording, read_as, write
from infer.common.tally import names_of
from infer.common.tasks import BUNDLED, Conversation, Question, load_tasks, task_folder


@dataclasses.dataclass(frozen=True)
class Args(Places):
    """Arguments of the recording.

    Attributes:
      methods: as in infer.bench, with settings if wanted, separated by commas; vanilla drafts nothing and is left out.
      tasks: as in infer.bench, separated by commas.
      temperatures: separated by commas; 0 is greedy.
      chains: lengths of the chains, separated by commas; empty for none. n-alpha is of the longest.
      data: folder of the tasks; its default is EAGLE_JAX_TASKS, or else the bundled questions.
      limit: questions per task, the first ones.
      spread: takes them evenly from a file's categories.
      max_new_tokens: longest reply.
      batch: replies that are written at a time; no text depends on it.
      bins: of confidence, in the calibration.
      seed: of sampled draws; every method gets the same.
      tree: depth,top_k,num_nodes of heads whose label says none; default is each one's own.
      dtype: of the weights.
      out: folder of the result file.
      resume: go on with the result file that is there.
    """

    methods: str = "eagle2,eagle3"
    tasks: str = BUNDLED
    temperatures: str = "0,1"
    chains: str = "1,2,3,4,5,6,7,8"
    data: Path = dataclasses.field(default_factory=task_folder)
    limit: int = 10
    spread: bool = False
    max_new_tokens: int = 128
    batch: int = 4
    bins: int = positions.BINS
    seed: int = 0
    tree: str | None = None
    dtype: str = "float32"
    out: Path = Path("runs/acceptance")
    resume: bool = False


class Batch(NamedTuple):
    """Prompts that are answered together, the question that each is a turn of, and the keys of their draws."""

    prompts: list[list[int]]
    questions: list[str]
    keys: jax.Array


FREE = ("methods", "tasks", "temperatures")
"""Options that may change between a run and the one that resumes it: no cell depends on them."""


def main(args: Args) -> dict[str, Any]:
    """Records all cells that the result file lacks; returns what it prints last."""
    at_least_one(args, "limit", "max_new_tokens", "batch", "bins")
    check_seed(args)
    temperatures = listed(args, "temperatures", float, 0)
    lengths = sorted(listed(args, "chains", int, 1)) if args.chains.strip() else []
    sources = Sources.of(args, args.dtype, args.tree)
    labels = [label for label in check_methods(listed(args, "methods"), sources) if label != PLAIN]
    if not labels:
        raise ValueError("--methods must name a method that drafts")
    tasks = load_tasks(listed(args, "tasks"), args.data, args.limit, spread=args.spread)
    recorded = _begin(args, {task.name: task.key for task in tasks})
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch
    use_compilation_cache()
    target, tokenizer = load_pair(sources)
    known = recorded.settings.get(NOTE)
    note = check_rendering(args.out / "result.json", known, target, tokenizer, begun=bool(recorded.cells))
    recorded = dataclasses.replace(recorded, settings=recorded.settings | {NOTE: note})
    load = Loader(target, sources)
    methods = {label: load(label) for label in labels}
    cells = list(recorded.cells)
    there = {cell.key for cell in cells}
    for task, entries in tasks:
        for temperature in temperatures:
            wanted = {label: method for label, method in methods.items() if (label, task, temperature) not in there}
            if not wanted:
                continue
            batches = conversations(task, entries, target, tokenizer, args, temperature)
            watch = functools.partial(record, target, batches=batches, args=args, temperature=temperature)
            chains: dict[Any, list[dict[str, Any]]] = {}
            for label, method in wanted.items():
                assert method is not None  # plain decoding is not among them
                print(f"{task} at temperature {temperature:g}: {label} ...", file=sys.stderr, flush=True)
                forget_programs()
                cycles = watch(method)
                found = count(cycles, method, temperature, args.bins)
                names = [name for batch in batches for name in batch.questions]
                found["by_question"] = by_question(cycles, names)
                name = label.partition("@")[0]
                found["chains"] = follow(watch, method, lengths, chains)
                found["draft"] = load.draft(label)
                who: dict[str, Any] = {"method": name, "label": label, "task": task, "temperature": temperature}
                asked: dict[str, Any] = {
                    "questions": len(entries),
                    "replies": sum(len(batch.prompts) for batch in batches),
                }
                cells.append(Recording(**who, **asked, **found))
                write(dataclasses.replace(recorded, cells=cells), args.out / "result.json")
    report = {
        "result": str(args.out / "result.json"),
        "tau": [{"label": c.label, "task": c.task, "temperature": c.temperature, "tau": c.tau} for c in cells],
    }
    print(json.dumps(report))
    return report


def _begin(args: Args, tasks: dict[str, str]) -> Recorded:
    """Returns the file to continue, or an empty one. Its settings identify the questions of the tasks (`Task.key`)."""
    path = args.out / "result.json"
    own = {name: value for name, value in dataclasses.asdict(args).items() if name not in ("out", "resume", "data")}
    own |= {"draws": DRAWS, "template_args": list(args.template_args)}  # as JSON has it
    if not path.exists():
        can_write(args.out)
        return Recorded(machine(), revision(REPOSITORY), own | {"questions": tasks}, [])
    if not args.resume:
        raise ValueError(f"{path} is there already: go on with it (--resume), or give another folder (--out)")
    old = read_as(path, Recorded)
    for name, value in own.items():
        if name not in FREE and old.settings.get(name) != value:
            raise ValueError(
                f"{path} was recorded with {name} {old.settings.get(name)!r}, not {value!r}: its cells do not belong "
                "beside new ones; give another --out"
            )
    known = old.settings.get("questions", {})
    if changed := [name for name, key in tasks.items() if known.get(name, key) != key]:
        raise ValueError(f"{path} was recorded with other questions of {changed[0]}: give another --out")
    revisions = dict.fromkeys([*(old.revision or "").split(", "), revision(REPOSITORY) or ""])
    code = ", ".join(filter(None, revisions)) or None
    kept = {name: value for name, value in old.settings.items() if name == NOTE}
    return dataclasses.replace(old, revision=code, settings=own | kept | {"questions": known | tasks})


def conversations(
    task: str, questions: Sequence[Question], target: Target, tokenizer: Any, args: Args, temperature: float
) -> list[Batch]:
    """Returns batches of prompts: every turn of every conversation, with plain decoding's text as earlier answers.

    A turn that is too long for the model with its reply is left out, as in `infer.bench`.
    """
    batches: list[Batch] = []
    names = names_of(questions)
    room = target.config.max_position - args.max_new_tokens
    talks = [Conversation(question, tokenizer, room) for question in questions]
    last = max(len(question.turns) for question in questions) - 1
    for turn in range(last + 1):
        asked = {row: talk.ask(turn) for row, talk in enumerate(talks) if turn < len(talk.question.turns)}
        prompts = {row: prompt for row, prompt in asked.items() if prompt is not None}
        rows = sorted(prompts, key=lambda row: (len(prompts[row]), row))  # equal lengths share a compiled program
        groups = [rows[start : start + args.batch] for start in range(0, len(rows), args.batch)]
        for group in groups:
            which = [names[row] for row in group]
            batches.append(Batch([prompts[row] for row in group], which, keys_of(args.seed, which, turn)))
            if turn == last:
                continue
            out = eagle_jax.generate(target, None, batches[-1].prompts, max_new_tokens=args.max_new_tokens,
                                     temperature=temperature, key=batches[-1].keys)  # fmt: skip
            for row, reply in zip(group, out.tokens, strict=True):
                talks[row].hear(reply)
    if not batches:
        raise ValueError(f"every turn of {task} is too long for the model's {target.config.max_position} positions: "
                         "lower --max-new-tokens or leave the task out")  # fmt: skip
    return batches


def record(target: Target, drafter: BoundDrafter, *, batches: list[Batch], args: Args, temperature: float) -> Cycles:
    """Returns every cycle of a method over all batches. `prompt` numbers the prompts of all batches together."""
    parts = [
        record_cycles(
            target, drafter, batch.prompts, max_new_tokens=args.max_new_tokens, temperature=temperature,
            key=batch.keys,
        )
        for batch in batches
    ]  # fmt: skip
    first = np.cumsum([0, *(len(batch.prompts) for batch in batches)])
    parts = [part._replace(prompt=part.prompt + before) for part, before in zip(parts, first, strict=False)]
    return Cycles._make(np.concatenate(columns) for columns in zip(*parts, strict=True))


def by_question(cycles: Cycles, names: Sequence[str]) -> CountedQuestions:
    """Returns tokens and cycles of every question; `names` has the question of every prompt."""
    own = list(dict.fromkeys(names))
    place = np.array([own.index(name) for name in names])[cycles.prompt]
    tokens, passes = np.bincount(place, cycles.emitted, len(own)), np.bincount(place, minlength=len(own))
    return {"question": own, "tokens": tokens.astype(int).tolist(), "cycles": passes.tolist()}


def count(cycles: Cycles, method: BoundDrafter, temperature: float, bins: int) -> dict[str, Any]:
    """Returns the fields of a recording that its cycles give."""
    tau = positions.tokens_per_pass(cycles)
    found: dict[str, Any] = {"tokens": int(cycles.emitted.sum()), "cycles": len(cycles.emitted)}
    found["tau"] = None if tau is None else round(tau, 4)
    found["positions"] = {name: table.tolist() for name, table in positions.by_position(cycles)._asdict().items()}
    found["calibration"] = found["uncalibrated"] = None
    try:
        if temperature > 0 and method.drafter.verify is not None:
            raise ValueError(
                "drafts that are sampled are accepted by p/q, not with the probability the draft gave them"
            )
        if not (calibration := positions.calibrate(cycles, bins)).count.any():
            raise ValueError("the target reached no drafted node")
        found["calibration"] = _calibration(calibration)
    except ValueError as error:
        found["uncalibrated"] = str(error)
    return found


def _calibration(found: positions.Calibration) -> dict[str, Any]:
    confidence = [None if np.isnan(value) else round(float(value), 6) for value in found.confidence]
    error = None if found.error is None else round(found.error, 6)
    return {
        "count": found.count.tolist(),
        "confidence": confidence,
        "accepted": found.accepted.tolist(),
        "error": error,
    }


def follow(
    watch: Any, method: BoundDrafter, lengths: list[int], done: dict[Any, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Records chains of a method, whatever its own tree; none where a method cannot fill any tree.

    Block and traversal verification accept a path as a whole, not draft by draft: such a method's chains are left out.
    """
    if not isinstance(method, TreeDrafter) or method.tree.verification in ("block", "traversal"):
        return []
    own = (id(method.params), method.tree.verification, method.tree.sampled_ranking)
    if own not in done:  # labels of the same weights differ in the tree, and the chains are the same
        done[own] = []
        for length in lengths:
            if length > (method.deepest or length):
                continue
            chain = TreeConfig.chain(length, method.tree.verification)
            tree = dataclasses.replace(chain, sampled_ranking=method.tree.sampled_ranking)
            cycles = watch(method.with_tree(tree))
            alpha = positions.n_alpha(cycles)
            counts = {"length": length, "tokens": int(cycles.emitted.sum()), "cycles": len(cycles.emitted)}
            done[own].append(counts | {"tested": alpha.tested, "accepted": alpha.accepted})
    return done[own]


if __name__ == "__main__":
    run(main, Args, __doc__)
