"""Times one training step of an EAGLE-3 head here and in PyTorch: the same mathematics, weights and texts.

    python -m train.bench_step
    python -m train.bench_step --size demo --dtype bfloat16 --no-compile
    taskset -c 0 python -m train.bench_step          (one core each: a busy machine then disturbs least)

A step is the target's forward pass, the head unrolled on its own outputs, its gradient, clipping and AdamW; neither
side computes anything twice to save memory (--remat and --chunk concern this library only). The PyTorch side,
`train/torch_step.py`, attends with PyTorch's fused kernels. It is timed eagerly, with as many threads as there are
cores and with one, and as `torch.compile` makes it; the fastest counts. Compiling takes minutes at first, and a C++
compiler (--no-compile leaves it out). Prints a table and, last, one JSON object: `ratio` (PyTorch's median seconds
divided by ours; above 1 this library is faster), `seconds`, `cpu_seconds` (median processor time), `tokens_per_second`,
`loss`. There is no ratio where the losses of the two differ by more than a thousandth. Needs torch:
pip install -e '.[test]'.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.core.types import Params, Texts
from eagle_jax.runtime.compilation import machine, use_compilation_cache
from eagle_jax.training import host
from eagle_jax.training import step as training
from eagle_jax.training.initialise import fresh_head, fresh_target
from eagle_jax.training.objective import Objective
from infer.common.programs import at_least_one, run

RATE, CLIP = 1e-4, 0.5
AGREE = 1e-3
"""Largest relative difference of the losses."""


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the benchmark.

    Attributes:
      size: small (hidden 512, 4 layers, 8192 tokens, 2048 of them drafted), demo (the bundled pair's shape) or tiny.
      rows: texts per step, each one document.
      length: tokens per text; 0 takes the size's own.
      unroll: steps of the head on its own outputs.
      dtype: of products and activations; master weights, scores and losses are float32.
      compile: time what torch.compile makes of the PyTorch side, too.
      remat: this library computes the steps of the head again for their gradient.
      chunk: rows of a text whose logits this library holds at once; 0 is all.
      warmup: unmeasured steps of each side.
      repeats: timed steps of each side, in turns.
      seed: of weights and texts.
    """

    size: Literal["small", "demo", "tiny"] = "small"
    rows: int = 1
    length: int = 0
    unroll: int = 7
    dtype: Literal["float32", "bfloat16"] = "float32"
    compile: bool = True
    remat: bool = False
    chunk: int = 0
    warmup: int = 2
    repeats: int = 7
    seed: int = 0


class Size(NamedTuple):
    """A pair's shape: target, size of the draft vocabulary, taps, tokens per text."""

    target: DecoderConfig
    draft_vocab: int
    taps: tuple[int, ...]
    length: int


SIZES = {
    "small": Size(DecoderConfig(8192, 512, 1408, 4, num_heads=8, num_kv_heads=4, head_dim=64), 2048, (1, 2, 3), 512),
    "demo": Size(DecoderConfig(512, 256, 640, 16, num_heads=4, num_kv_heads=2, head_dim=64), 384, (2, 8, 13), 512),
    "tiny": Size(DecoderConfig(64, 32, 48, 4, num_heads=4, num_kv_heads=2, head_dim=8), 24, (1, 2, 3), 24),
}

Step = Callable[[], float]
"""One update; returns the loss before it, when all is done."""


class Problem(NamedTuple):
    """What both sides train: shapes, weights, draft vocabulary and texts."""

    target: DecoderConfig
    head: HeadConfig
    frozen: Params
    fresh: Params
    kept: np.ndarray
    texts: Texts


def main(args: Args) -> dict[str, Any]:
    """Runs the benchmark; returns what it prints last."""
    at_least_one(args, "rows", "unroll", "warmup", "repeats")
    for name in ("length", "chunk"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name} {getattr(args, name)} must not be negative; 0 leaves the choice to the program")
    if 0 < args.length < args.unroll + 2:
        raise ValueError(
            f"--length {args.length} is too short: step {args.unroll} of the head first guesses token {args.unroll + 2}"
        )
    if not find_spec("torch"):
        raise ValueError("the step is compared with PyTorch, which is not installed: pip install -e '.[test]'")
    import torch

    host.keep_freed_memory()
    use_compilation_cache()
    problem, cores = problem_of(args), usable_cores()
    steps: dict[str, Step] = {"jax": jax_step(args, problem)}
    for threads in sorted({cores, 1}, reverse=True):
        steps[f"torch, {threads} threads"] = torch_step(args, problem, threads)
    how = "eager"
    if args.compile:
        try:
            steps["torch, compiled"] = torch_step(args, problem, cores, compiled=True)
            how = "eager and compiled"
        except torch._dynamo.exc.TorchDynamoException as error:
            how = f"eager; torch.compile failed here: {str(error).strip().splitlines()[0]}"
            logging.warning("PyTorch is timed %s", how)

    times, losses = measure(steps, args.warmup, args.repeats)
    report = summary(problem, times, losses)
    report |= {"torch": f"{torch.__version__}, {how}", "cores": cores, "load": os.getloadavg()[0], "machine": machine()}
    report |= {"settings": dataclasses.asdict(args), "config": dataclasses.asdict(SIZES[args.size].target)}
    print(json.dumps(report))
    return report


def usable_cores() -> int:
    """Cores this process may run on; XLA takes as many threads."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Times(NamedTuple):
    """Of every timed step, seconds on the wall and of the processor (all threads)."""

    seconds: list[float]
    cpu: list[float]


def measure(steps: dict[str, Step], warmup: int, repeats: int) -> tuple[dict[str, Times], dict[str, list[float]]]:
    """Times of the timed steps and losses of all; in turns, so that a slow minute of the machine hits all alike."""
    times = {name: Times([], []) for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(warmup + repeats):
        for name in list(steps)[:: 1 if turn % 2 == 0 else -1]:
            start, cpu = time.perf_counter(), time.process_time()
            losses[name].append(steps[name]())
            if turn >= warmup:
                times[name].seconds.append(time.perf_counter() - start)
                times[name].cpu.append(time.process_time() - cpu)
    return times, losses


def summary(problem: Problem, times: dict[str, Times], losses: dict[str, list[float]]) -> dict[str, Any]:
    """Prints the table; returns what the JSON object says of it.

    Raises:
      ValueError: the losses of the two sides differ.
    """
    for name, values in losses.items():
        for turn, (theirs, ours) in enumerate(zip(values, losses["jax"], strict=True)):
            if not abs(theirs - ours) <= AGREE * abs(ours):
                raise ValueError(
                    f"the two sides do not compute the same: at update {turn} the loss is {ours:.6f} here and "
                    f"{theirs:.6f} with {name}; a ratio of their times would mean nothing"
                )
    median = {name: statistics.median(each.seconds) for name, each in times.items()}
    cpu = {name: statistics.median(each.cpu) for name, each in times.items()}
    tokens = problem.texts.tokens.size
    print("| step | median s | fastest | slowest | processor s | tokens/s | first loss | last loss |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, (seconds, _) in times.items():
        cells = [f"{value:.4f}" for value in (median[name], min(seconds), max(seconds), cpu[name])]
        cells += [f"{tokens / median[name]:.0f}", f"{losses[name][0]:.5f}", f"{losses[name][-1]:.5f}"]
        print(f"| {name} | {' | '.join(cells)} |")
    fastest = min((name for name in times if name != "jax"), key=median.__getitem__)
    ratio = median[fastest] / median["jax"]
    print(f"\nA step takes {ratio:.2f} times as long in PyTorch ({fastest}) as here.")
    return {
        "ratio": round(ratio, 3),
        "fastest_torch": fastest,
        "seconds": {
            name: {"median": round(median[name], 5), "min": round(min(seconds), 5), "max": round(max(seconds), 5)}
            for name, (seconds, _) in times.items()
        },
        "cpu_seconds": {name: round(value, 5) for name, value in cpu.items()},
        "tokens_per_second": {name: round(tokens / value, 1) for name, value in median.items()},
        "loss": {name: [round(values[0], 6), round(values[-1], 6)] for name, values in losses.items()},
    }


def problem_of(args: Args) -> Problem:
    """Random weights and texts; the first quarter of every text is a prompt."""
    size = SIZES[args.size]
    layer = dataclasses.replace(size.target, num_layers=1)
    head = HeadConfig("eagle3", layer, size.draft_vocab, size.target.hidden_size, size.taps)
    rng = np.random.default_rng(args.seed)
    kept = np.sort(rng.choice(size.target.vocab_size, size.draft_vocab, replace=False)).astype(np.int32)
    keys = jax.random.split(jax.random.key(args.seed))
    frozen = fresh_target(size.target, keys[0])
    fresh = fresh_head(head, keys[1], frozen, jnp.asarray(kept - np.arange(len(kept), dtype=np.int32)))
    shape = (args.rows, args.length or size.length)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    tokens = rng.integers(0, size.target.vocab_size, shape, np.int32)
    texts = Texts(*map(jnp.asarray, (tokens, positions >= shape[1] // 4, np.ones(shape, np.int32), positions)))
    frozen = jax.tree.map(lambda leaf: leaf.astype(args.dtype), frozen)
    return Problem(size.target, head, frozen, fresh, kept, texts)


def jax_step(args: Args, problem: Problem) -> Step:
    """`eagle_jax.training`'s step, as `train.head` runs it."""
    # No warm-up beyond the first update, whose rate is 0, and no decay: what `torch_step` does.
    tx = training.head_optimiser(RATE, 1, 10**9, clip=CLIP, floor=1.0)
    objective = Objective(steps=args.unroll, chunk=args.chunk or problem.texts.tokens.shape[1], remat=args.remat)
    step = functools.partial(training.head_train_step, problem.target, problem.head, objective, tx, args.dtype)
    update = jax.jit(step, donate_argnums=0, compiler_options=host.compiler_options())
    state = training.HeadTrainState(problem.fresh, tx.init(problem.fresh), jnp.zeros((), jnp.int32), jax.random.key(0))
    frozen = training.Frozen(problem.frozen, jnp.asarray(problem.kept - np.arange(len(problem.kept), dtype=np.int32)))
    texts = jax.tree.map(lambda x: x[None], problem.texts)
    state = jax.tree.map(jnp.array, state)  # donated: the problem keeps its own

    def call() -> float:
        nonlocal state
        state, report = jax.block_until_ready(update(state, frozen, texts))
        return float(report.loss)

    return call


def torch_step(args: Args, problem: Problem, threads: int, compiled: bool = False) -> Step:
    """The same in PyTorch with so many threads, compiled here where it is to be."""
    import torch

    from train import torch_step as formula

    dtype = getattr(torch, args.dtype)
    what = formula.Formula(problem.target, problem.head, args.unroll)
    target = formula.tensors(problem.frozen, dtype)
    head = {name: value.requires_grad_() for name, value in formula.tensors(problem.fresh).items()}
    kept, texts = torch.from_numpy(problem.kept).long(), formula.texts_of(problem.texts)
    optimiser = torch.optim.AdamW(head.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    loss_of = torch.compile(formula.head_loss) if compiled else formula.head_loss

    def call() -> float:
        torch.set_num_threads(threads)
        optimiser.zero_grad()
        loss, _ = loss_of(what, head, target, kept, texts, dtype)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.values(), CLIP)
        optimiser.step()
        optimiser.param_groups[0]["lr"] = RATE
        return float(loss.detach())

    if compiled:
        start = time.perf_counter()
        torch.set_num_threads(threads)
        loss_of(what, head, target, kept, texts, dtype)[0].backward()
        print(f"torch.compile took {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return call


if __name__ == "__main__":
    run(main, Args, __doc__, log="plain")
