"""Measures drafting methods against plain decoding, prompt by prompt, on the tasks of the papers.

    python -m infer.bench --methods eagle2,eagle3 --limit 4 --temperatures 0,1
    python -m infer.bench --methods eagle3@chain3,eagle3@4x2x7 --batches 1,4,16 --limit 16 --data FOLDER --tasks gsm8k
    python -m infer.bench --pair smollm2 --methods eagle3@4x3x15 --by-cost eagle3@4x3x15 --batches 1,4
    python -m infer.bench --target meta-llama/Llama-3.1-8B-Instruct --eagle3 yuhuili/EAGLE3-LLaMA3.1-Instruct-8B \
        --methods eagle3@7x10x59,eagle3@static,pld,lookahead --dtype bfloat16 --tasks path/to/question.jsonl

A method may have a setting, `name[@setting]`: see `infer/common/labels.py`. Plain decoding is always measured, as the
baseline. For every task, temperature and batch size, all methods first run a prompt untimed, which compiles and gives
the compared text. Then they run it `repeats` times in turns. The speedup is the median of the ratios within a
repetition. The prefill is also timed alone, with the same program. A conversation continues with the replies of plain
decoding. `--by-cost` measures methods a second time, with the costs of their parts on this machine (`cycle_cost`): then
every cycle verifies as much of the tree as pays, down to a plain step. If torch is installed, `transformers` is
measured on the same weights; `--weights` leaves it out. `--vllm` does the same with vLLM, in its own environment.

The program writes result.json and table.md to `out` after every measurement, and `--resume` continues a stopped run. It
prints the tables and, last, one JSON object (fields: `infer/common/results.py`; the costs of `--by-cost` are measured
after prompts of middle length of the first task). `infer.papers` draws the figures.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

import eagle_jax
from eagle_jax.checkpoints import write_whole
from eagle_jax.core import CycleCost
from eagle_jax.runtime.compilation import forget_programs, use_compilation_cache
from eagle_jax.runtime.drafters import TreeDrafter
from infer.common.labels import PLAIN
from infer.common.methods import NOTHING
from infer.common.peers import hugging_face, vllm_methods
from infer.common.programs import at_least_one, listed, run
from infer.common.results import Costs, Group, Result
from infer.common.runs import Run, RunArgs, prepare, turns
from infer.common.tables import markdown
from infer.common.timing import Call, Method, cell, engine, time_repetitions
from infer.tuning.costs import ends_of, measure_costs
from infer.tuning.trials import Prompt, Setting

BY_COST = ", by cost"
"""End of the label of a method that follows its costs."""
PEERS = {"transformers", "vllm"}
PAUSE = 0.3
"""Seconds before every call beside other engines, whose threads wait in loops for a while after a call."""
COST_REPEATS = 5
"""Least number of timings of a cost."""


@dataclasses.dataclass(frozen=True)
class Args(RunArgs):
    """Options of the benchmark."""

    batches: str = "1"  # conversations at a time, several sizes separated by commas
    by_cost: str | None = None  # trees of --methods to measure with their costs too
    repeats: int = 3  # timed runs, of which the median counts
    transformers: bool = True  # measure `transformers` generate too, if torch is installed
    vllm: str | None = None  # Python of an environment with vLLM, to measure it too (docs/benchmarks.md)
    vllm_dtypes: str = "float32,bfloat16"  # dtypes of vLLM's weights
    vllm_head: str | None = None  # head that `train.export` wrote, for vLLM in float32
    vllm_chain: int = 3  # tokens that it drafts
    out: Path = Path("runs/bench")  # directory of the result


def main(args: Args) -> dict[str, Any]:
    """Runs the benchmark; returns the text that it prints last."""
    at_least_one(args, "repeats", "vllm_chain")
    dtypes = listed(args, "vllm_dtypes", str)
    if args.vllm_head is not None and args.vllm is None:
        raise ValueError("--vllm-head must come with --vllm, the Python of an environment with vLLM. Give it.")
    if args.vllm_head is not None and not Path(args.vllm_head).is_dir():
        raise ValueError(f"--vllm-head must be a folder of train.export, got {args.vllm_head}. Correct the path.")
    if args.vllm is not None and args.weights is not None:
        raise ValueError(
            f"--vllm must come without --weights, got {args.weights}: vLLM runs on float weights. Leave one out."
        )
    batches = listed(args, "batches", int, 1)
    current = prepare(args, Result, free=["batches"])
    for task in current.tasks:
        if len(task.questions) < max(batches):
            raise ValueError(f"--batches must be at most the {len(task.questions)} questions of {task.name}, got "
                             f"{max(batches)}. Raise --limit, or lower --batches.")  # fmt: skip
    trees = listed(args, "by_cost") if args.by_cost is not None else []
    if others := [label for label in trees if label not in current.labels]:
        raise ValueError(f"--by-cost must name methods of --methods, got {others[0]}. Add it there.")
    use_compilation_cache()
    drafters = {label: current.load(label) for label in current.labels}
    if others := [label for label in trees if not has_costs(drafters[label])]:
        raise ValueError(f"--by-cost must name chains and dynamic trees, got {others[0]}. Leave it out.")
    drafts = {label: current.load.draft(label) for label in current.labels}
    makers: dict[str, Callable[[int, float], Method]] = {
        label: functools.partial(engine, current.target, drafter) for label, drafter in drafters.items()
    }
    if args.transformers and args.weights is not None:
        print(f"transformers would run on float weights: it is not measured beside --weights {args.weights}")
    elif args.transformers and find_spec("torch"):
        makers["transformers"], drafts["transformers"] = hugging_face(current.target), NOTHING
    elif args.transformers:
        print("torch is not installed (pip install -e '.[test]'): transformers is not measured beside the engine")
    drafts |= {label + BY_COST: drafts[label] for label in trees}
    if args.vllm is not None:
        found = vllm_methods(args.vllm, current.target, dtypes, args.vllm_head, args.vllm_chain)
        makers |= {label: make for label, (make, _) in found.items()}
        drafts |= {label: draft for label, (_, draft) in found.items()}
    names = [task.name for task in current.tasks]
    groups = [Group(*found) for found in itertools.product(names, current.temperatures, batches)]
    done = {one.group for one in current.result.cells}
    for number, group in enumerate(groups, 1):
        if group in done:
            continue
        print(f"{number} of {len(groups)}, {group}: {', '.join(makers)} in turns; programs are compiled first ...",
              file=sys.stderr, flush=True)  # fmt: skip
        sizes = args.max_new_tokens, group.temperature
        methods = {label: make(*sizes) for label, make in makers.items()}
        if trees:
            costs = costs_of({label: drafters[label] for label in trees}, current, group, args)
            methods |= {
                label + BY_COST: engine(current.target, drafters[label], *sizes, cost=cost)
                for label, cost in costs.items()
            }
        calls = measure(current, methods, group, args)
        if calls[PLAIN]:
            current.result.cells += [
                cell(label, group, own, calls[PLAIN], drafts[label]) for label, own in calls.items()
            ]
        current.save()
        write_whole(args.out / "table.md", markdown(current.result))
    print(f"\n{markdown(current.result)}\n\nWritten: {current.path}, with every number of every question")
    report = {"result": str(current.path)} | msgspec.to_builtins(current.result)
    for one in report["cells"]:
        del one["by_question"], one["draft"], one["accepted"]  # the last line stays short
    print(json.dumps(report))
    return report


def has_costs(drafter: eagle_jax.BoundDrafter | None) -> bool:
    """Returns whether `cycle_cost` can choose the size of a tree."""
    if not isinstance(drafter, TreeDrafter):
        return False
    return drafter.tree.parents is None and drafter.tree.verification == "deterministic"


def costs_of(drafters: Mapping[str, Any], current: Run[Result], group: Group, args: Args) -> dict[str, CycleCost]:
    """Returns the costs of trees, measured once per temperature and batch size.

    They depend on the length of the prompts: the shortest and the longest batch of first turns count.
    """
    fields = [field.name for field in dataclasses.fields(CycleCost)]
    known = {
        one.label: CycleCost(**{name: getattr(one, name) for name in fields})
        for one in current.result.costs
        if (one.temperature, one.batch) == (group.temperature, group.batch)
    }
    if known:
        return known
    questions = next(task.questions for task in current.tasks if task.name == group.task)
    parts = (questions[start : start + group.batch] for start in range(0, len(questions), group.batch))
    firsts = [first for part in parts if (first := next(turns(part, current, args, group.batch), None))]
    whole = [turn for turn in firsts if len(turn.prompts) == group.batch] or firsts
    ends = ends_of([[Prompt(*pair) for pair in zip(turn.prompts, turn.keys, strict=True)] for turn in whole])
    setting = Setting(len(ends[0]), group.temperature, args.max_new_tokens)
    by_tree = {label: {drafter.tree: drafter} for label, drafter in drafters.items()}
    repeats = max(args.repeats, COST_REPEATS)
    least, *most = [measure_costs(current.target, by_tree, prompts, setting, repeats) for prompts in ends]
    found = {label: least.parts(label, drafter.tree, *most) for label, drafter in drafters.items()}
    current.result.costs += [
        Costs(label, group.temperature, group.batch, **dataclasses.asdict(cost)) for label, cost in found.items()
    ]
    return found


def measure(current: Run[Result], methods: Mapping[str, Method], group: Group, args: Args) -> dict[str, list[Call]]:
    """Runs every method on the conversations of a task."""
    pause = PAUSE if {label.partition("@")[0] for label in methods} & PEERS else 0.0
    questions = next(task.questions for task in current.tasks if task.name == group.task)
    found: dict[str, list[Call]] = {label: [] for label in methods}
    for turn in turns(questions, current, args, group.batch):
        forget_programs()
        calls = {
            (label, part): functools.partial(getattr(method, part), turn.prompts, turn.keys)
            for label, method in methods.items()
            for part in ("answer", "prefill")
        }
        answers = {key: call() for key, call in calls.items()}  # compiles
        seconds = time_repetitions(calls, args.repeats, pause)
        plain = answers[PLAIN, "answer"]
        for label, own in found.items():
            times = seconds[label, "answer"], seconds[label, "prefill"]
            own.append(Call(turn.batch, turn.questions, answers[label, "answer"], plain, *times))
        turn.add_replies(plain.tokens)
        if sys.stderr.isatty():
            print(f"batch {turn.batch + 1} of {-(-len(questions) // group.batch)} \033[K", end="\r", file=sys.stderr)
    left_out = sum(len(question.turns) for question in questions) - sum(len(call.questions) for call in found[PLAIN])
    if left_out:
        print(f"{group}: {left_out} turns are too long for the model's {current.target.config.max_position} positions "
              "and left out")  # fmt: skip
    return found


if __name__ == "__main__":
    run(main, Args, __doc__)
