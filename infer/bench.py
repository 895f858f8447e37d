"""Measures drafting methods against plain decoding, prompt by prompt, on real tasks.

    python -m infer.bench --methods vanilla,eagle2,eagle3 --tasks gsm8k,humaneval,mt_bench --limit 10 --temperature 0
    python -m infer.bench --target meta-llama/Llama-3.1-8B-Instruct --eagle3 yuhuili/EAGLE3-LLaMA3.1-Instruct-8B \
        --methods eagle3 --dtype bfloat16 --tree 8,10,59 --tasks path/to/question.jsonl

Every method runs a prompt once unmeasured (which compiles, and gives the text that is compared), then `repeats`
times in turns with the others; the median counts. The turns of a conversation follow each other, answered with the
plain loop's text. Prints a table and, last, one JSON object: `results` per method and task has tok_s (new tokens per
second of the whole call, prompt included), speedup and identical (against plain decoding), tau (new tokens per target
pass, pooled) and cycle_ms. `transformers` on the same weights is measured beside them where torch is installed, and
`engine_tok_s` is this engine on the golden pair of the tests (batch 1, 59 nodes, 6 levels, float32).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import eagle_jax
from eagle_jax.config import Verification
from eagle_jax.measure import (
    Question,
    chat_ids,
    find_task,
    machine,
    read_questions,
    time_interleaved,
    use_compilation_cache,
)
from eagle_jax.programs import at_least_one, parse_tree, run
from infer.methods import Sources, check_methods, load_method, load_pair

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
GOLDEN_RUN = "eagle3_total60_depth5_topk10"


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the benchmark.

    Attributes:
      methods: of vanilla, sps (a small model), pld (prompt lookup), lookahead, medusa, hydra, eagle2, eagle3; vanilla
        is always measured, the others are compared with it.
      tasks: names in the data folder or paths of question files, separated by commas.
      data: folder of the tasks; EAGLE_JAX_TASKS sets another default.
      limit: questions per task.
      max_new_tokens: longest answer.
      batch: conversations at a time.
      repeats: timed runs, of which the median counts.
      temperature: 0 is greedy.
      seed: of sampled draws; every method gets the same.
      tree: depth,top_k,num_nodes of all heads; default is each bundled head's own, or 6,10,59.
      sampled_ranking: what heads rank their candidates by at temperature > 0 (TreeConfig).
      target: path or hub id of the model; default is the bundled one.
      eagle2: path or hub id of its EAGLE-1/2 head.
      eagle3: path or hub id of its EAGLE-3 head.
      draft_model: path or hub id of a small model with its tokenizer, for sps.
      medusa: path or hub id of its Medusa heads. hydra: of its Hydra or Hydra++ heads.
      chain: tokens that sps drafts. verification: the rule by which they are accepted (TreeConfig).
      dtype: of the weights.
      transformers: measure `transformers` generate too, if torch is installed.
      golden: measure `engine_tok_s` too.
    """

    methods: str = "vanilla,eagle2,eagle3"
    tasks: str = "gsm8k,humaneval,mt_bench"
    data: Path = Path(os.environ.get("EAGLE_JAX_TASKS", "../shared/data/tasks"))
    limit: int = 10
    max_new_tokens: int = 128
    batch: int = 1
    repeats: int = 3
    temperature: float = 0.0
    seed: int = 0
    tree: str | None = None
    sampled_ranking: Literal["draw", "law", "untempered"] = "draw"
    target: str | None = None
    eagle2: str | None = None
    eagle3: str | None = None
    draft_model: str | None = None
    medusa: str | None = None
    hydra: str | None = None
    chain: int = 5
    verification: Verification = "rejection"
    dtype: str = "float32"
    transformers: bool = True
    golden: bool = True


class Answer(NamedTuple):
    """New tokens per row, and target passes after the prefill where the method counts them."""

    tokens: list[list[int]]
    cycles: int | None


Method = Callable[[list[list[int]], int], Answer]
"""`(prompts, seed) -> Answer`."""


@dataclasses.dataclass
class Tally:
    """Sums over the prompts of a task."""

    seconds: float = 0.0
    tokens: int = 0
    rows: int = 0
    identical: int = 0
    cycles: int | None = 0

    def add(self, answer: Answer, plain: Answer, seconds: float) -> None:
        """Counts one batch."""
        self.seconds += seconds
        self.tokens += sum(map(len, answer.tokens))
        self.rows += len(answer.tokens)
        self.identical += sum(a == b for a, b in zip(answer.tokens, plain.tokens, strict=True))
        self.cycles = None if self.cycles is None or answer.cycles is None else self.cycles + answer.cycles

    def summary(self, plain: Tally) -> dict[str, Any]:
        """What the table shows."""
        entry: dict[str, Any] = {"tok_s": round(self.tokens / self.seconds, 1)}
        entry["speedup"] = round(self.tokens / self.seconds / (plain.tokens / plain.seconds), 3)
        if self.cycles:
            entry["tau"] = round((self.tokens - self.rows) / self.cycles, 3)
            entry["cycle_ms"] = round(1000 * self.seconds / self.cycles, 3)
        entry["identical"] = f"{self.identical}/{self.rows}"
        return entry


def main(args: Args) -> dict[str, Any]:
    """Runs the benchmark; returns what it prints last."""
    at_least_one(args, "limit", "max_new_tokens", "batch", "repeats", "chain")
    names = check_methods(split(args.methods), sources := sources_of(args))
    if not split(args.tasks):
        raise ValueError("--tasks names no task; a task is a name in the folder --data or the path of a file")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch
    use_compilation_cache()
    paths = [find_task(name, args.data) for name in split(args.tasks)]
    tasks = {path.parent.name if path.stem == "question" else path.stem: path for path in paths}
    questions = {task: read_questions(path, args.limit) for task, path in tasks.items()}
    target, tokenizer, methods = load(args, sources, names)

    results: dict[str, dict[str, Any]] = {name: {} for name in methods}
    for task, entries in questions.items():
        print(f"{task}: {len(entries)} questions, {', '.join(methods)} in turns ...", file=sys.stderr, flush=True)
        tallies, skipped = measure(entries, methods, tokenizer, target.config.max_position, args)
        if skipped:
            print(f"{task}: {skipped} turns left out: too long for the model's {target.config.max_position} positions")
        if tallies["vanilla"].rows:
            for name, tally in tallies.items():
                results[name][task] = tally.summary(tallies["vanilla"])
    report: dict[str, Any] = {
        "results": results,
        "mean_speedup": {
            name: round(statistics.mean(entry["speedup"] for entry in rows.values()), 3)
            for name, rows in results.items()
            if rows
        },
        "machine": machine(),
        "settings": dataclasses.asdict(args) | {"data": args.data.name},  # where it lies says nothing
    }
    print_table(report)
    if args.golden:
        report |= golden(args.repeats)
    print(json.dumps(report))
    return report


def measure(
    questions: list[Question], methods: dict[str, Method], tokenizer: Any, max_position: int, args: Args
) -> tuple[dict[str, Tally], int]:
    """Sums of every method over the conversations of a task, and how many turns were too long for the model."""
    tallies = {name: Tally() for name in methods}
    skipped = 0
    for start in range(0, len(questions), args.batch):
        group = questions[start : start + args.batch]
        messages: list[list[dict[str, str]]] = [[] for _ in group]
        for turn in range(max(len(question.turns) for question in group)):
            rows, prompts = [], []
            for row, question in enumerate(group):
                if turn >= len(question.turns):
                    continue
                messages[row].append({"role": "user", "content": question.turns[turn]})
                prompt = chat_ids(tokenizer, messages[row])
                if len(prompt) + args.max_new_tokens > max_position:
                    skipped += 1
                    continue
                rows.append(row)
                prompts.append(prompt)
            if not rows:
                continue
            calls = {name: functools.partial(method, prompts, args.seed + turn) for name, method in methods.items()}
            answers = {name: call() for name, call in calls.items()}
            seconds = time_interleaved(calls, args.repeats)
            for name, answer in answers.items():
                tallies[name].add(answer, answers["vanilla"], seconds[name])
            for row, tokens in zip(rows, answers["vanilla"].tokens, strict=True):
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                messages[row].append({"role": "assistant", "content": text})
        if sys.stderr.isatty():
            print(f"{start + len(group)} of {len(questions)} questions", end="\r", file=sys.stderr, flush=True)
    return tallies, skipped


def sources_of(args: Args) -> Sources:
    """Where the methods come from."""
    tree = parse_tree(args.tree) if args.tree else None
    shared = {field.name: getattr(args, field.name) for field in dataclasses.fields(Sources) if field.name != "tree"}
    return Sources(tree=tree, **shared)


def load(args: Args, sources: Sources, names: list[str]) -> tuple[eagle_jax.Target, Any, dict[str, Method]]:
    """The target, its tokenizer, and the methods by name."""
    target, tokenizer = load_pair(sources)
    methods = {name: engine(target, load_method(name, target, sources), args) for name in names}
    if args.transformers and find_spec("torch"):
        methods["transformers"] = hugging_face(target, args)
    elif args.transformers:
        print("torch is not installed (pip install -e '.[test]'): transformers is not measured beside the engine")
    return target, tokenizer, methods


def engine(target: eagle_jax.Target, head: eagle_jax.BoundDrafter | None, args: Args) -> Method:
    """This library's `generate` as a method."""

    def run(prompts: list[list[int]], seed: int) -> Answer:
        options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "key": seed}
        out = eagle_jax.generate(target, head, prompts, **options)  # type: ignore[arg-type]
        return Answer(out.tokens, int(out.cycles.sum()))

    return run


def hugging_face(target: eagle_jax.Target, args: Args) -> Method:
    """`generate` of `transformers` on the same weights in PyTorch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target.name, dtype=getattr(torch, args.dtype)).eval()
    stops = set(target.config.eos_ids)
    law = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0} if args.temperature else {}

    @torch.no_grad()
    def run(prompts: list[list[int]], seed: int) -> Answer:
        torch.manual_seed(seed)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = {"max_new_tokens": args.max_new_tokens, "pad_token_id": 0, "eos_token_id": sorted(stops) or None}
        full = model.generate(ids, attention_mask=mask, **({"do_sample": False} | law), **options)
        rows = full[:, width:].tolist()
        ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in rows]
        return Answer([row[:end] for row, end in zip(rows, ends, strict=True)], None)

    return run


def golden(repeats: int) -> dict[str, Any]:
    """Tokens per second on the golden pair, and whether they are the reference engine's tokens."""
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


def print_table(report: dict[str, Any]) -> None:
    """A Markdown table, one row per task and method."""
    print(
        "\n| task | method | tokens/s | speedup | tau | ms per cycle | identical |\n|---|---|---:|---:|---:|---:|---:|"
    )
    for task in report["results"]["vanilla"]:
        for name, rows in report["results"].items():
            entry = rows[task]
            counts = f"{entry['tau']:.2f} | {entry['cycle_ms']:.2f}" if "tau" in entry else "- | -"
            row = f"{entry['tok_s']:.0f} | {entry['speedup']:.2f}x | {counts} | {entry['identical']}"
            print(f"| {task} | {name} | {row} |")
    means = ", ".join(f"{name} {value:.2f}x" for name, value in report["mean_speedup"].items())
    print(f"\nMean speedup over tasks: {means}\nMachine: {report['machine']}")


def split(names: str) -> list[str]:
    """`"a,b"` -> `["a", "b"]`."""
    return [name.strip() for name in names.split(",") if name.strip()]


if __name__ == "__main__":
    run(main, Args, __doc__)
