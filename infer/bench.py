"""Measures drafting methods against plain decoding, prompt by prompt, on the tasks of the papers.

    python -m infer.bench --methods eagle2,eagle3 --limit 4 --temperatures 0,1
    python -m infer.bench --methods eagle3@chain3,eagle3@4x2x7 --batches 1,4,16 --limit 16 --data FOLDER --tasks gsm8k
    python -m infer.bench --target meta-llama/Llama-3.1-8B-Instruct --eagle3 yuhuili/EAGLE3-LLaMA3.1-Instruct-8B \
        --methods eagle3@7x10x59,eagle3@static,pld,lookahead --dtype bfloat16 --tasks path/to/question.jsonl

A method may have a setting, `name[@setting]`: see `infer/common/labels.py`. For every task, temperature and batch size,
all methods run a prompt once unmeasured, which compiles and gives the compared text, then `repeats` times in turns. The
median of the ratios within a repetition counts. The prefill is also timed alone, with the same program. The turns of a
conversation follow each other, with the replies of plain decoding.

The program writes result.json and table.md to `out` after every measurement, so that `--resume` continues a stopped
run, and figures at the end. It prints the tables and, last, one JSON object (fields: `infer/common/results.py`). If
torch is installed, `transformers` runs on the same weights beside the engine. `engine_tok_s` is this engine on the
golden pair of the tests (batch 1, 59 nodes, 6 levels, float32).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import eagle_jax
from eagle_jax.checkpoints.files.staging import write_whole
from eagle_jax.runtime.compilation import forget_programs, machine, revision, use_compilation_cache
from eagle_jax.viz import WANTED
from infer import REPOSITORY
from infer.common import drafts, results
from infer.common.calls import DRAWS, Method, engine, hugging_face, keys_of
from infer.common.labels import PLAIN, Label
from infer.common.methods import Loader, Places, Sources, check_methods, load_pair
from infer.common.programs import at_least_one, can_write, check_seed, listed, run
from infer.common.rendering import NOTE, check_rendering
from infer.common.results import Group, Result
from infer.common.tables import markdown
from infer.common.tally import Tally, cell, names_of
from infer.common.tasks import BUNDLED, Conversation, Question, Task, load_tasks, task_folder
from infer.common.timing import time_interleaved, time_repetitions
from infer.papers.speed import draw

GOLDEN = REPOSITORY / "tests" / "golden"
GOLDEN_RUN = "eagle3_total60_depth5_topk10"
FREE = ("methods", "transformers", "tasks", "temperatures", "batches", "data", "golden")
"""Settings of what is measured: a resumed run may change them."""


@dataclasses.dataclass(frozen=True)
class Args(Places):
    """Arguments of the benchmark.

    Attributes:
      methods: of vanilla, sps (a small model), pld (prompt lookup), lookahead, medusa, hydra, eagle1 (a static tree),
        hass, eagle2, eagle3, each with a setting if wanted: eagle3@6x10x59, eagle3@chain3, eagle2@static,
        sps@chain5/block, eagle2@4x2x7/norerank, eagle3@untempered, pld@10, lookahead@5x7x7. Your own method is
        own:module:function, a function of the target that returns a Drafter or BoundDrafter. vanilla is always
        measured, as the baseline.
      tasks: names in the data folder, paths of question files, or owner/dataset[:part] on the hub, separated by commas;
        of the papers mt_bench, humaneval, gsm8k, alpaca, cnn_dm, nq (hub:gsm8k takes one from the hub). chat, math and
        code are bundled, ten questions each.
      data: folder of the tasks; its default is EAGLE_JAX_TASKS, or else the bundled questions.
      limit: questions per task, the first ones.
      spread: takes the questions evenly from the categories of a file, such as Spec-Bench's 480 in one file.
      max_new_tokens: longest answer.
      batches: conversations at a time, several sizes separated by commas.
      repeats: timed runs, of which the median counts.
      temperatures: 0 is greedy; several separated by commas.
      seed: of sampled draws; every method gets the same.
      tree: depth,top_k,num_nodes of heads whose label has none; default is each head's own. eagle1 always has the
        static tree of its paper (eagle1@4x2x7 is another).
      dtype: of the weights.
      transformers: measure `transformers` generate too, if torch is installed.
      golden: measure `engine_tok_s` too.
      out: directory of the result.
      resume: continue the result in `out`.
    """

    methods: str = "vanilla,eagle2,eagle3"
    tasks: str = BUNDLED
    data: Path = dataclasses.field(default_factory=task_folder)
    limit: int = 10
    spread: bool = False
    max_new_tokens: int = 128
    batches: str = "1"
    repeats: int = 3
    temperatures: str = "0"
    seed: int = 0
    tree: str | None = None
    dtype: str = "float32"
    transformers: bool = True
    golden: bool = True
    out: Path = Path("runs/bench")
    resume: bool = False


def main(args: Args) -> dict[str, Any]:
    """Runs the benchmark; returns what it prints last."""
    at_least_one(args, "limit", "max_new_tokens", "repeats")
    check_seed(args)
    labels = check_methods(listed(args, "methods"), sources := Sources.of(args, args.dtype, args.tree))
    temperatures = listed(args, "temperatures", float, 0)
    batches = listed(args, "batches", int, 1)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch
    tasks = load_tasks(listed(args, "tasks"), args.data, args.limit, spread=args.spread)
    if small := [task.name for task in tasks if len(task.questions) < max(batches)]:
        raise ValueError(
            f"--batches {max(batches)} is more than the questions of {small[0]}: raise --limit, or lower --batches"
        )
    others = ["transformers"] if args.transformers and find_spec("torch") else []
    if args.transformers and not others:
        print("torch is not installed (pip install -e '.[test]'): transformers is not measured beside the engine")
    result = begin(args, [*labels, *others], tasks)
    use_compilation_cache()

    groups = [Group(*found) for found in itertools.product((task.name for task in tasks), temperatures, batches)]
    done = {Group(entry["task"], entry["temperature"], entry["batch"]) for entry in result.more["groups"]}
    if ahead := [group for group in groups if group not in done]:
        questions = {task.name: task.questions for task in tasks}
        try:
            for finished in measured(result, ahead, questions, labels, others, sources, args):
                save(result := finished, args.out)
        except KeyboardInterrupt:
            if result.more["groups"]:
                print(f"\n{len(result.more['groups'])} of {len(groups)} measurements are kept in {args.out}: the same "
                      "command with --resume goes on", file=sys.stderr)  # fmt: skip
            raise
    if args.golden and "golden" not in result.more:
        print("the golden pair (engine_tok_s; --no-golden leaves it out) ...", file=sys.stderr, flush=True)
        result = dataclasses.replace(result, more=result.more | golden(args.repeats))
        save(result, args.out)
    if not find_spec("matplotlib"):
        print(WANTED, file=sys.stderr)
    elif result.cells:
        draw(result, args.out)
    print(f"\n{markdown(result)}\n\nWritten: {args.out / 'result.json'}, with every number of every cell")
    print(json.dumps(report := {"result": str(args.out / "result.json")} | short(result)))
    return report


def short(result: Result) -> dict[str, Any]:
    """Shortens a result for the last line: only the numbers of its cells."""
    whole = result.as_json()
    cells = [{name: value for name, value in cell.items() if not isinstance(value, dict | list)} | {
        "speedup_range": cell["speedup_range"]} for cell in whole["cells"]]  # fmt: skip
    return whole | {"cells": cells}


def measured(
    result: Result,
    groups: list[Group],
    questions: Mapping[str, tuple[Question, ...]],
    labels: list[str],
    others: list[str],
    sources: Sources,
    args: Args,
) -> Iterator[Result]:
    """Measures group after group, and yields the result so far."""
    target, tokenizer = load_pair(sources)
    note = check_rendering(
        args.out / "result.json", result.more.get(NOTE), target, tokenizer, begun=bool(result.more["groups"])
    )
    result = dataclasses.replace(result, more=result.more | {NOTE: note})
    if args.max_new_tokens >= target.config.max_position:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens} leaves no room for a prompt: the model has "
                         f"{target.config.max_position} positions; lower it")  # fmt: skip
    load = Loader(target, sources)
    drafters = {label: load(label) for label in labels}
    drafted = {label: load.draft(label) for label in labels} | dict.fromkeys(others, drafts.PLAIN)
    beside = {name: hugging_face(target) for name in others}
    for number, group in enumerate(groups, 1):
        named = f"{number} of {len(groups)}, {results.describe(group)}"
        many = f"{len(questions[group.task])} questions, {', '.join([*drafters, *beside])}"
        print(f"{named}: {many} in turns; programs are compiled first ...", file=sys.stderr, flush=True)
        law = (args.max_new_tokens, group.temperature)
        methods = {label: engine(target, drafter, *law) for label, drafter in drafters.items()}
        methods |= {name: make(*law) for name, make in beside.items()}
        room = target.config.max_position
        tallies, left_out = measure(questions[group.task], methods, tokenizer, room, group, args)
        if left_out:
            print(f"{named}: {left_out} turns left out: too long for the model's {room} positions")
        result = with_group(result, group, tallies, left_out, drafted)
        yield result


def begin(args: Args, labels: list[str], tasks: list[Task]) -> Result:
    """Returns the result so far: an empty one, or with `resume` the one in `out`.

    Raises:
      ValueError: a result that cannot be continued, or other files in `out`.
    """
    settings = {name: value for name, value in dataclasses.asdict(args).items() if name not in ("out", "resume")}
    settings |= {"data": args.data.name}  # where it lies says nothing
    settings["template_args"] = list(args.template_args)  # as JSON has it
    keys = {task.name: task.key for task in tasks}
    here = Result(
        machine(), revision(REPOSITORY), settings, [], {"labels": labels, "tasks": keys, "groups": [], "draws": DRAWS}
    )
    path = args.out / "result.json"
    if not path.is_file():
        can_write(args.out)
        if foreign := sorted(found.name for found in args.out.glob("*") if found.suffix != ".partial"):
            raise ValueError(f"--out {args.out} holds no result of infer.bench but {foreign[0]}: give another --out")
        return here
    there = results.read(path)
    if not args.resume:
        raise ValueError(f"{path} is there already: go on with it by --resume, or give another --out")
    changed = [name for name, value in settings.items() if name not in FREE and there.settings.get(name) != value]
    differences = [
        f"--{name.replace('_', '-')} was {there.settings.get(name)} and is now {settings[name]}" for name in changed
    ]
    if set(there.more["labels"]) != set(labels):
        differences.append(f"the methods were {', '.join(there.more['labels'])}, and all are timed in turns")
    if "draws" not in there.more and any(entry["temperature"] for entry in there.more["groups"]):
        differences.append("its questions shared their draws, and those of this version do not")
    known = there.more["tasks"]
    differences += [f"{name} had other questions" for name, key in keys.items() if known.get(name, key) != key]
    if there.machine != here.machine:
        differences.append(f"the machine was {there.machine}")
    if differences:
        raise ValueError(
            f"{path} cannot be gone on with: {'; '.join(differences)}. Give these again, or another --out; "
            "infer.papers joins files"
        )
    revisions = dict.fromkeys([*(there.revision or "").split(", "), here.revision or ""])
    more = there.more | {"tasks": known | keys, "draws": DRAWS}
    return dataclasses.replace(there, revision=", ".join(filter(None, revisions)) or None, settings=settings, more=more)


def with_group(
    result: Result, group: Group, tallies: Mapping[str, Tally], left_out: int, drafted: Mapping[str, dict[str, Any]]
) -> Result:
    """Adds a group to the result; a group without turns that fit the model has no cells."""
    plain = tallies[PLAIN]
    cells = [
        cell(name if name == "transformers" else Label.parse(name).method, name, group, tally, plain, drafted[name])
        for name, tally in tallies.items()
        if plain.replies
    ]
    more = result.more | {"groups": [*result.more["groups"], group._asdict() | {"left_out": left_out}]}
    return dataclasses.replace(result, cells=[*result.cells, *cells], more=more)


def save(result: Result, out: Path) -> None:
    """Writes the result and its tables."""
    results.write(result, out / "result.json")
    write_whole(out / "table.md", markdown(result))


def measure(
    questions: tuple[Question, ...],
    methods: dict[str, Method],
    tokenizer: Any,
    max_position: int,
    group: Group,
    args: Args,
) -> tuple[dict[str, Tally], int]:
    """Runs every method on the conversations of a task; also returns how many turns were too long for the model."""
    tallies = {name: Tally() for name in methods}
    left_out, names = 0, names_of(questions)
    for start in range(0, len(questions), group.batch):
        together = questions[start : start + group.batch]
        talks = [Conversation(question, tokenizer, max_position - args.max_new_tokens) for question in together]
        for turn in range(max(len(question.turns) for question in together)):
            asked = {row: talk.ask(turn) for row, talk in enumerate(talks) if turn < len(talk.question.turns)}
            left_out += sum(prompt is None for prompt in asked.values())
            rows = [row for row, prompt in asked.items() if prompt is not None]
            prompts = [prompt for prompt in asked.values() if prompt is not None]
            if not rows:
                continue
            which = [names[start + row] for row in rows]
            keys = keys_of(args.seed, which, turn)
            forget_programs()
            calls: dict[tuple[str, str], Callable[[], Any]] = {}
            for name, method in methods.items():
                calls[name, "answer"] = functools.partial(method.answer, prompts, keys)
                calls[name, "prefill"] = functools.partial(method.prefill, prompts, keys)
            texts = {}
            for call, function in calls.items():
                if start == turn == 0 and sys.stderr.isatty():
                    print(f"compiling {' '.join(call)} \033[K", end="\r", file=sys.stderr, flush=True)
                texts[call] = function()
            seconds = time_repetitions(calls, args.repeats)
            plain = texts[PLAIN, "answer"]
            categories = [together[row].category for row in rows]
            for name, tally in tallies.items():
                took = (seconds[name, "answer"], seconds[name, "prefill"])
                tally.add(start // group.batch, which, categories, texts[name, "answer"], plain, *took)
            for row, tokens in zip(rows, plain.tokens, strict=True):
                talks[row].hear(tokens)
        if sys.stderr.isatty():
            print(
                f"{start + len(together)} of {len(questions)} questions \033[K", end="\r", file=sys.stderr, flush=True
            )
    return tallies, left_out


def golden(repeats: int) -> dict[str, Any]:
    """Measures tokens per second on the golden pair, and compares the tokens with the reference engine's."""
    if not (GOLDEN / "reference_outputs.json").is_file():
        print(f"no golden pair in {GOLDEN}: engine_tok_s is not measured")
        return {}
    rows = json.loads((GOLDEN / "reference_outputs.json").read_text(encoding="utf-8"))[GOLDEN_RUN]["rows"]
    target = eagle_jax.load_target(GOLDEN / "target")
    tree = eagle_jax.TreeConfig(depth=6, top_k=10, num_nodes=59)
    heads = {"engine": eagle_jax.load_drafter(GOLDEN / "eagle3", target, tree=tree), "plain": None}
    tokens, seconds, identical = 0, dict.fromkeys(heads, 0.0), 0
    for row in rows:
        calls = {
            name: functools.partial(eagle_jax.generate, target, head, [row["prompt_ids"]], max_new_tokens=96)
            for name, head in heads.items()
        }
        answers = {name: call().tokens[0] for name, call in calls.items()}
        identical += answers["engine"] == answers["plain"] == row["output"][: len(answers["plain"])]
        tokens += len(answers["engine"])
        for name, value in time_interleaved(calls, repeats).items():
            seconds[name] += value
    rates = {name: round(tokens / value, 1) for name, value in seconds.items()}
    print(
        f"Golden pair: {rates['engine']:.0f} tokens/s, plain {rates['plain']:.0f} tokens/s, "
        f"{identical}/{len(rows)} texts those of the reference engine."
    )
    return {
        "engine_tok_s": rates["engine"],
        "golden": {"plain_tok_s": rates["plain"], "identical": f"{identical}/{len(rows)}"},
    }


if __name__ == "__main__":
    run(main, Args, __doc__)
