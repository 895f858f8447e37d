"""Times a training step of an EAGLE-3 head, and computes its model-flops utilisation.

    python -m train.bench_step
    python -m train.bench_step --size demo --dtype bfloat16

A step is the target's forward pass, the unrolled head, its gradient, clipping and AdamW, without recomputation. Weights
and texts are random. The last line of output is one JSON object; `mfu` is model-flops utilisation: matrix-product flops
per second divided by the devices' peak (on a CPU: the measured speed of a large matrix product).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import training
from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.packed import PackedTokens
from eagle_jax.runtime.compilation import machine, use_compilation_cache
from infer.common.programs import at_least_one, run


@dataclasses.dataclass(frozen=True)
class Args:
    """Options of the benchmark."""

    # small (hidden 512, 4 layers, vocabulary 8192, draft vocabulary 2048), demo (the bundled pair's shape) or tiny
    size: Literal["small", "demo", "tiny"] = "small"
    rows: int = 1  # texts per step
    length: int = 512  # tokens per text
    unroll: int = 7  # steps of the head on its own outputs
    # dtype of products and activations; trained weights, scores and losses are float32
    dtype: Literal["float32", "bfloat16"] = "float32"
    repeats: int = 7  # timed steps, after two that are not timed


SIZES = {
    "small": (DecoderConfig(8192, 512, 1408, 4, num_heads=8, num_kv_heads=4, head_dim=64), 2048, (1, 2, 3)),
    "demo": (DecoderConfig(512, 256, 640, 16, num_heads=4, num_kv_heads=2, head_dim=64), 384, (2, 8, 13)),
    "tiny": (DecoderConfig(64, 32, 48, 4, num_heads=4, num_kv_heads=2, head_dim=8), 24, (1, 2, 3)),
}
"""Target, size of the draft vocabulary and taps."""


def main(args: Args) -> dict[str, Any]:
    """Times the step; prints and returns the report."""
    at_least_one(args, "rows", "length", "unroll", "repeats")
    if args.length < (least := args.unroll + 2):
        raise ValueError(f"--length must be at least --unroll + 2 = {least}, got {args.length}. Raise it.")
    training.keep_freed_memory()
    use_compilation_cache()
    target, draft_vocab, taps = SIZES[args.size]
    config = HeadConfig("eagle3", target.one_layer(), draft_vocab, target.hidden_size, taps)
    keys = jax.random.split(jax.random.key(0))
    weights = jax.jit(functools.partial(training.fresh_target, target))(keys[0])
    d2t = jnp.zeros(draft_vocab, jnp.int32)
    head = jax.jit(functools.partial(training.fresh_head, config))(keys[1], weights, d2t)
    frozen = training.Frozen(jax.tree.map(lambda leaf: leaf.astype(args.dtype), weights), d2t)

    shape = (1, args.rows, args.length)  # one micro-batch; a prompt is the first quarter of a text
    positions = np.broadcast_to(np.arange(args.length, dtype=np.int32), shape)
    tokens = np.random.default_rng(0).integers(0, draft_vocab, shape, np.int32)
    arrays = (tokens, positions >= args.length // 4, np.ones(shape, np.int32), positions)
    texts = PackedTokens(*map(jnp.asarray, arrays))

    tx = training.head_optimiser(1e-4, 1, 10**9)
    objective = training.Objective(steps=args.unroll, chunk=args.length, remat=False)
    step = functools.partial(training.head_train_step, target, config, objective, tx, args.dtype)
    state = training.HeadTrainState(head, jax.jit(tx.init)(head), jnp.zeros((), jnp.int32), jax.random.key(0))
    flops = training.product_flops(step, state, frozen, texts)
    update = jax.jit(step, donate_argnums=0, compiler_options=training.compiler_options())
    losses, times = [], []
    for _ in range(2 + args.repeats):
        start = time.perf_counter()
        state, report = jax.block_until_ready(update(state, frozen, texts))
        times.append(time.perf_counter() - start)
        losses.append(float(report.loss))

    timed = times[2:]
    seconds = float(np.median(timed))
    found: dict[str, Any] = {
        "seconds": seconds, "fastest": min(timed), "slowest": max(timed),
        "tokens_per_second": round(args.rows * args.length / seconds, 1),
        "mfu": round(flops / seconds / training.peak_flops(args.dtype), 4), "loss": [losses[0], losses[-1]],
        "machine": machine(), "settings": dataclasses.asdict(args),
    }  # fmt: skip
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    run(main, Args, __doc__, log="plain")
