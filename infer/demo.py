"""Shows a trained draft head at work: the same text in fewer passes of the model.

    python -m infer.demo                                     # what `make demo` runs
    python -m infer.demo --drafter smollm2                   # what `make smollm` runs: a real chat model
    python -m infer.demo --prompt "Write ..." --temperature 1 --drafter eagle3

It streams a completion with accepted drafts in green, decodes the same prompt without a drafter, and times both on
compiled programs. The last line is one JSON object.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import eagle_jax
from eagle_jax.assets import SMOLLM2
from eagle_jax.data.chat import chat_ids
from eagle_jax.models.quantised import Scheme
from eagle_jax.runtime.compilation import machine, use_compilation_cache
from eagle_jax.runtime.loading import Bundled
from infer.common.programs import at_least_one, run
from infer.common.terminal import ReplyView, stdout_console
from infer.common.timing import time_interleaved


@dataclasses.dataclass(frozen=True)
class Args:
    """Options of the demo."""

    prompt: str = "Write a Python function that computes the factorial of n."  # message of the user
    drafter: Bundled = "hass"  # which of the bundled drafters
    max_new_tokens: int = 128  # length of the completion
    temperature: float = 0.0  # 0 is greedy; above 0 the text depends on `seed` but not on the drafter
    seed: int = 0  # of the sampled draws
    repetitions: int = 3  # timed runs of each path, of which the median counts
    weights: Scheme | None = None  # quantises the target when it is loaded (docs/own_model.md)


def main(args: Args) -> None:
    """Runs the demo."""
    at_least_one(args, "repetitions")
    started = time.perf_counter()
    use_compilation_cache()
    console = stdout_console(status=False)
    target, drafter, tokenizer = eagle_jax.load_demo(args.drafter, weights=args.weights)
    prompt = chat_ids(tokenizer, [{"role": "user", "content": args.prompt}])
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "key": args.seed}
    drafters = {"drafted": drafter, "vanilla": None}

    def complete(path: str) -> eagle_jax.GenerateOutput:
        return eagle_jax.generate(target, drafters[path], [prompt], **options)

    def stream(path: str) -> Iterator[eagle_jax.StreamChunk]:
        return eagle_jax.stream(target, drafters[path], prompt, **options)

    stream("drafted")  # raises on bad arguments before any thread compiles
    print(f"Compiling for {machine()} ...", flush=True)
    calls = {path: functools.partial(complete, path) for path in drafters}
    jobs: list[Callable[[], object]] = [*calls.values()]
    jobs += [functools.partial(deque, itertools.islice(stream(path), 2)) for path in drafters]
    pool = concurrent.futures.ThreadPoolExecutor()  # XLA compiles a program on one core
    for future in [pool.submit(job) for job in jobs]:
        future.result()
    print(f"Ready after {time.perf_counter() - started:.0f} s.\n\n> {args.prompt}\n")

    name = args.drafter.replace("eagle", "EAGLE-").replace(SMOLLM2, "EAGLE-3")
    legend = f"{name}: accepted drafts are green" if console.color_system and not console.no_color else name
    shown: list[list[int]] = []
    for path, title in (("drafted", legend), ("vanilla", "Plain decoding")):
        console.out(f"--- {title}", style="dim", highlight=False)
        with ReplyView(console, tokenizer) as view:
            shown.append([])
            for chunk in stream(path):
                view.push(chunk)
                shown[-1] += chunk.tokens
        print()

    outputs = {path: call() for path, call in calls.items()}
    seconds = time_interleaved(calls, args.repetitions)
    rates = {path: len(output.tokens[0]) / seconds[path] for path, output in outputs.items()}
    result = {
        "identical": outputs["drafted"].tokens == outputs["vanilla"].tokens == shown[:1] == shown[1:],
        "tau": round(outputs["drafted"].tau, 3),
        "speedup": round(rates["drafted"] / rates["vanilla"], 3),
        "drafted_tok_s": round(rates["drafted"], 1),
        "vanilla_tok_s": round(rates["vanilla"], 1),
        "machine": machine(),
    }
    if args.drafter != SMOLLM2:
        knows = "has memorised this prompt and answers others" if args.prompt == Args.prompt else "may answer"
        print(f"A model of 11 million parameters {knows} with nonsense; what counts is that both texts are the same.")
    print(
        f"{name} {rates['drafted']:.0f} tokens/s, plain {rates['vanilla']:.0f} tokens/s: {result['speedup']:.2f}x; "
        f"tau = {result['tau']:.2f} tokens per target pass; the texts "
        f"{'are identical' if result['identical'] else 'DIFFER'}.\n"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    run(main, Args, __doc__)
