"""Shows a trained draft head at work: the same text in fewer passes of the model.

    python -m infer.demo                                     # what `make demo` runs
    python -m infer.demo --prompt "Write ..." --temperature 1 --head eagle3

It streams a completion, with accepted drafts in green, decodes the same prompt without a drafter, and times both on
compiled programs. The last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import eagle_jax
from eagle_jax.data.chat.tokenize import chat_ids
from eagle_jax.runtime.compilation import machine, use_compilation_cache
from eagle_jax.runtime.demo import Bundled
from eagle_jax.viz import DIM, GREEN, paint
from infer.common.programs import at_least_one, run
from infer.common.timing import time_interleaved


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the demo.

    Attributes:
      prompt: message of the user.
      head: which of the bundled drafters.
      max_new_tokens: length of the completion.
      temperature: 0 is greedy; above 0 the text depends on `seed` but not on the drafter.
      seed: of the sampled draws.
      repetitions: timed runs of each path, of which the median counts.
    """

    prompt: str = "Write a Python function that computes the factorial of n."
    head: Bundled = "hass"
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    repetitions: int = 3


def main(args: Args) -> None:
    """Runs the demo."""
    at_least_one(args, "repetitions")
    started = time.perf_counter()
    use_compilation_cache()
    colours = (sys.stdout.isatty() or "FORCE_COLOR" in os.environ) and "NO_COLOR" not in os.environ
    target, drafter, tokenizer = eagle_jax.load_demo(args.head)
    prompt = chat_ids(tokenizer, [{"role": "user", "content": args.prompt}])
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "key": args.seed}
    paths = {"eagle": drafter, "vanilla": None}

    def complete(head: eagle_jax.BoundDrafter | None) -> eagle_jax.GenerateOutput:
        return eagle_jax.generate(target, head, [prompt], **options)

    def watch(head: eagle_jax.BoundDrafter | None) -> Iterator[eagle_jax.StreamChunk]:
        return eagle_jax.stream(target, head, prompt, **options)

    watch(drafter)  # raises on bad arguments before any thread compiles
    print(f"Compiling for {machine()} ...", flush=True)
    compile_at_once(
        [functools.partial(complete, head) for head in paths.values()]
        + [functools.partial(deque, itertools.islice(watch(head), 2)) for head in paths.values()]
    )
    print(f"Ready after {time.perf_counter() - started:.0f} s.\n\n> {args.prompt}\n")

    name = args.head.replace("eagle", "EAGLE-")
    legend = f"{name}: accepted drafts are green" if colours else name
    seen = []
    for label, head in ((legend, drafter), ("Plain decoding", None)):
        print(paint(f"--- {label}", DIM, colours), flush=True)
        seen.append(show(watch(head), tokenizer, colours))

    outputs = {path: complete(head) for path, head in paths.items()}
    calls = {path: functools.partial(complete, head) for path, head in paths.items()}
    seconds = time_interleaved(calls, args.repetitions)
    rates = {path: len(outputs[path].tokens[0]) / seconds[path] for path in paths}
    # The shown texts as well as the timed ones.
    identical = outputs["eagle"].tokens == outputs["vanilla"].tokens == seen[:1] == seen[1:]
    result = {
        "identical": identical,
        "tau": round(outputs["eagle"].tau, 3),
        "speedup": round(rates["eagle"] / rates["vanilla"], 3),
        "eagle_tok_s": round(rates["eagle"], 1),
        "vanilla_tok_s": round(rates["vanilla"], 1),
        "machine": machine(),
    }
    knows = "knows this prompt by heart, others it answers" if args.prompt == Args.prompt else "may well answer"
    print(f"A model of 11 million parameters {knows} with nonsense; what counts is that both texts are the same.")
    print(
        f"{name} {rates['eagle']:.0f} tokens/s, plain {rates['vanilla']:.0f} tokens/s: {result['speedup']:.2f}x; "
        f"tau = {result['tau']:.2f} tokens per target pass; the texts {'are identical' if identical else 'DIFFER'}.\n"
    )
    print(json.dumps(result))


def compile_at_once(calls: list[Callable[[], object]]) -> None:
    """Makes every call once, in daemon threads: XLA compiles a program on one core, and Ctrl-C need not wait.

    Raises:
      Exception: the first exception of a call.
    """
    failed: list[Exception] = []

    def made(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=made, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        # A join without a timeout would delay a signal that another thread receives.
        time.sleep(0.1)
    if failed:
        raise failed[0]


def show(chunks: Iterator[eagle_jax.StreamChunk], tokenizer: Any, colours: bool) -> list[int]:
    """Prints tokens as they come, accepted drafts in green; returns them."""
    text, tokens = eagle_jax.TextStream(tokenizer), list[int]()
    for chunk in chunks:
        tokens += chunk.tokens
        drafted = text.push(chunk.tokens[: chunk.drafted])
        print(paint(drafted, GREEN, colours) + text.push(chunk.tokens[chunk.drafted :]), end="", flush=True)
    print(text.end() + "\n")
    return tokens


if __name__ == "__main__":
    run(main, Args, __doc__)
