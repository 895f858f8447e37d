"""Pre-trains a small target on the documents of `train.demo.data`.

    python -m train.target --data runs/data --out runs/target --steps 961

The learning rate warms up, stays constant, and falls linearly to zero over the last `--decay` of the updates. A stopped
run continues when the same command is given again. `--out` holds `state.msgpack` (to resume), `checkpoint/` (bfloat16,
with the tokenizer) and `history.jsonl` (held-out loss).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
from transformers import AutoTokenizer

from eagle_jax.checkpoints import save_target_checkpoint, write_whole
from eagle_jax.config import DecoderConfig
from eagle_jax.data.corpus import Corpus, Source, build_corpus
from eagle_jax.runtime.compilation import use_compilation_cache
from eagle_jax.training import compiler_options, fresh_target, pretrain, target_optimiser
from infer.common.programs import at_least_one, run


@dataclasses.dataclass(frozen=True)
class Args:
    """Options of the program."""

    data: Path = Path("runs/data")  # folder that `train.demo.data` wrote
    out: Path = Path("runs/target")  # directory of checkpoints
    layers: int = 16  # decoder layers
    hidden: int = 256  # width of the residual stream
    intermediate: int = 640  # width of the MLPs
    heads: int = 4  # attention heads
    kv_heads: int = 2  # key-value heads
    head_dim: int = 64  # size of an attention head
    length: int = 256  # tokens per row
    micro_rows: int = 4  # rows per micro-batch
    micro_batches: int = 2  # micro-batches per step
    rate: float = 6e-3  # peak learning rate
    warmup: int = 30  # steps of warm-up
    decay: float = 0.25  # share of the run in which the rate falls
    steps: int = 1000  # updates
    seed: int = 0  # seed of weights and order
    save_every: int = 100  # steps per checkpoint and held-out loss
    log_every: int = 10  # steps per log line
    held_rows: int = 32  # held-out rows per measurement


SHARES = {"gsm8k": 0.35, "instruct": 0.35, "completion": 0.15, "code": 0.15}
"""Share of the tokens of every source of documents."""


def read(data: Path, tokenizer: Any) -> Corpus:
    """Reads the documents of `SHARES`, tokenised once and cached in `data/cache`."""
    return build_corpus([Source(str(data / f"{name}.jsonl")) for name in SHARES], tokenizer, data / "cache")[0]


def packed_rows(
    corpus: Corpus, shares: Sequence[float], length: int, seed: int, pool: int = 512
) -> Iterator[np.ndarray]:
    """Yields rows of `length` tokens: documents end to end, every source at its share of the tokens.

    Heads are trained on rows that cut and pad documents; a target learns every token. Rows are shuffled in pools of
    `pool`, because neighbours are often of one document.
    """

    def documents(source: int) -> Iterator[np.ndarray]:
        members = corpus.of(corpus.names[source])
        for epoch in itertools.count():
            for document in np.random.default_rng((seed, 1 + source, epoch)).permutation(members):
                yield corpus[int(document)].tokens

    streams = [documents(source) for source in range(len(shares))]
    spent, rest = np.zeros(len(shares), np.int64), np.zeros(0, np.int32)
    for number in itertools.count():
        parts, size = [rest], len(rest)
        while size < pool * length:
            source = int(np.argmin(spent / np.asarray(shares)))
            parts.append(next(streams[source]))
            spent[source] += len(parts[-1])
            size += len(parts[-1])
        whole, rest = np.split(np.concatenate(parts), [pool * length])
        order = np.random.default_rng((seed, 0, number)).permutation(pool)
        yield from whole.reshape(pool, length)[order]


def take(rows: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Returns the next [count, length] tokens."""
    return np.stack(list(itertools.islice(rows, count)))


def main(args: Args) -> None:
    """Trains until the schedule is complete; saves on the way."""
    at_least_one(args, "steps", "length", "micro_rows", "micro_batches", "save_every", "log_every", "held_rows")
    if not (args.data / "tokenizer" / "tokenizer.json").is_file():
        raise ValueError(f"--data must hold a tokenizer, got {args.data}. Write it there by python -m train.demo.data.")
    tokenizer = AutoTokenizer.from_pretrained(args.data / "tokenizer")
    config = DecoderConfig(
        vocab_size=len(tokenizer), hidden_size=args.hidden, intermediate_size=args.intermediate,
        num_layers=args.layers, num_heads=args.heads, num_kv_heads=args.kv_heads, head_dim=args.head_dim,
        max_position=2048, eos_ids=(tokenizer.eos_token_id,), bos_id=tokenizer.bos_token_id,
    )  # fmt: skip
    shares = list(SHARES.values())
    rows = packed_rows(read(args.data, tokenizer), shares, args.length + 1, args.seed)
    held = packed_rows(read(args.data / "heldout", tokenizer), shares, args.length + 1, args.seed, args.held_rows)
    tx = target_optimiser()
    params = fresh_target(config, jax.random.key(args.seed))
    state = pretrain.TrainState(params, jax.jit(tx.init)(params), jnp.int32(0))
    args.out.mkdir(parents=True, exist_ok=True)
    per_step = args.micro_batches * args.micro_rows
    if (args.out / "state.msgpack").is_file():
        saved = flax.serialization.from_bytes(state, (args.out / "state.msgpack").read_bytes())
        state = jax.tree.map(jnp.asarray, saved)
        next(itertools.islice(rows, int(state.step) * per_step - 1, None))  # the order follows from the seed
    begun = step = int(state.step)
    held_rows = jnp.asarray(take(held, args.held_rows))
    loss_fn = jax.jit(functools.partial(pretrain.next_token_loss, config))
    options = compiler_options()
    update = jax.jit(functools.partial(pretrain.train_step, config, tx), donate_argnums=0, compiler_options=options)
    logging.info("%.2fM parameters, from step %d", sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6, step)
    del params
    start, losses = time.time(), list[float]()
    decay_steps = max(1, round(args.steps * args.decay))
    while step < args.steps:
        rate = pretrain.warmup_stable_decay(step, args.rate, args.warmup, args.steps - decay_steps, decay_steps)
        batch = take(rows, per_step).reshape(args.micro_batches, args.micro_rows, -1)
        state, loss = update(state, jnp.asarray(batch), jnp.float32(rate))
        step += 1
        losses.append(float(loss))
        if not math.isfinite(losses[-1]):
            raise ValueError(
                f"loss must be finite, got {losses[-1]} at step {step}. Lower --rate and run again: the run continues "
                "from the last save."
            )
        speed = (step - begun) * per_step * args.length / (time.time() - start)
        record = {"step": step, "tokens": step * per_step * args.length, "tokens_s": round(speed, 1),
                  "loss": float(np.mean(losses[-args.log_every :]))}  # fmt: skip
        if step % args.save_every == 0 or step == args.steps:
            write_whole(args.out / "state.msgpack", flax.serialization.to_bytes(state))
            shutil.copytree(args.data / "tokenizer", args.out / "checkpoint", dirs_exist_ok=True)
            save_target_checkpoint(config, state.params, args.out / "checkpoint", "bfloat16")
            record["heldout"] = float(np.mean([loss_fn(state.params, part[None]) for part in held_rows]))
            with (args.out / "history.jsonl").open("a", encoding="utf-8") as history:
                history.write(json.dumps(record) + "\n")
        if step % args.log_every == 0 or "heldout" in record:
            logging.info("%s", json.dumps(record))


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
