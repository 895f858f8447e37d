"""Measures `rollout` against batches of fixed rows, on replies of very different lengths.

    python -m infer.rollouts
    python -m infer.rollouts --pair smollm2 --methods eagle3@chain3 --replies 64 --stops

The lengths are lognormal and known in advance; the longest is 20 times the median. The same replies are written in
lanes that refill themselves, in batches of `lanes` prompts in the order in which they come, and in such batches sorted
by length. Plain decoding and every method write them. With `--stops` the lengths are unknown: every reply has a budget
of 20 medians and ends at a stop token of the model, and nothing is sorted. The calls take turns, and the median counts.
In float32 all texts are the same, and the program counts different ones. It prints a table and, last, one JSON object.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import eagle_jax
from eagle_jax.data.chat import chat_ids
from eagle_jax.runtime.compilation import machine, revision, use_compilation_cache
from infer import REPOSITORY
from infer.common.labels import PLAIN
from infer.common.methods import Loader, Places, check_methods, load_pair
from infer.common.programs import at_least_one, check_seed, listed, run
from infer.common.tasks import BUNDLED, load_tasks, task_folder
from infer.common.timing import time_interleaved

LONGEST = 20
"""Length of the longest reply, in medians."""


@dataclasses.dataclass(frozen=True)
class Args(Places):
    """Options of the program."""

    methods: str = "eagle3"  # methods as in infer.bench, beside plain decoding
    tasks: str = BUNDLED  # as in infer.bench; the first turns of their questions are the prompts, repeated as needed
    replies: int = 256  # number of replies
    lanes: int = 16  # replies at a time
    median: int = 16  # tokens of the median reply
    stops: bool = False  # replies end at the model's stop tokens, after at most 20 medians
    temperature: float = 1.0  # of the draws
    repeats: int = 3  # measurements, of which the median counts
    seed: int = 0  # of lengths and draws


class Written(NamedTuple):
    """Holds replies in the order of their prompts, the target's passes, and the sum of those of every reply."""

    tokens: list[list[int]]
    passes: int
    cycles: int


def main(args: Args) -> dict[str, Any]:
    """Measures and prints a table; returns the last line."""
    at_least_one(args, "replies", "lanes", "median", "repeats")
    check_seed(args)
    labels = listed(args, "methods")
    check_methods(labels, args)
    use_compilation_cache()
    target, tokenizer = load_pair(args)
    load = Loader(target, args)
    texts = [
        question.turns[0] for task in load_tasks(listed(args, "tasks"), task_folder()) for question in task.questions
    ]
    prompts = [
        chat_ids(tokenizer, [{"role": "user", "content": text}])
        for text in itertools.islice(itertools.cycle(texts), args.replies)
    ]
    lengths = lognormal_lengths(args.replies, args.median, args.seed)
    options: dict[str, Any] = {"temperature": args.temperature, "eos_ids": ()}
    orders: tuple[str, ...] = ("as they come", "sorted")
    if args.stops:
        lengths, options, orders = [max(lengths)] * args.replies, {"temperature": args.temperature}, ("as they come",)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(args.seed), np.arange(args.replies))
    calls = {}
    for label in (PLAIN, *(one for one in labels if one != PLAIN)):
        rest = (target, load(label), prompts, lengths, keys, args.lanes, options)
        calls[label, "lanes"] = functools.partial(in_lanes, *rest)
        for order in orders:
            calls[label, order] = functools.partial(in_batches, *rest, order == "sorted")
    written = {name: call() for name, call in calls.items()}  # compiles
    seconds = time_interleaved(calls, args.repeats)
    expected = written[PLAIN, "lanes"].tokens
    # `over_bound`: passes by the fewest possible, if every lane always had a reply.
    rows = [
        {"method": label, "order": order, "seconds": round(seconds[label, order], 3), "passes": found.passes,
         "over_bound": round(found.passes * args.lanes / found.cycles, 3),
         "speedup": round(seconds[PLAIN, "as they come"] / seconds[label, order], 3),
         "different": sum(ours != theirs for ours, theirs in zip(found.tokens, expected, strict=True))}
        for (label, order), found in written.items()
    ]  # fmt: skip
    sizes = sorted(map(len, expected))
    print(f"{args.replies} replies of {sizes[0]} to {sizes[-1]} tokens, {args.lanes} at a time\n")
    print("| method | replies | seconds | speedup | passes | of the fewest | different texts |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        line = "| {method} | {order} | {seconds:.1f} | {speedup:.2f}x | {passes} | {over_bound:.3f} | {different} |"
        print(line.format(**row))
    about = {"machine": machine(), "revision": revision(REPOSITORY), "settings": dataclasses.asdict(args)}
    report = {"rows": rows, "lengths": sizes, **about}
    print(json.dumps(report))
    return report


def lognormal_lengths(count: int, median: int, seed: int) -> list[int]:
    """Returns lognormal lengths (sigma 1), of which one is `LONGEST` medians and none is longer."""
    draws = np.exp(np.random.default_rng(seed).normal(size=count))
    lengths = np.clip(np.round(median * draws / np.median(draws)), 1, LONGEST * median).astype(int)
    lengths[np.argmax(lengths)] = LONGEST * median
    return lengths.tolist()


def in_lanes(
    target: eagle_jax.Target, drafter: Any, prompts: list[list[int]], lengths: Sequence[int], keys: jax.Array,
    lanes: int, options: dict[str, Any],
) -> Written:  # fmt: skip
    """Writes the replies in lanes that refill themselves."""
    out = eagle_jax.rollout(target, drafter, prompts, lanes=lanes, max_new_tokens=lengths, key=keys, **options)
    return Written(out.tokens, out.passes, int(out.cycles.sum()))


def in_batches(
    target: eagle_jax.Target, drafter: Any, prompts: list[list[int]], lengths: Sequence[int], keys: jax.Array,
    lanes: int, options: dict[str, Any], by_length: bool,
) -> Written:  # fmt: skip
    """Writes the replies batch by batch; a batch ends with its longest reply."""
    order = np.argsort(-np.asarray(lengths), kind="stable") if by_length else np.arange(len(lengths))
    tokens: list[list[int]] = [[]] * len(lengths)
    passes = cycles = 0
    for at in range(0, len(order), lanes):
        rows = order[at : at + lanes]
        out = eagle_jax.generate(
            target, drafter, [prompts[row] for row in rows], max_new_tokens=[lengths[row] for row in rows],
            key=keys[rows], **options,
        )  # fmt: skip
        passes += int(out.cycles.max())
        cycles += int(out.cycles.sum())
        for row, text in zip(rows, out.tokens, strict=True):
            tokens[row] = text
    return Written(tokens, passes, cycles)


if __name__ == "__main__":
    run(main, Args, __doc__)
