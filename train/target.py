"""Pre-trains a small target on the documents of `train.demo.data`.

    python -m train.target --data runs/data --out runs/target --steps 961

The learning rate warms up, stays constant, and falls linearly to zero over the last `--decay` of the updates. A stopped
run continues when the same command is given again. `--out` holds `state.msgpack` (to resume), `checkpoint/` (bfloat16,
with the tokenizer) and `history.jsonl` (held-out loss).
"""

from __future__ import annotations

import collections
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

from eagle_jax.checkpoints import save_target_checkpoint
from eagle_jax.checkpoints.files.staging import write_whole
from eagle_jax.config import DecoderConfig
from eagle_jax.data.chat.tokenizers import load_tokenizer
from eagle_jax.data.corpus.documents import Corpus
from eagle_jax.data.corpus.sources import Source, build_corpus
from eagle_jax.runtime.compilation import use_compilation_cache
from eagle_jax.training import host, pretrain
from eagle_jax.training.initialise import fresh_target
from infer.common.programs import at_least_one, run


@dataclasses.dataclass(frozen=True)
class Args:
    """Options of the program.

    Attributes:
      data: folder that `train.demo.data` wrote.
      out: directory of checkpoints.
      layers: decoder layers.
      hidden: width of the residual stream.
      intermediate: width of the MLPs.
      heads: attention heads.
      kv_heads: key-value heads.
      head_dim: size of an attention head.
      max_position: longest context.
      length: tokens per row.
      micro_rows: rows per micro-batch.
      micro_batches: micro-batches per step.
      rate: peak learning rate.
      warmup: steps of warm-up.
      decay: share of the run in which the rate falls.
      steps: updates.
      seed: of weights and order.
      save_minutes: time between checkpoints.
      log_every: steps per log line.
      held_rows: held-out rows per measurement, a multiple of 4.
    """

    data: Path = Path("runs/data")
    out: Path = Path("runs/target")
    layers: int = 16
    hidden: int = 256
    intermediate: int = 640
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    max_position: int = 2048
    length: int = 256
    micro_rows: int = 4
    micro_batches: int = 2
    rate: float = 6e-3
    warmup: int = 30
    decay: float = 0.25
    steps: int = 1000
    seed: int = 0
    save_minutes: float = 5.0
    log_every: int = 10
    held_rows: int = 32


SHARES = {"gsm8k": 0.35, "instruct": 0.35, "completion": 0.15, "code": 0.15}
"""Share of the tokens of every source of documents."""


def read(data: Path, tokenizer: Any) -> Corpus:
    """Reads the documents of `SHARES`, tokenised once and cached in `data/cache`."""
    sources = [Source(str(data / f"{name}.jsonl")) for name in SHARES]
    return build_corpus(sources, tokenizer, data / "cache")[0]


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
    at_least_one(args, "steps", "length", "micro_rows", "micro_batches", "log_every", "held_rows")
    if args.held_rows % 4:
        raise ValueError(f"--held-rows must be a multiple of 4, got {args.held_rows}.")
    if not (args.data / "tokenizer" / "tokenizer.json").is_file():
        raise ValueError(f"--data {args.data} holds no tokenizer. Run python -m train.demo.data --out {args.data}.")
    vocabulary = json.loads((args.data / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    special = {entry["content"]: entry["id"] for entry in vocabulary["added_tokens"]}
    config = DecoderConfig(
        vocab_size=len(vocabulary["model"]["vocab"]), hidden_size=args.hidden, intermediate_size=args.intermediate,
        num_layers=args.layers, num_heads=args.heads, num_kv_heads=args.kv_heads, head_dim=args.head_dim,
        max_position=args.max_position, eos_ids=(special["<|end|>"],), bos_id=special["<|bos|>"],
    )  # fmt: skip
    tokenizer = load_tokenizer(args.data / "tokenizer", config)
    shares = list(SHARES.values())
    rows = packed_rows(read(args.data, tokenizer), shares, args.length + 1, args.seed)
    held = packed_rows(read(args.data / "heldout", tokenizer), shares, args.length + 1, args.seed, args.held_rows)
    tx = pretrain.optimiser()
    params = fresh_target(config, jax.random.key(args.seed))
    state = pretrain.TrainState(params, jax.jit(tx.init)(params), jnp.int32(0))
    args.out.mkdir(parents=True, exist_ok=True)
    consumed = 0
    if (args.out / "state.msgpack").is_file():
        saved = flax.serialization.msgpack_restore((args.out / "state.msgpack").read_bytes())
        state = jax.tree.map(jnp.asarray, flax.serialization.from_state_dict(state, saved["state"]))
        consumed = int(saved["rows"])
        collections.deque(itertools.islice(rows, consumed), maxlen=0)  # the order follows from the seed

    step = int(state.step)
    per_step = args.micro_batches * args.micro_rows
    held_rows = jnp.asarray(take(held, args.held_rows)).reshape(-1, 4, args.length + 1)
    loss_fn = jax.jit(functools.partial(pretrain.next_token_loss, config))
    options = host.compiler_options()
    update = jax.jit(functools.partial(pretrain.train_step, config, tx), donate_argnums=0, compiler_options=options)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    logging.info("%.2fM parameters, %d tokens per step, from step %d", size / 1e6, per_step * args.length, step)

    def save() -> float:
        everything = {"state": flax.serialization.to_state_dict(state), "rows": consumed}
        write_whole(args.out / "state.msgpack", flax.serialization.msgpack_serialize(everything))
        shutil.copytree(args.data / "tokenizer", args.out / "checkpoint", dirs_exist_ok=True)
        save_target_checkpoint(config, state.params, args.out / "checkpoint", "bfloat16")
        held_loss = float(np.mean([float(loss_fn(state.params, part)) for part in held_rows]))
        record = {"step": step, "tokens": consumed * args.length, "loss": float(np.mean(losses)),
                  "heldout": held_loss, "minutes": (time.time() - start) / 60}  # fmt: skip
        with (args.out / "history.jsonl").open("a", encoding="utf-8") as history:
            history.write(json.dumps(record) + "\n")
        logging.info("saved %s", json.dumps(record))
        return time.time()

    del params
    start = last_save = mark = time.time()
    losses: list[float] = []
    decay_steps = max(1, round(args.steps * args.decay))
    while step < args.steps:
        rate = pretrain.warmup_stable_decay(step, args.rate, args.warmup, args.steps - decay_steps, decay_steps)
        batch = take(rows, per_step).reshape(args.micro_batches, args.micro_rows, -1)
        state, loss = update(state, jnp.asarray(batch), jnp.float32(rate))
        losses = [*losses[-99:], float(loss)]
        if not math.isfinite(losses[-1]):
            raise ValueError(
                f"step {step}: the loss must be finite, got {losses[-1]}. Lower --rate; the "
                "command continues from the last save."
            )
        step, consumed = step + 1, consumed + per_step
        if step % args.log_every == 0:
            rate_now = args.log_every * per_step * args.length / (time.time() - mark)
            mark = time.time()
            logging.info("step %d loss %.4f tokens/s %.0f lr %.2e minute %.1f", step,
                         float(np.mean(losses[-args.log_every :])), rate_now, rate, (mark - start) / 60)  # fmt: skip
        if time.time() - last_save > args.save_minutes * 60:
            last_save = save()
    if losses:
        save()


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
