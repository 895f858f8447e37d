"""Pre-trains a small target from scratch on the documents that `train.demo.data` wrote.

    python -m train.target --data runs/data --out runs/target --minutes 100       (`--resume` carries on after a stop)

Learning rate: warm-up, constant, and over the last `--decay` of the run a linear fall to zero. The length of the run is
a wall-clock budget (or `--steps`, reproducible), so that the schedule is always completed. Progress is one line per
`--log-every` steps; every few minutes `state.msgpack` (to resume) and `checkpoint/` (bfloat16, with the tokenizer) are
rewritten, and `history.jsonl` grows by a line with the held-out loss.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints import save_target_checkpoint
from eagle_jax.checkpoints.staging import write_whole
from eagle_jax.config import DecoderConfig
from eagle_jax.data.corpus import Corpus
from eagle_jax.data.sources import Source, build_corpus
from eagle_jax.data.tokenizers import load_tokenizer
from eagle_jax.runtime.compilation import use_compilation_cache
from eagle_jax.training import host, pretrain
from eagle_jax.training.initialise import fresh_target
from infer.common.programs import at_least_one, run


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the program.

    Attributes:
      data: folder written by `train.demo.data`.
      out: where checkpoints go.
      layers: of the decoder.
      hidden: width of its residual stream.
      intermediate: width of its MLPs.
      heads: of attention.
      kv_heads: key-value heads.
      head_dim: size of a head.
      max_position: longest context.
      length: tokens per row.
      micro_rows: rows per micro-batch.
      micro_batches: micro-batches per step.
      rate: peak learning rate.
      warmup: steps of warm-up.
      decay: share of the run that the final fall takes.
      minutes: wall-clock budget of the whole run.
      steps: a fixed number of updates instead.
      seed: of weights and order.
      save_minutes: between checkpoints.
      log_every: steps per line.
      held_rows: held-out rows per measurement, a multiple of 4.
      resume: continue from `out`; `minutes` and `steps` then count from the restart.
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
    minutes: float = 100.0
    steps: int = 0
    seed: int = 0
    save_minutes: float = 5.0
    log_every: int = 10
    held_rows: int = 32
    resume: bool = False


SHARES = {"gsm8k": 0.35, "instruct": 0.35, "completion": 0.15, "code": 0.15}
"""Share of the tokens that every source of documents gets."""


def read(data: Path, tokenizer: Any) -> Corpus:
    """The documents of `SHARES` in a folder, tokenised once and kept in `cache/` there."""
    sources = [Source(str(data / f"{name}.jsonl")) for name in SHARES]
    return build_corpus(sources, tokenizer, data / "cache")[0]


class Rows:
    """Documents end to end, each source at its share of the tokens, cut into rows that are full to the last token.

    Not the packing that heads are trained on: that cuts long documents and pads, and a target learns every token. Rows
    are shuffled in pools of `pool`, since neighbours are often of one document.
    """

    def __init__(self, corpus: Corpus, shares: Sequence[float], length: int, seed: int, pool: int = 512) -> None:
        self._corpus, self._shares, self._size, self._seed = corpus, np.asarray(shares), (pool, length), seed
        self._members = [corpus.of(name) for name in corpus.names]
        self._taken = [0] * len(shares)  # documents of every source
        self._spent = np.zeros(len(shares), np.int64)  # tokens of every source
        self._rest = np.zeros(0, np.int32)
        self._pools = 0
        self._fill()

    def take(self, count: int) -> np.ndarray:
        """The next [count, length] tokens: the target learns everything, supervised or not."""
        rows = []
        for _ in range(count):
            if self._at == len(self._pool):
                self._fill()
            rows.append(self._pool[self._at])
            self._at += 1
        return np.stack(rows)

    def get_state(self) -> str:
        """Where the next row begins, as JSON."""
        return json.dumps({**self._begun, "at": self._at})

    def set_state(self, state: str) -> None:
        """Goes to where `get_state` was called."""
        begun = json.loads(state)
        self._taken, self._pools = begun["taken"], begun["pools"]
        self._spent, self._rest = np.array(begun["spent"], np.int64), np.array(begun["rest"], np.int32)
        self._fill()
        self._at = begun["at"]

    def _fill(self) -> None:
        spent, rest = self._spent.tolist(), self._rest.tolist()
        self._begun = {"taken": list(self._taken), "pools": self._pools, "spent": spent, "rest": rest}
        parts, size = [self._rest], len(self._rest)
        while size < self._size[0] * self._size[1]:
            parts.append(self._document())
            size += len(parts[-1])
        tokens = np.concatenate(parts)
        whole, self._rest = np.split(tokens, [self._size[0] * self._size[1]])
        order = np.random.default_rng((self._seed, 0, self._pools)).permutation(self._size[0])
        self._pool, self._at, self._pools = whole.reshape(self._size)[order], 0, self._pools + 1

    def _document(self) -> np.ndarray:
        """Tokens of the next document of the source that is furthest behind; an epoch of a source has its own order."""
        source = int(np.argmin(self._spent / self._shares))
        epoch, place = divmod(self._taken[source], len(self._members[source]))
        tokens = self._corpus[int(self._order(source, epoch)[place])].tokens
        self._taken[source] += 1
        self._spent[source] += len(tokens)
        return tokens

    @functools.lru_cache(maxsize=2 * len(SHARES))  # noqa: B019 (lives as long as the program)
    def _order(self, source: int, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, 1 + source, epoch)).permutation(self._members[source])


def main(args: Args) -> None:
    """Trains until the schedule is complete."""
    at_least_one(args, "length", "micro_rows", "micro_batches", "log_every", "held_rows")
    if args.held_rows % 4:
        raise ValueError(f"--held-rows {args.held_rows} must be a multiple of 4, the rows measured at once")
    if not (args.data / "tokenizer" / "tokenizer.json").is_file():
        raise ValueError(
            f"--data {args.data}: no tokenizer there: run `python -m train.demo.data --out {args.data}` first"
        )
    if args.resume and not (args.out / "state.msgpack").is_file():
        raise ValueError(f"--out {args.out}: there is nothing to resume: leave --resume out")
    vocabulary = json.loads((args.data / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    special = {entry["content"]: entry["id"] for entry in vocabulary["added_tokens"]}
    config = DecoderConfig(
        vocab_size=len(vocabulary["model"]["vocab"]), hidden_size=args.hidden, intermediate_size=args.intermediate,
        num_layers=args.layers, num_heads=args.heads, num_kv_heads=args.kv_heads, head_dim=args.head_dim,
        max_position=args.max_position, eos_ids=(special["<|end|>"],), bos_id=special["<|bos|>"],
    )  # fmt: skip
    tokenizer = load_tokenizer(args.data / "tokenizer", config)
    shares = list(SHARES.values())
    rows = Rows(read(args.data, tokenizer), shares, args.length + 1, args.seed)
    held = Rows(read(args.data / "heldout", tokenizer), shares, args.length + 1, args.seed, args.held_rows)
    tx = pretrain.optimiser()
    params = fresh_target(config, jax.random.key(args.seed))
    state = pretrain.TrainState(params, jax.jit(tx.init)(params), jnp.int32(0))
    args.out.mkdir(parents=True, exist_ok=True)
    consumed = 0
    if args.resume:
        saved = flax.serialization.msgpack_restore((args.out / "state.msgpack").read_bytes())
        state = jax.tree.map(jnp.asarray, flax.serialization.from_state_dict(state, saved["state"]))
        consumed = int(saved["rows"])
        rows.set_state(saved["position"])

    step = first = int(state.step)
    per_step = args.micro_batches * args.micro_rows
    held_rows = jnp.asarray(held.take(args.held_rows)).reshape(-1, 4, args.length + 1)
    loss_fn = jax.jit(functools.partial(pretrain.next_token_loss, config))
    options = host.compiler_options()
    update = jax.jit(functools.partial(pretrain.train_step, config, tx), donate_argnums=0, compiler_options=options)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    logging.info("%.2fM parameters, %d tokens per step, from step %d", size / 1e6, per_step * args.length, step)

    def save() -> float:
        everything = {"state": flax.serialization.to_state_dict(state), "rows": consumed,
                      "position": rows.get_state()}  # fmt: skip
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
    decay_from: int | None = None
    decay_steps = 0
    losses: list[float] = []
    while decay_from is None or step < decay_from + decay_steps:
        spent = (step - first) / args.steps if args.steps else (time.time() - start) / (60 * args.minutes)
        if decay_from is None and spent >= 1 - args.decay:
            decay_from = step
            left = args.steps - (step - first) if args.steps else (step - first) * args.decay / (1 - args.decay)
            decay_steps = max(1, round(left))
            logging.info("decay begins at step %d and takes %d steps", step, decay_steps)
        rate = pretrain.warmup_stable_decay(step, args.rate, args.warmup, decay_from, decay_steps)
        batch = rows.take(per_step).reshape(args.micro_batches, args.micro_rows, -1)
        state, loss = update(state, jnp.asarray(batch), jnp.float32(rate))
        losses = [*losses[-99:], float(loss)]
        if not math.isfinite(losses[-1]):
            raise ValueError(
                f"step {step}: loss {losses[-1]}; nothing of it is saved. Lower --rate, and go on from the last "
                "save with --resume"
            )
        step, consumed = step + 1, consumed + per_step
        if step % args.log_every == 0:
            rate_now = args.log_every * per_step * args.length / (time.time() - mark)
            mark = time.time()
            logging.info("step %d loss %.4f tokens/s %.0f lr %.2e minute %.1f", step,
                         float(np.mean(losses[-args.log_every :])), rate_now, rate, (mark - start) / 60)  # fmt: skip
        if time.time() - last_save > args.save_minutes * 60:
            last_save = save()
    save()


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
