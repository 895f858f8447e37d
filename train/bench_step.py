"""Times a training step of an EAGLE-3 head here and in PyTorch, with the same weights and texts.

    python -m train.bench_step
    python -m train.bench_step --size demo --dtype bfloat16 --no-compile
    taskset -c 0 python -m train.bench_step          (one core each: least disturbed by other programs)

A step is the target's forward pass, the unrolled head, its gradient, clipping and AdamW, without recomputation. PyTorch
runs `train/torch_step.py` with fused attention: eager with all cores, eager with one thread, and compiled (minutes at
first; needs a C++ compiler). Prints a table and, last, one JSON object: `ratio` (seconds of the fastest PyTorch step
over ours; above 1 this library is faster), `seconds`, `cpu_seconds`, `tokens_per_second`, `loss`. The losses must
agree. Needs torch: pip install -e '.[test]'.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.core.types import Params
from eagle_jax.packed import PackedTokens
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
    """Options of the benchmark.

    Attributes:
      size: small (hidden 512, 4 layers, 8192 tokens, 2048 of them drafted), demo (the bundled pair's shape) or tiny.
      rows: texts per step, one document each.
      length: tokens per text; None takes the size's own.
      unroll: steps of the head on its own outputs.
      dtype: of products and activations; trained weights, scores and losses are float32.
      compile: time torch.compile's version of the PyTorch step as well.
      warmup: unmeasured steps of each side.
      repeats: timed steps of each side, in turns.
      seed: of weights and texts.
    """

    size: Literal["small", "demo", "tiny"] = "small"
    rows: int = 1
    length: int | None = None
    unroll: int = 7
    dtype: Literal["float32", "bfloat16"] = "float32"
    compile: bool = True
    warmup: int = 2
    repeats: int = 7
    seed: int = 0


class Size(NamedTuple):
    """Shape of a pair: target, size of the draft vocabulary, taps, tokens per text."""

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
"""Runs one update; returns the loss before it."""


class Problem(NamedTuple):
    """What both sides train: shapes, weights, draft vocabulary and texts."""

    target: DecoderConfig
    head: HeadConfig
    frozen: Params
    fresh: Params
    kept: np.ndarray
    texts: PackedTokens


def main(args: Args) -> dict[str, Any]:
    """Runs the benchmark; prints and returns the report."""
    at_least_one(args, "rows", "length", "unroll", "warmup", "repeats")
    if args.length is not None and args.length < args.unroll + 2:
        raise ValueError(f"--length must be at least {args.unroll + 2} for --unroll {args.unroll}, got {args.length}.")
    if not find_spec("torch"):
        raise ValueError("this benchmark needs PyTorch. Install it: pip install -e '.[test]'")
    import torch

    host.keep_freed_memory()
    use_compilation_cache()
    problem = problem_of(args)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
    report = summary(problem.texts.tokens.size, *measure(steps, args.warmup, args.repeats))
    report |= {"torch": f"{torch.__version__}, {how}", "cores": cores, "load": os.getloadavg()[0], "machine": machine()}
    report |= {"settings": dataclasses.asdict(args), "config": dataclasses.asdict(problem.target)}
    print(json.dumps(report))
    return report


def measure(steps: dict[str, Step], warmup: int, repeats: int) -> tuple[dict[str, np.ndarray], dict[str, list[float]]]:
    """Returns [repeats, 2] seconds (wall, processor) and all losses of every side; sides take turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(warmup + repeats):
        for name in list(steps)[:: 1 if turn % 2 == 0 else -1]:
            start, cpu = time.perf_counter(), time.process_time()
            losses[name].append(steps[name]())
            times[name].append((time.perf_counter() - start, time.process_time() - cpu))
    return {name: np.array(each[warmup:]) for name, each in times.items()}, losses


def summary(tokens: int, times: dict[str, np.ndarray], losses: dict[str, list[float]]) -> dict[str, Any]:
    """Prints the table; returns the report.

    Raises:
      ValueError: the losses of the two sides differ.
    """
    for name, values in losses.items():
        for turn, (theirs, ours) in enumerate(zip(values, losses["jax"], strict=True)):
            if not abs(theirs - ours) <= AGREE * abs(ours):
                raise ValueError(
                    f"the losses must agree: at update {turn} the loss is {ours:.6f} here and {theirs:.6f} with {name}"
                )
    print("| step | median s | fastest | slowest | processor s | tokens/s | first loss | last loss |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    median, cpu = ({name: float(np.median(each[:, i])) for name, each in times.items()} for i in (0, 1))
    ends = {name: {"min": float(each[:, 0].min()), "max": float(each[:, 0].max())} for name, each in times.items()}
    for name in times:
        cells = [f"{value:.4f}" for value in (median[name], *ends[name].values(), cpu[name])]
        cells += [f"{tokens / median[name]:.0f}", f"{losses[name][0]:.5f}", f"{losses[name][-1]:.5f}"]
        print(f"| {name} | {' | '.join(cells)} |")
    fastest = min((name for name in times if name != "jax"), key=median.__getitem__)
    ratio = median[fastest] / median["jax"]
    print(f"\nA step takes {ratio:.2f} times as long in PyTorch ({fastest}) as here.")
    return {
        "ratio": round(ratio, 3), "fastest_torch": fastest,
        "seconds": {name: {"median": median[name], **ends[name]} for name in times}, "cpu_seconds": cpu,
        "tokens_per_second": {name: round(tokens / value, 1) for name, value in median.items()},
        "loss": {name: [round(values[0], 6), round(values[-1], 6)] for name, values in losses.items()},
    }  # fmt: skip


def problem_of(args: Args) -> Problem:
    """Draws weights and texts; the first quarter of every text is a prompt."""
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
    texts = PackedTokens(*map(jnp.asarray, (tokens, positions >= shape[1] // 4, np.ones(shape, np.int32), positions)))
    frozen = jax.tree.map(lambda leaf: leaf.astype(args.dtype), frozen)
    return Problem(size.target, head, frozen, fresh, kept, texts)


def jax_step(args: Args, problem: Problem) -> Step:
    """Returns the step of `eagle_jax.training`, as `train.head` runs it."""
    # The rate of the first update is 0 and the others are constant, as in `torch_step`.
    tx = training.head_optimiser(RATE, 1, 10**9, clip=CLIP, floor=1.0)
    objective = Objective(steps=args.unroll, chunk=problem.texts.tokens.shape[1], remat=False)
    step = functools.partial(training.head_train_step, problem.target, problem.head, objective, tx, args.dtype)
    update = jax.jit(step, donate_argnums=0, compiler_options=host.compiler_options())
    state = training.HeadTrainState(problem.fresh, tx.init(problem.fresh), jnp.zeros((), jnp.int32), jax.random.key(0))
    frozen = training.Frozen(problem.frozen, jnp.asarray(problem.kept - np.arange(len(problem.kept), dtype=np.int32)))
    texts = jax.tree.map(lambda x: x[None], problem.texts)
    state = jax.tree.map(jnp.array, state)  # a copy, because it is donated

    def call() -> float:
        nonlocal state
        state, report = jax.block_until_ready(update(state, frozen, texts))
        return float(report.loss)

    return call


def torch_step(args: Args, problem: Problem, threads: int, compiled: bool = False) -> Step:
    """Returns the step in PyTorch, compiled before it is timed."""
    import torch

    from train import torch_step as formula

    dtype = getattr(torch, args.dtype)
    what = formula.Formula(problem.target, problem.head, args.unroll)
    target = formula.tensors(problem.frozen, dtype)
    head = {name: value.requires_grad_() for name, value in formula.tensors(problem.fresh).items()}
    kept, texts = torch.from_numpy(problem.kept).long(), formula.texts_of(problem.texts)
    optimiser = torch.optim.AdamW(head.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    loss_of = torch.compile(formula.head_loss) if compiled else formula.head_loss

    def gradient() -> float:
        torch.set_num_threads(threads)
        optimiser.zero_grad()
        loss, _ = loss_of(what, head, target, kept, texts, dtype)
        loss.backward()
        return float(loss.detach())

    def call() -> float:
        loss = gradient()
        torch.nn.utils.clip_grad_norm_(head.values(), CLIP)
        optimiser.step()
        optimiser.param_groups[0]["lr"] = RATE
        return loss

    if compiled:
        start = time.perf_counter()
        gradient()
        logging.info("torch.compile took %.0f s", time.perf_counter() - start)
    return call


if __name__ == "__main__":
    run(main, Args, __doc__, log="plain")
