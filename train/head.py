"""Trains a draft head on a frozen target, features computed on the fly.

    python -m train.head --head eagle3 --target runs/target/checkpoint --corpus runs/regenerated.npz --out runs/eagle3

`--head eagle2` trains the EAGLE-1/2 head instead. The corpus is what `train.data` or `train.regenerate` wrote. The head
is saved in the official format; `log.jsonl` beside it holds loss and accuracy per draft step, training and held-out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints import load_head_checkpoint, load_target_checkpoint, save_head_checkpoint
from eagle_jax.config import DecoderConfig, HeadConfig
from eagle_jax.programs import at_least_one, run
from eagle_jax.training import step as training
from eagle_jax.data.corpus import SOURCES, Corpus
from eagle_jax.training.initialise import fresh_head
from eagle_jax.data.vocabulary import count_tokens, draft_vocabulary


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the program.

    Attributes:
      target: checkpoint of the target, frozen.
      corpus: .npz of texts; rows of several take turns.
      out: where the head goes.
      heldout: .npz of texts never trained on.
      head: its kind.
      init: a trained head to start from.
      draft_vocab: size of the draft vocabulary (eagle3).
      layer_intermediate: width of the MLP, 0 for the target's.
      steps: of training-time test (eagle3).
      decay: weight of each further step.
      noise: width of the uniform noise on features (eagle2).
      token_weight: of the token loss beside the feature loss (eagle2).
      rate: peak learning rate.
      warmup: updates until it is reached.
      updates: length of the run; the rate falls to a hundredth over it.
      minutes: ends an over-long run.
      rows: texts per update.
      length: tokens per text.
      seed: of weights, order and noise.
      dtype: of the saved weights.
      log_every: updates per line.
    """

    target: Path
    corpus: tuple[Path, ...]
    out: Path
    heldout: Path | None = None
    head: Literal["eagle3", "eagle2"] = "eagle3"
    init: Path | None = None
    draft_vocab: int = 512
    layer_intermediate: int = 0
    steps: int = 7
    decay: float = 0.8
    noise: float = 0.1
    token_weight: float = 0.1
    rate: float = 1e-3
    warmup: int = 30
    updates: int = 600
    minutes: float = 60.0
    rows: int = 8
    length: int = 256
    seed: int = 0
    dtype: str = "bfloat16"
    log_every: int = 20


Row = tuple[np.ndarray, np.ndarray]


def head_config(args: Args, target: DecoderConfig, draft_vocab: int) -> HeadConfig:
    """The head's shape: one layer as wide as the target's."""
    width = args.layer_intermediate or target.intermediate_size
    layer = dataclasses.replace(target, num_layers=1, intermediate_size=width, tie_word_embeddings=False)
    if args.head == "eagle2":
        return HeadConfig("eagle1", layer, target.vocab_size, target.hidden_size, (target.num_layers,))
    taps = (2, target.num_layers // 2, target.num_layers - 3)
    return HeadConfig("eagle3", layer, draft_vocab, target.hidden_size, taps)


def chat_rows(corpus: Corpus, length: int, seed: int) -> Iterator[Row]:
    """Packed rows of the chat turns, sources at their natural shares."""
    sizes = {name: float(corpus.lengths[corpus.source == i].sum()) for i, name in enumerate(SOURCES) if name != "code"}
    return corpus.packed({name: size for name, size in sizes.items() if size}, length, seed, pool=64)


def chat_counts(corpus: Corpus, vocab_size: int) -> np.ndarray:
    """How often every token is supervised in chat turns, [V]."""
    chat = np.repeat(corpus.prompts > 0, corpus.lengths)
    return count_tokens(corpus.tokens, corpus.supervised & chat, vocab_size)


def stack(rows: Iterator[Row], count: int) -> tuple[jax.Array, jax.Array]:
    """The next `count` rows as arrays: tokens and supervised [count, length]."""
    tokens, supervised = zip(*itertools.islice(rows, count), strict=True)
    return jnp.asarray(np.stack(tokens)), jnp.asarray(np.stack(supervised))


def main(args: Args) -> None:
    """Trains, measures, saves."""
    at_least_one(args, "updates", "rows", "length", "steps", "log_every", "draft_vocab")
    corpora = [Corpus.load(path) for path in args.corpus]
    held_out = None if args.heldout is None else Corpus.load(args.heldout)
    target, target_params = load_target_checkpoint(args.target, "float32")
    d2t = None
    if args.head == "eagle3":
        counts = np.sum([chat_counts(corpus, target.vocab_size) for corpus in corpora], axis=0)
        kept, offsets, coverage = draft_vocabulary(counts, args.draft_vocab)
        d2t = jnp.asarray(offsets)
        logging.info("draft vocabulary: %d of %d tokens cover %.2f%%", len(kept), target.vocab_size, 100 * coverage)
    config = head_config(args, target, args.draft_vocab)
    if args.init is None:
        head = fresh_head(config, jax.random.key(args.seed), target_params, d2t)
    else:
        config, start = load_head_checkpoint(args.init, target, "float32")
        head, d2t = start["head"], start.get("d2t")
    streams = [chat_rows(corpus, args.length, args.seed) for corpus in corpora]
    rows = itertools.chain.from_iterable(zip(*streams, strict=True))
    scale = None
    if config.kind == "eagle3" and not (config.fc_norm or config.norm_before_fc):
        sample, _ = stack(rows, args.rows)
        scale = jax.jit(training.feature_scale, static_argnums=(0, 3))(target, target_params, sample, config.taps)
        # A fresh head is drawn for divided features; a trained one was saved for raw ones.
        head = head if args.init is None else training.fold_scale(head, 1.0 / scale)
    frozen = training.Frozen(target_params, d2t, scale)
    objective = training.Objective(args.steps, args.decay, args.noise, args.token_weight)
    tx = training.head_optimiser(args.rate, args.warmup, args.updates)
    state = training.HeadTrainState(head, tx.init(head), jnp.int32(0), jax.random.key(args.seed + 1))
    update = jax.jit(functools.partial(training.head_train_step, target, config, objective, tx), donate_argnums=0)
    measure = jax.jit(functools.partial(training.head_loss, target, config, objective))
    held = [] if held_out is None else [stack(chat_rows(held_out, args.length, 0), 64)]
    size = sum(leaf.size for leaf in jax.tree.leaves(head))
    logging.info("%s head of %.2fM parameters on %s", args.head, size / 1e6, args.target)

    args.out.mkdir(parents=True, exist_ok=True)
    start_time, history, recent = time.time(), [], []
    for step in range(1, args.updates + 1):
        state, loss, metrics = update(state, frozen, *stack(rows, args.rows))
        recent.append((float(loss), np.asarray(metrics.accuracy, np.float64)))
        if step % args.log_every == 0 or step == args.updates:
            minutes = (time.time() - start_time) / 60
            accuracy = np.mean([entry[1] for entry in recent], axis=0)
            history.append({"step": step, "loss": float(np.mean([entry[0] for entry in recent])),
                            "accuracy": accuracy.round(4).tolist(), "minutes": round(minutes, 2)})  # fmt: skip
            recent = []
            logging.info("%s", json.dumps(history[-1]))
            if minutes > args.minutes:
                logging.info("stopped by --minutes")
                break
    for tokens, supervised in held:
        parts = [measure(state.head, frozen, tokens[i : i + 8], supervised[i : i + 8], state.key)
                 for i in range(0, len(tokens), 8)]  # fmt: skip
        accuracy = np.mean([np.asarray(metrics.accuracy, np.float64) for _, metrics in parts], axis=0)
        history.append({"heldout": float(np.mean([float(loss) for loss, _ in parts])),
                        "accuracy": accuracy.round(4).tolist()})  # fmt: skip
        logging.info("%s", json.dumps(history[-1]))
    head = state.head if scale is None else training.fold_scale(state.head, scale)
    params = {"head": head} if d2t is None else {"head": head, "d2t": d2t}
    # Official EAGLE-1/2 files carry a copy of the target's embedding, EAGLE-3 files do not.
    embedding = target_params["embed_tokens"]["embedding"] if config.kind == "eagle1" else None
    save_head_checkpoint(config, params, args.out, args.dtype, embedding=embedding)
    log = [{"args": dataclasses.asdict(args)}, *history]
    (args.out / "log.jsonl").write_text("".join(json.dumps(line, default=str) + "\n" for line in log), encoding="utf-8")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    run(main, Args, __doc__)
