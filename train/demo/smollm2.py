r"""Makes an EAGLE-3 head for SmolLM2-135M-Instruct on one GPU: replies, features, training, validation.

    XLA_FLAGS="--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0" \
        python -m train.demo.smollm2 --data FOLDER --tasks TASKS --out runs/smollm2

With jax 0.11.2 on an H200, Triton GEMM raised CUDA_ERROR_ILLEGAL_INSTRUCTION. The flags avoid it.

- The target answers prompts of `--data`, which holds `gsm8k/train.jsonl` (openai/gsm8k) and `gpteacher/*.json`
  (teknium1/GPTeacher), and prompts that it invents, for `--seconds`: their number depends on the device.
- A prompt that shares 13 tokens in a row with a question of the six benchmarks in `--tasks` is left out.
- Features stay in device memory, 4.8 GB per shard of 1,024 rows. The bundled head was trained on 13 shards.

`--out` gets `replies.jsonl` and `heldout.jsonl` (rows as of `train.regenerate`), `head/` (official layout) and
`log.jsonl`. With `replies.jsonl` there, or in `--replies`, the run begins with training; a stopped step begins anew.
The last line of output is one JSON object.

The bundled head was made by these functions in about seven minutes, with `--seconds 165 --own-batches 10 2 --no-norms
--updates 4608 --seed 7`. What was tried: `eagle_jax/assets/smollm2/README.md`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eagle_jax
from eagle_jax import training
from eagle_jax.checkpoints import write_whole
from eagle_jax.config import DecoderConfig
from eagle_jax.core import Params
from eagle_jax.data.chat import load_tokenizer, with_stop_ids
from eagle_jax.data.chat.encoding import encode_row
from eagle_jax.data.corpus import Batches, Corpus, coverage, draft_vocabulary, read_rows
from eagle_jax.packed import PackedTokens
from eagle_jax.runtime.compilation import use_compilation_cache
from eagle_jax.training import Frozen, HeadTrainState, MicroBatch, OptimiserKind, TargetOutputs
from infer.common.programs import at_least_one, can_write, check_seed, naming, run
from train.demo.replies import Decoder, Prompts, schedule, write_replies
from train.loop.learners import EagleLearner
from train.loop.options import HeadArgs
from train.loop.places import target_path

REPLIES, HELD_OUT = "replies.jsonl", "heldout.jsonl"
RATES = {"eagle3": {"muon": 1e-2, "adam": 4e-3}, "eagle1": {"muon": 5e-3, "adam": 2e-3}}
"""Peak learning rates by head and optimiser. For EAGLE-3 half and twice as large ones were worse, and so they were for
EAGLE-1's head with muon, in trainings of 80 updates; its rate with adam was not tuned."""
MEASURED = 2
"""Batches of held-out rows in a validation."""


@dataclasses.dataclass(frozen=True)
class Args:
    """Options of the program."""

    data: Path = Path("data")  # folder with gsm8k/ and gpteacher/
    tasks: Path = Path("tasks")  # folder of the benchmarks' questions
    out: Path = Path("runs/smollm2")  # directory to write
    replies: Path | None = None  # directory with the replies of an earlier run; None is --out
    target: str = "smollm2"  # path or hub id of the model
    seconds: float = 150.0  # time for the replies, with compilation; a batch begun before the limit is finished
    own_batches: tuple[int, int] = (7, 3)  # batches of invented prompts: any, and Python functions to complete
    batch: int = 1024  # replies at once
    max_prompt: int = 224  # longest prompt
    max_new_tokens: int = 512  # longest reply
    method: Literal["eagle3", "eagle1", "hass"] = "eagle3"  # objective and kind of head
    draft_vocab: int = 8192  # size of EAGLE-3's draft vocabulary
    shards: int | None = None  # train on the first shards only; None is as many as the replies fill
    shard_rows: int = 1024  # rows per shard; a call of the device makes a pass over one shard
    length: int = 1024  # tokens per row
    rows: int = 8  # rows per update
    updates: int = 3968  # updates of the head
    optimiser: OptimiserKind = "muon"  # as in train.head
    # peak learning rate (method default: eagle3 1e-2 and with adam 4e-3, the others half of it)
    rate: float | None = None
    taps: tuple[int, ...] | None = None  # hidden states that eagle3 fuses, as in train.head; 30 alone is the top layer
    feature_weight: float | None = None  # weight of the feature loss (method default: eagle3 0, others 1)
    norms: bool = True  # EAGLE-3.1: a norm per tap before the projection, and the normed state is fed back
    copy_layer: bool = True  # start the layer of eagle3 with the target's last one
    warmup: int = 50  # updates until the peak
    eval_every: int = 512  # updates between two validations; each writes the head
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the target and of products
    seed: int = 0  # seed of sampling, data order and initial weights


class Shard(NamedTuple):
    """Holds packed replies with the target's outputs, on the device."""

    texts: PackedTokens
    outputs: TargetOutputs


def make_replies(args: Args, target: eagle_jax.Target) -> None:
    """Writes the target's replies and, apart, those to held-out prompts.

    Raises:
      ValueError: one of the two has no reply; nothing is written.
    """
    start, rng = time.monotonic(), np.random.default_rng(args.seed)
    with naming("--target", args.target):
        tokenizer = load_tokenizer(target_path(args.target), target.config)
    with naming("--tasks", args.tasks):
        prompts = Prompts(tokenizer, args.tasks, args.max_prompt)
    with naming("--data", args.data):
        found = prompts.read(args.data, rng)
    logging.info("%d prompts after %.0f s", len(found), time.monotonic() - start)
    deadline = time.monotonic() + args.seconds
    decoder = Decoder(with_stop_ids(target, tokenizer), args.batch, args.max_prompt, args.max_new_tokens, args.seed)
    found += prompts.invent(decoder, args.own_batches)
    rows = write_replies(decoder, schedule(found, args.batch, rng), deadline)
    if not (rows[False] and rows[True]):
        raise ValueError(f"--seconds must be enough for replies to held-out prompts, got {args.seconds:g}. Raise it.")
    for name, held_out in ((HELD_OUT, True), (REPLIES, False)):  # REPLIES comes last: it marks the end
        write_whole(args.out / name, "".join(json.dumps(row) + "\n" for row in rows[held_out]))


def read_replies(path: Path) -> Corpus:
    """Reads a file of `make_replies`."""
    rows = [row for _, row in read_rows(path)]
    names = sorted({row["source"] for row in rows})
    places = [(names.index(row["source"]), number) for number, row in enumerate(rows)]
    return Corpus.from_documents([encode_row(None, row) for row in rows], places, names)  # ids need no tokenizer


@functools.partial(jax.jit, static_argnames=("target", "taps", "rows"))
def observe(target: DecoderConfig, params: Params, texts: PackedTokens, taps: tuple[int, ...], rows: int) -> Shard:
    """Runs the target over a shard, `rows` rows at a time."""
    parts = jax.tree.map(lambda leaf: leaf.reshape(-1, rows, *leaf.shape[1:]), texts)
    outputs = jax.lax.map(lambda part: training.observe(target, params, part, taps)._replace(embeds=None), parts)
    return Shard(texts, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs))


def learner_of(args: Args, target: eagle_jax.Target, noise: float | None = None) -> EagleLearner:
    """Returns the head of a method with its objective; `noise` None is that of the method."""
    learner = EagleLearner(
        HeadArgs(target=args.target, data=(), out=args.out, method=args.method, draft_vocab=args.draft_vocab,
                 dtype=args.dtype, noise=noise, fc_norm=args.norms, norm_output=args.norms, taps=args.taps,
                 feature_weight=args.feature_weight, copy_layer=args.copy_layer and args.method == "eagle3")
    )  # fmt: skip
    learner.begin(target)
    return learner


def update_fn(learner: EagleLearner, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns `(state, frozen, shard, order) -> (state, reports)`: an update per line of `order`, rows of the shard."""
    # HASS has three steps of logits over the whole vocabulary: they would fill the memory.
    remat = learner.args.method == "hass"

    def update(state: HeadTrainState, frozen: Frozen, shard: Shard, order: jax.Array) -> Any:
        def one(state: HeadTrainState, rows: jax.Array) -> Any:
            texts, outputs = jax.tree.map(lambda leaf: leaf[rows][None], shard)
            loss = functools.partial(learner.loss, frozen, None, remat)
            return training.train_step(loss, learner.count_rows, tx, state, texts, outputs)

        return jax.lax.scan(one, state, order)

    return jax.jit(update, donate_argnums=0)


def measure_fn(learner: EagleLearner, rows: int) -> Callable[..., Any]:
    """Returns `(head, frozen, shard) -> (loss, accuracy per step)`, computed `rows` rows at a time."""

    def measure(head: Params, frozen: Frozen, shard: Shard) -> tuple[jax.Array, jax.Array]:
        def one(part: Shard) -> tuple[jax.Array, jax.Array]:
            batch = MicroBatch(part.texts, part.outputs, jax.random.key(0), jnp.ones(learner.terms))
            loss, metrics = learner.loss(frozen, None, False, head, batch)
            return loss, metrics.accuracy

        parts = jax.tree.map(lambda leaf: leaf.reshape(-1, rows, *leaf.shape[1:]), shard)
        return jax.tree.map(lambda values: jnp.mean(values, axis=0), jax.lax.map(one, parts))

    return jax.jit(measure)


def train_head(args: Args, target: eagle_jax.Target, corpus: Corpus, held_out: Corpus) -> Iterator[dict[str, Any]]:
    """Trains a head; writes it and yields a line of the log at every validation."""
    learner, params = learner_of(args, target), target.params
    d2t, share = None, 1.0
    if learner.draft_vocab is not None:
        counts = corpus.token_counts(target.config.vocab_size)
        kept = draft_vocabulary(counts, learner.draft_vocab)
        d2t, share = jnp.asarray(kept - np.arange(len(kept), dtype=np.int32)), coverage(counts, kept)

    def shards_of(some: Corpus, count: int) -> list[Shard]:
        batches = Batches(some, length=args.length, rows=args.shard_rows, seed=args.seed)
        packed = (jax.tree.map(jnp.asarray, next(batches)) for _ in range(count))
        return [observe(target.config, params, texts, learner.taps, args.rows) for texts in packed]

    whole = max(1, len(corpus.tokens) // (args.shard_rows * args.length))
    shards = shards_of(corpus, whole if args.shards is None else min(args.shards, whole))
    measured = jax.tree.map(lambda leaf: leaf[: MEASURED * args.rows], shards_of(held_out, 1)[0])
    scale = jax.jit(training.feature_scale)(shards[0].outputs.features, shards[0].texts) if learner.scaled else None
    frozen = Frozen(params, d2t, scale)
    rate = args.rate or RATES["eagle3" if args.method == "eagle3" else "eagle1"][args.optimiser]
    tx = training.head_optimiser(rate, args.warmup, args.updates, kind=args.optimiser)
    fresh = jax.jit(learner.fresh)(jax.random.key(args.seed), params, d2t, scale)
    head = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), fresh)
    state = HeadTrainState(head, tx.init(head), jnp.int32(0), jax.random.key(args.seed))
    update, measure = update_fn(learner, tx), measure_fn(learner_of(args, target, noise=0.0), args.rows)
    supervised = sum(int(shard.texts.supervised.sum()) for shard in shards)
    yield {"shards": len(shards), "supervised": supervised, "documents": len(corpus), "draft_vocab_share": share}

    start, rng, order = time.monotonic(), np.random.default_rng(args.seed), list[int]()
    calls = args.shard_rows // args.rows  # updates per call
    for done in range(calls, args.updates + 1, calls):
        order = order or rng.permutation(len(shards)).tolist()
        rows = rng.permutation(args.shard_rows).reshape(calls, args.rows)
        state, reports = update(state, frozen, shards[order.pop()], jnp.asarray(rows))
        if done % args.eval_every < calls or done == args.updates:
            loss, accuracy = jax.device_get(measure(state.head, frozen, measured))
            learner.write(learner.finished(state.head, frozen), args.out / "head")
            # A chain of drafts is accepted this far, were the steps independent.
            chain = float(np.cumprod(accuracy).sum())
            yield {
                "updates": done, "train_loss": float(reports.loss.mean()), "loss": float(loss), "chain": chain,
                "accuracy": accuracy.tolist(), "gradient": float(reports.gradient.mean()),
                "seconds": round(time.monotonic() - start, 1),
            }  # fmt: skip


def main(args: Args) -> None:
    """Makes the replies if there are none, trains the head, and prints the last line of the log."""
    at_least_one(args, "batch", "max_prompt", "max_new_tokens", "draft_vocab", "shards", "shard_rows", "length", "rows",
                 "updates", "warmup", "eval_every")  # fmt: skip
    check_seed(args)
    can_write(args.out)
    if args.shard_rows % args.rows or args.shard_rows < MEASURED * args.rows:
        raise ValueError(
            f"--shard-rows must be a multiple of --rows {args.rows} and at least {MEASURED} times it, got "
            f"{args.shard_rows}. Change one."
        )
    if args.updates % (calls := args.shard_rows // args.rows):
        raise ValueError(
            f"--updates must be a multiple of {calls}, a pass over a shard, got {args.updates}. Change it."
        )
    folder = args.replies or args.out
    missing = not (folder / REPLIES).is_file()
    if missing and args.replies is not None:
        raise ValueError(f"--replies must hold {REPLIES}, got {folder} without. Leave it out to make replies.")
    with naming("--target", args.target):
        target = eagle_jax.load_target(target_path(args.target), args.dtype)
    if missing:
        make_replies(args, target)
    corpus, held_out = (read_replies(folder / name) for name in (REPLIES, HELD_OUT))
    lines: list[str] = []
    for entry in train_head(args, target, corpus, held_out):
        lines.append(json.dumps(entry))
        logging.info("%s", lines[-1])
        write_whole(args.out / "log.jsonl", "".join(line + "\n" for line in lines))
    print(json.dumps({**entry, "head": str(args.out / "head")}))


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
